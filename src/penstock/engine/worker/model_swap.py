"""Weight updates of a running worker: new weights are loaded while the old ones are in use, then swapped or dropped."""

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
"""Bytes that must remain free while both copies of the weights are in memory, for packing a matrix and for buffers."""


class ModelSwap:
    """Holds loaded weights until they are used, and replaced weights until the swap is committed or reverted.

    Args:
        runner: runner of the served model.
        reload: builds the model with the weights of a folder (``LoadedModels.reload``).
        weight_bytes: size of this rank's weights, bytes.
        local_ranks: number of ranks that share this machine's memory.
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
        """Model before the swap; None without a swap, or if the model was dropped before it."""
        self._swapped = False
        self._lora_layers: dict[str, LoRALayer] = {
            name: target.layer for name, target in runner.model.lora_targets.items() if target
        }
        """Layers with LoRA adapters. New models share the adapter slots of these layers."""

    def check_memory(self) -> None:
        """Raise ``PenstockError`` (``unsupported``) if there is no memory for a second copy of the weights."""
        if self._device.type == "cuda":
            free, where = torch.cuda.mem_get_info(self._device)[0], "the GPU"
            free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        else:
            free, where = free_host_bytes() // self._local_ranks, "this machine"
        if (needed := self._weight_bytes + SPARE_BYTES) > free:
            message = (
                f"no memory for a second copy of the weights: it takes {needed / 1e9:.2f} GB, and {where} has "
                f"{free / 1e9:.2f} GB free. Put the engine to sleep (level 2), which drops the weights in use, then "
                "load the new weights and wake it up; or give the KV cache less memory"
            )
            raise PenstockError(Code.UNSUPPORTED, message, "path")

    def read(self, path: str) -> Model:
        """Read and pack the weights in folder ``path``; empty: the folder of the served model. May be called in another
        thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with torch.inference_mode():
            return self._reload(Path(path) if path else None)

    def keep(self, model: Model) -> str:
        """Keep a loaded model until ``swap`` or ``revert``. Returns the version of its weights."""
        for name, target in model.lora_targets.items():
            if target:
                target.layer.share_slots(self._lora_layers[name])
        self._loaded = model
        return model.weights_version

    def swap(self) -> None:
        """Capture the forward pass of the loaded model, and use it."""
        assert self._loaded is not None, "load it first"
        with torch.inference_mode():
            captured = self._runner.capture(self._loaded)
        self._before = self._runner.captured if self._runner.has_model else None
        self._runner.use(captured)
        self._loaded, self._swapped = None, True

    def commit(self) -> None:
        """Drop the model replaced by the swap."""
        self._before, self._swapped = None, False
        return_memory()

    def revert(self) -> None:
        """Undo the swap, if there was one, and drop the loaded model."""
        if self._swapped and self._before:
            self._runner.use(self._before)
        elif self._swapped:
            self._runner.drop_model()
        self._loaded = self._before = None
        self._swapped = False
        return_memory()

    def drop(self) -> None:
        """Drop the current model to free the memory of its weights."""
        self._runner.drop_model()


def return_memory() -> None:
    """Return freed memory of tensors to the operating system and the GPU."""
    ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
