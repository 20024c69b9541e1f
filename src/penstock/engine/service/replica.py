"""State that ``EnginePool`` keeps for each engine and for each open request."""

from __future__ import annotations

import asyncio

import msgspec

from penstock.config.addresses import reachable, split_address
from penstock.core import Code, EngineRequest, PenstockError, TokenDelta
from penstock.core.requests import NUM_CLEARING_TOKENS

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
        self.num_requests = self.cost = self.prefill_cost = self.unstarted_tokens = 0
        """Number of this process's open requests, prompt tokens that it has still to compute for them (as ``replica``
        and as ``prefill`` of ``OpenRequest``), and prompt tokens of those without output."""
        self.leaving = False
        """True if the replica gets no new requests, and is removed once its open requests have ended."""
        self.replaced = False
        """True if the replica leaves as soon as the engines that replace it are connected."""

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
        *(
            "_num_repeated",
            "aborted",
            "adapter_path",
            "changed",
            "cost",
            "deaths",
            "engine",
            "full",
            "num_prompt_logprobs",
        ),
        *("num_survived", "paused", "prefill", "prefill_cost", "replica", "request", "sent_deaths", "started"),
        *("unstarted_tokens", "waiting"),
    )

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        """The request as the client sent it, without ``resumed``."""
        self.replica: Replica | None = None
        """Replica that computes it; None while it waits for one."""
        self.prefill: Replica | None = None
        """Prefill instance that is expected to compute the prompt; None: ``replica`` computes it."""
        self.cost = self.prefill_cost = self.unstarted_tokens = 0
        """Number of prompt tokens that ``replica`` and ``prefill`` have not computed yet, and of all prompt tokens
        until the replica's first output."""
        self.full: frozenset[Replica] = frozenset()
        """Replicas that have rejected the request, because their queue was full or they were stopping."""
        self.engine: messages.Ready | None = None
        """Report of the engine that generated the output so far; None without output."""
        self.adapter_path: str | None = None
        """Folder of the request's adapter when it was sent first."""
        self.started = False
        """True once the first token or the end has arrived."""
        self.changed = False
        """True if ``replica`` may compute other bits than the earlier engine, and has returned nothing yet."""
        self.aborted = False
        self.paused = False
        self.deaths = self.sent_deaths = 0
        """Number of engines that died in a step with the request, and the number that ``replica`` knows."""
        self.num_survived = 0
        """Number of tokens that ``replica`` has generated."""
        self.waiting: asyncio.TimerHandle | None = None
        """Timer that fails the request while it waits for a replica."""
        self.num_prompt_logprobs = self._num_repeated = 0
        """Number of prompt positions whose logprobs have arrived, and number of those that ``replica`` returns again
        because it computes the prompt from the beginning."""

    def assign(self, replica: Replica, cost: int, prefills: list[Replica]) -> None:
        """Record that the request was sent to a replica.

        Args:
            cost: number of uncached tokens.
            prefills: prefill instances that may compute the prompt, in order of preference; empty: the replica does.
        """
        self.unassign()
        self.stop_waiting()
        self.replica = replica
        self.prefill = prefills[0] if prefills else None
        self.prefill_cost, self.cost = (cost, 0) if prefills else (0, cost)
        self.unstarted_tokens = len(self.request.prompt)
        self._num_repeated, self.num_survived, self.sent_deaths = self.num_prompt_logprobs, 0, self.deaths
        replica.num_requests += 1
        replica.cost += self.cost
        replica.unstarted_tokens += self.unstarted_tokens
        if self.prefill:
            self.prefill.prefill_cost += self.prefill_cost

    def unassign(self) -> None:
        """Record that no replica computes the request."""
        self.mark_started()
        if self.replica:
            self.replica.num_requests -= 1
        self.replica = self.prefill = None

    def mark_started(self) -> None:
        """Record that output of the replica has arrived, or that the request was aborted."""
        if self.replica and self.unstarted_tokens:
            self.replica.cost -= self.cost
            self.replica.unstarted_tokens -= self.unstarted_tokens
            if self.prefill:
                self.prefill.prefill_cost -= self.prefill_cost
        self.cost = self.prefill_cost = self.unstarted_tokens = 0

    def record_survival(self, num_tokens: int) -> None:
        """Record new tokens of the replica. After ``NUM_CLEARING_TOKENS`` per sequence the request is no suspect."""
        self.num_survived += num_tokens
        if self.num_survived >= NUM_CLEARING_TOKENS * self.request.sampling.num_sequences:
            self.deaths = 0

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

    def stop_waiting(self) -> None:
        if self.waiting:
            self.waiting.cancel()
            self.waiting = None
