"""Messages between an engine process and its clients: msgspec structs, as MessagePack over ZeroMQ."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import msgspec

from penstock.config.options import EngineOptions, LogOptions
from penstock.core import Code, EngineRequest, Failure, TokenDelta, Vocabulary
from penstock.core.sampling import MAX_SEQUENCES

from .actions import EngineAction, EngineState
from .snapshot import Snapshot

PROTOCOL = 3
"""Number of this protocol; engines and clients on several hosts must have the same."""
KEEP_ALIVE_INTERVAL = 1.0
"""Seconds between two ``KeepAlive`` messages of a client."""
CLIENT_TIMEOUT = 5.0
"""Seconds without a message after which the engine cancels a client's requests."""
LOOP_TIMEOUT = 30.0
"""Seconds that a client's event loop may be blocked before its ``ProcessAlive`` messages stop."""
ENGINE_ASLEEP = Failure(Code.UNAVAILABLE, "the engine sleeps; wake it up, then try again")
"""The error of requests while the engine sleeps."""
ENGINE_STOPPING = Failure(Code.UNAVAILABLE, "the engine is stopping")
"""The error of requests after ``Stopping``."""

# --- From clients to the engine --------------------------------------------------------------------------------------


class Connect(msgspec.Struct, tag=True, frozen=True):
    """The client's first message. Answered with ``Ready`` once the engine has loaded."""


class KeepAlive(msgspec.Struct, tag=True, frozen=True):
    """Renews the client's lease, as every message does. Answered with ``Stats``."""


class ProcessAlive(msgspec.Struct, tag=True, frozen=True):
    """Renews a client's lease while its event loop is blocked. Sent by a thread on a separate socket; not answered."""

    client: bytes
    """ZeroMQ identity of the client's main socket."""


class Disconnect(msgspec.Struct, tag=True, frozen=True):
    """The client has received ``Stopped``, and so all before it."""


class SetVocabulary(msgspec.Struct, tag=True, frozen=True):
    """The model's vocabulary, for guided decoding; sent before the first guided request."""

    vocabulary: Vocabulary


class Add(msgspec.Struct, tag=True, frozen=True):
    """Queue a request. Its deltas, or its error, come in ``Deltas``."""

    request: EngineRequest
    time_left: float | None = None
    """Seconds until its deadline, from a client that may be on another host; replaces the one of the request, which is
    on the client's clock."""


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Cancel a request of this client."""

    request_id: str


class FinishSequence(msgspec.Struct, tag=True, frozen=True):
    """End one sequence of a request, whose text contains a stop string."""

    request_id: str
    sequence: int


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Cancel requests by their external ids, whichever client sent them. The engine forwards it to all clients, which
    abort those of their own."""

    request_ids: list[str]


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Pause or resume a request's sequences, because the consumer of its output is slow."""

    request_id: str
    paused: bool


class Call(msgspec.Struct, tag=True, frozen=True):
    """An action on the engine as a whole. Answered with ``CallResult`` once it has ended."""

    call_id: int
    """Chosen by the client; repeated in the ``CallResult``."""
    action: EngineAction


# --- From the engine to its clients ----------------------------------------------------------------------------------


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Report that the engine serves, with the properties of its model and KV cache that clients need."""

    pid: int
    max_model_len: int
    vocab_size: int
    num_blocks: int
    """Number of KV blocks on the device."""
    block_size: int
    """Tokens in a KV block."""
    fingerprint: str
    """``Engine.info.fingerprint``: equal for engines whose results are equal to the bit."""
    batch_invariant: bool
    adapters: dict[str, str]
    """As in ``Adapters``."""
    iteration_timeout: float = 0.0
    """The option ``engine_iteration_timeout``, seconds."""
    prefix_caching: bool = True
    """The option ``enable_prefix_caching``."""
    role: str = "mixed"
    """The option ``role``."""
    state: EngineState = EngineState()
    """Its weights, and whether it sleeps."""
    tokenizer_version: str = ""
    """``tokenizer_version`` of the model's folder."""
    kv_address: str = ""
    """Where a prefill instance gives KV to decode instances, as host:port; empty for none."""
    engine_address: str = ""
    """Where routers reach the engine, as host:port with the port that was bound; empty for none."""
    protocol: int = 0
    """``PROTOCOL``."""
    version: str = ""
    """Penstock's version."""

    @property
    def weights_version(self) -> str:
        """``Engine.info.weights_version``: equal for engines with the same weights."""
        return self.state.weights_version


LISTS = ("accepted_at", "steps_by_tokens")
"""Fields of ``Stats`` with counters by position."""
NOT_SUMMED = (*LISTS, *"adapters_running adapters_waiting expert_load replicas address role state".split())


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Statistics of the engine; counters count from its start."""

    running: int = 0
    """Sequences that are running."""
    waiting: int = 0
    """Sequences in the queue."""
    waiting_prerequisites: int = 0
    """Those of them whose requests wait for something else than room: a grammar, cached prefixes, keys and values."""
    prompt_tokens: int = 0
    """Tokens of prompts that are still to be computed."""
    requests_of_others: int = 0
    """Open requests of other clients than the one that this is sent to."""
    blocks: int = 0
    """KV blocks on the device."""
    blocks_used: int = 0
    """KV blocks that sequences hold."""
    preemptions: int = 0
    """Counter of preempted sequences."""
    num_preempted_waiting: int = 0
    """Sequences in the queue because they were preempted."""
    num_swapped: int = 0
    """Those of them whose KV blocks are in host memory."""
    blocks_reused: int = 0
    """Counter of KV blocks found in the prefix cache."""
    steps: int = 0
    """Counter of steps."""
    steps_by_tokens: list[int] = []
    """Counter of steps by their tokens, in the buckets of ``step_statistics.BUCKETS``."""
    step_tokens: int = 0
    """Counter of tokens that steps have computed, drafts included."""
    scheduled: int = 0
    """Sequences in the last step; 0 where none is running."""
    in_prefill: int = 0
    """Sequences in the last step whose prompt was being computed."""
    prefill_tokens: int = 0
    """Prompt tokens computed in the last step."""
    cpu_memory: int = 0
    """Resident memory of the engine process, bytes."""
    gpu_memory: int = 0
    """Memory that the engine process has allocated on a GPU, bytes."""
    longest_step: float = 0.0
    """Longest step since the start, seconds."""
    heartbeat_age: float = 0.0
    """Seconds since the engine's last heartbeat; filled in by the client."""
    clock: float = 0.0
    """The engine's monotonic clock."""
    drafts: int = 0
    """Counter of drafts in speculative decoding."""
    draft_tokens: int = 0
    """Counter of draft tokens."""
    accepted_tokens: int = 0
    """Counter of draft tokens that were accepted."""
    accepted_at: list[int] = []
    """``accepted_tokens`` by position in the draft."""
    kv_transfers: int = 0
    """Counter of KV transfers begun by a decode engine."""
    kv_completed: int = 0
    """Counter of those that brought a prompt's keys and values."""
    kv_failed: int = 0
    """Counter of those that failed."""
    kv_recomputed: int = 0
    """Counter of requests whose prompts a decode engine has computed since their transfers failed."""
    kv_seconds: float = 0.0
    """Time of the transfers that brought something, the prefill engine's queue and computation included, seconds."""
    kv_bytes_received: int = 0
    """Counter of bytes of keys and values that came from prefill engines."""
    kv_bytes_sent: int = 0
    """Counter of bytes of keys and values sent to decode engines over TCP."""
    kv_rereads: int = 0
    """Counter of parts of transfers that were read again."""
    kv_checksum_failures: int = 0
    """Counter of parts of transfers whose checksum was wrong."""
    kv_slots: int = 0
    """Slots of the transfer buffer."""
    kv_slots_used: int = 0
    """Those that are not free."""
    offload_queries: int = 0
    """Counter of tokens looked up in the host tier of the prefix cache, as the device did not have them."""
    offload_hits: int = 0
    """Counter of tokens loaded from it."""
    offload_bytes_stored: int = 0
    """Counter of bytes stored to it."""
    offload_bytes_loaded: int = 0
    """Counter of bytes loaded from it."""
    offload_evictions: int = 0
    """Counter of blocks evicted from it."""
    offload_slots: int = 0
    """Blocks that it has room for."""
    offload_slots_used: int = 0
    """Blocks in it."""
    offload_disk_hits: int = 0
    """Counter of tokens read from the disk tier into it."""
    offload_disk_bytes_read: int = 0
    """Counter of bytes read from the disk tier."""
    offload_disk_bytes_written: int = 0
    """Counter of bytes written to it."""
    offload_disk_evictions: int = 0
    """Counter of files that this engine has deleted there to make room."""
    offload_disk_read_failures: int = 0
    """Counter of damaged files, and of reads that took too long."""
    offload_disk_write_failures: int = 0
    """Counter of blocks that could not be written."""
    encoder_queries: int = 0
    """Counter of images and pairs of frames whose features steps needed."""
    encoder_hits: int = 0
    """Counter of those whose features were kept."""
    encoder_entries: int = 0
    """Images and pairs of frames whose features are kept."""
    encoder_tokens: int = 0
    """Their features."""
    encoder_bytes: int = 0
    """Of these, on each worker."""
    spans_exported: int = 0
    """Counter of spans of traces that the collector has taken."""
    spans_dropped: int = 0
    """Counter of those that it has not."""
    expert_load: dict[int, list[int]] = {}
    """Counters of the tokens that chose each expert, by layer; empty without the option ``expert_load``."""
    adapters_running: list[str] = []
    """LoRA adapters of requests that are running, by name."""
    adapters_waiting: list[str] = []
    """Of those that wait, where none of the adapter runs."""
    replicas: list[Stats] = []
    """Of several engines: each one's; filled in by the client."""
    address: str = ""
    """Where the engine is reached, of one of several over TCP; filled in by the client."""
    role: str = ""
    """Its option ``role``; likewise."""
    state: EngineState = EngineState()
    """Filled in by the client; of several engines, the first one's."""

    @classmethod
    def total(cls, replicas: list[Stats]) -> Stats:
        """The statistics of several replicas together."""
        sums = {
            name: sum(getattr(one, name) for one in replicas)
            for name in cls.__struct_fields__
            if name not in NOT_SUMMED
        }
        sums |= {
            name: max(getattr(one, name) for one in replicas) for name in ("longest_step", "heartbeat_age", "clock")
        }
        lists = {
            name: [sum(counts) for counts in zip_longest(*(getattr(one, name) for one in replicas), fillvalue=0)]
            for name in LISTS
        }
        expert_load = {
            layer: [sum(counts) for counts in zip(*(one.expert_load[layer] for one in having), strict=True)]
            for layer in sorted({layer for one in replicas for layer in one.expert_load})
            if (having := [one for one in replicas if layer in one.expert_load])
        }
        return cls(
            **sums,
            accepted_at=lists["accepted_at"],
            steps_by_tokens=lists["steps_by_tokens"],
            adapters_running=sorted({name for one in replicas for name in one.adapters_running}),
            adapters_waiting=sorted({name for one in replicas for name in one.adapters_waiting}),
            expert_load=expert_load,
            replicas=replicas,
            state=replicas[0].state,
        )


class Deltas(msgspec.Struct, tag=True, frozen=True):
    """The deltas of one step, of this client's requests."""

    deltas: list[TokenDelta]


class Adapters(msgspec.Struct, tag=True, frozen=True):
    """The LoRA adapters; sent to every client whenever they change."""

    paths: dict[str, str]
    """Name → folder of each adapter that is loaded or being loaded."""


class StepStarted(msgspec.Struct, tag=True, frozen=True):
    """A long step has begun; sent to clients over TCP, which cannot see the engine's heartbeat."""

    expected: float
    """Seconds that it may take."""


class Stopping(msgspec.Struct, tag=True, frozen=True):
    """The engine was told to stop: it computes the requests that it has, and accepts no others."""


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """Nothing follows; sent to clients over TCP, which answer with ``Disconnect``. A connection that one end closes
    while something of the other is on its way is reset, and what had arrived last may be lost with it."""


class CallResult(msgspec.Struct, tag=True, frozen=True):
    """The result of a ``Call``."""

    call_id: int
    failure: Failure | None = None
    """The error; None where the call succeeded."""
    snapshot: Snapshot | None = None
    """The answer to ``Inspect``."""


# --- Messages that cannot be decoded ---------------------------------------------------------------------------------


class PartialRequest(msgspec.Struct, frozen=True):
    """Fields of an ``EngineRequest`` that can be decoded even where others cannot."""

    request_id: str
    sampling: dict[str, Any] = {}

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the client waits for; 1 where it cannot be decoded."""
        values = [self.sampling.get(name) for name in ("n", "best_of")]
        return max([1, *(value for value in values if isinstance(value, int) and value <= MAX_SEQUENCES)])


class PartialMessage(msgspec.Struct, frozen=True):
    """Fields of an invalid message by which its sender can be sent an error; None where there is none."""

    request: PartialRequest | None = None
    call_id: int | None = None


# --- Between an engine process and the process that starts it --------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """The engine's options, which an engine process reads on its standard input as one JSON document."""

    options: EngineOptions
    logs: LogOptions
    parent: int
    """Process id of the parent; the engine is killed when it dies."""
    replica: int = 0
    """Index of the data-parallel replica."""
    weights: str = ""
    """Folder of the weights to start with; empty for the model's."""


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine could not start."""

    failure: Failure


ToEngine = (
    Connect
    | Disconnect
    | KeepAlive
    | ProcessAlive
    | SetVocabulary
    | Add
    | Abort
    | FinishSequence
    | Pause
    | Cancel
    | Call
)
FromEngine = Ready | EngineState | Stats | Deltas | Adapters | Cancel | StepStarted | Stopping | Stopped | CallResult
StartReport = Ready | StartFailed
"""What an engine process writes on its standard output: one line of JSON."""

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_partial = msgspec.msgpack.Decoder(PartialMessage).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_start_report = msgspec.json.Decoder(StartReport).decode
