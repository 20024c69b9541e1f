"""Actions on an engine as a whole, such as weight updates, pause and sleep: messages, and their execution."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from penstock.core import PenstockError

from ..modes import PauseMode, WeightUpdateMode
from .snapshot import Snapshot

if TYPE_CHECKING:
    from ..engine import Engine


class LoadWeights(msgspec.Struct, tag=True, frozen=True):
    """Load weights, while the current weights remain in use. ``CommitWeights`` or ``DiscardWeights`` must follow."""

    path: str
    """Folder of a checkpoint of the same model; empty: read the current folder again."""


class CommitWeights(msgspec.Struct, tag=True, frozen=True):
    """Replace the weights in use by the weights of ``LoadWeights``."""

    running: WeightUpdateMode = "finish"


class DiscardWeights(msgspec.Struct, tag=True, frozen=True):
    """Drop the weights of ``LoadWeights``, also while they are being loaded."""


class PauseGeneration(msgspec.Struct, tag=True, frozen=True):
    """Compute no steps until ``ResumeGeneration``."""

    mode: PauseMode = "abort"
    clear_cache: bool = True
    """Empty the prefix cache. Ignored if ``mode`` is ``keep``."""


class ResumeGeneration(msgspec.Struct, tag=True, frozen=True):
    """Compute steps again after ``PauseGeneration``."""


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Free the KV cache, and with level 2 also the weights."""

    level: int = 1
    mode: PauseMode = "abort"


class WakeUp(msgspec.Struct, tag=True, frozen=True):
    """End ``Sleep``: load the weights and allocate the KV cache again."""

    tags: tuple[str, ...] | None = None
    """Parts to restore (``weights``, ``kv_cache``); None: all."""


class Synchronize(msgspec.Struct, tag=True, frozen=True):
    """No operation. When a client gets the result, it has received all messages that the engine sent before."""


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Load a LoRA adapter. Requests may use the adapter once the action has ended."""

    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Unload a LoRA adapter."""

    name: str


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Drop all cached prefixes."""


class Inspect(msgspec.Struct, tag=True, frozen=True):
    """Take a ``Snapshot``, which is the result of the action."""


EngineAction: TypeAlias = (
    LoadWeights
    | CommitWeights
    | DiscardWeights
    | PauseGeneration
    | ResumeGeneration
    | Sleep
    | WakeUp
    | Synchronize
    | LoadAdapter
    | UnloadAdapter
    | ResetPrefixCache
    | Inspect
)


class EngineState(msgspec.Struct, tag=True, frozen=True):
    """Engine state that actions change. Sent to every client on each change, before any output computed afterwards."""

    weights_version: str = ""
    weights_path: str = ""
    """Folder of the weights in use; empty: the option ``model``."""
    weights_updates: int = 0
    """Number of weight updates since the engine's start."""
    is_paused: bool = False
    """True if the engine computes no steps, because it is paused or sleeps."""
    asleep: tuple[str, ...] = ()
    """Freed parts (``weights``, ``kv_cache``); empty while awake."""


class PendingAction(NamedTuple):
    """An action requested by a client."""

    client: bytes
    call_id: int
    action: EngineAction
    done: Future[Any]


class ActionQueue:
    """Executes actions on an engine. Not thread-safe: use it in the engine's thread.

    Args:
        snapshot: takes a snapshot of the engine.
    """

    def __init__(self, engine: Engine, snapshot: Callable[[], Snapshot]) -> None:
        self._engine = engine
        self._snapshot = snapshot
        self.pending: list[PendingAction] = []
        """Started actions that ``take_done`` has not returned yet."""

    def start(self, client: bytes, call_id: int, action: EngineAction) -> None:
        """Start an action. ``take_done`` returns it when it has ended."""
        try:
            done = self._begin(action)
        except PenstockError as error:
            done = Future()
            done.set_exception(error)
        self.pending.append(PendingAction(client, call_id, action, done))

    def _begin(self, action: EngineAction) -> Future[Any]:
        engine, result = self._engine, None
        match action:
            case LoadWeights(path):
                return engine.weights.load(path)
            case CommitWeights(running):
                return engine.weights.commit(running)
            case DiscardWeights():
                engine.weights.discard()
            case PauseGeneration(mode, clear_cache):
                return engine.sleeper.pause(mode, clear_cache)
            case ResumeGeneration():
                engine.sleeper.resume()
            case Sleep(level, mode):
                return engine.sleeper.sleep(level, mode)
            case WakeUp(tags):
                return engine.sleeper.wake_up(tags)
            case LoadAdapter(name, path):
                return engine.adapters.load(name, path)
            case UnloadAdapter(name):
                engine.adapters.unload(name)
            case ResetPrefixCache():
                engine.scheduler.kv.reset_prefix_cache()
            case Inspect():
                result = self._snapshot()
        done: Future[Any] = Future()
        done.set_result(result)
        return done

    def take_done(self) -> list[PendingAction]:
        """Remove and return the actions that have ended."""
        done = [entry for entry in self.pending if entry.done.done()]
        self.pending = [entry for entry in self.pending if not entry.done.done()]
        return done

    @property
    def state(self) -> EngineState:
        weights, sleeper = self._engine.weights, self._engine.sleeper
        return EngineState(
            weights_version=self._engine.info.weights_version,
            weights_path=weights.path,
            weights_updates=weights.num_updates,
            is_paused=sleeper.is_paused,
            asleep=tuple(sorted(sleeper.asleep)),
        )
