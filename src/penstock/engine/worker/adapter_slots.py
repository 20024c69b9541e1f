"""LoRA adapters in a worker: read from their folders, and put into slots."""

from __future__ import annotations

from pathlib import Path

from penstock.core import Code, PenstockError
from penstock.models.weights import LoRAAdapter, load_lora

from .model_runner import ModelRunner


class AdapterSlots:
    """The adapters of a model.

    Args:
        max_rank: of adapters.
    """

    def __init__(self, runner: ModelRunner, max_rank: int) -> None:
        self._runner = runner
        self._max_rank = max_rank
        self._adapters: dict[int, LoRAAdapter] = {}

    def read(self, path: str) -> LoRAAdapter:
        """Read an adapter's folder; may be called in another thread. Raises ``PenstockError`` where it does not fit, or
        the engine sleeps without its weights."""
        if not self._runner.has_model:
            words = "the engine sleeps without its weights; wake it up before adapters are loaded"
            raise PenstockError(Code.UNAVAILABLE, words, "lora_path")
        model = self._runner.model
        experts = model.config.experts
        return load_lora(
            Path(path),
            model.lora_targets,
            model.dtype,
            self._runner.device,
            self._max_rank,
            interleaved=experts is not None and experts.fused.interleaved,
        )

    def fill(self, slot: int, adapter: LoRAAdapter) -> str:
        """Put an adapter into a slot; returns its version."""
        self.empty(slot)  # where a load has failed on another rank, its adapter is there still
        self._adapters[slot] = adapter
        adapter.activate(slot)
        self._runner.has_expert_lora |= adapter.has_experts
        return adapter.version

    def empty(self, slot: int) -> None:
        """Empty a slot, which may be empty already."""
        if adapter := self._adapters.pop(slot, None):
            adapter.deactivate(slot)
            self._runner.has_expert_lora = any(each.has_experts for each in self._adapters.values())
