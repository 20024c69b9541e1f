"""Vision towers of LLaVA 1.5 (Liu et al., 2023) and LLaVA-OneVision (Li et al., 2024): an encoder, and a projector of
two layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.checkpoint.anyres import read_anyres
from penstock.checkpoint.model_config import ModelConfig
from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext

from ..composite import TOWER
from ..families.llava import is_pixtral, read_vision
from ..vision_tower import Embed, TokenPositions, VisionTower
from . import composite, pixtral
from .composite import projector
from .vit import ViT


def llava_tower(context: BuildContext, config: ModelConfig, embed: Embed) -> VisionTower:
    tower = pixtral.PixtralVisionTower if is_pixtral(config.raw) else LlavaVisionTower
    return tower(context, config, embed)


class LlavaVisionTower(TokenPositions):
    """A ``VisionTower`` with one feature per patch.

    Args:
        context: result of ``tower_context``.
        embed: embedding of the language model.
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
        return self.encode_tiles(image).flatten(0, 1)

    def encode_tiles(self, image: ImageInput) -> Tensor:
        """Features of each tile, ``[tiles, patches, hidden]``."""
        states = self._encoder(image)[:, self._first :]
        return self._projector(states.flatten(0, 1)).view(*states.shape[:2], -1)


class OneVisionTower(LlavaVisionTower):
    """A ``VisionTower`` that joins the features of tiles, drops the features of padding, and appends a learned newline
    feature to each row.

    Args:
        context: result of ``tower_context``.
        embed: embedding of the language model.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, embed: Embed) -> None:
        super().__init__(context, config, embed)
        self._anyres = read_anyres(config.raw)
        self._newline = context.read_weight("image_newline", config.hidden_size)

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> Tensor:
        """See ``VisionTower.encode``. The features of the whole image precede the features of the tiles."""
        whole, *tiles = self.encode_tiles(image)
        if not tiles:
            return torch.cat((whole, self._newline[None]))
        (down, right), grid = image.grid, self._anyres.grid
        area = self._anyres.features(*image.original_size, image.grid)
        features = torch.stack(tiles).view(down, right, grid, grid, -1).permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2)
        rows, columns = slice(area.top, area.top + area.rows), slice(area.left, area.left + area.columns)
        features = features[:, rows, columns]
        if area.shrunk:
            features = F.interpolate(features[None], area.shrunk, mode="bilinear")[0]
        newlines = self._newline[:, None, None].expand(-1, features.shape[1], 1)
        return torch.cat((whole, torch.cat((features, newlines), -1).flatten(1).T))


build = partial(composite.build, tower=llava_tower)
build_onevision = partial(composite.build, tower=OneVisionTower)
