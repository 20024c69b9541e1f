"""Jamba (AI21 Labs, 2024): Mamba in most layers, attention without rotary embedding in the others, and a mixture of
experts in every second layer."""

from dataclasses import replace

from penstock.checkpoint.decoder_options import LayerNorms
from penstock.checkpoint.experts_config import read_experts
from penstock.checkpoint.model_config import ConfigJson, LayerKind, ModelConfig, dense_config, options_of
from penstock.checkpoint.state_config import MambaConfig, check_kernel

from ..registry import Family
from ..stored import Stored
from .mamba import check_silu, find_parts, step_rank


def read_config(raw: ConfigJson) -> ModelConfig:
    check_silu(raw)
    config = dense_config(raw, options=options_of(raw, layer_norms=LayerNorms(before_mlp="pre_ff_layernorm")))
    layers, hidden = config.num_layers, config.hidden_size
    config = replace(config, options=replace(config.options, rope_layers=(False,) * layers))

    def selected(kind: str, period: int, offset: int) -> list[int]:
        period = int(raw.get(f"{kind}_layer_period") or period)
        offset = int(raw.get(f"{kind}_layer_offset", offset))
        return [layer for layer in range(layers) if layer % period == offset]

    with_attention, with_experts = selected("attn", 8, 4), selected("expert", 2, 1)
    state = MambaConfig(
        int(raw.get("mamba_expand") or 2) * hidden,
        int(raw.get("mamba_d_state") or 16),
        step_rank(raw.get("mamba_dt_rank"), hidden),
        check_kernel(int(raw.get("mamba_d_conv") or 4), "mamba_d_conv"),
        bias=bool(raw.get("mamba_proj_bias", False)),
        convolution_bias=bool(raw.get("mamba_conv_bias", True)),
        norms="weighted",
        norm_eps=config.rms_norm_eps,
        module="mamba",
    )
    experts = None
    if int(raw.get("num_experts") or 16) > 1 and with_experts:
        dense = frozenset(range(layers)).difference(with_experts)
        experts = read_experts(
            raw, "intermediate_size", {"renormalize": False}, dense_layers=dense, module="feed_forward", router="router"
        )
    kinds: tuple[LayerKind, ...] = tuple("attention" if layer in with_attention else "state" for layer in range(layers))
    return replace(config, layer_kinds=kinds, state=state, experts=experts)


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    if name == "model.norm":
        return Stored("model.final_layernorm")
    return find_parts(config, name.replace(".mlp.", ".feed_forward."))


FAMILY = Family(("JambaForCausalLM",), read_config, find_stored=find_stored, find_gguf=find_parts)
