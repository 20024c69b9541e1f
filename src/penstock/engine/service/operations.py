"""Operations on an engine as a whole: its weights change, it is paused, it sleeps. Messages, and their execution."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from ..modes import PauseMode, Running

if TYPE_CHECKING:
    from ..engine import Engine


class LoadWeights(msgspec.Struct, tag=True, frozen=True):
    """Load weights beside those in use; ``CommitWeights`` or ``DiscardWeights`` has to follow."""

    path: str
    """Folder of a checkpoint of the same model; empty reads those in use again."""


class CommitWeights(msgspec.Struct, tag=True, frozen=True):
    """Use the weights that were loaded."""

    running: Running = "finish"


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


Operation: TypeAlias = (
    LoadWeights | CommitWeights | DiscardWeights | PauseGeneration | ResumeGeneration | Sleep | WakeUp | Synchronize
)


class EngineState(msgspec.Struct, tag=True, frozen=True):
    """What operations change; sent to every client whenever it has changed, before anything that was computed since."""

    weights_version: str = ""
    weights_path: str = ""
    """Folder of the weights in use; empty for the model's."""
    weights_updates: int = 0
    """Counter of changes of the weights since the engine's start."""
    is_paused: bool = False
    """Whether it computes no steps; also while it sleeps."""
    asleep: tuple[str, ...] = ()
    """Parts that were freed: ``weights``, ``kv_cache``."""


class OperationQueue:
    """Carries out operations on an engine, in the thread that runs its steps.

    Args:
        answer: called with an operation's client, its number, and its error or None.
    """

    def __init__(self, engine: Engine, answer: Callable[[bytes, int, BaseException | None], None]) -> None:
        self._engine = engine
        self._answer = answer
        self._pending: list[tuple[bytes, int, Future[Any]]] = []

    def start(self, client: bytes, number: int, operation: Operation) -> None:
        """Begin an operation; its end is told by ``poll``. Raises ``PenstockError`` where it cannot begin."""
        weights, sleeper = self._engine.weights, self._engine.sleeper
        done: Future[Any] = Future()
        match operation:
            case LoadWeights(path):
                done = weights.load(path)
            case CommitWeights(running):
                done = weights.commit(running)
            case DiscardWeights():
                weights.discard()
                done.set_result(None)
            case PauseGeneration(mode, clear_cache):
                done = sleeper.pause(mode, clear_cache)
            case ResumeGeneration():
                sleeper.resume()
                done.set_result(None)
            case Sleep(level, mode):
                done = sleeper.sleep(level, mode)
            case WakeUp(tags):
                done = sleeper.wake_up(tags)
            case Synchronize():
                done.set_result(None)
        self._pending.append((client, number, done))

    def poll(self) -> None:
        """Answer operations that have ended."""
        ended = [entry for entry in self._pending if entry[2].done()]
        self._pending = [entry for entry in self._pending if not entry[2].done()]
        for client, number, done in ended:
            self._answer(client, number, done.exception())

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
