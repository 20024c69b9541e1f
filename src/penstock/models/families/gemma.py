"""Gemma (Gemma Team, 2024 and 2025): RMS norms with 1 + weight, GEGLU, a scaled embedding. Gemma 2: pre-norm and
post-norm, soft caps, sliding windows in every second layer. Gemma 3: q/k norms, sliding windows in five of six layers;
layers with a window have a separate RoPE base."""

from typing import Any

from penstock.checkpoint.decoder_options import DecoderOptions, LayerNorms, NormOptions
from penstock.checkpoint.model_config import (
    ConfigJson,
    ModelConfig,
    activation_of,
    dense_config,
    options_of,
    sliding_windows_by_pattern,
)
from penstock.checkpoint.rope import local_rope_parameters_of
from penstock.core.errors import invalid

from ..registry import Family

NORM = NormOptions(unit_offset=True)
TANH = "gelu_pytorch_tanh"
"""Activation of all published models. In files of Gemma 1, ``gelu`` means this; in Gemma 2 and 3 it is exact GELU."""
LAYER_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


def _options(raw: ConfigJson, activation: str, **options: Any) -> DecoderOptions:
    scale = float(raw["hidden_size"]) ** 0.5
    return options_of(raw, activation=activation_of(activation), norm=NORM, embedding_scale=scale, **options)


def read_gemma(raw: ConfigJson) -> ModelConfig:
    activation = str(raw.get("hidden_act") or TANH)
    return dense_config(raw, options=_options(raw, TANH if activation == "gelu" else activation))


def _windowed_options(raw: ConfigJson) -> DecoderOptions:
    """Options of Gemma 2 and 3."""
    scale = float(raw.get("query_pre_attn_scalar") or 256)
    if scale <= 0:
        raise invalid("model", f"query_pre_attn_scalar is {scale}; it must be above 0")
    return _options(
        raw,
        str(raw.get("hidden_activation") or TANH),
        layer_norms=LAYER_NORMS,
        attention_scale=scale**-0.5,
        attention_softcap=float(raw.get("attn_logit_softcapping") or 0),
        logit_softcap=float(raw.get("final_logit_softcapping") or 0),
    )


def read_gemma2(raw: ConfigJson) -> ModelConfig:
    return dense_config(raw, sliding_windows=sliding_windows_by_pattern(raw, 2), options=_windowed_options(raw))


def read_gemma3(raw: ConfigJson) -> ModelConfig:
    return dense_config(
        raw,
        sliding_windows=sliding_windows_by_pattern(raw, int(raw.get("sliding_window_pattern") or 6)),
        qk_norm=True,
        local_rope_parameters=local_rope_parameters_of(raw),
        # As in transformers, attention has no soft cap, even if config.json sets attn_logit_softcapping.
        options=_windowed_options({**raw, "attn_logit_softcapping": None}),
    )


GEMMA = Family(("GemmaForCausalLM",), read_gemma)
GEMMA2 = Family(("Gemma2ForCausalLM",), read_gemma2)
GEMMA3 = Family(("Gemma3ForCausalLM",), read_gemma3)
