"""LoRA adapters of a worker: reads them from folders, and puts them into slots."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from penstock.core import Code, PenstockError
from penstock.models.registry import family_of
from penstock.models.weights import LoRAAdapter, load_lora

from .model_runner import ModelRunner


class AdapterSlots:
    """The adapter slots of a model.

    Args:
        max_rank: maximum rank of an adapter.
    """

    def __init__(self, runner: ModelRunner, max_rank: int) -> None:
        self._runner = runner
        self._max_rank = max_rank
        self._adapters: dict[int, LoRAAdapter] = {}

    def read(self, path: str) -> LoRAAdapter:
        """Read an adapter from a folder. May be called in another thread. Raises ``PenstockError`` if the adapter does
        not fit the model, or if the engine sleeps without weights."""
        if not self._runner.has_model:
            message = f"cannot load {path}: the engine sleeps without weights; wake it up first"
            raise PenstockError(Code.UNAVAILABLE, message, "lora_path")
        model = self._runner.model
        config, experts = model.config, model.config.experts
        find_stored = family_of(config).find_stored
        return load_lora(
            Path(path),
            model.lora_targets,
            model.dtype,
            self._runner.device,
            self._max_rank,
            interleaved=experts is not None and experts.fused.interleaved,
            find_stored=partial(find_stored, config) if find_stored else None,
        )

    def fill(self, slot: int, adapter: LoRAAdapter) -> str:
        """Put an adapter into a slot. Returns the version of the adapter."""
        self.empty(slot)  # the slot is in use if its last load succeeded here and failed on another rank
        self._adapters[slot] = adapter
        adapter.activate(slot)
        self._runner.has_expert_lora |= adapter.has_experts
        return adapter.version

    def empty(self, slot: int) -> None:
        """Remove the adapter from a slot. Does nothing if the slot is empty."""
        if adapter := self._adapters.pop(slot, None):
            adapter.deactivate(slot)
            self._runner.has_expert_lora = any(each.has_experts for each in self._adapters.values())
