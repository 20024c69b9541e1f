"""Gemma 3 with images (Gemma Team, 2025): SigLIP, with patches averaged to 256 features per image. The features of an
image attend to each other bidirectionally."""

import math
from dataclasses import replace

from penstock.checkpoint.model_config import ConfigJson, ModelConfig
from penstock.checkpoint.vision_config import ViTConfig, read_vit

from ..composite import find_stored
from ..registry import Family, imported
from .gemma import read_gemma3


def read_vision(raw: ConfigJson) -> tuple[ViTConfig, int]:
    """Configuration of the encoder, and edge in patches of the square that is averaged to a feature. Raises
    ``KeyError``, ``TypeError`` or ``ValueError`` for invalid fields."""
    config = read_vit(raw["vision_config"])
    tokens = int(raw["mm_tokens_per_image"])
    pooled = config.grid // max(math.isqrt(tokens), 1)
    if pooled < 1 or (config.grid // pooled) ** 2 != tokens:
        message = f"mm_tokens_per_image is {tokens}; it must be the number of equal squares"
        raise ValueError(f"{message} of {config.grid} x {config.grid} patches")
    return config, pooled


def read_config(raw: ConfigJson) -> ModelConfig:
    vision, _ = read_vision(raw)
    uncapped = {**raw, "final_logit_softcapping": None}  # as in transformers, this architecture has no soft cap
    config = read_gemma3(uncapped)
    weights = vision.weights(vision.depth) + vision.size * config.hidden_size
    return replace(config, raw=raw, vision_weights=weights)


FAMILY = Family(
    ("Gemma3ForConditionalGeneration",),
    read_config,
    imported("penstock.models.vision.gemma3:build"),
    find_stored=find_stored,
)
