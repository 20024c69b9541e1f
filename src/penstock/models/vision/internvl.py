"""Vision tower of InternVL 3 (Zhu et al., 2025) in transformers' format: InternViT on tiles, with patches merged by
pixel shuffle."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from penstock.checkpoint.model_config import ModelConfig
from penstock.checkpoint.vision_config import feature_layers
from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext, LayerNorm

from ..composite import PROJECTOR, TOWER
from ..families.internvl import merge_size, read_vision
from ..vision_tower import Embed, TokenPositions
from . import composite
from .composite import projector
from .vit import ViT

PROJECTOR_EPS = 1e-5


class InternVLVisionTower(TokenPositions):
    """A ``VisionTower``. The features of tiles are concatenated.

    Args:
        context: result of ``tower_context``.
        embed: embedding of the language model.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, embed: Embed) -> None:
        raw = config.raw
        super().__init__(embed)
        vision = read_vision(raw)
        self._grid, self._merge = vision.grid, merge_size(raw)
        self._encoder = ViT(context, TOWER, vision, feature_layers(raw["vision_feature_layer"], vision.depth))
        pooled, last = raw["vision_config"].get("use_mean_pooling", True), raw["vision_feature_layer"] in (-1, [-1])
        self._post_norm = None
        if last and not pooled:
            self._post_norm = LayerNorm(context, f"{TOWER}.layernorm", vision.size, vision.eps, bias=True)
        merged = vision.size * self._merge**2
        self._norm = LayerNorm(context, f"{PROJECTOR}.layer_norm", merged, PROJECTOR_EPS, bias=True)
        self._projector = projector(context, config, merged, bias=True)

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> Tensor:
        states = self._encoder(image)
        if self._post_norm:
            states = self._post_norm(states)
        merge, tiles = self._merge, image.tiles
        grid = states[:, 1:].view(tiles, self._grid // merge, merge, self._grid // merge, merge, -1)
        merged = grid.permute(0, 1, 3, 2, 4, 5).reshape(tiles * (self._grid // merge) ** 2, -1)
        return self._projector(self._norm(merged))


build = partial(composite.build, tower=InternVLVisionTower)
