"""SmolLM3 (Hugging Face, 2025): Llama without rotary embedding in every fourth layer."""

from penstock.checkpoint.model_config import (
    ConfigJson,
    ModelConfig,
    dense_config,
    options_of,
    sliding_windows_by_layer_types,
)

from ..registry import Family


def read_config(raw: ConfigJson) -> ModelConfig:
    layers, interval = int(raw["num_hidden_layers"]), int(raw.get("no_rope_layer_interval") or 4)
    given = raw.get("no_rope_layers")  # despite its name, true for layers with rotary embedding
    rope = tuple(map(bool, given)) if given else tuple((layer + 1) % interval != 0 for layer in range(layers))
    if len(rope) != layers:
        raise ValueError(f"no_rope_layers has {len(rope)} entries; it must have one for each of {layers} layers")
    window = int(raw.get("sliding_window") or 0) if raw.get("use_sliding_window") else 0
    windows = sliding_windows_by_layer_types({**raw, "sliding_window": window}, layers)
    return dense_config(
        raw,
        sliding_windows=windows or tuple(0 if each else window for each in rope),
        options=options_of(raw, rope_layers=rope),
    )


FAMILY = Family(("SmolLM3ForCausalLM",), read_config)
