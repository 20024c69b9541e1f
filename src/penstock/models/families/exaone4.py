"""EXAONE 4 (LG AI Research, 2025): post-norm, q/k norms, sliding windows in three of four layers. Models with windows
have rotary embedding only in layers with a window."""

from penstock.checkpoint.decoder_options import LayerNorms
from penstock.checkpoint.model_config import (
    ConfigJson,
    ModelConfig,
    dense_config,
    options_of,
    sliding_windows_by_pattern,
)

from ..registry import Family

LAYER_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def read_config(raw: ConfigJson) -> ModelConfig:
    pattern = raw.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):  # "LLLG": three layers with a window (local), then one without (global)
        pattern = pattern.find("G") + 1
    windows = sliding_windows_by_pattern(raw, int(pattern or 0))
    rope = tuple(map(bool, windows)) if raw.get("sliding_window") else ()
    options = options_of(raw, layer_norms=LAYER_NORMS, rope_layers=rope)
    return dense_config(
        raw,
        sliding_windows=windows,
        qk_norm=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        options=options,
    )


FAMILY = Family(("Exaone4ForCausalLM",), read_config)
