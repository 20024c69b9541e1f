"""State that ``EnginePool`` keeps for each engine and for each open request."""

from __future__ import annotations

from penstock.config.addresses import reachable, split_address
from penstock.core import Code, EngineRequest, PenstockError

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
    """A request that has not ended.

    Args:
        cost: number of uncached prompt tokens.
        prefills: prefill instances that may compute the prompt, in order of preference; empty: ``replica`` computes it.
        full: replicas that have rejected the request, because their queue was full or they were stopping.
    """

    __slots__ = ("cost", "full", "output", "prefill", "prefill_cost", "replica", "request", "retriable")

    def __init__(
        self, request: EngineRequest, replica: Replica, cost: int, prefills: list[Replica], full: frozenset[Replica]
    ) -> None:
        self.request = request
        self.replica = replica
        self.prefill = prefills[0] if prefills else None
        """Prefill instance that is expected to compute the prompt; None: ``replica`` computes it."""
        self.prefill_cost, self.cost = (cost, 0) if prefills else (0, cost)
        """Number of prompt tokens that ``prefill`` has not computed yet, and the same for ``replica``."""
        self.full = full
        self.retriable = True
        """True if the request can run on another replica: no token has arrived, and it was not aborted."""
        self.output: list[int] = []
        """Output tokens of the first sequence. Recorded only if there are several replicas."""

    def mark_started(self) -> None:
        """Record that the first token has arrived, or that the request was aborted."""
        self.retriable, self.cost, self.prefill_cost = False, 0, 0
