"""Interface of vision towers, which compute the features of images."""

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
"""Type of ``VisionTower.embed``."""


class VisionTower(Protocol):
    """Interface of vision towers: the image encoder, and the handling of image tokens in the language model."""

    deepstack: Sequence[Tensor]
    """Tensors ``[step tokens, hidden]`` that are added to the residual stream after the first decoder layers, one per
    layer: features for image tokens, zeros for text (DeepStack, Meng et al., 2024). Empty in most models."""
    bidirectional: bool
    """True if the tokens of an image attend to each other bidirectionally (``AttentionMetadata.key_ends``)."""
    placeholder: int | None
    """Id of the token whose embedding features replace, if images also have other tokens; None: all tokens of an image
    are replaced."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed tokens with the language model, ``[tokens]`` int64 to ``[tokens, hidden]``. The caller may modify the
        result."""
        ...

    def encode(self, image: ImageInput) -> Tensor:
        """Features of an image, ``[image.length, hidden]`` in the model's dtype on its device. Features replace the
        embeddings of the image's placeholder tokens, and only depend on the image. Features for ``deepstack`` are
        appended to each row."""
        ...

    def rope_rows(self, positions: np.ndarray) -> Tensor:
        """Convert positions in time, height and width, ``[3, tokens]`` int64, to ``Batch.positions``, ``[tokens]``."""
        ...


def tower_context(context: BuildContext) -> BuildContext:
    """Build context of a tower: every rank has the whole tower, which is not quantized."""
    return replace(context, group=SINGLE_RANK, scheme=Scheme(), max_loras=0)


class TokenPositions:
    """Base class of a ``VisionTower`` whose features have the positions of their tokens.

    Args:
        embed: embedding of the language model.
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
    """Base class of a ``VisionTower`` whose features have positions in time, height and width.

    Args:
        embed, mrope: embedding and M-RoPE of the language model.
    """

    def __init__(self, embed: Embed, mrope: MRoPE) -> None:
        super().__init__(embed)
        self._mrope = mrope

    def rope_rows(self, positions: np.ndarray) -> Tensor:
        return self._mrope.rows(positions)
