"""One of a pool's engines, and one of its open requests."""

from __future__ import annotations

from penstock.config.addresses import reachable, split_address
from penstock.core import Code, EngineRequest, PenstockError

from . import messages
from .client import EngineClient
from .instance import Instance


class Replica:
    """One of the pool's engines.

    Args:
        number: its bit in the ``PrefixIndex``.
        instance: what the supervisor has found at its address; None for an engine that this server has started.
    """

    def __init__(self, number: int, client: EngineClient, instance: Instance | None) -> None:
        self.number = number
        self.client = client
        self.instance = instance
        self.num_other_requests = 0
        """Requests that it had of other processes when it last told its statistics."""
        self.weights_version = ""
        """Of the weights whose cached prefixes are counted."""
        self.leaving = False
        """Whether it gets no more requests, and is removed once it has none."""

    @property
    def address(self) -> str:
        return self.client.address

    @property
    def engine(self) -> messages.Ready | None:
        """The report of its engine, if that is connected, and the one that the supervisor has found."""
        engine = self.client.engine
        return engine if engine and (self.instance is None or self.instance.is_of(engine)) else None

    @property
    def answers(self) -> bool:
        """Whether it computes answers, rather than prompts for others."""
        return self.instance is None or self.instance.role != "prefill"

    @property
    def takes_kv(self) -> bool:
        """Whether prefill instances may compute prompts for it."""
        engine = self.engine
        return engine is not None and engine.role == "decode"

    def require_engine(self, asleep: bool = False) -> messages.Ready:
        """As ``EngineClient.require_engine``; also raises where the engine sleeps, unless it may be ``asleep``."""
        ready = self.client.require_engine()
        if self.leaving or self.engine is None:
            raise PenstockError(Code.UNAVAILABLE, f"the instance at {self.client.name} is leaving or has changed")
        if ready.state.asleep and not asleep:
            raise PenstockError.of(messages.ENGINE_ASLEEP)
        return ready

    def has_adapter(self, name: str) -> bool:
        return not name or (name in self.client.adapters and not self.client.is_loading(name))

    @property
    def kv_address(self) -> str:
        """Where decode instances get KV from it; empty where they cannot."""
        engine = self.engine
        if engine is None or not engine.kv_address:
            return ""
        return reachable(engine.kv_address, split_address(self.client.name, "engine_address")[0])


class OpenRequest:
    """A request that has not ended.

    Args:
        cost: tokens of its prompt that its replica has to compute.
        prefills: prefill instances that may compute its prompt, and the tokens that the first of them has to.
    """

    __slots__ = ("cost", "full", "output", "prefill", "prefill_cost", "replica", "request", "retriable")

    def __init__(
        self, request: EngineRequest, replica: Replica, cost: int, prefills: list[Replica], full: frozenset[Replica]
    ) -> None:
        self.request = request
        self.replica = replica
        self.prefill = prefills[0] if prefills else None
        """The prefill instance that is to compute its prompt."""
        self.prefill_cost, self.cost = (cost, 0) if prefills else (0, cost)
        self.full = full
        """Replicas that had no room for it, or were stopping."""
        self.retriable = True
        """Whether it runs again if its replica is lost: until its first token has come, or it was aborted."""
        self.output: list[int] = []
        """Tokens of its first sequence, where there are several replicas."""

    def settle(self) -> None:
        """Its first token has come, or it was aborted."""
        self.retriable, self.cost, self.prefill_cost = False, 0, 0
