"""InternVL 3 (Zhu et al., 2025), of transformers' checkpoints: InternViT over tiles, whose patches are merged by pixel
shuffle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.model_config import ModelConfig
from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext, LayerNorm

from ..vision_tower import Embed, TokenPositions
from .composite import PROJECTOR, composite_family, projector, projector_activation, read_text
from .stored import TOWER
from .vit import ViT, ViTConfig, ViTNames, feature_layers, read_vit

NAMES = ViTNames(
    patches="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    class_token="embeddings.cls_token",
    layers="encoder.layer",
    norms=("layernorm_before", "layernorm_after"),
    attention="attention",
    output="projection_layer",
)
PROJECTOR_EPS = 1e-5


def read_vision(raw: Mapping[str, Any]) -> ViTConfig:
    """The encoder's configuration. Raises ``KeyError``, ``TypeError`` or ``ValueError`` where it is wrong."""
    vision = raw["vision_config"]
    if not vision.get("use_absolute_position_embeddings", True):
        raise ValueError("vision_config has no positions (use_absolute_position_embeddings)")
    config = read_vit(
        vision,
        rms_norm=vision.get("norm_type", "layer_norm") == "rms_norm",
        class_token=True,
        qkv_bias=bool(vision.get("attention_bias", False)),
        qk_norm=bool(vision.get("use_qk_norm", False)),
        layer_scale=True,
        names=NAMES,
    )
    merge = merge_size(raw)
    if config.grid % merge or (config.grid // merge) ** 2 != int(raw["image_seq_length"]):
        raise ValueError(f"image_seq_length is {raw['image_seq_length']}, for {config.grid} x {config.grid} patches")
    if raw["vision_feature_select_strategy"] != "default" or len(feature_layers(_layer(raw), config.depth)) > 1:
        raise ValueError("vision_feature_select_strategy must be default, of a single vision_feature_layer")
    return config


def merge_size(raw: Mapping[str, Any]) -> int:
    """Patches of a feature's edge. Raises ``ValueError`` for a ``downsample_ratio`` that gives none."""
    ratio = float(raw["downsample_ratio"])
    if not 0 < ratio <= 1 or abs(1 / ratio - round(1 / ratio)) > 1e-6:
        raise ValueError(f"downsample_ratio is {ratio}, and must be 1 over a whole number")
    return round(1 / ratio)


def _layer(raw: Mapping[str, Any]) -> Any:
    return raw["vision_feature_layer"]


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    read_vision(raw)
    projector_activation(raw)
    return read_text(raw)


class InternVLVisionTower(TokenPositions):
    """A ``VisionTower``.

    Args:
        context: of ``tower_context``.
        embed: of the language model.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, embed: Embed) -> None:
        raw = config.raw
        super().__init__(embed)
        vision = read_vision(raw)
        self._grid, self._merge = vision.grid, merge_size(raw)
        self._encoder = ViT(context, TOWER, vision, feature_layers(_layer(raw), vision.depth))
        pooled, last = raw["vision_config"].get("use_mean_pooling", True), _layer(raw) in (-1, [-1])
        self._post_norm = None
        if last and not pooled:
            self._post_norm = LayerNorm(context, f"{TOWER}.layernorm", vision.size, vision.eps, bias=True)
        merged = vision.size * self._merge**2
        self._norm = LayerNorm(context, f"{PROJECTOR}.layer_norm", merged, PROJECTOR_EPS, bias=True)
        self._projector = projector(context, config, merged, bias=True)

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> Tensor:
        """As ``VisionTower.encode``: of one tile after the other."""
        states = self._encoder(image)
        if self._post_norm:
            states = self._post_norm(states)
        merge, tiles = self._merge, image.tiles
        grid = states[:, 1:].view(tiles, self._grid // merge, merge, self._grid // merge, merge, -1)
        merged = grid.permute(0, 1, 3, 2, 4, 5).reshape(tiles * (self._grid // merge) ** 2, -1)
        return self._projector(self._norm(merged))


FAMILY = composite_family("InternVLForConditionalGeneration", read_config, InternVLVisionTower)
