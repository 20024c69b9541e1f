"""Gemma 3 that sees images (Gemma Team, 2025): SigLIP, whose patches are averaged to 256 features of an image. These
attend to each other in both directions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.checkpoint.model_config import ModelConfig
from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext, RMSNorm
from penstock.quant import PackedMatrix

from ..families.gemma import read_gemma3
from ..vision_tower import Embed, TokenPositions
from .composite import PROJECTOR, composite_family
from .stored import TOWER
from .vit import ViT, ViTConfig, make_norm, read_vit


def read_vision(raw: Mapping[str, Any]) -> tuple[ViTConfig, int]:
    """The encoder's configuration, and how many patches of an edge are averaged to a feature. Raises ``KeyError``,
    ``TypeError`` or ``ValueError`` where they are wrong."""
    config = read_vit(raw["vision_config"])
    tokens = int(raw["mm_tokens_per_image"])
    pooled = config.grid // max(math.isqrt(tokens), 1)
    if pooled < 1 or (config.grid // pooled) ** 2 != tokens:
        raise ValueError(f"mm_tokens_per_image is {tokens}, for {config.grid} x {config.grid} patches")
    return config, pooled


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    read_vision(raw)
    uncapped = {**raw, "final_logit_softcapping": None}  # with images, logits have no soft cap, as in transformers
    return replace(read_gemma3(uncapped), raw=raw, has_vision=True)


class Gemma3VisionTower(TokenPositions):
    """A ``VisionTower``.

    Args:
        context: of ``tower_context``.
        embed: of the language model.
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
        """As ``VisionTower.encode``."""
        patches = self._post_norm(self._encoder(image).flatten(0, 1))
        grid = patches.T.reshape(1, -1, self._grid, self._grid)
        pooled = F.avg_pool2d(grid, self._pooled).flatten(2).mT[0].contiguous()
        return self._projection.linear(self._norm(pooled))


FAMILY = composite_family("Gemma3ForConditionalGeneration", read_config, Gemma3VisionTower)
