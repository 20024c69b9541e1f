"""Captured graphs: a step of kernel calls, captured once and replayed by one native call for any number of tokens.

A model's step makes some hundred kernel calls whose arguments are the same in every step but for the number of rows. So
the step runs once over buffers large enough for every step, while the kernels note their arguments in place of
computing. A replay copies the batch into those buffers and runs the calls. It is the idea of CUDA graphs, without one
graph for each batch size.
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
from ..batch import CPU, AttentionMetadata, Batch, CaptureOptions, ForwardFn

MAX_CAPTURED_TOKENS = 4096
"""Tokens of the largest batch that a graph has buffers for."""
_capturing = threading.local()


class Arena:
    """Memory of a graph's intermediate results. A buffer that nothing refers to any more while the graph is captured
    is reused by later calls, because a replay makes the calls in the same order."""

    def __init__(self) -> None:
        self.buffers: list[np.ndarray] = []
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)

    def allocate(self, size: int) -> np.ndarray:
        """``[size]`` uint8, which returns to the arena when its last reference goes."""
        size = max(size, 1)
        if self._free[size]:
            memory = self._free[size].pop()
        else:
            memory = pages.zeros(size).numpy()  # pages that no step writes to take no memory
            self.buffers.append(memory)
        view = memory[:]
        weakref.finalize(view, self._free[size].append, memory)
        return view


def current_arena() -> Arena | None:
    """Of the graph that this thread captures; None where it captures none."""
    arena: Arena | None = getattr(_capturing, "arena", None)
    return arena


def is_capturing() -> bool:
    """As ``reference.is_capturing``."""
    return current_arena() is not None


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """As ``reference.empty``; in the arena while this thread captures a graph."""
    arena = current_arena()
    if arena is None:
        return torch.empty(shape, dtype=dtype)
    memory = arena.allocate(prod(shape) * dtype.itemsize)
    return torch.from_numpy(memory).view(dtype).view(tuple(shape))


def contiguous(x: Tensor) -> Tensor:
    """As ``Tensor.contiguous``. Raises ``RuntimeError`` where a captured step would have to copy: graphs hold kernel
    calls only, and PyTorch's copy would be missing from the replay."""
    if not x.is_contiguous() and current_arena() is not None:
        raise RuntimeError("a captured step must not copy tensors that are not contiguous")
    return x.contiguous()


@contextmanager
def _allocating_from(arena: Arena) -> Iterator[None]:
    _capturing.arena = arena
    try:
        yield
    finally:
        _capturing.arena = None


class CapturedGraph:
    """A forward pass as one native call; arguments as for ``capture``."""

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
        self._exported = max_tokens  # of ``export_places`` as many may not be -1
        self._native, self._arena = _kernels.Tape(), Arena()
        with _allocating_from(self._arena):
            self._native.record()
            try:
                self._out = forward(self._batch)
            finally:
                self._native.stop()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the memory that a step computes in."""
        return sum(memory.nbytes for memory in self._arena.buffers)

    def __call__(self, batch: Batch) -> Tensor:
        tokens, rows = batch.token_ids.shape[0], batch.logits_indices.shape[0]
        if tokens > self._max_tokens or batch.slot_copies:
            return self._forward(batch)
        own = self._batch
        own.token_ids[:tokens] = batch.token_ids
        own.positions[:tokens] = batch.positions
        own.slot_mapping[:tokens] = batch.slot_mapping
        own.logits_indices[:rows] = batch.logits_indices
        for mine, given in (
            (own.lora_slots, batch.lora_slots),
            (own.logits_lora_slots, batch.logits_lora_slots),
            (own.hidden_states, batch.hidden_states),
        ):
            if mine is not None and given is not None:
                mine[: len(given)] = given
        self._set_export_places(batch.export_places)
        sequences, logits_sequences = (
            _copy_metadata(mine, given)
            for mine, given in ((own.attention, batch.attention), (own.logits_attention, batch.logits_attention))
        )
        self._native.run(tokens, sequences, rows, logits_sequences)
        batch.aux_hidden_states = tuple(states[:tokens] for states in own.aux_hidden_states)
        return self._out[:rows]

    def _set_export_places(self, given: Tensor | None) -> None:
        own = self._batch.export_places
        assert own is not None
        if self._exported:
            own[: self._exported] = -1
        self._exported = 0 if given is None else len(given)
        if given is not None:
            own[: self._exported] = given


def _copy_metadata(own: AttentionMetadata, given: AttentionMetadata) -> int:
    """Copy into the graph's buffers; returns the number of sequences."""
    sequences, blocks = given.block_tables.shape
    own.query_start_loc[: sequences + 1] = given.query_start_loc
    own.seq_lens[:sequences] = given.seq_lens
    own.block_tables[:sequences, :blocks] = given.block_tables
    if own.key_ends is not None and given.key_ends is not None:
        own.key_ends[: len(given.key_ends)] = given.key_ends
    return sequences


def capture(forward: ForwardFn, options: CaptureOptions) -> ForwardFn:
    """As ``reference.capture``. A batch of more than ``MAX_CAPTURED_TOKENS`` tokens runs call by call.

    Limits PyTorch to one thread from now on: its threads spin for a while after each call, on cores that the kernels
    then lack.
    """
    torch.set_num_threads(1)
    return CapturedGraph(forward, options)
