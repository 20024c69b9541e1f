"""Inputs of a step for models with image input: embeddings that contain image features, and positions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.models.model import Model
from penstock.ops import Batch

from ..step import StepInput
from .input_batch import InputBatch


class ImageFeatures:
    """Features of encoded images, and the batch inputs built from them. The scheduler decides which images are encoded
    and evicted (``EncoderCache``).

    Each image is encoded separately, so its features do not depend on other images.

    Args:
        batch: the worker's rows.
    """

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        self._features: dict[bytes, Tensor] = {}
        self._num_deepstack = 0
        """Number of leading tokens of ``VisionTower.deepstack`` that may hold features of the last step."""

    def update(self, model: Model, step: StepInput) -> None:
        """Drop the features of evicted images, and encode new images, as listed in the step."""
        for content_hash in step.evicted_images:
            self._features.pop(content_hash, None)
        if not step.encoded_images:
            return
        assert model.vision is not None
        for image in step.encoded_images:
            self._features[image.content_hash] = model.vision.encode(image)

    def clear(self) -> None:
        """Drop all features."""
        self._features.clear()

    def prepare(self, model: Model, batch: Batch, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        """Set inputs of a batch: embeddings of its tokens, with image features in place of placeholders; positions; and
        the end of the visible keys of each token, for bidirectional attention within images.

        Args:
            rows, starts, lengths: items of the batch, ``[items]`` (see ``InputBatch.flatten``).
        """
        assert model.vision is not None
        embeddings = model.vision.embed(batch.token_ids)
        size = embeddings.shape[1]
        for layer in model.vision.deepstack:
            layer[: self._num_deepstack].zero_()
        self._num_deepstack = 0
        ends = batch.positions.numpy() + 1
        positions = batch.positions.numpy() + self._batch.mrope_deltas[rows].repeat(lengths)
        grid = None
        first = 0
        for number, start, length in zip(rows.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            row = self._batch.row(number)
            for span in row.image_spans:
                begin, end = max(span.start, start), min(span.end, start + length)
                if begin < end:
                    features = self._features[span.content_hash][begin - span.start : end - span.start]
                    tokens = slice(first + begin - start, first + end - start)
                    if model.vision.placeholder is None:
                        embeddings[tokens] = features[:, :size]
                    else:
                        is_placeholder = batch.token_ids[tokens] == model.vision.placeholder
                        embeddings[tokens][is_placeholder] = features[is_placeholder]
                    if span.bidirectional:
                        ends[tokens] = span.end
                    for i, layer in enumerate(model.vision.deepstack, 1):
                        layer[tokens] = features[:, i * size : (i + 1) * size]
                        self._num_deepstack = tokens.stop
            if row.mrope_positions.size and start < row.mrope_positions.shape[1]:
                grid = np.stack([positions] * 3) if grid is None else grid
                given = row.mrope_positions[:, start : start + length]
                grid[:, first : first + given.shape[1]] = given
            first += length
        batch.hidden_states = embeddings
        if model.vision.bidirectional:
            key_ends = torch.from_numpy(ends.astype(np.int32))
            batch.attention.key_ends = key_ends
            batch.logits_attention.key_ends = key_ends[batch.logits_indices]
        batch.positions = torch.from_numpy(positions) if grid is None else model.vision.rope_rows(grid)
