"""Copies between a rank's KV cache and memory shared with the engine: the transfer buffer, and the host tier of the
prefix cache."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np
import torch

from penstock.core import Code, PenstockError
from penstock.ops import LayerExport

from ..step import StepInput, TransferMemory
from .model_runner import ModelRunner


class KVCopies:
    """Copies keys and values of this rank's heads and layers.

    Args:
        block_size: number of tokens per KV block.
        quantization: format of the KV cache (``KVSpec.quantization``).
        rank: world rank.
    """

    def __init__(self, runner: ModelRunner, block_size: int, quantization: str, rank: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._quantization = quantization
        self._rank = rank
        self.exports: list[LayerExport] = []
        """Part of the transfer buffer for each layer of this stage; empty without KV transfers."""
        self.transfer_slots = torch.empty(0, 0, dtype=torch.uint8)
        """Slots of the transfer buffer, ``[slots, slot_bytes]`` uint8."""
        self._host_tier: list[LayerExport] = []
        """Part of the host tier for each layer of this stage; empty without a host tier."""
        self.host_slots = torch.empty(0, 0, dtype=torch.uint8)
        """Slots of the host tier, ``[slots, slot_bytes]`` uint8."""

    def map(self, transfer: TransferMemory | None, host_tier: TransferMemory | None) -> None:
        """Map the transfer buffer and the host tier; None: absent. Raises ``OSError`` if they cannot be opened."""
        if transfer:
            self.exports, self.transfer_slots = self._map(transfer)
        if host_tier:
            self._host_tier, self.host_slots = self._map(host_tier)

    def _map(self, shared: TransferMemory) -> tuple[list[LayerExport], torch.Tensor]:
        """Map shared memory. Returns the part of each layer, and all slots. Raises ``OSError`` if it cannot be opened,
        for example because the worker is on another host."""
        layouts = self._runner.model.transfer_layouts(shared.slot_tokens, self._quantization)
        if layouts and layouts[0].slot_bytes != shared.slot_bytes:
            message = f"the engine expects {shared.slot_bytes} bytes per slot, the model has {layouts[0].slot_bytes}"
            raise PenstockError(Code.INTERNAL, message)
        size = shared.offset + shared.slots * shared.slot_bytes
        descriptor = os.open(shared.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        finally:
            os.close(descriptor)
        progress = torch.from_numpy(memory[: shared.offset].view(np.int64)[shared.progress + self._rank :][:1])
        buffer = torch.from_numpy(memory[shared.offset :])
        layers = [LayerExport(buffer, layout, progress) for layout in layouts]
        return layers, buffer.unflatten(0, (shared.slots, shared.slot_bytes))

    def export_tokens(self, first_layer: int, last_layer: int, slots: np.ndarray, places: np.ndarray) -> None:
        """Copy tokens of some layers to the transfer buffer. Arguments are the fields of ``ExportKV``."""
        self._copy_tokens(self._runner.ops.export_kv, first_layer, last_layer, slots, places)

    def import_tokens(self, first_layer: int, last_layer: int, slots: np.ndarray, places: np.ndarray) -> None:
        """Copy tokens of some layers from the transfer buffer. Arguments are the fields of ``ImportKV``."""
        self._copy_tokens(self._runner.ops.import_kv, first_layer, last_layer, slots, places)

    def store_blocks(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        """Copy whole KV blocks to slots of the host tier. Both arguments are ``[blocks]``."""
        self._copy_blocks(self._runner.ops.export_kv, blocks, slots)

    def load_blocks(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        """Copy whole KV blocks from slots of the host tier. Both arguments are ``[blocks]``."""
        self._copy_blocks(self._runner.ops.import_kv, blocks, slots)

    def _copy_tokens(
        self, copy: Callable[..., None], first_layer: int, last_layer: int, slots: np.ndarray, places: np.ndarray
    ) -> None:
        model = self._runner.model
        first_of_stage = sum(map(model.config.has_kv, range(model.layers.start)))
        mapping, targets = (torch.from_numpy(each.astype(np.int64)) for each in (slots, places))
        for number, (cache, layer) in enumerate(zip(self._runner.cache, self.exports, strict=False), first_of_stage):
            if first_layer <= number < last_layer:
                copy(cache, mapping.to(self._runner.device), layer.buffer, targets, layer.layout)

    def _copy_blocks(self, copy: Callable[..., None], blocks: np.ndarray, slots: np.ndarray) -> None:
        offsets = np.arange(self._block_size)
        mapping, places = (
            torch.from_numpy((each.astype(np.int64)[:, None] * len(offsets) + offsets).ravel())
            for each in (blocks, slots)
        )
        for cache, layer in zip(self._runner.cache, self._host_tier, strict=False):
            copy(cache, mapping.to(self._runner.device), layer.buffer, places, layer.layout)


def export_places(step: StepInput, num_tokens: np.ndarray) -> np.ndarray:
    """``Batch.export_places`` of a step: ``step.export_places``, and -1 for draft tokens, ``[tokens]`` int64.

    Args:
        num_tokens: number of tokens of each item, including draft tokens, ``[items]``.
    """
    given = step.export_places.astype(np.int64)
    if not len(step.drafts):
        return given
    places = np.full(num_tokens.sum(), -1, np.int64)
    ends, starts = step.lengths.cumsum(), num_tokens.cumsum() - num_tokens
    for start, end, length in zip(starts.tolist(), ends.tolist(), step.lengths.tolist(), strict=True):
        places[start : start + length] = given[end - length : end]
    return places
