"""Copies between host and device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """A tensor's values for the host: copied to pinned memory once the device has computed them.

    On a CPU it is the tensor itself.

    Args:
        tensor: not overwritten before ``get`` returns, unless by the same stream.
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
        """The values, on the CPU; waits until they are there."""
        if self._event:
            self._event.synchronize()
        return self._host


def to_device(values: np.ndarray | Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """Values of the host as a tensor on ``device``: int64 or float32 where they are a sequence of Python's numbers."""
    if isinstance(values, np.ndarray):
        tensor = torch.from_numpy(np.require(values, requirements="W"))  # arrays of messages are read-only
    else:
        tensor = torch.tensor(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
