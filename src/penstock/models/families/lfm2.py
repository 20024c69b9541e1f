"""LFM2 (Liquid AI, 2025): gated short convolutions in most layers, attention in the others; optionally a mixture of
experts with sigmoid scores."""

from dataclasses import replace
from typing import Any

from penstock.checkpoint.decoder_options import LayerNorms
from penstock.checkpoint.experts_config import read_experts
from penstock.checkpoint.model_config import ConfigJson, LayerKind, ModelConfig, dense_config, options_of
from penstock.checkpoint.state_config import GatedConvolutionConfig, check_kernel

from ..registry import Family
from ..stored import Stored, part_of

NORMS = LayerNorms(before_attention="operator_norm", before_mlp="ffn_norm")
NAMES = {
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    # dense layers of a model with experts
    "feed_forward.gate_proj": "feed_forward.w1",
    "feed_forward.up_proj": "feed_forward.w3",
    "feed_forward.down_proj": "feed_forward.w2",
}
"""Modules of a layer: name in layers → name in the checkpoint."""


def _read(raw: ConfigJson, intermediate_size: int) -> ModelConfig:
    fields: dict[str, Any] = {
        "intermediate_size": intermediate_size,
        "rms_norm_eps": raw.get("norm_eps"),
        "tie_word_embeddings": raw.get("tie_embedding", raw.get("tie_word_embeddings")),
    }
    config = dense_config({**raw, **fields}, qk_norm=True, options=options_of({}, layer_norms=NORMS))
    layers, hidden = config.num_layers, config.hidden_size
    if not (types := raw.get("layer_types")):
        with_attention = raw.get("full_attn_idxs")
        types = ["full_attention" if with_attention is None or i in with_attention else "conv" for i in range(layers)]
    kinds: dict[str, LayerKind] = {"full_attention": "attention", "conv": "state"}
    kernel = check_kernel(int(raw.get("conv_L_cache") or 3), "conv_L_cache")
    if len(types) != layers or not kinds.keys() >= set(types):
        raise ValueError(f"layer_types must have an entry for each of {layers} layers, one of {', '.join(kinds)}")
    state = GatedConvolutionConfig(hidden, kernel, bool(raw.get("conv_bias")))
    return replace(config, layer_kinds=tuple(kinds[each] for each in types), state=state, raw=raw)


def read_lfm2(raw: ConfigJson) -> ModelConfig:
    size = int(raw.get("block_ff_dim") or raw["intermediate_size"])
    if raw.get("block_auto_adjust_ff_dim", True):
        size = 2 * size // 3
        if (factor := raw.get("block_ffn_dim_multiplier", 1.0)) is not None:
            multiple = int(raw.get("block_multiple_of") or 256)
            size = -(-int(factor * size) // multiple) * multiple
    return _read(raw, size)


def read_lfm2_moe(raw: ConfigJson) -> ModelConfig:
    config = _read(raw, int(raw["intermediate_size"]))
    num_dense = int(raw.get("num_dense_layers", 2))
    routing = {
        "scores": "sigmoid",
        "renormalize": bool(raw.get("norm_topk_prob", True)),
        "added_sum": 1e-6,
        "scale": float(raw.get("routed_scaling_factor", 1.0)),
    }
    experts = read_experts(
        raw,
        "moe_intermediate_size",
        routing,
        dense_layers=frozenset(layer for layer in range(config.num_layers) if layer < num_dense),
        router_bias="expert_bias" if raw.get("use_expert_bias", True) else "",
        module="feed_forward",
        projections=("w1", "w3", "w2"),
    )
    return replace(config, experts=experts)


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    if name == "model.norm":
        return Stored("model.embedding_norm")
    layer, module = (".".join(part) for part in (name.split(".")[:3], name.split(".")[3:]))
    return Stored(f"{layer}.{NAMES[module]}") if module in NAMES else find_parts(config, name)


def find_parts(config: ModelConfig, name: str) -> Stored:
    """Location of the parts of ``in_proj``."""
    parent, _, last = name.rpartition(".")
    if last in ("in_proj_b", "in_proj_c", "in_proj_x"):
        return part_of(f"{parent}.in_proj", [config.hidden_size] * 3, "bcx".index(last[-1]))
    return Stored(name)


LFM2 = Family(("Lfm2ForCausalLM",), read_lfm2, find_stored=find_stored, find_gguf=find_parts)
LFM2_MOE = Family(("Lfm2MoeForCausalLM",), read_lfm2_moe, find_stored=find_stored, find_gguf=find_parts)
