"""OLMo 2 and 3 (Ai2, 2025): post-norm, q/k norms over the whole projection. OLMo 3: sliding windows in three of four
layers."""

from typing import Any

from penstock.checkpoint.decoder_options import LayerNorms, NormOptions, QKNormOptions
from penstock.checkpoint.model_config import (
    ConfigJson,
    ModelConfig,
    dense_config,
    options_of,
    sliding_windows_by_pattern,
)
from penstock.checkpoint.rope import local_rope_parameters_of

from ..registry import Family

LAYER_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def read_olmo2(raw: ConfigJson, **overrides: Any) -> ModelConfig:
    options = options_of(
        raw,
        norm=NormOptions(float32=True),
        layer_norms=LAYER_NORMS,
        qk_norm=QKNormOptions(scope="projection"),
    )
    return dense_config(raw, qk_norm=True, mlp_bias=False, options=options, **overrides)


def read_olmo3(raw: ConfigJson) -> ModelConfig:
    windows = sliding_windows_by_pattern(raw, 4)
    return read_olmo2(raw, sliding_windows=windows, local_rope_parameters=local_rope_parameters_of(raw))


OLMO2 = Family(("Olmo2ForCausalLM",), read_olmo2)
OLMO3 = Family(("Olmo3ForCausalLM",), read_olmo3)
