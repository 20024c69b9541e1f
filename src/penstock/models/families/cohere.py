"""Command R and Command A (Cohere, 2024 and 2025): layer norms without bias, parallel attention and MLP, interleaved
RoPE, scaled logits. Command A: sliding windows, and rotary embedding only in layers with a window."""

from typing import Any

from penstock.checkpoint.decoder_options import LayerNorms, NormOptions, QKNormOptions
from penstock.checkpoint.model_config import (
    ConfigJson,
    ModelConfig,
    dense_config,
    options_of,
    sliding_windows_by_pattern,
)

from ..registry import Family

LAYER_NORMS = LayerNorms("input_layernorm", None, None, None)


def read_cohere(raw: ConfigJson, rope_layers: tuple[bool, ...] = (), **overrides: Any) -> ModelConfig:
    scale = raw.get("logit_scale")
    options = options_of(
        raw,
        norm=NormOptions("layer"),
        layer_norms=LAYER_NORMS,
        qk_norm=QKNormOptions(weight="per_head"),
        parallel_residual=True,
        rope_interleaved=True,
        rope_layers=rope_layers,
        logit_scale=0.0625 if scale is None else float(scale),
    )
    eps = float(raw.get("layer_norm_eps") or 1e-5)
    return dense_config(raw, rms_norm_eps=eps, mlp_bias=False, options=options, **overrides)


def read_command_r(raw: ConfigJson) -> ModelConfig:
    return read_cohere(raw, qk_norm=bool(raw.get("use_qk_norm")))


def read_command_a(raw: ConfigJson) -> ModelConfig:
    windows = sliding_windows_by_pattern(raw, int(raw.get("sliding_window_pattern") or 4))
    return read_cohere(raw, tuple(map(bool, windows)), sliding_windows=windows)


COHERE = Family(("CohereForCausalLM",), read_command_r)
COHERE2 = Family(("Cohere2ForCausalLM",), read_command_a)
