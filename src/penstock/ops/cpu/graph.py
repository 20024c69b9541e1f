"""Captured graphs: the kernel calls of a step, recorded once and replayed by one native call for any number of tokens.

A step makes hundreds of kernel calls, with arguments that differ between steps only in the number of rows. To capture a
graph, the step runs once over buffers for the largest batch, while the kernels record their arguments instead of
computing. A replay copies the batch into these buffers and runs the calls. Unlike a CUDA graph, one captured graph
serves all batch sizes.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import numpy as np
import torch
from torch import Tensor

from .. import _kernels, pages
from ..batch import CPU, MAX_SNAPSHOTS, AttentionMetadata, Batch, CaptureOptions, ForwardFn, StateBatch

MAX_CAPTURED_TOKENS = 4096
"""Maximum number of tokens of a batch that uses the graph, which has buffers of this size."""
_capturing = threading.local()
"""``arena``: the arena of the graph that the thread captures."""


class Arena:
    """Memory of a graph's intermediate results. Once a buffer has no reference during the capture, later calls reuse
    it: replays make the calls in the same order."""

    def __init__(self) -> None:
        self.buffers: list[np.ndarray] = []
        """All buffers."""
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        """Unreferenced buffers by size in bytes."""

    def allocate(self, size: int) -> np.ndarray:
        """Allocate ``[size]`` uint8, which returns to the arena when its last reference is dropped."""
        size = max(size, 1)
        if self._free[size]:
            memory = self._free[size].pop()
        else:
            memory = pages.zeros(size).numpy()  # pages that are never written use no memory
            self.buffers.append(memory)
        view = memory[:]
        weakref.finalize(view, self._free[size].append, memory)
        return view


def current_arena() -> Arena | None:
    """Return the arena of the graph that this thread captures; None if it does not capture a graph."""
    arena: Arena | None = getattr(_capturing, "arena", None)
    return arena


def is_capturing() -> bool:
    """See ``reference.is_capturing``."""
    return current_arena() is not None


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """See ``reference.empty``. While this thread captures a graph, memory is allocated from its arena."""
    arena = current_arena()
    if arena is None:
        return torch.empty(shape, dtype=dtype)
    memory = arena.allocate(prod(shape) * dtype.itemsize)
    return torch.from_numpy(memory).view(dtype).view(tuple(shape))


def contiguous(x: Tensor) -> Tensor:
    """``Tensor.contiguous`` for inputs of kernels. Raises ``RuntimeError`` if a captured step would have to copy:
    graphs contain only kernel calls, so that the replay would lack PyTorch's copy."""
    if not x.is_contiguous() and current_arena() is not None:
        raise RuntimeError(f"a captured step cannot make a tensor {tuple(x.shape)} of strides {x.stride()} contiguous")
    return x.contiguous()


@contextmanager
def _allocating_from(arena: Arena) -> Iterator[None]:
    """Let ``empty`` allocate from ``arena`` in this thread."""
    _capturing.arena = arena
    try:
        yield
    finally:
        _capturing.arena = None


class CapturedGraph:
    """A forward pass as one native call, with the arguments of ``capture``."""

    def __init__(self, forward: ForwardFn, options: CaptureOptions) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        def metadata() -> AttentionMetadata:
            starts, lengths = zeros(sequences + 1, dtype=torch.int32), zeros(sequences, dtype=torch.int32)
            tables = zeros(sequences, options.max_blocks, dtype=torch.int32)
            ends = zeros(max_tokens, dtype=torch.int32) if options.key_ends else None
            return AttentionMetadata(starts, lengths, tables, ends)

        self._forward = forward
        self._max_tokens = max_tokens = min(options.max_tokens, MAX_CAPTURED_TOKENS)
        sequences, use_lora, hidden_states = options.max_sequences, options.use_lora, options.hidden_states
        self._batch = Batch(
            token_ids=zeros(max_tokens),
            positions=zeros(max_tokens),
            slot_mapping=zeros(max_tokens),
            attention=metadata(),
            logits_indices=zeros(max_tokens),
            logits_attention=metadata(),
            lora_slots=zeros(max_tokens, dtype=torch.int32) if use_lora else None,
            logits_lora_slots=zeros(max_tokens, dtype=torch.int32) if use_lora else None,
            hidden_states=None if hidden_states is None else hidden_states[:max_tokens],
            export_places=zeros(max_tokens),
        )
        if options.state_cache is not None:
            numbers = [zeros(count, dtype=torch.int32) for count in (sequences, sequences, sequences, sequences + 1)]
            snapshots = [zeros(MAX_SNAPSHOTS * sequences, dtype=torch.int32) for _ in range(2)]
            self._batch.states = StateBatch(options.state_cache, *numbers, *snapshots)
        self._exported = max_tokens
        """Number of leading entries of ``export_places`` that may differ from -1."""
        self._native, self._arena = _kernels.Graph(), Arena()
        with _allocating_from(self._arena):
            self._native.record()
            try:
                self._out = forward(self._batch)
            finally:
                self._native.stop()

    @property
    def buffer_bytes(self) -> int:
        """Size of the graph's intermediate results in bytes."""
        return sum(memory.nbytes for memory in self._arena.buffers)

    def __call__(self, batch: Batch) -> Tensor:
        tokens, rows = batch.token_ids.shape[0], batch.logits_indices.shape[0]
        if tokens > self._max_tokens or batch.slot_copies:
            return self._forward(batch)
        buffers = self._batch
        buffers.token_ids[:tokens] = batch.token_ids
        buffers.positions[:tokens] = batch.positions
        buffers.slot_mapping[:tokens] = batch.slot_mapping
        buffers.logits_indices[:rows] = batch.logits_indices
        for buffer, source in (
            (buffers.lora_slots, batch.lora_slots),
            (buffers.logits_lora_slots, batch.logits_lora_slots),
            (buffers.hidden_states, batch.hidden_states),
        ):
            if buffer is not None and source is not None:
                buffer[: len(source)] = source
        self._set_export_places(batch.export_places)
        if buffers.states and batch.states:
            _copy_states(buffers.states, batch.states)
        sequences = _copy_metadata(buffers.attention, batch.attention)
        logits_sequences = _copy_metadata(buffers.logits_attention, batch.logits_attention)
        self._native.run(tokens, sequences, rows, logits_sequences)
        batch.aux_hidden_states = tuple(states[:tokens] for states in buffers.aux_hidden_states)
        return self._out[:rows]

    def _set_export_places(self, places: Tensor | None) -> None:
        """Copy ``Batch.export_places`` into the graph's buffer, with -1 for all further tokens."""
        buffer = self._batch.export_places
        assert buffer is not None
        if self._exported:
            buffer[: self._exported] = -1
        self._exported = 0 if places is None else len(places)
        if places is not None:
            buffer[: self._exported] = places


def _copy_metadata(buffers: AttentionMetadata, source: AttentionMetadata) -> int:
    """Copy metadata into the graph's buffers. Returns the number of sequences."""
    sequences, blocks = source.block_tables.shape
    buffers.query_start_loc[: sequences + 1] = source.query_start_loc
    buffers.seq_lens[:sequences] = source.seq_lens
    buffers.block_tables[:sequences, :blocks] = source.block_tables
    if buffers.key_ends is not None and source.key_ends is not None:
        buffers.key_ends[: len(source.key_ends)] = source.key_ends
    return sequences


def _copy_states(buffers: StateBatch, source: StateBatch) -> None:
    """Copy the numbers of a step's states into the graph's buffers."""
    for buffer, values in (
        (buffers.slots, source.slots),
        (buffers.accepted, source.accepted),
        (buffers.drafts, source.drafts),
        (buffers.save_start_loc, source.save_start_loc),
        (buffers.save_after, source.save_after),
        (buffers.save_slots, source.save_slots),
    ):
        buffer[: len(values)] = values


def capture(forward: ForwardFn, options: CaptureOptions) -> ForwardFn:
    """See ``reference.capture``. A batch of more than ``MAX_CAPTURED_TOKENS`` tokens runs without the graph.

    From then on, PyTorch is limited to one thread: its threads spin after each call, on cores that the kernels need.
    """
    torch.set_num_threads(1)
    return CapturedGraph(forward, options)
