"""Asynchronous copies between host and device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """An asynchronous copy of a tensor to pinned host memory. A tensor on a CPU is not copied.

    Args:
        tensor: tensor to copy. Before ``get`` returns, only the current CUDA stream may overwrite it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            self._host = tensor
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))

    def get(self) -> Tensor:
        """Wait for the copy, and return it as a tensor on the CPU."""
        if self._event:
            self._event.synchronize()
        return self._host


def to_device(values: np.ndarray | Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """Copy values to a tensor on ``device``, asynchronously. Python numbers become int64 or float32."""
    if isinstance(values, np.ndarray):
        tensor = torch.from_numpy(np.require(values, requirements="W"))  # arrays of decoded messages are read-only
    else:
        tensor = torch.tensor(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
