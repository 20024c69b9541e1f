"""Forward passes on the GPU: a batch is sent in one copy, and steps in which every sequence decodes replay CUDA graphs.

A graph has a fixed number of sequences. Graphs of several sizes are captured, and a batch uses the smallest one that is
large enough. The padding has no query tokens, stores nothing in the KV cache and in recurrent states, and does not
change the bits of other rows, since all kernels are batch-invariant.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from penstock.config.progress import track

from ..batch import MAX_SNAPSHOTS, AttentionMetadata, Batch, CaptureOptions, ForwardFn, StateBatch
from .kernels.tokens import resolve_tokens_kernel
from .launch import launch

logger = logging.getLogger(__name__)

ALIGNMENT = 16
"""Alignment of arrays in bytes, so that Triton compiles kernels only for aligned addresses."""
NUM_PINNED = 4
"""Number of pinned buffers: more than steps in flight, so that a step does not wait for an earlier copy."""
RESOLVE_BLOCK = 256
"""Number of tokens of a program that resolves token ids."""
WARM_UP_TOKENS = (1, 17, 65, 129, 257, 513, 1025, 2049, 4097, 8192)
"""Numbers of tokens of warm-up steps at startup. The tiles of kernels depend on the number of tokens: without these
steps, requests would wait for the compiler."""
MIN_BLOCK_SIZE = 16
"""Smallest block size of the KV cache."""


class Staging:
    """Copies arrays to the GPU: packed in pinned memory, then sent in one asynchronous copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * NUM_PINNED
        self._copied: list[Any] = [None] * NUM_PINNED
        """CUDA event after the last copy from each buffer."""
        self._next = 0
        """Index of the buffer to use next."""

    def reserve(self, size: int) -> Tensor:
        """Return ``[size]`` uint8 of pinned host memory, to be filled before ``send``. Waits until an earlier copy of
        this memory has ended."""
        if self._copied[self._next]:
            self._copied[self._next].synchronize()
        if self._buffers[self._next].numel() < size:
            capacity = 1 << (size - 1).bit_length()
            self._buffers[self._next] = torch.empty(capacity, dtype=torch.uint8, pin_memory=self._on_gpu)
        return self._buffers[self._next][:size]

    def send(self, size: int, target: Tensor) -> None:
        """Copy the reserved memory to ``target``, ``[size]`` uint8 on the device."""
        target.copy_(self._buffers[self._next][:size], non_blocking=True)
        if self._on_gpu:
            self._copied[self._next] = torch.cuda.Event()
            self._copied[self._next].record()
        self._next = (self._next + 1) % NUM_PINNED


class Layout:
    """Offsets of tensors in one buffer.

    Args:
        tensors: tensors with the shapes and dtypes of the layout.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._entries = []
        self.size = 0
        """Size of the buffer in bytes."""
        for tensor in tensors:
            self._entries.append((self.size, tensor.shape, tensor.dtype))
            self.size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return views of the tensors in a buffer, ``[size]`` uint8."""
        return [
            buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, shape, dtype in self._entries
        ]


class CapturedForward:
    """A captured forward pass, with the arguments of ``reference.capture``."""

    def __init__(self, forward: ForwardFn, options: CaptureOptions) -> None:
        max_blocks, use_lora, hidden_states = options.max_blocks, options.use_lora, options.hidden_states
        state_cache = options.state_cache
        self._run = _with_resolved_tokens(forward, options.sampled)
        self._device = device = options.device
        self._staging = Staging(device)
        self._graphs: dict[int, DecodeGraph] = {}
        self._sizes: list[int] = []
        on_gpu, started = device.type == "cuda", time.monotonic()
        before = torch.cuda.memory_reserved(device) if on_gpu else 0
        pool, stream = (torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)) if on_gpu else (None, None)
        try:
            graph_sizes = options.graph_sizes if hidden_states is None else ()
            sizes = sorted({min(size, options.max_sequences) for size in graph_sizes}, reverse=True)
            for size in track("capturing CUDA graphs", sizes, len(sizes), "graph", logger):
                batch = _decode_batch(size, max_blocks, use_lora, state_cache)
                self._graphs[size] = DecodeGraph(self._run, batch, self._staging, device, pool, stream)
        except Exception as error:  # for example, a collective that cannot be captured
            logger.warning("CUDA graphs are off, because a capture failed: %s", error, exc_info=error)
            self._graphs.clear()
            with suppress(Exception):  # without this call, PyTorch would free no memory after a failed capture
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool or (0, 0))
        self._sizes = sorted(self._graphs)
        if on_gpu:
            for tokens in WARM_UP_TOKENS:
                if tokens <= min(options.max_tokens, max_blocks * MIN_BLOCK_SIZE):
                    batch = _prompt_batch(tokens, max_blocks, use_lora, hidden_states, state_cache)
                    self._run(self._to_device(batch))
        if self._sizes and on_gpu:
            # the memory of the runs before captures belongs to the capture stream; no other stream can use it
            torch.cuda.empty_cache()
            size, seconds = torch.cuda.memory_reserved(device) - before, time.monotonic() - started
            logger.info("captured %d CUDA graphs in %.1f seconds, %.2f GB", len(self._sizes), seconds, size / 1e9)

    def __call__(self, batch: Batch) -> Tensor:
        """Compute a batch in host memory. The result is on the device, and valid until the next call."""
        sequences = len(batch.attention.seq_lens)
        decodes = sequences == len(batch.token_ids) == len(batch.logits_indices)
        if decodes and batch.hidden_states is None and batch.export_places is None and not batch.slot_copies:
            for size in self._sizes:
                if size >= sequences:
                    return self._graphs[size](batch)
        moved = self._to_device(batch)
        out = self._run(moved)
        batch.aux_hidden_states = moved.aux_hidden_states
        return out

    def _to_device(self, batch: Batch) -> Batch:
        """Copy a batch to the device in one copy. ``export_places`` stay in host memory, like the transfer buffer."""
        tensors = _tensors(batch)
        layout = Layout(tensors)
        for view, tensor in zip(layout.views(self._staging.reserve(layout.size)), tensors, strict=True):
            view.copy_(tensor)
        memory = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
        self._staging.send(layout.size, memory)
        moved = _with_tensors(batch, layout.views(memory))
        if batch.slot_copies:
            moved.slot_copies = batch.slot_copies[0].to(self._device), batch.slot_copies[1].to(self._device)
        moved.hidden_states = None if batch.hidden_states is None else batch.hidden_states.to(self._device)
        return moved


def _with_resolved_tokens(forward: ForwardFn, sampled: Tensor | None) -> ForwardFn:
    """Wrap a forward pass to resolve token ids that refer to ``sampled``."""
    if sampled is None:
        return forward

    def run(batch: Batch) -> Tensor:
        count = len(batch.token_ids)
        grid = (-(-count // RESOLVE_BLOCK),)
        launch(resolve_tokens_kernel, grid, batch.token_ids, sampled, count, BLOCK=RESOLVE_BLOCK)
        return forward(batch)

    return run


class DecodeGraph:
    """The CUDA graph of a fixed number of sequences, each with one token. On CPUs, the padded batch is computed without
    a graph.

    Args:
        run: computes a batch on the device.
        padding: batch in host memory of the graph's number of sequences, without tokens.
        pool: memory pool that graphs share.
        stream: stream on which all graphs are captured, since other streams cannot use its memory; None on CPUs.
    """

    def __init__(
        self,
        run: ForwardFn,
        padding: Batch,
        staging: Staging,
        device: torch.device,
        pool: Any,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._staging = staging
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        self._template = padding
        tensors = _tensors(padding)
        self._layout = Layout(tensors)
        self._padding = torch.zeros(self._layout.size, dtype=torch.uint8)
        for view, tensor in zip(self._layout.views(self._padding), tensors, strict=True):
            view.copy_(tensor)
        self._memory = self._padding.to(device, copy=True)
        if stream is None:
            return
        stream.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            run(self._batch())  # compiles and loads the kernels, since a capture cannot do that
            stream.synchronize()
            self._captured = self._batch()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads may use the GPU
            try:
                self._out = run(self._captured)
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = graph

    def __call__(self, batch: Batch) -> Tensor:
        """Compute a batch in host memory with at most the graph's number of sequences."""
        memory = self._staging.reserve(self._layout.size)
        memory.copy_(self._padding)
        for view, tensor in zip(self._layout.views(memory), _tensors(batch), strict=True):
            if tensor.dim() == 2:
                view[: tensor.shape[0], : tensor.shape[1]] = tensor
            else:
                view[: len(tensor)] = tensor
                if len(tensor) == len(batch.token_ids) + 1:  # starts: padding has no queries and snapshots
                    view[len(tensor) :] = tensor[-1]
        self._staging.send(self._layout.size, self._memory)
        if self._graph:
            self._graph.replay()
        else:
            self._captured = self._batch()
            self._out = self._run(self._captured)
        count = len(batch.token_ids)
        batch.aux_hidden_states = tuple(states[:count] for states in self._captured.aux_hidden_states)
        return self._out[:count]

    def _batch(self) -> Batch:
        """Return a new batch over the graph's memory. Each run needs one, since kernels store their plan in it."""
        return _with_tensors(self._template, self._layout.views(self._memory))


def _decode_batch(size: int, max_blocks: int, use_lora: bool, state_cache: list[dict[str, Tensor]] | None) -> Batch:
    """Create a batch of ``size`` padding sequences without tokens."""
    zeros, lengths = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int32)
    starts, tables = torch.zeros(size + 1, dtype=torch.int32), torch.zeros(size, max_blocks, dtype=torch.int32)
    metadata = AttentionMetadata(starts, lengths, tables)
    slots = torch.full_like(lengths, -1) if use_lora else None
    states = _padding_states(size, MAX_SNAPSHOTS * size, state_cache)
    return Batch(zeros, zeros, zeros - 1, metadata, torch.arange(size), metadata, slots, slots, states=states)


def _prompt_batch(
    tokens: int,
    max_blocks: int,
    use_lora: bool,
    hidden_states: Tensor | None,
    state_cache: list[dict[str, Tensor]] | None,
) -> Batch:
    """Create a warm-up batch of one prompt, which stores no keys, values and states, and attends to the first KV
    block."""
    zeros, starts = torch.zeros(tokens, dtype=torch.int64), torch.tensor([0, tokens], dtype=torch.int32)
    tables, lengths = torch.zeros(1, max_blocks, dtype=torch.int32), starts[1:].clone()
    slots = torch.full((tokens,), -1, dtype=torch.int32) if use_lora else None
    hidden = None if hidden_states is None else hidden_states[:tokens]
    return Batch(
        zeros,
        zeros,
        zeros - 1,
        AttentionMetadata(starts, lengths, tables),
        torch.tensor([tokens - 1]),
        AttentionMetadata(torch.tensor([0, 1], dtype=torch.int32), lengths, tables),
        slots,
        None if slots is None else slots[:1],
        hidden,
        states=_padding_states(1, 0, state_cache),
    )


def _padding_states(sequences: int, snapshots: int, cache: list[dict[str, Tensor]] | None) -> StateBatch | None:
    """States of padding sequences, with memory for ``snapshots``; None without state layers."""
    if cache is None:
        return None
    slots, starts, saves = (torch.zeros(count, dtype=torch.int32) for count in (sequences, sequences + 1, snapshots))
    return StateBatch(cache, slots - 1, slots, slots, starts, saves, saves)


def _tensors(batch: Batch) -> list[Tensor]:
    """Tensors of a batch to copy. ``logits_attention`` and ``logits_lora_slots`` are omitted if they are the same
    objects as ``attention`` and ``lora_slots``."""
    metadata = [batch.attention]
    if batch.logits_attention is not batch.attention:
        metadata.append(batch.logits_attention)
    slots = [] if batch.lora_slots is None else [batch.lora_slots]
    if batch.logits_lora_slots is not None and batch.logits_lora_slots is not batch.lora_slots:
        slots.append(batch.logits_lora_slots)
    tables = [tensor for m in metadata for tensor in (m.query_start_loc, m.seq_lens, m.block_tables)]
    states = _state_tensors(batch.states) if batch.states else []
    return [batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_indices, *states, *tables, *slots]


def _state_tensors(states: StateBatch) -> list[Tensor]:
    """Tensors of ``StateBatch``, in the order of its arguments after the cache."""
    numbers = [states.slots, states.accepted, states.drafts, states.save_start_loc]
    return [*numbers, states.save_after, states.save_slots]


def _with_tensors(batch: Batch, tensors: list[Tensor]) -> Batch:
    """Replace the tensors of a batch, in the order of ``_tensors``."""
    token_ids, positions, slot_mapping, logits_indices, *rest = tensors
    states = None
    if batch.states:
        states, rest = StateBatch(batch.states.cache, *rest[:6]), rest[6:]
    starts, lengths, tables, *rest = rest
    attention = logits_attention = AttentionMetadata(starts, lengths, tables)
    if batch.logits_attention is not batch.attention:
        logits_attention, rest = AttentionMetadata(*rest[:3]), rest[3:]
    lora_slots = logits_lora_slots = None
    if batch.lora_slots is not None:
        lora_slots, logits_lora_slots = rest[0], rest[-1]
    return replace(
        batch,
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        logits_indices=logits_indices,
        attention=attention,
        logits_attention=logits_attention,
        lora_slots=lora_slots,
        logits_lora_slots=logits_lora_slots,
        states=states,
    )


def is_capturing() -> bool:
    """See ``reference.is_capturing``."""
    return torch.cuda.is_current_stream_capturing()


def capture(forward: ForwardFn, options: CaptureOptions) -> ForwardFn:
    """See ``reference.capture``. Raises ``ValueError`` for ``key_ends``, which the kernels do not support."""
    if options.key_ends:
        raise ValueError("bidirectional attention within images (key_ends) is not supported on GPUs: use a CPU")
    return CapturedForward(forward, options)
