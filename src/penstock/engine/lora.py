"""LoRA adapters by name, each in a slot of the workers: loaded while others are served, gone once nobody uses them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .executor.base import Executor
from .step import LoadLoRA, UnloadLoRA

logger = logging.getLogger(__name__)

NO_ADAPTER = -1
"""The slot of what has no adapter."""


@dataclass(frozen=True)
class Loaded:
    """An adapter that requests may name."""

    path: str
    key: str
    """What its requests are marked with, and what they have in the prefix cache: no other load has the same."""
    slot: int


@dataclass(frozen=True)
class Loading:
    """An adapter that is being read."""

    path: str
    slot: int
    answer: Future[None]
    """Of the workers."""
    done: Future[None]
    """Once requests may name it."""


class Adapters:
    """The adapters of a model, which its workers read. To be used in the thread that runs the steps.

    Args:
        most: that may be loaded at the same time; 0 is for a model that takes none.
        slots: of the adapters by key, kept up to date here; ``""`` is the slot of requests without one.
        in_use: keys of the adapters that requests have which have not ended.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        most: int,
        slots: dict[str, int],
        in_use: Callable[[], set[str]],
    ) -> None:
        self._executor = executor
        self._most = most
        self._in_use = in_use
        self._loaded: dict[str, Loaded] = {}
        self._reading: dict[str, Loading] = {}
        self._leaving: list[Loaded] = []
        self._free = list(range(most))
        self._loads = 0
        self._slots = slots

    @property
    def paths(self) -> dict[str, str]:
        """The folder of each adapter that requests may name, or that is being read, by name."""
        loaded = {name: loaded.path for name, loaded in self._loaded.items()}
        return loaded | {name: loading.path for name, loading in self._reading.items()}

    @property
    def unsettled(self) -> bool:
        """Whether there is something for ``settle`` to do, now or soon."""
        return bool(self._reading or self._leaving)

    def key(self, name: str) -> str:
        """What a request for an adapter is marked with.

        Raises ``PenstockError``: ``not_found`` where it is not here, ``unavailable`` where it is still being read.
        """
        if found := self._loaded.get(name):
            return found.key
        if name in self._reading:
            raise PenstockError(Code.UNAVAILABLE, f"adapter {name!r} is being loaded; try again soon", "adapter")
        raise PenstockError(Code.NOT_FOUND, f"adapter {name[:200]!r} is not here", "adapter")

    def load(self, name: str, path: str) -> Future[None]:
        """Have an adapter read; ``settle`` lets requests name it, and then the future is done.

        It has an exception, ``PenstockError``, where the adapter cannot be loaded. The same one again from the same
        folder is loaded already.
        """
        future: Future[None] = Future()
        try:
            if self._refused(name, path):
                slot = self._free.pop()
                self._reading[name] = Loading(path, slot, self._executor.call(LoadLoRA(slot, path)), future)
            elif name in self._reading:
                future = self._reading[name].done
            else:
                future.set_result(None)
        except PenstockError as error:
            future.set_exception(error)
        return future

    def unload(self, name: str) -> None:
        """Take the name away. Requests that have begun with the adapter go on with it.

        Raises ``PenstockError`` (``not_found``) where it is not here.
        """
        if name not in self._loaded:
            raise PenstockError(Code.NOT_FOUND, f"adapter {name[:200]!r} is not here", "lora_name")
        self._leaving.append(self._loaded.pop(name))
        logger.info("adapter %s is unloaded", name)
        self.settle()

    def settle(self) -> None:
        """Let requests name what has been read, and give back what no request uses any more."""
        if self._leaving:
            used = self._in_use()
            for left in [left for left in self._leaving if left.key not in used]:
                self._leaving.remove(left)
                del self._slots[left.key]
                self._executor.call(UnloadLoRA(left.slot))
                self._free.append(left.slot)
        self._executor.poll()
        for name, loading in list(self._reading.items()):
            if not loading.answer.done():
                continue
            error = loading.answer.exception()
            del self._reading[name]
            if error:
                self._free.append(loading.slot)
                if not isinstance(error, PenstockError):
                    logger.error("adapter %s could not be read", name, exc_info=error)
                    error = PenstockError(Code.INTERNAL, "the adapter could not be read; the log says why")
                loading.done.set_exception(error)
                continue
            self._loads += 1
            loaded = self._loaded[name] = Loaded(loading.path, f"{name}#{self._loads}", loading.slot)
            self._slots[loaded.key] = loading.slot
            logger.info("adapter %s is loaded from %s", name, loading.path)
            loading.done.set_result(None)

    def wait(self, future: Future[None]) -> None:
        """Until a load is settled. Raises ``PenstockError`` where it failed."""
        while not future.done():
            for loading in list(self._reading.values()):
                self._executor.wait(loading.answer)
            self.settle()
        future.result()

    def _refused(self, name: str, path: str) -> bool:
        """False where it is loaded already, or being read.

        Raises ``PenstockError`` where it cannot be loaded.
        """
        if not self._most:
            words = "this engine takes no adapters: start it with enable_lora"
            raise PenstockError(Code.UNSUPPORTED, words, "lora_name")
        if not name or not path:
            raise invalid("lora_path" if name else "lora_name", "must not be empty")
        if (known := self.paths.get(name)) is not None:
            if known == path:
                return False
            raise invalid("lora_name", f"{name!r} is loaded from another folder; unload it first")
        self.settle()
        if len(self._loaded) + len(self._reading) + len(self._leaving) >= self._most:
            going = f", {len(self._leaving)} of them until the requests that use them end" if self._leaving else ""
            words = f"{self._most} adapters are loaded (max_loras){going}; unload one first"
            raise invalid("lora_name", words, self._most)
        return True
