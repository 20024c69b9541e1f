"""Messages between an executor and its worker processes, encoded as MessagePack."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from penstock.config.options import EngineOptions, LogOptions
from penstock.core import Failure

from ..step import StepInput, StepOutput, WorkerCall, decoder
from .layout import RankInfo
from .ring import Descriptors


class PeerSocket(msgspec.Struct, frozen=True):
    """A connection to a rank on another node, inherited by the worker process."""

    descriptor: int
    rank: int
    """World rank of the peer."""


class Start(msgspec.Struct, frozen=True):
    """Parameters of a worker process. Sent to the fork server as JSON."""

    options: EngineOptions
    logs: LogOptions | None
    inbox: Descriptors
    outbox: Descriptors
    parent: int
    """Process id of the executor."""
    rank_info: RankInfo = RankInfo()
    memory: int | None = None
    """File descriptor of the ranks' shared memory; None for a single rank."""
    previous: Descriptors | None = None
    """Ring that carries hidden states from the previous pipeline stage on this node; None without such a stage."""
    following: Descriptors | None = None
    """Ring that carries hidden states to the next pipeline stage on this node; None without such a stage."""
    sockets: tuple[PeerSocket, ...] = ()
    """Connections to ranks on other nodes that belong to the previous, the same or the next pipeline stage."""


class GrammarBitmask(msgspec.Struct, tag=True):
    """The grammar bitmask of the preceding ``StepInput`` (see ``Executor.submit``)."""

    bitmask: np.ndarray


class Call(msgspec.Struct, tag=True):
    """A call (``Executor.call``). Its ``CallReply`` has the same number, and may follow replies to later messages."""

    number: int
    call: WorkerCall


class Close(msgspec.Struct, tag=True):
    """End the worker process. Has no reply."""


class Failed(msgspec.Struct, tag=True):
    """An error in the worker. The worker logs the traceback unless it is a ``PenstockError``."""

    message: str
    failure: Failure | None = None
    """Failure of a ``PenstockError``; None for other exceptions."""


class StepReply(msgspec.Struct, tag=True):
    """The reply to ``StepInput``: either ``output`` or ``failed``."""

    output: StepOutput | None = None
    failed: Failed | None = None


class CallReply(msgspec.Struct, tag=True):
    """The reply to ``Call``: ``value``, or ``failed``."""

    number: int
    value: Any = None
    """Result of the call, with structs as dictionaries."""
    failed: Failed | None = None


ToWorker = StepInput | GrammarBitmask | Call | Close
FromWorker = StepReply | CallReply
to_worker: msgspec.msgpack.Decoder[Any] = decoder(ToWorker)
from_worker: msgspec.msgpack.Decoder[Any] = decoder(FromWorker)
