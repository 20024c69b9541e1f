"""State that ``EnginePool`` keeps for each engine and for each open request."""

from __future__ import annotations

import asyncio

import msgspec

from penstock.config.addresses import reachable, split_address
from penstock.core import Code, EngineRequest, PenstockError, TokenDelta

from . import messages
from .client import EngineClient
from .instance import Instance


class Replica:
    """An engine of an ``EnginePool``.

    Args:
        number: bit of the replica in the ``PrefixIndex``.
        instance: instance found by the supervisor; None for an engine started by this server.
    """

    def __init__(self, number: int, client: EngineClient, instance: Instance | None) -> None:
        self.number = number
        self.client = client
        self.instance = instance
        self.num_other_requests = 0
        """Number of open requests of other processes, from the replica's last statistics."""
        self.weights_version = ""
        """Version of the weights to which the replica's entries in the ``PrefixIndex`` belong."""
        self.pid = 0
        """Process id of the engine that was connected last."""
        self.leaving = False
        """True if the replica gets no new requests, and is removed once its open requests have ended."""

    @property
    def address(self) -> str:
        return self.client.address

    @property
    def engine(self) -> messages.Ready | None:
        """Report of the engine; None if it is not connected or does not match ``instance``."""
        engine = self.client.engine
        return engine if engine and (self.instance is None or self.instance.matches(engine)) else None

    @property
    def generates(self) -> bool:
        """True if the engine generates output; False for a prefill instance."""
        return self.instance is None or self.instance.role != "prefill"

    @property
    def takes_kv(self) -> bool:
        """True if prefill instances may compute prompts for this engine: it is a decode instance."""
        engine = self.engine
        return engine is not None and engine.role == "decode"

    def require_engine(self, asleep: bool = False) -> messages.Ready:
        """Report of the engine. Raises ``PenstockError`` (``unavailable``) in the cases of
        ``EngineClient.require_engine``, if the instance is leaving or has changed, and, unless ``asleep``, if the
        engine sleeps."""
        ready = self.client.require_engine()
        if self.leaving or self.engine is None:
            message = f"the instance at {self.client.name} is leaving or has changed; try again soon"
            raise PenstockError(Code.UNAVAILABLE, message)
        if ready.state.asleep and not asleep:
            raise PenstockError.of(messages.ENGINE_ASLEEP)
        return ready

    def has_adapter(self, name: str) -> bool:
        return not name or (name in self.client.adapters and not self.client.is_loading(name))

    @property
    def kv_address(self) -> str:
        """Address from which decode instances pull KV; empty if this replica is not a connected prefill instance."""
        engine = self.engine
        if engine is None or not engine.kv_address:
            return ""
        return reachable(engine.kv_address, split_address(self.client.name, "engine_address")[0])


class OpenRequest:
    """A request that has not ended."""

    __slots__ = (
        *("_num_repeated", "aborted", "cost", "deaths", "engine", "full", "num_prompt_logprobs", "paused", "prefill"),
        *("prefill_cost", "replica", "request", "started", "waiting"),
    )

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        """The request as the client sent it, without ``resumed``."""
        self.replica: Replica | None = None
        """Replica that computes it; None while it waits for one."""
        self.prefill: Replica | None = None
        """Prefill instance expected to compute the prompt."""
        self.cost = self.prefill_cost = 0
        """Number of prompt tokens still to be computed by ``replica`` and by ``prefill``."""
        self.full: frozenset[Replica] = frozenset()
        """Replicas that had no room for it or were stopping."""
        self.engine: messages.Ready | None = None
        """Report of the engine that generated the output so far; None without output."""
        self.started = False
        """True once the first token or the end has arrived."""
        self.aborted = False
        self.deaths = 0
        """Number of engines that died in a step with it."""
        self.paused = False
        self.waiting: asyncio.TimerHandle | None = None
        """Timer that fails the request while it waits for a replica."""
        self.num_prompt_logprobs = self._num_repeated = 0
        """Number of prompt positions whose logprobs have arrived, and number of those that ``replica`` returns again
        because it computes the prompt from the beginning."""

    def assign(self, replica: Replica, cost: int, prefills: list[Replica]) -> None:
        """Record that it was sent to a replica.

        Args:
            cost: number of uncached tokens.
            prefills: prefill instances that may compute the prompt, the preferred one first; empty: the replica does.
        """
        self.replica = replica
        self.prefill = prefills[0] if prefills else None
        self.prefill_cost, self.cost = (cost, 0) if prefills else (0, cost)
        self._num_repeated = self.num_prompt_logprobs
        self.stop_waiting()

    def without_repeated(self, delta: TokenDelta) -> TokenDelta:
        """The delta without the prompt logprobs that another replica has returned already."""
        logprobs = delta.prompt_logprobs or []
        new = logprobs[self._num_repeated :]
        self._num_repeated -= len(logprobs) - len(new)
        self.num_prompt_logprobs += len(new)
        return delta if len(new) == len(logprobs) else msgspec.structs.replace(delta, prompt_logprobs=new or None)

    def notify(self, message: messages.ToEngine) -> None:
        """Send a message about the request to its engine."""
        if self.replica:
            self.replica.client.notify(message)

    def mark_started(self) -> None:
        """Called when output has arrived, or the request was aborted."""
        self.cost = self.prefill_cost = 0

    def stop_waiting(self) -> None:
        if self.waiting:
            self.waiting.cancel()
            self.waiting = None
