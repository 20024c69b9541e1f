"""gpt-oss (OpenAI, 2025): attention sinks, sliding windows in every second layer, biases, experts with clamped
SwiGLU."""

from penstock.checkpoint.experts_config import FusedLayout, read_experts
from penstock.checkpoint.model_config import (
    ConfigJson,
    ModelConfig,
    dense_config,
    options_of,
    sliding_windows_by_layer_types,
)
from penstock.core import Code, PenstockError

from ..registry import Family

CLAMP = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
"""Constants of ``ops.activations.swigluoai``, by field of ``config.json``."""


def read_config(raw: ConfigJson) -> ModelConfig:
    for name, known in CLAMP.items():
        if (value := float(raw.get(name) or known)) != known:
            message = f"{name} in config.json is {value}; only {known} is supported"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
    layers = int(raw["num_hidden_layers"])
    windows = sliding_windows_by_layer_types(raw, layers)
    if windows is None:
        window = int(raw.get("sliding_window") or 0)
        windows = tuple(0 if layer % 2 else window for layer in range(layers))
    experts = read_experts(
        raw,
        "intermediate_size",
        {"renormalize": True},
        bias=True,
        router="router",
        router_matrix_bias=True,
        fused=FusedLayout(transposed=True, interleaved=True),
    )
    bias = bool(raw.get("attention_bias", True))
    return dense_config(
        raw,
        qkv_bias=bias,
        output_bias=bias,
        sliding_windows=windows,
        experts=experts,
        options=options_of(raw, activation="swigluoai", attention_sinks=True),
    )


FAMILY = Family(("GptOssForCausalLM",), read_config)
