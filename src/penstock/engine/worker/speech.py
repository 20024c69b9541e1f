"""What rows hear: keys and values of their audio, in a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.models import Model, Whisper, largest_activation
from penstock.ops import AttentionMetadata, CrossAttention, Ops

from ..step import NewRow


class SpeechStates:
    """Each row has blocks of its own, as all windows of audio have the same length. They are written when a sequence
    starts to run, and again after it was preempted.

    Args:
        model: which encodes the audio.
        rows: number of rows.
        block_size: tokens of a KV block.
    """

    def __init__(self, model: Whisper, ops: Ops, rows: int, block_size: int) -> None:
        assert model.config.speech
        self._ops = ops
        self._block_size = block_size
        self._length = model.config.speech.num_positions
        self._row_blocks = blocks = -(-self._length // block_size)
        specs = model.kv_specs(block_size)
        self.num_bytes = rows * blocks * sum(spec.bytes_per_block for spec in specs)
        """Bytes of the cache, and of the largest activations of an encoder."""
        self.num_bytes += largest_activation(model.config.speech, model.config.hidden_size)
        self._cache = ops.new_kv_cache(specs, rows * blocks, torch.device("cpu"))

    def update(self, model: Model, new: Sequence[NewRow]) -> None:
        """Encode the audio of sequences that start to run."""
        assert isinstance(model, Whisper)
        for row in new:
            if row.audio is None:
                continue
            features = np.frombuffer(row.audio.features, np.float32).reshape(row.audio.bins, row.audio.frames)
            slots = torch.arange(self._length) + row.row * self._row_blocks * self._block_size
            for cache, (k, v) in zip(self._cache, model.encode(torch.from_numpy(features.copy())), strict=True):
                self._ops.store_kv(cache, k, v, slots)

    def cross_attention(self, rows: np.ndarray, query_start_loc: Tensor) -> CrossAttention:
        """For a batch.

        Args:
            rows: ``[items]``: the rows of its sequences.
            query_start_loc: as of ``AttentionMetadata``.
        """
        tables = rows[:, None] * self._row_blocks + np.arange(self._row_blocks)
        lengths = torch.full((len(rows),), self._length, dtype=torch.int32)
        metadata = AttentionMetadata(query_start_loc, lengths, torch.from_numpy(tables.astype(np.int32)))
        return CrossAttention(self._cache, metadata)
