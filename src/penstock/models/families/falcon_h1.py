"""Falcon-H1 (TII, 2025): each layer has attention and Mamba 2 heads in parallel, and muP scales of activations."""

from dataclasses import replace

from penstock.checkpoint.decoder_options import LayerNorms
from penstock.checkpoint.model_config import ConfigJson, LayerKind, ModelConfig, dense_config, options_of
from penstock.core import Code, PenstockError

from ..mamba import find_mamba2, read_mamba2
from ..registry import Family
from ..stored import Stored


def read_config(raw: ConfigJson) -> ModelConfig:
    def scale(name: str) -> float:
        value = raw.get(name)
        return 1.0 if value is None else float(value)

    gate, output = map(float, raw.get("mlp_multipliers") or (1, 1))
    config = dense_config(raw, options=options_of(raw))
    options = replace(
        config.options,
        layer_norms=LayerNorms(before_mlp="pre_ff_layernorm"),
        embedding_scale=scale("embedding_multiplier"),
        logit_scale=scale("lm_head_multiplier"),
        attention_scale=config.head_dim**-0.5 * scale("key_multiplier"),
        attention_scales=(scale("attention_in_multiplier"), scale("attention_out_multiplier")),
        mlp_scales=(gate, output),
    )
    if options.mlp_scales != (1, 1) and options.activation != "silu":
        message = f"mlp_multipliers are supported only with hidden_act silu; it is {raw['hidden_act']!r:.40}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    z, x, b, c, step = map(float, raw.get("ssm_multipliers") or (1,) * 5)
    inner = raw["mamba_d_ssm"] if raw.get("mamba_d_ssm") else raw["mamba_expand"] * config.hidden_size
    state = read_mamba2(
        raw,
        int(inner),
        output_bias=bool(raw.get("projectors_bias")),
        norm=bool(raw.get("mamba_rms_norm")),
        gate_first=not raw.get("mamba_norm_before_gate", True),
        input_scale=scale("ssm_in_multiplier"),
        output_scale=scale("ssm_out_multiplier"),
        scales=(z, x, b, c, step),
    )
    kind: LayerKind = "both"
    return replace(config, options=options, layer_kinds=(kind,) * config.num_layers, state=state)


def find_stored(config: ModelConfig, name: str) -> Stored:
    stored = find_mamba2(config, name.replace(".mlp.", ".feed_forward."))
    return Stored("model.final_layernorm") if name == "model.norm" else stored


FAMILY = Family(("FalconH1ForCausalLM",), read_config, find_stored=find_stored, find_gguf=find_mamba2)
