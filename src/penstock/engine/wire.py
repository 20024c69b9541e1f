"""What an engine process and its clients say to each other: msgspec's MessagePack over ZeroMQ."""

from __future__ import annotations

import msgspec

from penstock.core import EngineRequest, Failure, TokenDelta, Vocabulary
from penstock.core.options import EngineOptions, LogOptions


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A client is there and wants to know the engine. Answered with ``Ready``, now or once it has loaded."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """The client is still there. Everything it says counts as this; answered with ``Stats``."""


class Learn(msgspec.Struct, tag=True, frozen=True):
    """What tokens spell; comes before the first request that is guided."""

    vocabulary: Vocabulary


class Add(msgspec.Struct, tag=True, frozen=True):
    request: EngineRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_id: str


class Stop(msgspec.Struct, tag=True, frozen=True):
    """The text of one sequence has come to a stop string."""

    request_id: str
    sequence: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """What the engine runs."""

    pid: int
    max_model_len: int
    vocabulary: int
    blocks: int
    block_size: int
    fingerprint: str
    batch_invariant: bool
    adapters: dict[str, str]
    """As in ``Adapters``."""


class Stats(msgspec.Struct, tag=True, frozen=True):
    """How the engine is doing."""

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    blocks_used: int = 0
    preemptions: int = 0
    """Since it started."""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = []
    """Of speculative decoding since it started: times that tokens were guessed, how many were guessed and how many
    rightly, and these by how many were guessed before each."""


class Broken(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start, and says why."""

    failure: Failure


class Deltas(msgspec.Struct, tag=True, frozen=True):
    """What a step brought to this client's requests."""

    deltas: list[TokenDelta]


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Answered with ``Done`` once requests may name it, or if they never will."""

    number: int
    """The client's own for the answer."""
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Answered with ``Done``."""

    number: int
    name: str


class Adapters(msgspec.Struct, tag=True, frozen=True):
    """Told to every client whenever it changes."""

    paths: dict[str, str]
    """Folders of the adapters that requests may name, or soon may, by name."""


class Done(msgspec.Struct, tag=True, frozen=True):
    """What a client wanted was done, or why not."""

    number: int
    failure: Failure | None = None


ToEngine = Hello | Beat | Learn | Add | Abort | Stop | LoadAdapter | UnloadAdapter
FromEngine = Ready | Stats | Deltas | Adapters | Done
Report = Ready | Broken
"""The one line of JSON that an engine writes on its standard output, for the process that started it."""

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_report = msgspec.json.Decoder(Report).decode


class Start(msgspec.Struct, frozen=True):
    """What an engine process reads on its standard input."""

    options: EngineOptions
    logs: LogOptions
    parent: int
    """The process without which this one must not be."""


BEAT = 1.0
"""Seconds between a client's beats."""
LEASE = 5.0
"""Seconds of silence after which a client counts as dead, and its requests are cancelled."""
