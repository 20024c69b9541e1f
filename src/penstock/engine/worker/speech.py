"""Encoded audio of rows: cross-attention keys and values in a separate KV cache, and the end times of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.core.audio import Alignment
from penstock.models.model import Model
from penstock.models.whisper import Whisper
from penstock.models.whisper_alignment import alignment_bytes, token_times
from penstock.models.whisper_encoder import largest_activation
from penstock.ops import AttentionMetadata, CrossAttention, Ops, TransferLayout

from ..step import NewRow


class _AlignedRow:
    """State of a row for which token times are requested."""

    def __init__(self, alignment: Alignment) -> None:
        self.alignment = alignment
        self.queries: list[Tensor] = []
        """Recorded queries of each step so far, ``[heads, tokens, head_dim]``."""


class SpeechStates:
    """The cross-attention KV cache of a speech model, and the token times of rows.

    All audio windows have the same length, and the cache has one window per row. A window is written when a sequence
    starts to run (also after preemption), unless the cache already has the same audio (``AudioInput.key``).

    Args:
        model: model that encodes the audio.
        rows: number of rows.
        block_size: number of tokens per KV block.
    """

    def __init__(self, model: Whisper, ops: Ops, rows: int, block_size: int) -> None:
        assert model.config.speech
        self._ops = ops
        self._block_size = block_size
        self._length = model.config.speech.num_positions
        self._filter_width = model.config.speech.median_filter_width
        self._window_blocks = blocks = -(-self._length // block_size)
        self._specs = specs = model.kv_specs(block_size)
        self.num_bytes = rows * blocks * sum(spec.bytes_per_block for spec in specs)
        """Size of the cache and of the largest activations of encoder or alignment, bytes."""
        self.num_bytes += max(
            largest_activation(model.config.speech, model.config.hidden_size),
            alignment_bytes(model.max_len, self._length),
        )
        self._cache = ops.new_kv_cache(specs, rows * blocks, torch.device("cpu"))
        self._windows = np.arange(rows)
        """Window of each row, ``[rows]``. A row keeps its window after its sequence has ended."""
        self._keys = {window: b"" for window in range(rows)}
        """Window → ``AudioInput.key``, in the order in which the windows were written."""
        self._aligned: dict[int, _AlignedRow] = {}
        """Row number → state, for rows with requested token times."""

    def update(self, model: Model, new: Sequence[NewRow]) -> None:
        """Encode the audio of the sequences that start to run, ``new``."""
        assert isinstance(model, Whisper)
        for row in new:
            self._aligned.pop(row.row, None)
            if row.audio is None:
                continue
            if row.audio.alignment:
                self._aligned[row.row] = _AlignedRow(row.audio.alignment)
            if self._find_window(row.row, row.audio.key):
                continue
            features = np.frombuffer(row.audio.features, np.float32).reshape(row.audio.bins, row.audio.frames)
            slots = self._slots(row.row)
            for cache, (k, v) in zip(self._cache, model.encode(torch.from_numpy(features.copy())), strict=True):
                self._ops.store_kv(cache, k, v, slots)
            self._keys[int(self._windows[row.row])] = row.audio.key

    def clear(self) -> None:
        """Invalidate all cached audio, which depends on the weights."""
        self._keys = dict.fromkeys(self._keys, b"")

    def _find_window(self, row: int, key: bytes) -> bool:
        """Assign a window to a row. Returns True if a window already has the row's audio; otherwise assigns the least
        recently written window that no other row has, and returns False."""
        for window, held in self._keys.items():
            if key and held == key:
                self._windows[row] = window
                return True
        others = {*self._windows[:row].tolist(), *self._windows[row + 1 :].tolist()}
        window = next(window for window in self._keys if window not in others)
        del self._keys[window]
        self._keys[window] = b""
        self._windows[row] = window
        return False

    def _slots(self, row: int) -> Tensor:
        """Cache slots of a row's audio, ``[positions]`` int64."""
        return torch.arange(self._length) + int(self._windows[row]) * self._window_blocks * self._block_size

    def cross_attention(self, rows: np.ndarray, query_start_loc: Tensor) -> CrossAttention:
        """Cross-attention input of a batch.

        Args:
            rows: row of each item, ``[items]``.
            query_start_loc: index of each item's first token in the batch, ``[items + 1]`` (``AttentionMetadata``).
        """
        tables = self._windows[rows][:, None] * self._window_blocks + np.arange(self._window_blocks)
        lengths = torch.full((len(rows),), self._length, dtype=torch.int32)
        metadata = AttentionMetadata(query_start_loc, lengths, torch.from_numpy(tables.astype(np.int32)))
        aligned = [self._aligned[row].alignment for row in rows.tolist() if row in self._aligned]
        layers = frozenset(layer for alignment in aligned for layer, _ in alignment.heads)
        return CrossAttention(self._cache, metadata, layers)

    def collect(self, rows: np.ndarray, cross: CrossAttention) -> None:
        """Keep the queries recorded by a forward pass for rows with requested token times."""
        if not cross.recorded_layers:
            return
        starts = cross.attention.query_start_loc.tolist()
        for row, start, end in zip(rows.tolist(), starts, starts[1:], strict=False):
            if aligned := self._aligned.get(row):
                heads = [cross.queries[layer][start:end, head] for layer, head in aligned.alignment.heads]
                aligned.queries.append(torch.stack(heads))

    def take_times(self, row: int) -> np.ndarray | None:
        """End times of a row's tokens (see ``Alignment``), ``[1, tokens]`` float32; None if they are not requested.
        Call this once all tokens are computed."""
        aligned = self._aligned.pop(row, None)
        if aligned is None:
            return None
        alignment = aligned.alignment
        queries = torch.cat(aligned.queries, 1)[:, alignment.start :]
        slots, keys = self._slots(row), dict[int, Tensor]()
        for layer, _ in alignment.heads:
            if layer not in keys:
                keys[layer] = self._read_keys(layer, slots)
        heads = torch.stack([keys[layer][:, head] for layer, head in alignment.heads])
        times = token_times(queries, heads, alignment.length, self._filter_width)
        return times.astype(np.float32)[None]

    def _read_keys(self, layer: int, slots: Tensor) -> Tensor:
        """Read keys of a layer from the cache, ``[slots, heads, head_dim]``."""
        spec, count = self._specs[layer], len(slots)
        size = count * spec.bytes_per_token
        layout = TransferLayout(count, size, 0, spec.kv_heads, spec.bytes_per_vector)
        buffer = torch.empty(size, dtype=torch.uint8)
        self._ops.export_kv(self._cache[layer], slots, buffer, torch.arange(count), layout)
        vectors = buffer.view(getattr(torch, spec.dtype)).view(2, count, spec.kv_heads, spec.head_dim)
        return vectors[0]
