"""Ministral 3 (Mistral, 2025): Mistral with YaRN, and queries scaled by position."""

from dataclasses import replace

from penstock.checkpoint.decoder_options import QueryScaling
from penstock.checkpoint.model_config import ConfigJson, ModelConfig

from ..registry import Family
from . import mistral


def read_config(raw: ConfigJson) -> ModelConfig:
    config = mistral.read_config(raw)
    rope = {name: value for name, value in config.rope_parameters.items() if name != "max_position_embeddings"}
    factor, interval = (
        float(rope.get("llama_4_scaling_beta") or 0),
        int(rope.get("original_max_position_embeddings") or 0),
    )
    if factor and interval < 1:
        message = f"llama_4_scaling_beta ({factor}) requires original_max_position_embeddings of at least 1"
        raise ValueError(f"rope_parameters: {message}, which is {interval}")
    options = replace(config.options, query_scaling=QueryScaling(factor, interval) if factor else None)
    return replace(config, rope_parameters=rope, options=options)


FAMILY = Family(("Ministral3ForCausalLM",), read_config)
