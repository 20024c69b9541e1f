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

PROTOCOL = 4
"""Version of this protocol. Engines and clients on different hosts must have the same version."""
KEEP_ALIVE_INTERVAL = 1.0
"""Interval between two ``KeepAlive`` messages of a client, seconds."""
CLIENT_TIMEOUT = 5.0
"""Seconds without a message after which the engine cancels a client's requests."""
LOOP_TIMEOUT = 30.0
"""Maximum seconds for which a client with a blocked event loop sends ``ProcessAlive`` messages."""
ENGINE_ASLEEP = Failure(Code.UNAVAILABLE, "the engine sleeps; wake it up, then try again")
"""Error of requests that arrive while the engine sleeps."""
ENGINE_STOPPING = Failure(Code.UNAVAILABLE, "the engine is stopping; try again later")
"""Error of requests that arrive after the engine has sent ``Stopping``."""
ENGINE_STOPPED = Failure(Code.UNAVAILABLE, "the engine has stopped before the request ended; try again later")
"""Error of requests that have not ended within ``drain_timeout``."""

# --- From clients to the engine --------------------------------------------------------------------------------------


class Connect(msgspec.Struct, tag=True, frozen=True):
    """The client's first message. The engine replies with ``Ready`` once it has loaded the model."""


class KeepAlive(msgspec.Struct, tag=True, frozen=True):
    """Renews the client's lease, as every message does. The engine replies with ``Stats``."""


class ProcessAlive(msgspec.Struct, tag=True, frozen=True):
    """Renews a client's lease while its event loop is blocked. A thread of the client sends it on a separate socket.
    The engine does not reply."""

    client: bytes
    """ZeroMQ identity of the client's main socket."""


class Disconnect(msgspec.Struct, tag=True, frozen=True):
    """The client has received ``Stopped``, and therefore all earlier messages."""


class SetVocabulary(msgspec.Struct, tag=True, frozen=True):
    """The model's vocabulary for guided decoding, sent before the first guided request."""

    vocabulary: Vocabulary


class Add(msgspec.Struct, tag=True, frozen=True):
    """Queue a request. Its deltas or its error follow in ``Deltas``."""

    request: EngineRequest
    time_left: float | None = None
    """Seconds until the deadline, set by clients over TCP. Replaces ``request.deadline``, which is a time of the
    client's clock."""


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Cancel a request of this client."""

    request_id: str


class FinishSequence(msgspec.Struct, tag=True, frozen=True):
    """End one sequence of a request after a stop string was found in its text."""

    request_id: str
    sequence: int


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Cancel requests of any client by their external ids. The engine forwards the message to all clients, which abort
    their requests with these ids."""

    request_ids: list[str]


class Pause(msgspec.Struct, tag=True, frozen=True):
    """Pause or resume a request whose output is consumed slowly."""

    request_id: str
    paused: bool


class Call(msgspec.Struct, tag=True, frozen=True):
    """Execute an action on the engine as a whole. The engine replies with ``CallResult`` when the action has ended."""

    call_id: int
    """Id chosen by the client, repeated in ``CallResult``."""
    action: EngineAction


# --- From the engine to its clients ----------------------------------------------------------------------------------


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine is ready: properties of its model and KV cache that clients need."""

    pid: int
    max_model_len: int
    vocab_size: int
    num_blocks: int
    """Number of KV blocks on the device."""
    block_size: int
    """Number of tokens per KV block."""
    fingerprint: str
    """``Engine.info.fingerprint``: equal for engines with bit-identical results."""
    batch_invariant: bool
    adapters: dict[str, str]
    """Name → folder of each loaded LoRA adapter."""
    iteration_timeout: float = 0.0
    """The option ``engine_iteration_timeout``, seconds; 0: no timeout."""
    prefix_caching: bool = True
    """The option ``enable_prefix_caching``."""
    role: str = "mixed"
    """Role of the engine: ``mixed``, ``prefill`` or ``decode``."""
    max_waiting: int = 0
    """The option ``max_waiting``."""
    host_bytes: int = 0
    """Bytes of host memory for weights and all tiers of the KV cache on all ranks; 0 on a GPU."""
    num_allocated_blocks: int = 0
    """``num_blocks`` with the blocks of draft token trees: the value of ``num_gpu_blocks_override`` for an equal
    engine."""
    state: EngineState = EngineState()
    """Weights, pause and sleep state of the engine."""
    tokenizer_version: str = ""
    """Hash of the model's tokenizer (``instance.tokenizer_version``)."""
    kv_address: str = ""
    """Address (host:port) from which decode instances pull KV; empty unless this is a prefill instance."""
    engine_address: str = ""
    """Address (host:port, with the bound port) for routers; empty without the option ``engine_address``."""
    suspects: list[int] = []
    """``EngineRequest.uid`` of the requests in the fatal step of the engine's previous process, if that died."""
    protocol: int = 0
    """``PROTOCOL`` of the engine's version of Penstock."""
    version: str = ""
    """The engine's version of Penstock."""

    @property
    def weights_version(self) -> str:
        """``Engine.info.weights_version``: equal for engines with the same weights."""
        return self.state.weights_version


LISTS = ("accepted_at", "steps_by_tokens")
"""Fields of ``Stats`` that are lists of counters. ``Stats.total`` adds them element by element."""
MAXIMA = ("longest_step", "heartbeat_age", "clock")
"""Fields of ``Stats`` for which ``Stats.total`` takes the maximum of the replicas."""
NOT_SUMMED = (*LISTS, *MAXIMA, *"adapters_running adapters_waiting expert_load replicas address role state".split())


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Statistics of an engine. Counters and totals begin with 0 at its start."""

    running: int = 0
    """Number of running sequences."""
    waiting: int = 0
    """Number of sequences in the queue."""
    waiting_prerequisites: int = 0
    """Number of queued sequences that wait for a grammar, a cached prefix, or a KV transfer."""
    prompt_tokens: int = 0
    """Number of prompt tokens of open requests that are not computed yet."""
    requests_of_others: int = 0
    """Number of open requests of clients other than the receiver of this message."""
    blocks: int = 0
    """Number of KV blocks on the device."""
    blocks_used: int = 0
    """Number of KV blocks held by sequences."""
    state_snapshots: int = 0
    """Number of snapshots of recurrent states."""
    state_snapshots_used: int = 0
    """Number of snapshots with a state that other sequences may start from."""
    preemptions: int = 0
    """Counter of preemptions; the beams of a request count once."""
    num_preempted_waiting: int = 0
    """Number of preempted sequences in the queue."""
    num_swapped: int = 0
    """Number of preempted sequences that have their KV blocks in host memory (swap space)."""
    blocks_reused: int = 0
    """Counter of KV blocks found in the prefix cache."""
    steps: int = 0
    """Counter of computed steps."""
    steps_by_tokens: list[int] = []
    """Counters of steps by number of tokens: one per bucket of ``step_statistics.BUCKETS``."""
    step_tokens: int = 0
    """Counter of tokens computed by steps, including draft tokens."""
    scheduled: int = 0
    """Number of sequences in the last step; 0 if no sequence is running."""
    in_prefill: int = 0
    """Number of sequences in prefill in the last step."""
    prefill_tokens: int = 0
    """Number of prompt tokens computed in the last step."""
    cpu_memory: int = 0
    """Resident memory of the engine process, bytes."""
    gpu_memory: int = 0
    """GPU memory allocated by the engine process, bytes."""
    longest_step: float = 0.0
    """Duration of the longest step, seconds."""
    heartbeat_age: float = 0.0
    """Seconds since the engine's last heartbeat; set by the client."""
    clock: float = 0.0
    """Time of the engine's monotonic clock when it sent this message, seconds."""
    drafts: int = 0
    """Counter of drafts in speculative decoding."""
    draft_tokens: int = 0
    """Counter of draft tokens that steps have verified."""
    accepted_tokens: int = 0
    """Counter of draft tokens that were accepted."""
    decoded_rows: int = 0
    """Counter of tokens sampled after the first token of a sequence, without accepted draft tokens."""
    decode_seconds: float = 0.0
    """Duration of the steps without prompt tokens; 0 without speculative decoding."""
    seconds_without_drafts: float = 0.0
    """Estimated duration of the same steps' tokens without drafts."""
    accepted_at: list[int] = []
    """Counters of accepted draft tokens: one per position in the draft."""
    kv_transfers: int = 0
    """Counter of KV transfers started by a decode engine."""
    kv_completed: int = 0
    """Counter of completed KV transfers."""
    kv_failed: int = 0
    """Counter of failed KV transfers."""
    kv_recomputed: int = 0
    """Counter of requests with a failed KV transfer, whose prompts the decode engine computed."""
    kv_seconds: float = 0.0
    """Total duration of completed KV transfers, seconds, including queue and computation in prefill engines."""
    kv_bytes_received: int = 0
    """Counter of KV bytes received from prefill engines."""
    kv_bytes_sent: int = 0
    """Counter of KV bytes sent to decode engines over TCP."""
    kv_rereads: int = 0
    """Counter of parts of KV transfers that were read again."""
    kv_checksum_failures: int = 0
    """Counter of parts of KV transfers with a wrong checksum."""
    kv_slots: int = 0
    """Number of slots of the transfer buffer."""
    kv_slots_used: int = 0
    """Number of allocated slots of the transfer buffer."""
    offload_queries: int = 0
    """Counter of tokens looked up in the host tier of the prefix cache after a miss on the device."""
    offload_hits: int = 0
    """Counter of tokens loaded from the host tier."""
    offload_bytes_stored: int = 0
    """Counter of bytes stored to the host tier."""
    offload_bytes_loaded: int = 0
    """Counter of bytes loaded from the host tier."""
    offload_evictions: int = 0
    """Counter of blocks evicted from the host tier."""
    offload_slots: int = 0
    """Capacity of the host tier, blocks."""
    offload_slots_used: int = 0
    """Number of blocks in the host tier."""
    offload_disk_hits: int = 0
    """Counter of tokens read from the disk tier into the host tier."""
    offload_disk_bytes_read: int = 0
    """Counter of bytes read from the disk tier."""
    offload_disk_bytes_written: int = 0
    """Counter of bytes written to the disk tier."""
    offload_disk_evictions: int = 0
    """Counter of files deleted by this engine from the disk tier to make room."""
    offload_disk_read_failures: int = 0
    """Counter of failed reads from the disk tier: damaged files and timeouts."""
    offload_disk_write_failures: int = 0
    """Counter of blocks that could not be written to the disk tier."""
    encoder_queries: int = 0
    """Counter of images and pairs of video frames looked up in the encoder cache."""
    encoder_hits: int = 0
    """Counter of images and pairs of video frames found in the encoder cache."""
    encoder_entries: int = 0
    """Number of images and pairs of video frames in the encoder cache."""
    encoder_tokens: int = 0
    """Number of feature vectors in the encoder cache."""
    encoder_bytes: int = 0
    """Size of the feature vectors in the encoder cache of each worker, bytes."""
    spans_exported: int = 0
    """Counter of trace spans accepted by the collector."""
    spans_dropped: int = 0
    """Counter of trace spans that were dropped, as the collector did not accept them."""
    expert_load: dict[int, list[int]] = {}
    """Layer → counter of routed tokens of each expert; empty without the option ``expert_load``."""
    adapters_running: list[str] = []
    """Names of the LoRA adapters of running requests."""
    adapters_waiting: list[str] = []
    """Names of the LoRA adapters of waiting requests that no running request uses."""
    replicas: list[Stats] = []
    """Statistics of each engine, if this message combines several engines; set by the client."""
    address: str = ""
    """Address (host:port) of an engine of a router; set by the client."""
    role: str = ""
    """The option ``role`` of an engine of a router; set by the client."""
    state: EngineState = EngineState()
    """State of the engine, or of the first of several engines; set by the client."""

    @classmethod
    def total(cls, replicas: list[Stats]) -> Stats:
        """Combine the statistics of several replicas: sums, except for the fields in ``LISTS`` and ``MAXIMA``, lists of
        adapters, and the state of the first replica."""

        def values(name: str) -> Any:
            return [getattr(replica, name) for replica in replicas]

        loads = [replica.expert_load for replica in replicas]
        expert_load = {
            layer: [sum(counts) for counts in zip(*(load[layer] for load in loads if layer in load), strict=True)]
            for layer in sorted(set[int]().union(*loads))
        }
        combined: dict[str, Any] = {name: sum(values(name)) for name in cls.__struct_fields__ if name not in NOT_SUMMED}
        combined |= {name: max(values(name)) for name in MAXIMA}
        combined |= {name: [sum(counts) for counts in zip_longest(*values(name), fillvalue=0)] for name in LISTS}
        return cls(
            **combined,
            adapters_running=sorted({name for replica in replicas for name in replica.adapters_running}),
            adapters_waiting=sorted({name for replica in replicas for name in replica.adapters_waiting}),
            expert_load=expert_load,
            replicas=replicas,
            state=replicas[0].state,
        )


class Deltas(msgspec.Struct, tag=True, frozen=True):
    """The deltas of one step for this client's requests."""

    deltas: list[TokenDelta]


class Adapters(msgspec.Struct, tag=True, frozen=True):
    """The LoRA adapters of the engine. Sent to every client when they change."""

    paths: dict[str, str]
    """Name → folder of each loaded adapter."""


class StepStarted(msgspec.Struct, tag=True, frozen=True):
    """A long step has started. Sent to clients over TCP, because they cannot read the engine's heartbeat."""

    expected: float
    """Expected duration of the step, seconds."""


class Stopping(msgspec.Struct, tag=True, frozen=True):
    """The engine is stopping: it finishes its requests, and accepts no new ones."""


class Stopped(msgspec.Struct, tag=True, frozen=True):
    """The engine's last message. Clients over TCP reply with ``Disconnect``, for which the engine waits: if it closed
    the connection while a client sends data, TCP would reset the connection, and unread messages could be lost."""


class CallResult(msgspec.Struct, tag=True, frozen=True):
    """The reply to ``Call``, sent when the action has ended."""

    call_id: int
    failure: Failure | None = None
    """Error of a failed call; None if the call succeeded."""
    snapshot: Snapshot | None = None
    """Result of ``Inspect``; None for other actions."""


# --- Messages that cannot be decoded ---------------------------------------------------------------------------------


class PartialRequest(msgspec.Struct, frozen=True):
    """Fields of an ``EngineRequest`` that are decoded even if other fields are invalid."""

    request_id: str
    sampling: dict[str, Any] = {}

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the client waits for; 1 if the number in ``sampling`` is invalid."""
        values = [self.sampling.get(name) for name in ("n", "best_of")]
        return max([1, *(value for value in values if isinstance(value, int) and value <= MAX_SEQUENCES)])


class PartialMessage(msgspec.Struct, frozen=True):
    """Fields of an invalid message that identify its request or call, for the reply with the error."""

    request: PartialRequest | None = None
    call_id: int | None = None


# --- Between an engine process and the process that starts it --------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """Parameters of an engine process: one JSON document on its standard input."""

    options: EngineOptions
    logs: LogOptions
    parent: int
    """Process id of the parent. The engine is killed when its parent dies."""
    replica: int = 0
    """Index of the data-parallel replica."""
    weights: str = ""
    """Folder of the weights to load; empty: the option ``model``."""
    suspects: list[int] = []
    """See ``Ready.suspects``."""


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine could not start. It writes this report, and exits."""

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
"""The one line of JSON that an engine process writes to its standard output."""

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_partial = msgspec.msgpack.Decoder(PartialMessage).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_start_report = msgspec.json.Decoder(StartReport).decode
