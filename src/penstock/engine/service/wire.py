"""What an engine process and its clients say to each other: msgspec's MessagePack over ZeroMQ."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.config.options import EngineOptions, LogOptions
from penstock.core import EngineRequest, Failure, TokenDelta, Vocabulary
from penstock.core.sampling import MAX_SEQUENCES


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A client is there and wants to know the engine. Answered with ``Ready``, now or once it has loaded."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """The client is still there. Everything it says counts as this; answered with ``Stats``."""


class Alive(msgspec.Struct, tag=True, frozen=True):
    """The client's process is still there, whatever holds up its event loop; sent by a thread, on a socket of its own.
    Not answered."""

    client: bytes
    """The client's identity on its own socket."""


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


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Whichever client has requests that its own clients call so is to abort them: the engine tells all of them."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Forget all cached prefixes; answered with ``Done``."""

    number: int


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Whether a request's sequences are to wait, as what they made already is not read."""

    request_id: str
    paused: bool


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
    iteration_timeout: float = 0.0
    """The option ``engine_iteration_timeout``, seconds."""


class Stats(msgspec.Struct, tag=True, frozen=True):
    """How the engine is doing."""

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    blocks_used: int = 0
    preemptions: int = 0
    """Since it started."""
    paused: int = 0
    """Of those that wait, how many were preempted."""
    blocks_reused: int = 0
    """Found in the prefix cache, since it started."""
    steps: int = 0
    """Since it started."""
    scheduled: int = 0
    """Sequences of the last step; 0 where none runs now."""
    in_prefill: int = 0
    """Of these, whose prompt was being computed, and how many tokens of prompts were."""
    prefill_tokens: int = 0
    cpu_memory: int = 0
    """Bytes that the engine's process has in memory."""
    gpu_memory: int = 0
    """Bytes that it has allocated on a GPU."""
    longest_step: float = 0.0
    """Seconds, since it started."""
    heartbeat_age: float = 0.0
    """Seconds since its loop came round; known to the client, not told by the engine."""
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


class AboutRequest(msgspec.Struct, frozen=True):
    """What can be told of a request that cannot be read."""

    request_id: str
    sampling: dict[str, Any] = {}

    @property
    def sequences(self) -> int:
        """Those that its client waits for; one where that is not known."""
        wanted = [self.sampling.get(name) for name in ("n", "best_of")]
        return max([1, *(number for number in wanted if isinstance(number, int) and number <= MAX_SEQUENCES)])


class About(msgspec.Struct, frozen=True):
    """What can be told of a message that cannot be read: what its client waits for, if anything."""

    request: AboutRequest | None = None
    number: int | None = None


ToEngine = (
    Hello | Beat | Alive | Learn | Add | Abort | Stop | Pause | Cancel | ResetPrefixCache | LoadAdapter | UnloadAdapter
)
FromEngine = Ready | Stats | Deltas | Adapters | Cancel | Done
Report = Ready | Broken
"""The one line of JSON that an engine writes on its standard output, for the process that started it."""

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_about = msgspec.msgpack.Decoder(About).decode
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
LOOP_DEAD = 30.0
"""Seconds after which a client whose event loop does not come round says no more that it is alive."""
