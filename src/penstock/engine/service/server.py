"""The engine process: ``python -m penstock.engine.service.server ADDRESS``.

It reads ``messages.Start`` from standard input, loads the model, writes ``messages.StartReport`` to standard output,
and serves any number of clients over ZeroMQ. It cancels the requests of a client that sends nothing for
``CLIENT_TIMEOUT``. On SIGTERM it finishes its requests within ``drain_timeout`` and exits with status 0; on SIGUSR1 it
exits at once, and its clients continue their requests on another engine. If its parent dies, it is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from socket import SOCK_STREAM, getaddrinfo
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import zmq

from penstock.config import logs
from penstock.config.addresses import join_address, split_address
from penstock.config.options import EngineOptions
from penstock.core import Code, Failure, FinishReason, PenstockError, TokenDelta
from penstock.core.errors import invalid
from penstock.core.machine_errors import start_failure
from penstock.tracing import start_tracer
from penstock.version import __version__

from ..executor.cluster_secret import read_secret
from ..lean_torch import import_torch
from ..step_statistics import FIRST_STEP_TIMEOUT_FACTOR, StepTimes
from . import messages
from .actions import ActionQueue, LoadAdapter, UnloadAdapter
from .connection import set_heartbeats
from .curve import secure_server
from .heartbeat import Heartbeat
from .instance import tokenizer_version
from .snapshot import Snapshot
from .step_record import StepRecord

if TYPE_CHECKING:
    from penstock.tracing import Tracer

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
IDLE_POLL_MS = 200
"""Maximum time that an idle engine waits for messages in one iteration of its loop, milliseconds."""
PENDING_POLL_MS = 10
"""Maximum time to wait for messages while actions are pending, or if the last step computed nothing, milliseconds."""
GUIDED_PRELOAD_DELAY = 0.5
"""Seconds without work after which the engine prepares guided decoding."""
MAX_MESSAGES_PER_STEP = 256
"""Maximum number of messages handled between two steps. Limits the delay of running requests by many new ones."""
CHANGE_TIMEOUT = 600.0
"""Maximum duration of a change between two steps, such as new weights or a new allocation of the KV cache, seconds."""
LONG_STEP = 0.5
"""Expected duration above which a step is announced to clients over TCP (``StepStarted``), seconds."""
DISCONNECT_TIMEOUT = 2.0
"""Maximum time to wait for ``Disconnect`` from the clients over TCP when the engine ends, seconds."""
MAX_PROMPT_LOGPROBS = 64
"""Maximum number of prompt positions whose logprobs are sent in one message."""
CLIENT_SILENT = Failure(
    Code.UNAVAILABLE, f"the request's API process has sent nothing for {messages.CLIENT_TIMEOUT:g} seconds; try again"
)


class EngineServer:
    """Runs an engine, and serves clients on this host and, with the option ``engine_address``, on other hosts.

    Args:
        address: ZeroMQ address to bind, ``ipc://…``.
        report: file to which ``messages.StartReport`` is written.
        start: parameters of the engine.
    """

    def __init__(self, address: str, report: BinaryIO, start: messages.Start) -> None:
        options = start.options
        self._socket = _router_socket()
        self._socket.bind(address)
        self._remote: zmq.Socket[bytes] | None = None
        """Socket for clients over TCP; None without the option ``engine_address``."""
        self._engine_address = ""
        """Address of the socket for clients over TCP, host:port; empty without this socket."""
        self._remote_clients: set[bytes] = set()
        self._signals, signal_sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(signal_sender)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._stopping_sent = False
        """True if ``Stopping`` was sent to the clients."""
        self._poller.register(self._signals, zmq.POLLIN)  # SIGTERM ends a wait for messages
        self._options = options
        self._replica = start.replica
        self._weights = start.weights
        self._suspects = start.suspects
        self._logs = start.logs
        self._report = report
        self._heartbeat = Heartbeat(address)
        self._step_record = StepRecord(address)
        self._step_times = StepTimes(FIRST_STEP_TIMEOUT_FACTOR * options.engine_iteration_timeout)
        self._step_in_progress: tuple[int, float] | None = None
        """Number of tokens and start time (monotonic clock) of the current step; None between steps."""
        self._last_step_computed = True
        """True if the last step computed any tokens."""
        self._last_heard: dict[bytes, float] = {}
        """Client → time of its last message (monotonic clock)."""
        self._last_expiry_check = time.monotonic()
        self._parent = os.getppid()
        self._last_work = time.monotonic()
        self._stopping = False
        self._deadline = float("inf")
        self._tracer: Tracer | None = None

    def run(self) -> None:
        """Load the model and serve until SIGTERM. Exits with status 2 if the model cannot be loaded, and 1 if the
        engine fails."""
        signal.signal(signal.SIGTERM, self._on_stop_signal)
        signal.signal(signal.SIGUSR1, self._on_stop_signal)
        for number in (signal.SIGINT, signal.SIGHUP):  # they may reach the whole process group; the parent handles them
            signal.signal(number, signal.SIG_IGN)
        gc.disable()  # garbage collections would take a tenth of the time of importing PyTorch
        try:
            self._start_engine()
        except PenstockError as error:
            self._send_report(messages.StartFailed(error.failure))
            raise SystemExit(2) from error
        self._heartbeat.beat()
        self._heartbeat.report_running()
        self._send_report(self._ready)
        self._last_work = time.monotonic()
        while not self._should_exit():
            self._heartbeat.beat()
            if self._stopping and not self._stopping_sent:
                self._announce_stop()
            if self._receive(self._poll_ms()):
                self._expire_clients()
            self._work()
            if self._engine.failure:
                self._shut_down()
                raise SystemExit(1)
            if self._actions.pending:
                self._broadcast_state()
                self._answer_actions()
        self._shut_down()

    def _start_engine(self) -> None:
        """Load the model. Raises ``PenstockError`` if it cannot be loaded."""
        if self._options.role == "router":
            raise invalid("role", "router is no role of an engine: start a router with penstock serve --role router")
        if self._options.engine_address:
            self._listen(self._options.engine_address)
        if self._options.role != "mixed" and not self._options.enable_prefix_caching:
            logger.info("enabled prefix caching, which %s instances need to exchange KV", self._options.role)
            self._options = msgspec.structs.replace(self._options, enable_prefix_caching=True)
        import_torch()
        from ..engine import Engine
        from .step_recorder import StepRecorder

        if self._options.data_parallel_size > 1 or _is_bound(self._options):
            self._options = _share_cores(self._options, self._replica)
        if self._options.data_parallel_size > 1:
            self._options = _choose_gpus(self._options, self._replica)
        self._engine = engine = Engine(self._options, self._logs, self._weights)
        engine.before_step = self._before_step
        engine.record_step = self._step_record.write
        self._tracer = start_tracer(
            self._logs, f"{role}-engine" if (role := self._options.role) != "mixed" else "engine"
        )
        if self._tracer:
            engine.set_tracer(self._tracer)
        self._actions = ActionQueue(engine, StepRecorder(engine).snapshot)
        self._sent_state = self._actions.state
        if connector := engine.kv_connector:
            self._poller.register(connector.wakeup, zmq.POLLIN)  # events of KV transfers end a wait for messages
        gc.collect()
        gc.freeze()  # exclude long-lived objects from later garbage collections
        gc.enable()
        self._ready = messages.Ready(
            pid=os.getpid(),
            max_model_len=engine.max_model_len,
            vocab_size=engine.info.vocab_size,
            num_blocks=engine.scheduler.device_pool.total,
            block_size=self._options.block_size,
            fingerprint=engine.info.fingerprint,
            batch_invariant=engine.info.batch_invariant,
            adapters=engine.adapters.paths,
            iteration_timeout=self._options.engine_iteration_timeout,
            prefix_caching=self._options.enable_prefix_caching,
            role=self._options.role,
            max_waiting=self._options.max_waiting,
            host_bytes=engine.host_bytes,
            num_allocated_blocks=engine.num_allocated_blocks,
            state=self._sent_state,
            kv_address=connector.address if connector else "",
            tokenizer_version=tokenizer_version(self._options.model),
            engine_address=self._engine_address,
            suspects=list(self._suspects),
            protocol=messages.PROTOCOL,
            version=__version__,
        )

    def _work(self) -> None:
        """Compute a step if there is work. Otherwise load pending adapters, or prepare guided decoding."""
        engine = self._engine
        if engine.busy or engine.has_pending:
            if engine.has_pending:
                self._heartbeat.beat(CHANGE_TIMEOUT)
            deltas = engine.step()
            if engine.failure:  # the clients continue these requests on another engine
                deltas = [delta for delta in deltas if delta.failure != engine.failure]
            self._after_step()
            if self._actions.pending:
                self._broadcast_state()  # clients must know new weights before their output arrives
            self._send(deltas)
            self._last_work = time.monotonic()
        elif engine.failure:  # a worker failed while the engine was idle
            return
        elif engine.adapters.has_pending:
            engine.adapters.process_pending()
        elif time.monotonic() - self._last_work > GUIDED_PRELOAD_DELAY:
            engine.prepare_guided_decoding()

    def _poll_ms(self) -> int:
        """Maximum time to wait for messages now, milliseconds."""
        if self._engine.busy or self._engine.has_pending:
            return 0 if self._last_step_computed else PENDING_POLL_MS
        return PENDING_POLL_MS if self._actions.pending else IDLE_POLL_MS

    def _listen(self, engine_address: str) -> None:
        """Bind the socket for clients over TCP. Raises ``PenstockError`` if the address cannot be bound."""
        secret = read_secret(self._options.cluster_secret_file, make=True)
        host, port = split_address(engine_address, "engine_address")
        self._remote = remote = _router_socket()
        secure_server(remote, secret)
        set_heartbeats(remote)
        try:
            ip = str(getaddrinfo(host, 0, type=SOCK_STREAM)[0][4][0])
            remote.setsockopt(zmq.IPV6, ":" in ip)
            remote.bind(f"tcp://{join_address(ip, port or '*')}")
        except (OSError, zmq.ZMQError) as error:
            reason = os.strerror(error.errno or 0) if isinstance(error, zmq.ZMQError) else error.strerror
            reason = (reason or str(error)).lower()
            message = f"cannot listen on {engine_address}: {reason}; try another address or port"
            raise invalid("engine_address", message) from error
        bound = remote.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self._engine_address = join_address(host, bound)
        self._poller.register(remote, zmq.POLLIN)

    def _before_step(self, tokens: int) -> None:
        self._step_in_progress = tokens, time.monotonic()
        expected = self._step_times.expected(tokens)
        self._heartbeat.beat(expected)
        if expected > LONG_STEP:
            for client in self._remote_clients:
                self._send_to(client, messages.StepStarted(expected))

    def _after_step(self) -> None:
        self._last_step_computed = self._step_in_progress is not None
        if self._step_in_progress:
            tokens, started = self._step_in_progress
            self._step_times.add(tokens, time.monotonic() - started)
            self._step_in_progress = None
            self._heartbeat.beat()

    def _on_stop_signal(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True
        self._deadline = time.monotonic() + (self._options.drain_timeout if signum == signal.SIGTERM else 0.0)

    def _announce_stop(self) -> None:
        """Tell all clients that this engine is stopping."""
        if self._engine.kv_connector:
            self._engine.kv_connector.exports.stopping = True
        self._broadcast(messages.Stopping())
        self._stopping_sent = True

    def _should_exit(self) -> bool:
        if os.getppid() != self._parent:
            return True
        connector = self._engine.kv_connector
        busy = self._engine.busy or (connector is not None and connector.has_unread)
        waits = busy and not self._engine.sleeper.is_paused  # in a paused engine, requests would never end
        return self._stopping and (not waits or time.monotonic() > self._deadline)

    def _shut_down(self) -> None:
        """Refuse new requests, and fail the requests that are still open."""
        self._stopping = True
        if not self._engine.failure:
            self._step_record.write(())  # the end of this process is not caused by its requests
            if not self._stopping_sent:
                self._announce_stop()
        while not self._receive(0):
            pass
        for request_id in self._engine.scheduler.request_ids():
            self._send(self._engine.scheduler.abort(request_id, messages.ENGINE_STOPPED))
        waited_for, deadline = set(self._remote_clients), time.monotonic() + DISCONNECT_TIMEOUT
        for client in waited_for:
            self._send_to(client, messages.Stopped())
        while waited_for & self._remote_clients and time.monotonic() < deadline:
            self._heartbeat.beat()
            self._receive(PENDING_POLL_MS)
        self._socket.close()
        if self._remote:
            self._remote.close()
        if self._tracer:
            self._tracer.close()

    def _receive(self, timeout_ms: int) -> bool:
        """Handle the messages that have arrived, at most ``MAX_MESSAGES_PER_STEP``.

        Args:
            timeout_ms: maximum milliseconds to wait for the first message.

        Returns True if all messages were handled. If not, a client that seems silent may have a message in the queue.
        """
        ready = dict(self._poller.poll(timeout_ms))
        if self._signals in ready:
            os.read(self._signals, 64)
        return all([self._receive_from(each) for each in (self._socket, self._remote) if each and each in ready])

    def _receive_from(self, socket: zmq.Socket[bytes]) -> bool:
        """Handle messages of one socket, at most ``MAX_MESSAGES_PER_STEP``. Returns True if no message is left."""
        for _ in range(MAX_MESSAGES_PER_STEP):
            try:
                client, *parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            data = b"".join(parts)
            try:
                message = messages.decode_to_engine(data)
                if isinstance(message, messages.ProcessAlive):
                    if message.client in self._last_heard:  # a client that has not connected yet has no lease
                        self._last_heard[message.client] = time.monotonic()
                    continue
                self._last_heard[client] = time.monotonic()
                if socket is self._remote:
                    self._remote_clients.add(client)
                self._handle(client, message)
            except Exception as error:
                self._send_error(client, data, error)
        return False

    def _send_error(self, client: bytes, data: bytes, error: Exception) -> None:
        """Reply with an error to a message that could not be decoded or handled, if its request id or call id can be
        decoded."""
        if isinstance(error, PenstockError):
            failure = error.failure
        elif isinstance(error, msgspec.MsgspecError):
            failure = Failure(Code.INVALID, f"the engine cannot decode the request: {error}")
        else:
            failure = Failure(Code.INTERNAL, "the engine could not handle the request; its log has the traceback")
            logger.error("a message of client %s could not be handled", client.hex(), exc_info=error)
        try:
            partial = messages.decode_partial(data)
        except Exception:  # no request id or call id can be decoded, so the engine cannot reply
            logger.warning("client %s sent a message that cannot be decoded: %s", client.hex(), error)
            return
        if partial.request:
            request_id = _internal_id(client, partial.request.request_id)
            self._engine.abort(request_id)  # a part of the request's sequences may have been added
            self._send(_error_deltas(request_id, partial.request.num_sequences, failure))
        elif partial.call_id is not None:
            self._send_to(client, messages.CallResult(partial.call_id, failure))

    def _handle(self, client: bytes, message: messages.ToEngine) -> None:
        match message:
            case messages.Connect() if self._stopping:
                pass  # no reply: the client connects again, and then reaches the restarted engine
            case messages.Disconnect():
                self._remote_clients.discard(client)
                self._last_heard.pop(client, None)
            case messages.Connect():
                ready = msgspec.structs.replace(
                    self._ready, adapters=self._engine.adapters.paths, state=self._actions.state
                )
                self._send_to(client, ready)
            case messages.Call(call_id, action):
                self._actions.start(client, call_id, action)
            case messages.SetVocabulary(vocabulary):
                self._engine.set_vocabulary(lambda: vocabulary)
            case messages.Add(request, time_left):
                if time_left is not None:
                    request = msgspec.structs.replace(request, deadline=time.monotonic() + time_left)
                internal_id = _internal_id(client, request.request_id)
                try:
                    if self._stopping:
                        raise PenstockError.of(messages.ENGINE_STOPPING)
                    if self._engine.sleeper.asleep:
                        raise PenstockError.of(messages.ENGINE_ASLEEP)
                    self._engine.scheduler.abort_older(request.uid)  # of the client's previous connection
                    self._engine.add(msgspec.structs.replace(request, request_id=internal_id))
                except PenstockError as error:
                    self._send(_error_deltas(internal_id, request.sampling.num_returned, error.failure))
            case messages.Abort(request_id):
                self._send(self._engine.abort(_internal_id(client, request_id)))
            case messages.FinishSequence(request_id, sequence):
                self._engine.finish_sequence(_internal_id(client, request_id), sequence)
            case messages.Cancel():
                self._broadcast(message)
            case messages.Pause(request_id, paused):
                self._engine.scheduler.pause(_internal_id(client, request_id), paused)
            case messages.KeepAlive():
                self._send_to(client, self._stats(client))

    def _broadcast_state(self) -> None:
        """Send all clients the engine's state if it has changed."""
        if (state := self._actions.state) != self._sent_state:
            self._sent_state = state
            self._broadcast(state)

    def _answer_actions(self) -> None:
        """Send the results of ended actions. If adapters were changed, all clients get the new adapters first."""
        ended = self._actions.take_done()
        if any(isinstance(action, LoadAdapter | UnloadAdapter) for _, _, action, _ in ended):
            self._broadcast(messages.Adapters(self._engine.adapters.paths))
        for client, call_id, _, done in ended:
            if error := done.exception():
                self._send_error_result(client, call_id, error)
            else:
                result = done.result()
                self._send_to(
                    client, messages.CallResult(call_id, snapshot=result if isinstance(result, Snapshot) else None)
                )

    def _broadcast(self, message: messages.FromEngine) -> None:
        for client in self._last_heard:
            self._send_to(client, message)

    def _send_to(self, client: bytes, message: messages.FromEngine) -> None:
        """Send a message. Does nothing if the client has disconnected."""
        socket = self._remote if self._remote and client in self._remote_clients else self._socket
        socket.send_multipart((client, messages.encode(message)))

    def _send_error_result(self, client: bytes, call_id: int, error: BaseException) -> None:
        failure = error.failure if isinstance(error, PenstockError) else None
        if not failure:
            logger.error("an action requested by client %s failed", client.hex(), exc_info=error)
            failure = Failure(Code.INTERNAL, "the action failed; the engine's log has the traceback")
        self._send_to(client, messages.CallResult(call_id, failure))

    def _send(self, deltas: list[TokenDelta]) -> None:
        """Send each client its deltas in one message, preceded by separate messages for long prompt logprobs."""
        by_client: dict[bytes, list[TokenDelta]] = defaultdict(list)
        for internal in deltas:
            client, request_id = _split_internal_id(internal.request_id)
            delta = msgspec.structs.replace(internal, request_id=request_id)
            if delta.prompt_logprobs:
                *parts, delta = _split_prompt_logprobs(delta)
                for part in parts:
                    self._send_to(client, messages.Deltas([part]))
            by_client[client].append(delta)
        for client, client_deltas in by_client.items():
            self._send_to(client, messages.Deltas(client_deltas))

    def _expire_clients(self) -> None:
        """Cancel the requests of clients that have sent nothing for ``CLIENT_TIMEOUT``."""
        now = time.monotonic()
        was_blocked, self._last_expiry_check = now - self._last_expiry_check > messages.CLIENT_TIMEOUT, now
        if was_blocked:  # this process has not read messages for too long: restart the clients' leases
            self._last_heard = dict.fromkeys(self._last_heard, now)
        expired = [client for client, last in self._last_heard.items() if now - last > messages.CLIENT_TIMEOUT]
        for client in expired:
            message = "client %s has sent nothing for %g seconds: its requests are cancelled"
            logger.warning(message, client.hex(), messages.CLIENT_TIMEOUT)
            del self._last_heard[client]
            self._remote_clients.discard(client)
            for request_id in self._engine.scheduler.request_ids():
                if _split_internal_id(request_id)[0] == client:
                    self._send(self._engine.scheduler.abort(request_id, CLIENT_SILENT))

    def _stats(self, client: bytes) -> messages.Stats:
        scheduler = self._engine.scheduler
        draft_counts = asdict(scheduler.speculation.stats) if scheduler.speculation else {}
        connector = self._engine.kv_connector
        kv_counts = {f"kv_{name}": count for name, count in connector.counts.items()} if connector else {}
        offloading = self._engine.kv_offloading
        offload_counts = {f"offload_{name}": count for name, count in offloading.counts.items()} if offloading else {}
        encoder = scheduler.encoder_cache
        items = self._engine.last_plan.scheduled if scheduler.running else []
        prefills = [item for item in items if item.start < item.sequence.prompt_length]
        in_use = scheduler.running_adapters() if (adapters := self._engine.adapters).paths else set[str]()
        waiting = scheduler.adapters() - in_use if adapters.paths else set[str]()
        return messages.Stats(
            running=len(scheduler.running),
            waiting=scheduler.admission.num_waiting,
            waiting_prerequisites=len(scheduler.admission.prerequisites),
            prompt_tokens=scheduler.num_prompt_tokens,
            requests_of_others=sum(_split_internal_id(name)[0] != client for name in scheduler.request_ids()),
            blocks=scheduler.device_pool.total,
            blocks_used=scheduler.device_pool.num_used,
            state_snapshots=scheduler.kv.snapshots.total if scheduler.kv.snapshots else 0,
            state_snapshots_used=scheduler.kv.snapshots.num_used if scheduler.kv.snapshots else 0,
            preemptions=scheduler.num_preemptions,
            num_preempted_waiting=scheduler.num_preempted_waiting,
            num_swapped=scheduler.num_swapped,
            blocks_reused=scheduler.kv.num_hit_blocks,
            steps=self._engine.steps,
            steps_by_tokens=self._engine.step_counts.steps,
            step_tokens=self._engine.step_counts.tokens,
            scheduled=len(items),
            in_prefill=len(prefills),
            prefill_tokens=sum(item.length for item in prefills),
            cpu_memory=_resident_bytes(),
            gpu_memory=self._engine.gpu_memory,
            longest_step=self._step_times.longest,
            clock=time.monotonic(),
            expert_load=self._engine.expert_load,
            adapters_running=adapters.names(in_use),
            adapters_waiting=adapters.names(waiting),
            **draft_counts,
            **kv_counts,
            **offload_counts,
            encoder_queries=encoder.num_encoded + encoder.num_hits,
            encoder_hits=encoder.num_hits,
            encoder_entries=encoder.num_entries,
            encoder_tokens=encoder.num_tokens,
            encoder_bytes=encoder.num_tokens * self._engine.info.feature_bytes,
            spans_exported=self._tracer.counts.exported if self._tracer else 0,
            spans_dropped=self._tracer.counts.dropped if self._tracer else 0,
        )

    def _send_report(self, report: messages.StartReport) -> None:
        """Write the report to the parent process. Does nothing if the parent has exited."""
        with contextlib.suppress(BrokenPipeError), self._report:
            self._report.write(msgspec.json.encode(report) + b"\n")


def _router_socket() -> zmq.Socket[bytes]:
    """Create a socket for clients. It queues messages without limit, so it never drops any."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    for option, value in ((zmq.LINGER, 1000), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
        socket.setsockopt(option, value)
    return socket


def _is_bound(options: EngineOptions) -> bool:
    """True if ``cpu_binding`` lists cores and this process is the only rank."""
    ranks = options.tensor_parallel_size * options.pipeline_parallel_size
    return ranks == 1 and options.cpu_binding not in ("auto", "none")


def _share_cores(options: EngineOptions, replica: int) -> EngineOptions:
    """Bind this process to the cores of its replica. Returns the options with matching ``cpu_binding`` and ``threads``.
    Raises ``PenstockError`` if ``cpu_binding`` does not fit (see ``bind_replica``)."""
    from penstock.ops.cores import bind_replica, usable_cores  # this module imports PyTorch

    replicas, ranks = options.data_parallel_size, options.tensor_parallel_size * options.pipeline_parallel_size
    threads = options.threads or max(1, usable_cores() // (replicas * ranks))
    binding = bind_replica(options.cpu_binding, replica, replicas, ranks)
    if not options.threads:  # ``cpu_binding`` may give this replica fewer cores than an even share
        threads = max(1, min(threads, usable_cores() // ranks))
    return msgspec.structs.replace(options, cpu_binding=binding, threads=threads)


def _choose_gpus(options: EngineOptions, replica: int) -> EngineOptions:
    """Return the options with the first GPU of a replica as ``device``. Each rank has one GPU, in replica order."""
    import torch

    kind, _, first = options.device.partition(":")
    if kind not in ("auto", "cuda") or not torch.cuda.is_available():
        return options
    ranks = options.tensor_parallel_size * options.pipeline_parallel_size
    return msgspec.structs.replace(options, device=f"cuda:{int(first or 0) + replica * ranks}")


def _resident_bytes() -> int:
    """Resident memory of this process, bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _internal_id(client: bytes, request_id: str) -> str:
    """Request id in the engine: client and ``request_id``, as different clients may use the same ``request_id``."""
    return f"{client.hex()}:{request_id}"


def _split_internal_id(internal_id: str) -> tuple[bytes, str]:
    """Split an id of ``_internal_id`` into client and request id."""
    client, _, request_id = internal_id.partition(":")
    return bytes.fromhex(client), request_id


def _split_prompt_logprobs(delta: TokenDelta) -> list[TokenDelta]:
    """Split a delta into parts with at most ``MAX_PROMPT_LOGPROBS`` prompt logprobs each. Only the last part has the
    other fields of the delta."""
    logprobs = delta.prompt_logprobs or []
    last = max(len(logprobs) - MAX_PROMPT_LOGPROBS, 0)
    starts = range(0, last, MAX_PROMPT_LOGPROBS)
    parts = [
        TokenDelta(
            request_id=delta.request_id,
            sequence=delta.sequence,
            prompt_logprobs=logprobs[start : start + MAX_PROMPT_LOGPROBS],
        )
        for start in starts
    ]
    rest = logprobs[len(parts) * MAX_PROMPT_LOGPROBS :]
    return [*parts, msgspec.structs.replace(delta, prompt_logprobs=rest)] if parts else [delta]


def _error_deltas(request_id: str, num_sequences: int, failure: Failure) -> list[TokenDelta]:
    """Deltas that end all sequences of a request with a failure."""
    return [
        TokenDelta(request_id=request_id, sequence=index, finished=FinishReason.ERROR, failure=failure)
        for index in range(num_sequences)
    ]


def kill_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies, or at once if the parent has died already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    report = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print to standard output, which is the pipe to the parent
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=messages.Start)
    kill_with_parent(start.parent)
    logs.set_up(start.logs, "engine")
    status = 0
    try:
        EngineServer(sys.argv[1], report, start).run()
    except SystemExit as error:
        assert isinstance(error.code, int)
        status = error.code
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        if (failure := start_failure(error)) is None or report.closed:  # the report is closed once the engine is ready
            raise
        report.write(msgspec.json.encode(messages.StartFailed(failure)) + b"\n")
        report.close()
        status = 2
    atexit._run_exitfuncs()  # end the workers, and finish writing to the weight cache
    zmq.Context.instance().destroy()  # waits until ZeroMQ has sent all messages
    with contextlib.suppress(OSError):  # the process that reads the log may have exited
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)  # a regular exit frees PyTorch's and the model's objects, which takes 0.2 seconds or more


if __name__ == "__main__":
    main()
