"""The messages between an executor and its worker process, encoded as MessagePack."""

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
    """A connection to a rank of another node, which the worker process inherits."""

    descriptor: int
    rank: int
    """World rank of the peer."""


class Start(msgspec.Struct, frozen=True):
    """What a worker process reads on its standard input, as JSON."""

    options: EngineOptions
    logs: LogOptions | None
    inbox: Descriptors
    outbox: Descriptors
    parent: int
    """Process id of the executor."""
    rank_info: RankInfo = RankInfo()
    memory: int | None = None
    """File descriptor of the memory that ranks share; None for a single rank."""
    previous: Descriptors | None = None
    """Ring from the pipeline stage before."""
    following: Descriptors | None = None
    """Ring to the next pipeline stage."""
    sockets: tuple[PeerSocket, ...] = ()
    """Connections to ranks of other nodes: of the same stage, or the stages before and after."""


class GrammarBitmask(msgspec.Struct, tag=True):
    """The grammar bitmask of the ``StepInput`` sent just before, in the form of ``Executor.submit``."""

    bitmask: np.ndarray


class Call(msgspec.Struct, tag=True):
    """``Executor.call``, answered with a ``CallReply`` of the same number, perhaps after other messages."""

    number: int
    call: WorkerCall


class Close(msgspec.Struct, tag=True):
    """End the process."""


class Failed(msgspec.Struct, tag=True):
    """An error in the worker, whose log has the traceback unless it is a ``PenstockError``."""

    words: str
    failure: Failure | None = None
    """Of a ``PenstockError``."""


class StepReply(msgspec.Struct, tag=True):
    """The answer to ``StepInput``: its output, or ``failed``."""

    output: StepOutput | None = None
    failed: Failed | None = None


class CallReply(msgspec.Struct, tag=True):
    """The answer to ``Call``."""

    number: int
    value: Any = None
    """The answer, of which structs are plain dictionaries."""
    failed: Failed | None = None


ToWorker = StepInput | GrammarBitmask | Call | Close
FromWorker = StepReply | CallReply
to_worker: msgspec.msgpack.Decoder[Any] = decoder(ToWorker)
from_worker: msgspec.msgpack.Decoder[Any] = decoder(FromWorker)
