"""The engine in a process of its own: ``python -m penstock.engine.service.server ADDRESS``.

It reads its options on standard input and writes one line on standard output when it is ready, or why it cannot be
(``wire.Start``, ``wire.Report``). It serves any number of clients over ZeroMQ. A client that falls silent loses its
requests, and the engine does not outlive the process that started it. SIGTERM lets what runs come to its end, and exits
with 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import msgspec
import zmq

from penstock.config import logs
from penstock.config.options import EngineOptions, LogOptions
from penstock.core import Code, Failure, FinishReason, PenstockError, TokenDelta

from ..step_times import FIRST_STEP, StepTimes
from . import wire
from .heartbeat import Heartbeat

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
IDLE_MS = 200
"""Milliseconds an idle engine waits for messages before it looks after leases and its parent."""
REST = 0.5
"""Seconds without work after which an engine makes ready what requests may ask for."""
LOADING_MS = 10
"""The same while adapters are being loaded."""
MESSAGES_A_STEP = 256
"""Handled at most between two steps, so that a flood of requests does not hold up those that run."""


PROMPT_LOGPROBS = 64
"""Positions of a prompt whose log probabilities go in one message."""
SILENT = Failure(Code.UNAVAILABLE, "the process that asked for it fell silent")


class Server:
    """An engine and the clients it serves."""

    def __init__(self, address: str, options: EngineOptions, logs: LogOptions, report: BinaryIO) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._options = options
        self._logs = logs
        self._report = report
        self._heartbeat = Heartbeat(address)
        self._step_times = StepTimes(FIRST_STEP * options.engine_iteration_timeout)
        self._step: tuple[int, float] | None = None
        """Tokens of the step that is being computed, and when it began."""
        self._computed = True
        """Whether the last step had anything to compute."""
        self._heard: dict[bytes, float] = {}
        self._looked = time.monotonic()
        self._parent = os.getppid()
        self._loading: list[tuple[bytes, int, Future[None]]] = []
        self._worked = time.monotonic()
        self._stopping = False
        self._deadline = float("inf")

    def run(self) -> None:
        """Load the model and serve until told to stop."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the whole group; the parent decides
        gc.disable()  # a tenth of the time that importing torch takes
        try:
            from ..engine import Engine

            self._engine = Engine(self._options, self._logs)
            self._engine.before_step = self._before_step
            gc.collect()
            gc.freeze()  # what is there now stays, and need not be looked through again and again
            gc.enable()
        except PenstockError as error:
            self._tell(wire.Broken(error.failure))
            raise SystemExit(2) from error
        self._ready = wire.Ready(
            pid=os.getpid(),
            max_model_len=self._engine.max_model_len,
            vocabulary=self._engine.info.vocab_size,
            blocks=self._engine.scheduler.device.total,
            block_size=self._options.block_size,
            fingerprint=self._engine.info.fingerprint,
            batch_invariant=self._engine.info.batch_invariant,
            adapters=self._engine.adapters.paths,
            iteration_timeout=self._options.engine_iteration_timeout,
        )
        self._heartbeat.beat()
        self._tell(self._ready)
        self._worked = time.monotonic()
        while not self._finished():
            self._heartbeat.beat()
            if self._receive(self._patience()):
                self._end_leases()
            if self._engine.busy:
                deltas = self._engine.step()
                self._after_step()
                self._send(deltas)
                if self._engine.failure:
                    self._end()
                    raise SystemExit(1)
                self._worked = time.monotonic()
            elif self._engine.failure:  # of a worker, while there was nothing to do
                self._end()
                raise SystemExit(1)
            elif self._engine.adapters.unsettled:
                self._engine.adapters.settle()
            elif time.monotonic() - self._worked > REST:
                self._engine.prepare()
            if self._loading:
                self._answer_loads()
        self._end()

    def _patience(self) -> int:
        """Milliseconds to wait for messages."""
        if self._engine.busy:
            return 0 if self._computed else LOADING_MS  # all may be paused
        return LOADING_MS if self._loading else IDLE_MS

    def _before_step(self, tokens: int) -> None:
        self._step = tokens, time.monotonic()
        self._heartbeat.beat(self._step_times.expected(tokens))

    def _after_step(self) -> None:
        self._computed = self._step is not None
        if self._step:
            tokens, begun = self._step
            self._step_times.add(tokens, time.monotonic() - begun)
            self._step = None
            self._heartbeat.beat()

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True
        self._deadline = time.monotonic() + self._options.drain_timeout

    def _finished(self) -> bool:
        if os.getppid() != self._parent:
            return True
        return self._stopping and (not self._engine.busy or time.monotonic() > self._deadline)

    def _end(self) -> None:
        """Refuse what is still coming, and fail what the time to drain was too short for."""
        self._stopping = True
        while not self._receive(0):
            pass
        for request_id in self._engine.scheduler.requests():
            self._send(self._engine.scheduler.abort(request_id, Failure(Code.UNAVAILABLE, "the engine has stopped")))
        self._socket.close()

    def _receive(self, wait_ms: int) -> bool:
        """Handle what has come, waiting for something to come where there is nothing else to do.

        Returns whether that was all: only then is it known who has been silent.
        """
        if not self._socket.poll(wait_ms):
            return True
        for _ in range(MESSAGES_A_STEP):
            try:
                client, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            data = b"".join(parts)
            try:
                message = wire.decode_to_engine(data)
                if isinstance(message, wire.Alive):
                    if message.client in self._heard:  # else it was another engine's client
                        self._heard[message.client] = time.monotonic()
                    continue
                self._heard[client] = time.monotonic()
                self._handle(client, message)
            except Exception as error:
                self._refuse(client, data, error)
        return False

    def _refuse(self, client: bytes, data: bytes, error: Exception) -> None:
        """Answer a message that cannot be read, or handled: whoever waits for what it asks for is told."""
        if isinstance(error, PenstockError):
            failure = error.failure
        elif isinstance(error, msgspec.MsgspecError):
            failure = Failure(Code.INVALID, f"the engine cannot read what was sent: {error}")
        else:
            failure = Failure(Code.INTERNAL, "the engine cannot take the request; its log says why")
            logger.error("a message of client %s could not be handled", client.hex(), exc_info=error)
        try:
            about = wire.decode_about(data)
        except Exception:  # nothing can be read of it, and its client waits for nothing
            logger.warning("client %s sent what is no message: %s", client.hex(), error)
            return
        if about.request:
            request_id = _inside(client, about.request.request_id)
            self._engine.abort(request_id)  # whatever of it there is
            self._send(_refusal(request_id, about.request.sequences, failure))
        elif about.number is not None:
            self._done(client, about.number, PenstockError.of(failure))

    def _handle(self, client: bytes, message: wire.ToEngine) -> None:
        match message:
            case wire.Hello():
                ready = msgspec.structs.replace(self._ready, adapters=self._engine.adapters.paths)
                self._socket.send_multipart((client, wire.encode(ready)))
            case wire.LoadAdapter(number, name, path):
                self._loading.append((client, number, self._engine.adapters.load(name, path)))
            case wire.UnloadAdapter(number, name):
                try:
                    self._engine.adapters.unload(name)
                except PenstockError as error:
                    self._done(client, number, error)
                else:
                    self._tell_adapters()
                    self._done(client, number)
            case wire.Learn(vocabulary):
                self._engine.learn(lambda: vocabulary)
            case wire.Add(request):
                own = msgspec.structs.replace(request, request_id=_inside(client, request.request_id))
                try:
                    if self._stopping:
                        raise PenstockError(Code.UNAVAILABLE, "the engine is stopping")
                    self._engine.add(own)
                except PenstockError as error:
                    self._send(_refusal(own.request_id, request.sampling.told, error.failure))
            case wire.Abort(request_id):
                self._send(self._engine.abort(_inside(client, request_id)))
            case wire.Stop(request_id, sequence):
                self._engine.stop(_inside(client, request_id), sequence)
            case wire.Cancel():
                self._tell_all(message)
            case wire.ResetPrefixCache(number):
                self._engine.scheduler.device.clear_cache()
                self._done(client, number)
            case wire.Pause(request_id, paused):
                self._engine.scheduler.pause(_inside(client, request_id), paused)
            case wire.Beat():
                self._socket.send_multipart((client, wire.encode(self._stats())))

    def _answer_loads(self) -> None:
        """Those that are done; before anybody hears of it, every client knows of the adapter."""
        done = [loading for loading in self._loading if loading[2].done()]
        if done:
            self._tell_adapters()
        for entry in done:
            self._loading.remove(entry)
            client, number, loading = entry
            self._done(client, number, loading.exception())

    def _tell_adapters(self) -> None:
        self._tell_all(wire.Adapters(self._engine.adapters.paths))

    def _tell_all(self, message: wire.FromEngine) -> None:
        encoded = wire.encode(message)
        for client in self._heard:
            self._socket.send_multipart((client, encoded))

    def _done(self, client: bytes, number: int, error: BaseException | None = None) -> None:
        failure = error.failure if isinstance(error, PenstockError) else None
        if error and not failure:
            logger.error("what client %s wants could not be done", client.hex(), exc_info=error)
            failure = Failure(Code.INTERNAL, "it could not be done; the engine's log says why")
        self._socket.send_multipart((client, wire.encode(wire.Done(number, failure))))

    def _send(self, deltas: list[TokenDelta]) -> None:
        """To each client its own, in one message."""
        by_client: dict[bytes, list[TokenDelta]] = defaultdict(list)
        for delta in deltas:
            client, request_id = _outside(delta.request_id)
            own = msgspec.structs.replace(delta, request_id=request_id)
            if own.prompt_logprobs:
                *parts, own = _parts(own)
                for part in parts:  # each in a message of its own
                    self._socket.send_multipart((client, wire.encode(wire.Deltas([part]))))
            by_client[client].append(own)
        for client, told in by_client.items():
            self._socket.send_multipart((client, wire.encode(wire.Deltas(told))))

    def _end_leases(self) -> None:
        now = time.monotonic()
        held_up, self._looked = now - self._looked > wire.LEASE, now
        if held_up:  # then nothing is known of anybody's silence
            self._heard = dict.fromkeys(self._heard, now)
        for client in [client for client, heard in self._heard.items() if now - heard > wire.LEASE]:
            logger.warning("client %s has fallen silent: its requests are cancelled", client.hex())
            del self._heard[client]
            for request_id in self._engine.scheduler.requests():
                if _outside(request_id)[0] == client:
                    self._send(self._engine.scheduler.abort(request_id, SILENT))

    def _stats(self) -> wire.Stats:
        scheduler = self._engine.scheduler
        guessed = asdict(scheduler.speculation.counts) if scheduler.speculation else {}
        items = self._engine.last_plan.items if scheduler.running else []
        prefills = [item for item in items if item.start < item.sequence.prompt_length]
        return wire.Stats(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            blocks=scheduler.device.total,
            blocks_used=scheduler.device.used,
            preemptions=scheduler.preemptions,
            paused=scheduler.paused,
            blocks_reused=scheduler.blocks_reused,
            steps=self._engine.steps,
            scheduled=len(items),
            in_prefill=len(prefills),
            prefill_tokens=sum(item.length for item in prefills),
            cpu_memory=_resident(),
            gpu_memory=self._engine.gpu_memory,
            longest_step=self._step_times.longest,
            **guessed,
        )

    def _tell(self, report: wire.Report) -> None:
        """Answer the process that started this one; it may have gone."""
        with contextlib.suppress(BrokenPipeError), self._report:
            self._report.write(msgspec.json.encode(report) + b"\n")


def _resident() -> int:
    """Bytes that this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _inside(client: bytes, request_id: str) -> str:
    """A client's request as the engine knows it: clients need not know of each other's ids."""
    return f"{client.hex()}:{request_id}"


def _outside(request_id: str) -> tuple[bytes, str]:
    client, _, own = request_id.partition(":")
    return bytes.fromhex(client), own


def _parts(delta: TokenDelta) -> list[TokenDelta]:
    """A delta with no more of the prompt's log probabilities than a client can take in without holding up others."""
    told = delta.prompt_logprobs or []
    last = max(len(told) - PROMPT_LOGPROBS, 0)
    parts = [
        TokenDelta(
            request_id=delta.request_id, sequence=delta.sequence, prompt_logprobs=told[at : at + PROMPT_LOGPROBS]
        )
        for at in range(0, last, PROMPT_LOGPROBS)
    ]
    rest = told[len(parts) * PROMPT_LOGPROBS :]
    return [*parts, msgspec.structs.replace(delta, prompt_logprobs=rest)] if parts else [delta]


def _refusal(request_id: str, sequences: int, failure: Failure) -> list[TokenDelta]:
    return [
        TokenDelta(request_id=request_id, sequence=index, finished=FinishReason.ERROR, failure=failure)
        for index in range(sequences)
    ]


def die_with(parent: int) -> None:
    """End when the parent does, even if it has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    report = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints is not to be taken for the report
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=wire.Start)
    die_with(start.parent)
    logs.set_up(start.logs, "engine")
    Server(sys.argv[1], start.options, start.logs, report).run()


if __name__ == "__main__":
    main()
