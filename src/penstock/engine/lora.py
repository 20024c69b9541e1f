"""LoRA adapters of an engine: loading them into slots of the workers, and unloading them once no request uses them."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .executor.base import Executor
from .scheduling.scheduler import Scheduler
from .step import LoadLoRA, UnloadLoRA

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that requests can use."""

    path: str
    """Folder of the adapter."""
    key: str
    """Digest of the adapter's contents, the same in all engines. Identifies the adapter in requests and in the prefix
    cache."""
    slot: int
    """Slot in the workers; adapters with equal contents share one."""


@dataclass(frozen=True)
class PendingLoad:
    """An adapter that the workers are loading."""

    path: str
    """Folder of the adapter."""
    slot: int
    """Slot in the workers that the load takes."""
    reply: Future[str]
    """Reply of the workers: the adapter's key."""
    done: Future[None]
    """Done once requests can use the adapter."""


class LoRAManager:
    """Loads and unloads the adapters of one model. Not thread-safe: use it in the thread that runs the steps.

    Args:
        scheduler: its ``builder.lora_slots`` is updated.
        max_loras: maximum number of loaded adapters; 0 disables LoRA.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, max_loras: int) -> None:
        self._executor = executor
        self._max_loras = max_loras
        self._keys_in_use = scheduler.adapters
        self._loaded: dict[str, LoadedAdapter] = {}
        """Loaded adapters by name."""
        self._loading: dict[str, PendingLoad] = {}
        """Unfinished loads by adapter name."""
        self._unloading: list[LoadedAdapter] = []
        """Unloaded adapters that unfinished requests still use."""
        self._cancelled_loads: list[PendingLoad] = []
        """Adapters that were unloaded while the workers were loading them."""
        self._free_slots = list(range(max_loras))
        self._lora_slots = scheduler.builder.lora_slots
        """Slot of each adapter, by key."""
        self.has_pending = False
        """True if loads or unloads are pending: ``process_pending`` has to be called."""

    @property
    def paths(self) -> dict[str, str]:
        """Folders of the loaded adapters, by name."""
        return {name: adapter.path for name, adapter in self._loaded.items()}

    def names(self, keys: set[str]) -> list[str]:
        """Sorted names of the loaded adapters with these keys."""
        return sorted(name for name, adapter in self._loaded.items() if adapter.key in keys)

    def key(self, name: str) -> str:
        """Key (``LoadedAdapter.key``) of a loaded adapter.

        Raises ``PenstockError``: ``not_found`` for an unknown adapter, ``unavailable`` while it is being loaded.
        """
        if adapter := self._loaded.get(name):
            return adapter.key
        if name in self._loading:
            raise PenstockError(Code.UNAVAILABLE, f"adapter {name!r} is being loaded; try again soon", "adapter")
        raise PenstockError(Code.NOT_FOUND, f"adapter {name[:200]!r} is not loaded", "adapter")

    def load(self, name: str, path: str) -> Future[None]:
        """Start to load an adapter. Does nothing if it is already loaded, or being loaded, from this folder.

        Returns:
            A future that ``process_pending`` completes once requests can use the adapter, or with a ``PenstockError``.

        Raises ``PenstockError`` if it cannot be loaded.
        """
        if not self._needs_load(name, path) and name in self._loading:
            return self._loading[name].done
        future: Future[None] = Future()
        if name in self._loaded:
            future.set_result(None)
            return future
        slot = self._free_slots.pop()
        self._loading[name] = PendingLoad(path, slot, self._executor.call(LoadLoRA(slot, path)), future)
        self.has_pending = True
        return future

    def unload(self, name: str) -> None:
        """Unload an adapter. Its slot is freed once the unfinished requests that use the adapter have ended. A pending
        load of the adapter fails.

        Raises ``PenstockError`` (``not_found``) if it is not loaded.
        """
        if load := self._loading.pop(name, None):
            self._cancelled_loads.append(load)
            self.has_pending = True
            message = f"adapter {name!r} was unloaded while it was being loaded"
            load.done.set_exception(PenstockError(Code.UNAVAILABLE, message, "lora_name"))
            return
        if name not in self._loaded:
            raise PenstockError(Code.NOT_FOUND, f"adapter {name[:200]!r} is not loaded", "lora_name")
        adapter = self._loaded.pop(name)
        if adapter.key not in {other.key for other in self._loaded.values()}:
            self._unloading.append(adapter)
        logger.info("unloaded LoRA adapter %s", name)
        self.process_pending()

    def process_pending(self) -> None:
        """Complete loads that the workers have finished, and free the slots of unloaded adapters no longer in use."""
        if self._unloading:
            in_use = self._keys_in_use()
            for adapter in [adapter for adapter in self._unloading if adapter.key not in in_use]:
                self._unloading.remove(adapter)
                del self._lora_slots[adapter.key]
                self._executor.call(UnloadLoRA(adapter.slot))
                self._free_slots.append(adapter.slot)
        self._executor.poll()
        for load in [load for load in self._cancelled_loads if load.reply.done()]:
            self._cancelled_loads.remove(load)
            if not load.reply.exception():
                self._executor.call(UnloadLoRA(load.slot))
            self._free_slots.append(load.slot)
        for name, load in list(self._loading.items()):
            if not load.reply.done():
                continue
            error = load.reply.exception()
            del self._loading[name]
            if error:
                self._free_slots.append(load.slot)
                if not isinstance(error, PenstockError):
                    logger.error("adapter %s could not be read", name, exc_info=error)
                    error = PenstockError(Code.INTERNAL, "the adapter could not be read; see the server's log")
                load.done.set_exception(error)
                continue
            self._loaded[name] = LoadedAdapter(load.path, key := load.reply.result(), self._slot_of(key, load.slot))
            logger.info("loaded LoRA adapter %s from %s", name, load.path)
            load.done.set_result(None)
        self.has_pending = bool(self._loading or self._unloading or self._cancelled_loads)

    def _slot_of(self, key: str, slot: int) -> int:
        """Final slot of an adapter that was loaded into ``slot``. If an adapter with equal contents has a slot already,
        that slot is shared, and ``slot`` is freed."""
        if (shared := self._lora_slots.setdefault(key, slot)) != slot:
            self._unloading = [adapter for adapter in self._unloading if adapter.key != key]
            self._executor.call(UnloadLoRA(slot))
            self._free_slots.append(slot)
        return shared

    def wait(self, future: Future[None]) -> None:
        """Wait for a load. Raises ``PenstockError`` if it failed."""
        while not future.done():
            for load in list(self._loading.values()):
                self._executor.wait(load.reply)
            self.process_pending()
        future.result()

    def _needs_load(self, name: str, path: str) -> bool:
        """True unless the adapter is already loaded, or being loaded, from this folder.

        Raises ``PenstockError`` if it cannot be loaded.
        """
        if not self._max_loras:
            message = "this engine runs without LoRA adapters: start it with enable_lora"
            raise PenstockError(Code.UNSUPPORTED, message, "lora_name")
        if not name or not path:
            raise invalid("lora_path" if name else "lora_name", "must not be empty: name the adapter and its folder")
        known = self._loaded.get(name) or self._loading.get(name)
        if known:
            if known.path == path:
                return False
            message = f"{name!r} is loaded from another folder, {known.path}; unload it first"
            raise invalid("lora_name", message)
        self.process_pending()
        if not self._free_slots:
            count = len(self._unloading)
            unloading = f", {count} of them only until the requests that use them end" if count else ""
            message = f"{self._max_loras} adapters are loaded (max_loras){unloading}; unload one first"
            raise invalid("lora_name", message, self._max_loras)
        return True
