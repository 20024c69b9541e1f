"""The interface of vision towers: what the worker calls to make features of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from penstock.core.multimodal import ImageInput


class VisionTower(Protocol):
    """An encoder of images, and how the language model places their features."""

    deepstack: Sequence[Tensor]
    """Of each of the first decoder layers ``[step tokens, hidden]``: what is added to the residual stream behind it for
    the tokens of a step, zeros for those of text (DeepStack, Meng et al., 2024). Most models have none."""

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
