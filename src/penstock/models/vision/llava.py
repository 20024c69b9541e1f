"""LLaVA 1.5 (Liu et al., 2023) with CLIP, SigLIP or Pixtral, and LLaVA-OneVision (Li et al., 2024) with tiles:
a projector of two layers between encoder and language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.checkpoint.anyres import read_anyres
from penstock.checkpoint.model_config import ModelConfig
from penstock.core import Code, PenstockError
from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext

from ..vision_tower import Embed, TokenPositions, VisionTower
from . import pixtral
from .composite import composite_family, projector, projector_activation, read_text
from .stored import TOWER
from .vit import ViT, ViTConfig, feature_layers, read_vit

ENCODERS: dict[str, dict[str, bool]] = {
    "siglip_vision_model": {},
    "clip_vision_model": {"class_token": True, "pre_norm": True, "patch_bias": False},
}
"""By ``model_type`` of ``vision_config``: switches of ``ViTConfig``."""


def read_vision(raw: Mapping[str, Any]) -> tuple[ViTConfig, tuple[int, ...]]:
    """The encoder's configuration, and the layers whose states are projected. Raises ``KeyError``, ``TypeError`` or
    ``ValueError`` where they are wrong, and ``PenstockError`` (``unsupported``) for another encoder."""
    vision = raw["vision_config"]
    if (kind := str(vision.get("model_type"))) not in ENCODERS:
        words = f"the encoder {kind[:40]!r} of {raw.get('model_type')}; known are {', '.join(ENCODERS)}"
        raise PenstockError(Code.UNSUPPORTED, words, "model")
    config = read_vit(vision, **ENCODERS[kind])
    if (strategy := raw["vision_feature_select_strategy"]) not in ("default", "full"):
        raise ValueError(f"vision_feature_select_strategy is {strategy!r:.40}")
    projector_activation(raw)
    return config, feature_layers(raw["vision_feature_layer"], config.depth)


def _is_pixtral(raw: Mapping[str, Any]) -> bool:
    return bool(raw["vision_config"].get("model_type") == "pixtral")


def read_llava(raw: Mapping[str, Any]) -> ModelConfig:
    if _is_pixtral(raw):
        return pixtral.read_config(raw)
    read_vision(raw)
    return read_text(raw)


def llava_tower(context: BuildContext, config: ModelConfig, embed: Embed) -> VisionTower:
    tower = pixtral.PixtralVisionTower if _is_pixtral(config.raw) else LlavaVisionTower
    return tower(context, config, embed)


class LlavaVisionTower(TokenPositions):
    """A ``VisionTower`` that makes a feature of each patch.

    Args:
        context: of ``tower_context``.
        embed: of the language model.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, embed: Embed) -> None:
        super().__init__(embed)
        vision, layers = read_vision(config.raw)
        self._encoder = ViT(context, TOWER, vision, layers)
        self._first = int(config.raw["vision_feature_select_strategy"] == "default")
        bias = bool(config.raw["multimodal_projector_bias"])
        self._projector = projector(context, config, len(layers) * vision.size, bias)

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> Tensor:
        """As ``VisionTower.encode``."""
        return self.encode_tiles(image).flatten(0, 1)

    def encode_tiles(self, image: ImageInput) -> Tensor:
        """Features of each tile, ``[tiles, patches, hidden]``."""
        states = self._encoder(image)[:, self._first :]
        return self._projector(states.flatten(0, 1)).view(*states.shape[:2], -1)


def read_onevision(raw: Mapping[str, Any]) -> ModelConfig:
    config, _ = read_vision(raw)
    read_anyres(raw)
    if config.class_token or raw["vision_feature_select_strategy"] != "full":
        raise ValueError("vision_feature_select_strategy must be full, without class token, for tiles")
    return read_text(raw)


class OneVisionTower(LlavaVisionTower):
    """Places the features of tiles side by side, without those of padding, and adds a learned one to each row.

    Args:
        context: of ``tower_context``.
        embed: of the language model.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, embed: Embed) -> None:
        super().__init__(context, config, embed)
        self._anyres = read_anyres(config.raw)
        self._newline = context.read_weight("image_newline", config.hidden_size)

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> Tensor:
        """As ``VisionTower.encode``: the whole image first, then its tiles."""
        whole, *tiles = self.encode_tiles(image)
        if not tiles:
            return torch.cat((whole, self._newline[None]))
        (down, right), grid = image.grid, self._anyres.grid
        places = self._anyres.features(*image.original_size, image.grid)
        features = torch.stack(tiles).view(down, right, grid, grid, -1).permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2)
        rows, columns = slice(places.top, places.top + places.rows), slice(places.left, places.left + places.columns)
        features = features[:, rows, columns]
        if places.shrunk:
            features = F.interpolate(features[None], places.shrunk, mode="bilinear")[0]
        newlines = self._newline[:, None, None].expand(-1, features.shape[1], 1)
        return torch.cat((whole, torch.cat((features, newlines), -1).flatten(1).T))


FAMILIES = (
    composite_family("LlavaForConditionalGeneration", read_llava, llava_tower),
    composite_family("LlavaOnevisionForConditionalGeneration", read_onevision, OneVisionTower),
)
