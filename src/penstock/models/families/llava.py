"""LLaVA 1.5 (Liu et al., 2023) with CLIP, SigLIP or Pixtral, and LLaVA-OneVision (Li et al., 2024) with tiles: an
encoder, a projector of two layers, and a language model."""

from penstock.checkpoint.anyres import read_anyres
from penstock.checkpoint.model_config import ConfigJson, ModelConfig
from penstock.checkpoint.vision_config import ViTConfig, feature_layers, read_vit
from penstock.core import Code, PenstockError

from ..composite import find_stored, projector_activation, read_text
from ..registry import Family, imported
from . import pixtral

ENCODERS: dict[str, dict[str, bool]] = {
    "siglip_vision_model": {},
    "clip_vision_model": {"class_token": True, "pre_norm": True, "patch_bias": False},
}
"""``model_type`` of ``vision_config`` → fields of ``ViTConfig``."""


def read_vision(raw: ConfigJson) -> tuple[ViTConfig, tuple[int, ...]]:
    """Read the encoder's configuration, and the layers whose hidden states are projected. Raises ``KeyError``,
    ``TypeError`` or ``ValueError`` for invalid fields, and ``PenstockError`` (``unsupported``) for another encoder."""
    vision = raw["vision_config"]
    if (kind := str(vision.get("model_type"))) not in ENCODERS:
        message = f"{raw.get('model_type')} with the encoder {kind[:40]!r} is not supported; use {', '.join(ENCODERS)}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    config = read_vit(vision, **ENCODERS[kind])
    if (strategy := raw["vision_feature_select_strategy"]) not in ("default", "full"):
        raise ValueError(f"vision_feature_select_strategy is {strategy!r:.40}; it must be default or full")
    projector_activation(raw)
    return config, feature_layers(raw["vision_feature_layer"], config.depth)


def is_pixtral(raw: ConfigJson) -> bool:
    return bool(raw["vision_config"].get("model_type") == "pixtral")


def read_llava(raw: ConfigJson) -> ModelConfig:
    if is_pixtral(raw):
        return pixtral.read_config(raw)
    config, layers = read_vision(raw)
    return read_text(raw, config.weights(max(layers)), len(layers) * config.size)


def read_onevision(raw: ConfigJson) -> ModelConfig:
    config, layers = read_vision(raw)
    read_anyres(raw)
    if config.class_token or raw["vision_feature_select_strategy"] != "full":
        strategy = raw["vision_feature_select_strategy"]
        message = "it must be full, and the encoder must not have a class token (CLIP)"
        raise ValueError(f"vision_feature_select_strategy is {strategy!r:.40}; {message}")
    return read_text(raw, config.weights(max(layers)), len(layers) * config.size)


LLAVA = Family(
    ("LlavaForConditionalGeneration",),
    read_llava,
    imported("penstock.models.vision.llava:build"),
    find_stored=find_stored,
)
LLAVA_ONEVISION = Family(
    ("LlavaOnevisionForConditionalGeneration",),
    read_onevision,
    imported("penstock.models.vision.llava:build_onevision"),
    find_stored=find_stored,
)
