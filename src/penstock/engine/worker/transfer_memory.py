"""The transfer buffer in a worker: memory of the engine's process, to which ranks copy their layers and heads."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch

from penstock.ops import LayerExport, TransferLayout

from ..step import TransferMemory


def layer_exports(transfer: TransferMemory, layouts: Sequence[TransferLayout], rank: int) -> list[LayerExport]:
    """Map the transfer buffer.

    Args:
        layouts: of this rank's layers.
        rank: world rank, which has a word for its progress in the memory's header.

    Raises ``OSError`` where the memory cannot be opened, as in a worker on another host.
    """
    size = transfer.offset + transfer.slots * layouts[0].slot_bytes
    descriptor = os.open(transfer.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    finally:
        os.close(descriptor)
    progress = torch.from_numpy(memory[: transfer.offset].view(np.int64)[transfer.progress + rank :][:1])
    buffer = torch.from_numpy(memory[transfer.offset :])
    return [LayerExport(buffer, layout, progress) for layout in layouts]
