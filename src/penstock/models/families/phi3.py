"""Phi-3 and Phi-4 (Microsoft, 2024): Llama with fused projections, partial RoPE, and LongRoPE."""

from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.checkpoint.rope import rope_parameters_of

from ..registry import Family
from ..stored import find_fused


def read_config(raw: ConfigJson) -> ModelConfig:
    share = rope_parameters_of(raw).get("partial_rotary_factor", 1.0)
    if (kind := rope_parameters_of(raw)["rope_type"]) not in ("default", "longrope"):
        raise ValueError(f"rope_type is {kind[:40]!r}; it must be default or longrope for Phi-3")
    window = int(raw.get("sliding_window") or 0)
    return dense_config(
        raw,
        max_model_len=int(raw.get("max_position_embeddings") or 4096),
        sliding_windows=(window,) * int(raw["num_hidden_layers"]),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        options=options_of(raw, partial_rotary_factor=share),
    )


FAMILY = Family(("Phi3ForCausalLM",), read_config, find_stored=find_fused)
