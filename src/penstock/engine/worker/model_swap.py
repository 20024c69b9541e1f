"""Weights that change while the worker runs: others are loaded beside those in use, then swapped, or dropped."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.core import Code, PenstockError
from penstock.layers import LoRALayer
from penstock.models.model import Model
from penstock.planning.host_memory import free_host_bytes

from .model_runner import CapturedModel, ModelRunner

logger = logging.getLogger(__name__)

SPARE_BYTES = 2**26
"""Bytes that must be left beside both copies of the weights: those of a matrix while it is packed, and of buffers."""


class ModelSwap:
    """Holds the weights that were loaded, and those that they have replaced, until it is clear which are to stay.

    Args:
        runner: of the served model.
        reload: builds the model from a folder; None for the folder of the start.
        weight_bytes: of this rank's part of the model.
        local_ranks: ranks that share this machine's memory.
    """

    def __init__(
        self,
        runner: ModelRunner,
        reload: Callable[[Path | None], Model],
        device: torch.device,
        weight_bytes: int,
        local_ranks: int,
    ) -> None:
        self._runner = runner
        self._reload = reload
        self._device = device
        self._weight_bytes = weight_bytes
        self._local_ranks = local_ranks
        self._loaded: Model | None = None
        self._before: CapturedModel | None = None
        """What ran before the swap; None where nothing was swapped, or there was no model."""
        self._swapped = False
        self._lora_layers: dict[str, LoRALayer] = {
            name: target.layer for name, target in runner.model.lora_targets.items() if target
        }
        """Whose slots have the adapters, which models share."""

    def check_memory(self) -> None:
        """Raise ``PenstockError`` (``unsupported``) where this machine has no room for another copy of the weights."""
        if self._device.type == "cuda":
            free, where = torch.cuda.mem_get_info(self._device)[0], "the GPU"
            free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        else:
            free, where = free_host_bytes() // self._local_ranks, "this machine"
        if (needed := self._weight_bytes + SPARE_BYTES) > free:
            words = (
                f"there is no room for other weights beside those in use: they take {needed / 1e9:.2f} GB, and {where} "
                f"has {free / 1e9:.2f} GB free. Put the engine to sleep (level 2), which drops those in use, then load "
                "them and wake it up; or give the KV cache less memory"
            )
            raise PenstockError(Code.UNSUPPORTED, words, "path")

    def read(self, path: str) -> Model:
        """Read and pack the weights of a folder; may run in another thread than steps do."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with torch.inference_mode():
            return self._reload(Path(path) if path else None)

    def keep(self, model: Model) -> str:
        """Keep a model that was read until it is swapped or dropped; returns its version."""
        for name, target in model.lora_targets.items():
            if target:
                target.layer.share_slots(self._lora_layers[name])
        self._loaded = model
        return model.weights_version

    def swap(self) -> None:
        """Run the model that was loaded, which takes a capture of its forward pass."""
        assert self._loaded is not None, "load it first"
        with torch.inference_mode():
            captured = self._runner.capture(self._loaded)
        self._before = self._runner.captured if self._runner.has_model else None
        self._runner.use(captured)
        self._loaded, self._swapped = None, True

    def commit(self) -> None:
        """Drop the model that ran before the swap."""
        self._before, self._swapped = None, False
        return_memory()

    def revert(self) -> None:
        """Go back to what ran before the swap, if there was one, and drop the model that was loaded."""
        if self._swapped and self._before:
            self._runner.use(self._before)
        elif self._swapped:
            self._runner.drop_model()
        self._loaded = self._before = None
        self._swapped = False
        return_memory()

    def drop(self) -> None:
        """Drop the model that runs."""
        self._runner.drop_model()


def return_memory() -> None:
    """Give memory of tensors that were dropped back to the machine, or to others on the GPU."""
    ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
