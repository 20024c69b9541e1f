"""Vision tower of Gemma 3 (Gemma Team, 2025): SigLIP, with patches averaged to 256 features per image. The features of
an image attend to each other bidirectionally."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.checkpoint.model_config import ModelConfig
from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext, RMSNorm
from penstock.quant import PackedMatrix

from ..composite import PROJECTOR, TOWER
from ..families.gemma3_vision import read_vision
from ..vision_tower import Embed, TokenPositions
from . import composite
from .vit import ViT, make_norm


class Gemma3VisionTower(TokenPositions):
    """The ``VisionTower`` of Gemma 3.

    Args:
        context: result of ``tower_context``.
        embed: embedding of the language model.
    """

    bidirectional = True

    def __init__(self, context: BuildContext, config: ModelConfig, embed: Embed) -> None:
        super().__init__(embed)
        vision, self._pooled = read_vision(config.raw)
        self._grid = vision.grid
        self._encoder = ViT(context, TOWER, vision)
        self._post_norm = make_norm(context, vision, f"{TOWER}.post_layernorm")
        self._norm = RMSNorm(context, f"{PROJECTOR}.mm_soft_emb_norm", vision.size, vision.eps, unit_offset=True)
        name = f"{PROJECTOR}.mm_input_projection_weight"
        weight = context.read_weight(name, vision.size, config.hidden_size)
        self._projection = PackedMatrix(context.ops, context.ops.pack([weight.T.contiguous()], None))

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> Tensor:
        patches = self._post_norm(self._encoder(image).flatten(0, 1))
        grid = patches.T.reshape(1, -1, self._grid, self._grid)
        pooled = F.avg_pool2d(grid, self._pooled).flatten(2).mT[0].contiguous()
        return self._projection.linear(self._norm(pooled))


build = partial(composite.build, tower=Gemma3VisionTower)
