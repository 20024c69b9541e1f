"""The interface of vision towers: what the worker calls to make features of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.core.multimodal import ImageInput
from penstock.core.quantization import Scheme
from penstock.layers import BuildContext
from penstock.layers.mrope import MRoPE
from penstock.parallel import SINGLE_RANK

Embed = Callable[[Tensor], Tensor]
"""``VisionTower.embed``."""


class VisionTower(Protocol):
    """An encoder of images, and how the language model places their features."""

    deepstack: Sequence[Tensor]
    """Of each of the first decoder layers ``[step tokens, hidden]``: what is added to the residual stream behind it for
    the tokens of a step, zeros for those of text (DeepStack, Meng et al., 2024). Most models have none."""
    bidirectional: bool
    """Whether the tokens of an image attend to each other in both directions (``AttentionMetadata.key_ends``)."""
    placeholder: int | None
    """The only token whose embedding features replace, where images have others, too; None if they have not."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """The language model's embeddings of tokens, ``[tokens]`` int64 to ``[tokens, hidden]``, which the caller may
        change."""
        ...

    def encode(self, image: ImageInput) -> Tensor:
        """Features of an image, ``[image.length, hidden]``, in the model's dtype on its device: in place of its
        placeholders' embeddings; those for each entry of ``deepstack`` follow in the same rows. They depend on nothing
        but the image."""
        ...

    def rope_rows(self, positions: np.ndarray) -> Tensor:
        """``Batch.positions`` of tokens with positions ``[3, tokens]`` int64 in time, height and width."""
        ...


def tower_context(context: BuildContext) -> BuildContext:
    """For layers of a tower, which all ranks have whole, and which are not quantized."""
    return replace(context, group=SINGLE_RANK, scheme=Scheme(), max_loras=0)


class TokenPositions:
    """The part of a ``VisionTower`` whose features have the positions of their tokens.

    Args:
        embed: of the language model.
    """

    bidirectional = False
    placeholder: int | None = None
    deepstack: Sequence[Tensor] = ()

    def __init__(self, embed: Embed) -> None:
        self._embed = embed

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embed(token_ids)

    def rope_rows(self, positions: np.ndarray) -> Tensor:
        return torch.from_numpy(positions[0])


class MRoPEPositions(TokenPositions):
    """The part of a ``VisionTower`` whose features have positions in time, height and width.

    Args:
        embed, mrope: of the language model.
    """

    def __init__(self, embed: Embed, mrope: MRoPE) -> None:
        super().__init__(embed)
        self._mrope = mrope

    def rope_rows(self, positions: np.ndarray) -> Tensor:
        return self._mrope.rows(positions)
