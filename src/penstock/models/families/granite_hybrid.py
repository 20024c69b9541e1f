"""Granite 4 (IBM, 2025): Mamba 2 layers, some layers with attention, often without rotary embedding, and a mixture of
experts with a shared expert, or a dense MLP."""

from dataclasses import replace

from penstock.checkpoint.experts_config import FusedLayout, read_experts
from penstock.checkpoint.model_config import ConfigJson, ModelConfig

from ..mamba import find_mamba2, layer_kinds, read_mamba2
from ..registry import Family
from ..stored import Stored, part_of
from . import granite

SHARED = "shared_mlp"


def read_config(raw: ConfigJson) -> ModelConfig:
    shared_size = int(raw["shared_intermediate_size"])
    config = replace(granite.read_config(raw), intermediate_size=shared_size, mlp_bias=False)
    if raw.get("position_embedding_type") != "rope":
        config = replace(config, options=replace(config.options, rope_layers=(False,) * config.num_layers))
    if raw.get("num_local_experts"):
        experts = read_experts(
            raw,
            "intermediate_size",
            {"renormalize": True},
            module="block_sparse_moe",
            router="router.layer",
            fused=FusedLayout(tensors=("input_linear.weight", "output_linear.weight")),
            shared_size=shared_size,
            shared_name=SHARED,
        )
        config = replace(config, experts=experts)
    kinds = layer_kinds(raw.get("layer_types") or ["linear_attention"] * config.num_layers)
    if "state" not in kinds:
        return config
    state = read_mamba2(raw, int(raw["mamba_expand"] * config.hidden_size))
    return replace(config, layer_kinds=kinds, state=state)


def find_stored(config: ModelConfig, name: str) -> Stored:
    """``shared_mlp`` is beside the module with the experts. It has the gate and up projection in one matrix."""
    parent, _, last = name.rpartition(".")
    layer, _, module = parent.rpartition(".")
    if module not in ("mlp", SHARED) or last not in ("gate_proj", "up_proj", "down_proj"):
        return find_mamba2(config, name)
    shared = f"{layer.removesuffix('.block_sparse_moe')}.{SHARED}"
    if last == "down_proj":
        return Stored(f"{shared}.output_linear")
    return part_of(f"{shared}.input_linear", [config.intermediate_size] * 2, last == "up_proj")


FAMILY = Family(("GraniteMoeHybridForCausalLM",), read_config, find_stored=find_stored, find_gguf=find_mamba2)
