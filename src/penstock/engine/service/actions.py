"""Actions on an engine as a whole: its weights change, it is paused, it sleeps. Messages, and their execution."""

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
    """Load weights beside those in use; ``CommitWeights`` or ``DiscardWeights`` has to follow."""

    path: str
    """Folder of a checkpoint of the same model; empty reads those in use again."""


class CommitWeights(msgspec.Struct, tag=True, frozen=True):
    """Use the weights that were loaded."""

    running: WeightUpdateMode = "finish"


class DiscardWeights(msgspec.Struct, tag=True, frozen=True):
    """Drop weights that were loaded, or are being loaded."""


class PauseGeneration(msgspec.Struct, tag=True, frozen=True):
    """Compute no steps until ``ResumeGeneration``."""

    mode: PauseMode = "abort"
    clear_cache: bool = True
    """Whether the prefix cache is emptied; not where requests are kept."""


class ResumeGeneration(msgspec.Struct, tag=True, frozen=True):
    """Compute steps again after ``PauseGeneration``."""


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Free the KV cache, and with level 2 the weights."""

    level: int = 1
    mode: PauseMode = "abort"


class WakeUp(msgspec.Struct, tag=True, frozen=True):
    """Bring back what ``Sleep`` has freed."""

    tags: tuple[str, ...] | None = None


class Synchronize(msgspec.Struct, tag=True, frozen=True):
    """Nothing: when it is answered, the client has all that the engine had told before."""


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Load a LoRA adapter; done once requests may name it."""

    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Unload a LoRA adapter."""

    name: str


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Drop all cached prefixes."""


class Inspect(msgspec.Struct, tag=True, frozen=True):
    """Take a ``Snapshot``, which is the result."""


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
    """What actions change; sent to every client whenever it has changed, before anything that was computed since."""

    weights_version: str = ""
    weights_path: str = ""
    """Folder of the weights in use; empty for the model's."""
    weights_updates: int = 0
    """Counter of changes of the weights since the engine's start."""
    is_paused: bool = False
    """Whether it computes no steps; also while it sleeps."""
    asleep: tuple[str, ...] = ()
    """Parts that were freed: ``weights``, ``kv_cache``."""


class PendingAction(NamedTuple):
    """An action that a client has asked for."""

    client: bytes
    call_id: int
    action: EngineAction
    done: Future[Any]


class ActionQueue:
    """Carries out actions on an engine, in the thread that runs its steps.

    Args:
        snapshot: takes a snapshot of the engine.
    """

    def __init__(self, engine: Engine, snapshot: Callable[[], Snapshot]) -> None:
        self._engine = engine
        self._snapshot = snapshot
        self.pending: list[PendingAction] = []
        """Actions whose results were not taken (``take_done``)."""

    def start(self, client: bytes, call_id: int, action: EngineAction) -> None:
        """Begin an action, whose result ``take_done`` returns."""
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
        """Actions that have ended since the last call."""
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
