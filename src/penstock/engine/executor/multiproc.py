"""The executor with worker processes. The engine's process survives a worker's crash or hang."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

import msgspec
import numpy as np

from penstock.config.options import EngineOptions, LogOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from ..exit_status import LINK_LOST
from ..step import (
    LONG_CALLS,
    LoadLoRA,
    LoadModel,
    LoadWeights,
    MemoryProfile,
    ModelInfo,
    ProfileMemory,
    Propose,
    ReadExpertLoad,
    StepInput,
    StepOutput,
    WorkerCall,
    encoder,
)
from ..step_statistics import FIRST_STEP_TIMEOUT_FACTOR, StepTimes
from .base import Executor, StepFailedError, WorkerLostError
from .local_ranks import CLOSE_TIMEOUT, LocalRanks
from .messages import Call, CallReply, Failed, GrammarBitmask, StepReply, ToWorker, from_worker
from .poller import PeerLostError
from .rank_process import RankProcess
from .remote_node import RemoteNode, RemoteRank
from .rendezvous import Links, all_ranks, gather_nodes

LOAD_TIMEOUT = 1800.0
"""Maximum duration of ``LONG_CALLS``, such as loading a model or an adapter, seconds."""
TIMEOUT_FACTOR = 0.9
"""Fraction of ``engine_iteration_timeout`` after which workers are killed. Below 1, so that the engine reports the
worker before the engine is itself killed for not answering."""
CAUSE_TIMEOUT, CAUSE_POLL = 2.0, 0.01
"""Maximum seconds to wait for the end of the rank whose loss ended other ranks, and polling interval in seconds."""


class _PendingCall(msgspec.Struct):
    """A call that some ranks have not answered yet."""

    call: WorkerCall
    future: Future[Any]
    answers: dict[int, CallReply] = {}
    """Replies received so far, by world rank."""


class MultiprocExecutor(Executor):
    """Executor with one worker process per rank, connected by shared memory, and by TCP to other nodes.

    All ranks receive the same messages. The first rank of the last pipeline stage replies to steps.

    If a worker ends, or exceeds the expected time of its steps by ``engine_iteration_timeout``, all workers are
    killed, and ``WorkerLostError`` names that worker.

    Args:
        options: options of the engine.
        logs: logging options of the workers; None: leave logging unconfigured, for use as a library.
        secret: secret shared by the nodes; None: read from ``cluster_secret_file``.
        check: called while waiting for other nodes; raises to stop waiting.
    """

    def __init__(
        self,
        options: EngineOptions,
        logs: LogOptions | None = None,
        secret: bytes | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._times = StepTimes(FIRST_STEP_TIMEOUT_FACTOR * options.engine_iteration_timeout)
        self._steps: deque[tuple[int, float]] = deque()
        """Number of tokens and submission time of each step in flight, oldest first."""
        self._outputs: deque[StepReply] = deque()
        self._calls: dict[int, _PendingCall] = {}
        """Unfinished calls, by number."""
        self._num_calls = 0
        self._last_collected = 0.0
        """Time at which the last step was collected (monotonic clock)."""
        self._num_abandoned = 0
        """Number of steps in flight whose output will be dropped, because their ``collect`` was interrupted."""
        nodes: list[RemoteNode] = []
        links: Links = {}
        infos = all_ranks(options)
        if options.nnodes > 1:
            nodes, links = gather_nodes(options, secret, check)
        try:
            local = LocalRanks(options, logs, [info for info in infos if info.node == 0], links)
        except BaseException:
            for node in nodes:
                node.kill()
            raise
        self._local, self._nodes = local, nodes
        self._finalizer = weakref.finalize(self, _shut_down, local, nodes, os.getpid())
        """Ends the workers. Called by ``close`` and by garbage collection."""
        for node in nodes:
            node.join(local.poller)
        remote = [rank for node in nodes for rank in node.ranks]
        self._ranks: list[RankProcess | RemoteRank] = [*local.processes, *remote]
        self._last_stage = self._ranks[-options.tensor_parallel_size]
        """First rank of the last pipeline stage, which replies to steps."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, in rank order."""
        return [rank.pid for rank in self._ranks]

    def submit(self, step: StepInput, grammar_bitmask: Future[np.ndarray] | None = None) -> None:
        tokens = int(step.lengths.sum()) + len(step.draft_token_ids)
        tokens += sum(image.num_patches for image in step.encoded_images)
        tokens += sum(new.audio.length for new in step.updates.new if new.audio)
        self._send(step)
        self._steps.append((tokens, time.monotonic()))
        if step.has_grammar_bitmask:
            assert grammar_bitmask is not None
            try:
                bits = grammar_bitmask.result()
            except BaseException:  # without the bitmask, the workers would wait for it forever
                self._kill()
                raise
            self._send(GrammarBitmask(bits))

    def collect(self) -> StepOutput:
        try:
            while not self._outputs:
                self._receive(self._last_stage, self._deadline(self._tokens))
        except KeyboardInterrupt:  # the caller abandons the step, but the workers still send its output
            self._steps.popleft()
            self._num_abandoned += 1
            raise
        tokens, submitted = self._steps.popleft()
        now = time.monotonic()
        self._times.add(tokens, now - max(submitted, self._last_collected))
        self._last_collected = now
        computed = self._outputs.popleft()
        if computed.failed:
            raise _error(computed.failed, self._last_stage)
        assert computed.output is not None
        return computed.output

    def call(self, call: WorkerCall) -> Future[Any]:
        self._num_calls += 1
        future: Future[Any] = Future()
        self._calls[self._num_calls] = _PendingCall(call, future)
        self._send(Call(self._num_calls, call))
        return future

    def wait(self, future: Future[Any]) -> None:
        pending = next((call for call in self._calls.values() if call.future is future), None)
        if pending is None:
            return
        tokens = self._tokens + self._options.max_num_batched_tokens
        takes_long = isinstance(pending.call, LONG_CALLS)
        deadline = time.monotonic() + LOAD_TIMEOUT if takes_long else self._deadline(tokens)
        while not future.done():
            self._receive(next(rank for rank in self._ranks if rank.rank not in pending.answers), deadline)

    def poll(self) -> None:
        for rank in self._ranks:
            while rank.has_message():
                self._receive(rank, self._deadline(self._tokens))

    def close(self) -> None:
        self._finalizer()

    # --- Messages ---------------------------------------------------------------------------------------------------

    @property
    def _tokens(self) -> int:
        """Number of tokens of the steps in flight."""
        return sum(tokens for tokens, _ in self._steps)

    def _deadline(self, tokens: int) -> float:
        """Time (monotonic clock) by which a worker must have computed ``tokens`` tokens and answered."""
        timeout = TIMEOUT_FACTOR * self._options.engine_iteration_timeout
        return time.monotonic() + self._times.expected(tokens) + timeout if timeout else float("inf")

    def _send(self, message: ToWorker) -> None:
        encoded, deadline = encoder.encode(message), self._deadline(self._tokens)
        to: RankProcess | RemoteNode
        try:
            for to in self._nodes:
                to.send(encoded, deadline)
            for to in self._local.processes:
                to.send(encoded, deadline)
        except (TimeoutError, PeerLostError) as error:
            self._lost(error, to)
        except KeyboardInterrupt:  # the message may be partially written; workers could not read later messages
            self._kill()
            raise

    def _receive(self, rank: RankProcess | RemoteRank, deadline: float) -> None:
        try:
            message = from_worker.decode(rank.receive(deadline))
        except (TimeoutError, PeerLostError) as error:
            self._lost(error, rank)
        if isinstance(message, StepReply):
            if self._num_abandoned:
                self._num_abandoned -= 1
            else:
                self._outputs.append(message)
        elif isinstance(message, CallReply):
            pending = self._calls[message.number]
            pending.answers[rank.rank] = message
            if len(pending.answers) == len(self._ranks):
                del self._calls[message.number]
                try:
                    pending.future.set_result(self._combined(pending))
                except Exception as error:
                    pending.future.set_exception(error)

    def _combined(self, pending: _PendingCall) -> Any:
        """Return the result of a call: all ranks' results combined if they are parts, otherwise the result of rank 0.
        Raises the error of a failed rank, and ``PenstockError`` if results that must be equal differ."""
        answers = [pending.answers[rank.rank] for rank in self._ranks]
        for rank, answer in zip(self._ranks, answers, strict=True):
            if answer.failed:
                raise _error(answer.failed, rank)
        values = [answer.value for answer in answers]
        match pending.call:
            case LoadModel():
                return self._same_model([msgspec.convert(value, ModelInfo) for value in values])
            case ProfileMemory():
                return _smallest([msgspec.convert(value, MemoryProfile) for value in values])
            case LoadLoRA(path=path) | LoadWeights(path) if any(value != values[0] for value in values):
                kind, field = ("adapters", "lora_path") if isinstance(pending.call, LoadLoRA) else ("weights", "path")
                raise invalid(field, f"the ranks read different {kind} from {path}: put the same files on all nodes")
            case ReadExpertLoad():  # each pipeline stage returns the counters of its layers
                return {layer: counts for layers in values for layer, counts in layers.items()}
        return values[0]

    def _same_model(self, infos: list[ModelInfo]) -> ModelInfo:
        """Return the model loaded by all ranks. Raises ``PenstockError`` if a rank's differs from rank 0's."""
        info = infos[0]
        for rank, other in zip(self._ranks, infos, strict=True):
            # weights_version may differ, as a node may lack weights of other stages; ``Join`` has compared the files
            if self._options.nnodes > 1:
                other = msgspec.structs.replace(other, weights_version=info.weights_version)
            if other != info:
                names = [name for name in info.__struct_fields__ if getattr(info, name) != getattr(other, name)]
                differences = [f"{name} {getattr(other, name)} instead of {getattr(info, name)}" for name in names]
                message = f"{rank} differs from rank 0: {', '.join(differences)}; all ranks must have the same model"
                raise PenstockError(Code.UNAVAILABLE, message)
        return info

    def _lost(self, error: Exception, awaited: RankProcess | RemoteRank | RemoteNode) -> NoReturn:
        """Kill all workers and raise ``WorkerLostError``, which names the worker that ended or is the slowest."""
        message = self._ended() if isinstance(error, PeerLostError) else self._ended(0)
        if not message:
            computes = self._steps or any(isinstance(call.call, Propose) for call in self._calls.values())
            late = self._slowest() if computes else awaited
            limit = f"--engine-iteration-timeout {self._options.engine_iteration_timeout:g}"
            message = f"{late} has not answered in time and was killed ({limit})"
            if isinstance(late, RemoteNode):
                message = f"{late.name} has not answered in time ({limit})"
        self._kill()
        lost = WorkerLostError(message)
        for pending in self._calls.values():
            pending.future.set_exception(lost)
        self._calls.clear()
        raise lost from error

    def _ended(self, timeout: float = CAUSE_TIMEOUT) -> str:
        """Describe which worker or node ended, and why; empty if all are running. If a rank ended because it lost its
        connection to another node's rank, wait up to ``timeout`` seconds for that rank's end, which is the cause."""
        deadline = time.monotonic() + timeout
        while True:
            reasons: dict[str, bool] = {}  # key: description; value: True if another failure is the cause
            for process in self._local.processes:
                if process.end_reason is not None:
                    reasons[f"{process} ended: {process.end_reason}"] = process.returncode == LINK_LOST
            for node in self._nodes:
                node.drain()
                if ended := node.rank_ended:
                    rank = self._ranks[ended.rank]
                    reasons[f"{rank} ended: {ended.reason}"] = ended.lost_link
                elif node.lost:
                    reasons[f"the connection to {node.name} is lost: {node.lost.lower()}"] = False
            causes = [reason for reason, is_consequence in reasons.items() if not is_consequence]
            if causes or time.monotonic() > deadline:
                return next(iter(causes or reasons), "")
            time.sleep(CAUSE_POLL)

    def _slowest(self) -> RankProcess | RemoteRank | RemoteNode:
        """The rank with the least progress, or a node that does not report its ranks' progress."""
        progress = [*self._local.progress()]
        for node in self._nodes:
            node_progress = node.progress()
            if node_progress is None:
                return node
            progress += node_progress
        return self._ranks[progress.index(min(progress))]

    def _kill(self) -> None:
        for node in self._nodes:
            node.kill()
        self._local.kill()


def _smallest(profiles: list[MemoryProfile]) -> MemoryProfile:
    """Profile of all ranks together: room for as many blocks as the rank with the fewest, each as large as the largest
    block of a pipeline stage."""
    block_bytes = max(profile.block_bytes for profile in profiles)
    state_bytes = max(profile.state_bytes for profile in profiles)

    def share(profile: MemoryProfile) -> float:
        """Largest share of a block's or snapshot's bytes that this rank has."""
        return max(profile.block_bytes / (block_bytes or 1), profile.state_bytes / (state_bytes or 1))

    return MemoryProfile(
        free=int(min(profile.free / share(profile) for profile in profiles if share(profile))),
        total=min(profile.total for profile in profiles),
        block_bytes=block_bytes,
        host_block_bytes=max(profile.host_block_bytes for profile in profiles),
        state_bytes=state_bytes,
        swapped_state_bytes=max(profile.swapped_state_bytes for profile in profiles),
    )


def _error(failed: Failed, rank: RankProcess | RemoteRank) -> Exception:
    """Exception for a failed rank. Its message names the node if the rank is remote."""
    where = f"{rank.node.name}: " if isinstance(rank, RemoteRank) else ""
    if failed.failure:
        return PenstockError.of(msgspec.structs.replace(failed.failure, message=where + failed.failure.message))
    return StepFailedError(where + failed.message)


def _shut_down(local: LocalRanks, nodes: list[RemoteNode], owner: int) -> None:
    """End the workers and close the connections to them."""
    if os.getpid() != owner:  # this process is a fork of the one that started the workers
        return
    deadline = time.monotonic() + CLOSE_TIMEOUT
    for node in nodes:
        node.send_close(deadline)
    local.close(deadline=deadline)
    for node in nodes:
        node.close(deadline)
