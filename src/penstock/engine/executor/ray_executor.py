"""The executor with ranks on the nodes of a Ray cluster.

Ray places the ranks and starts the node processes. As with ``--nnodes``, ranks communicate through shared memory and
TCP; no data of a step passes through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.config import logs as logs_of_process
from penstock.config.options import EngineOptions, LogOptions
from penstock.core import Code, Failure, PenstockError
from penstock.core.errors import invalid

from .multiproc import CAUSE_TIMEOUT, MultiprocExecutor
from .rendezvous import WaitLog

try:
    import ray
    from ray import PlacementGroupID
    from ray.util.placement_group import (
        PlacementGroup,
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    hint = f"ray cannot be imported ({error}); install it with pip install 'penstock-llm[ray]'"
    raise invalid("distributed_executor_backend", hint) from error

logger = logging.getLogger(__name__)

FIELD = "distributed_executor_backend"
PLACEMENT_GROUP = "PENSTOCK_RAY_PLACEMENT_GROUP"
"""Environment variable with the id of the placement group that Ray Serve has created for a replica of this engine."""
NODE_ID = "ray.io/node-id"
"""Name of Ray's node label that contains the node id."""
POLL = 0.2
"""Interval at which Ray's state is polled, seconds."""
CONNECT_TIMEOUT = 5.0
"""Maximum duration of one attempt to connect to the head of the cluster, seconds."""


class RayExecutor(MultiprocExecutor):
    """Executor with one worker process per rank, on the nodes of the Ray cluster to which this machine belongs.

    A placement group (that of ``PLACEMENT_GROUP``, or a new one) has one bundle per rank, the first on this machine.
    Ranks on the same Ray node share memory. If Ray nodes have different numbers of ranks, each is divided into several
    nodes of equal size.

    Raises ``PenstockError``: ``unavailable`` if there is no cluster, or no room for the bundles within
    ``node_timeout``; otherwise as ``MultiprocExecutor``.
    """

    def __init__(self, options: EngineOptions, logs: LogOptions | None = None) -> None:
        self._placement = _Placement(options)
        try:
            placed, secret = self._placement.start(logs)
            super().__init__(placed, logs, secret, self._placement.check)
        except BaseException as error:
            try:
                if isinstance(error, PenstockError):
                    self._placement.check(CAUSE_TIMEOUT)  # if a node process has ended, report that cause
            finally:
                self._placement.close()
            raise

    def close(self) -> None:
        super().close()
        self._placement.close()


class _Placement:
    """The placement group of an engine's ranks, and an actor for each node except this one."""

    def __init__(self, options: EngineOptions) -> None:
        if options.nnodes > 1 or options.node_rank:
            message = f"{options.nnodes} given, but Ray chooses the nodes: remove nnodes and node_rank, or {FIELD}=ray"
            raise invalid("nnodes", message, 1)
        if options.data_parallel_size > 1:
            message = f"data_parallel_size {options.data_parallel_size}: a model on a Ray cluster has one engine; use 1"
            raise PenstockError(Code.UNSUPPORTED, message, "data_parallel_size", 1)
        self._options = options
        self._world = options.tensor_parallel_size * options.pipeline_parallel_size
        self._actors: list[Any] = []
        self._running: list[Any] = []
        """Ray object references to the results of ``_Node.run``, in order of the node rank."""
        _connect(options.node_timeout)
        self._bundle = bundle_of(options)
        if given := os.environ.get(PLACEMENT_GROUP):
            self._group = PlacementGroup(PlacementGroupID.from_hex(given))
            created = None
        else:
            here = {NODE_ID: ray.get_runtime_context().get_node_id()}
            selectors = [here, *({} for _ in range(self._world - 1))]
            self._group = placement_group(
                [self._bundle] * self._world, strategy="PACK", bundle_label_selector=selectors
            )
            created = self._group
        self._finalizer = weakref.finalize(self, _remove, created, self._actors)

    def start(self, logs: LogOptions | None) -> tuple[EngineOptions, bytes]:
        """Wait for the bundles, and start the processes of the other nodes. Returns the options of node 0, and the
        secret shared by the nodes."""
        self._await_bundles()
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        if len(nodes) != self._world:
            raise invalid(FIELD, f"the placement group has {len(nodes)} bundles; the {self._world} ranks need one each")
        counts = Counter(nodes.values())
        size = math.gcd(*counts.values())
        master = ray.util.get_node_ip_address()
        options = msgspec.structs.replace(
            self._options,
            nnodes=len(nodes) // size,
            master_addr=master,
            master_port=_free_port(master),
            threads=max(self._options.threads, 1),
            cpu_binding="none" if self._options.cpu_binding == "auto" else self._options.cpu_binding,
        )
        secret = secrets.token_bytes(32)
        first: dict[str, list[int]] = {}
        for index, node in sorted(nodes.items(), key=lambda item: (item[1] != nodes[0], item[1], item[0])):
            first.setdefault(node, []).append(index)
        bundles = [group[at] for group in first.values() for at in range(0, len(group), size)]
        for rank, index in enumerate(bundles[1:], 1):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            actor = ray.remote(_Node).options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=strategy,
                name=f"penstock-{self._group.id.hex()}-node-{rank}",
            )
            self._actors.append(actor.remote(msgspec.structs.replace(options, node_rank=rank), logs, secret))
        self._running += [actor.run.remote() for actor in self._actors]
        logger.info("Ray has placed %d ranks on %d of its nodes", len(nodes), len(counts))
        return options, secret

    def check(self, timeout: float = 0) -> None:
        """Raise ``PenstockError`` if a node's process has ended, or ends within ``timeout`` seconds."""
        ended, _ = ray.wait(self._running, timeout=timeout) if self._running else ([], [])
        for result in ended:
            rank = self._running.index(result) + 1
            try:
                failure = msgspec.convert(ray.get(result), Failure)
            except ray.exceptions.RayError as error:
                message = f"the process of node {rank} has ended: {_cause(error)}"
                raise PenstockError(Code.UNAVAILABLE, message, FIELD) from error
            raise PenstockError.of(msgspec.structs.replace(failure, message=f"node {rank}: {failure.message}"))

    def close(self) -> None:
        self._finalizer()

    def _await_bundles(self) -> None:
        wait_log = WaitLog(self._options.node_timeout)
        room = f"room for {self._world} ranks of {self._bundle} each, the first on this machine"
        while not self._is_created():
            if wait_log.overdue:
                free = {name: ray.available_resources().get(name, 0.0) for name in self._bundle}
                timeout = f"within {self._options.node_timeout:g} seconds (--node-timeout)"
                raise PenstockError(Code.UNAVAILABLE, f"the Ray cluster had no {room}, {timeout}; free: {free}", FIELD)
            wait_log.log(lambda: f"waiting for the Ray cluster to have {room}")

    def _is_created(self) -> bool:
        """True if Ray has placed all bundles; otherwise waits ``POLL`` seconds before returning False. Bundles of a
        node that has died are placed again."""
        state = placement_group_table(self._group).get("state")
        if state == "REMOVED":
            message = "the placement group of the ranks has been removed; start the engine again"
            raise PenstockError(Code.UNAVAILABLE, message, FIELD)
        if state != "CREATED":
            time.sleep(POLL)
        return bool(state == "CREATED")


class _Node:
    """Ray actor: the process of a node other than node 0."""

    def __init__(self, options: EngineOptions, logs: LogOptions | None, secret: bytes) -> None:
        from .node_process import NodeProcess

        if logs:
            logs_of_process.set_up(logs, f"node-{options.node_rank}")
        self._failure: PenstockError | None = None
        try:
            self._node = NodeProcess(options, logs, secret)
        except PenstockError as error:
            self._failure = error

    def run(self) -> dict[str, Any]:
        """Run the node until the actor is killed. Returns the ``Failure`` that ended it, as a dictionary."""
        if not self._failure:
            try:
                self._node.run()
            except PenstockError as error:
                self._failure = error
        failure = self._failure.failure if self._failure else Failure(Code.UNAVAILABLE, "the node was stopped")
        fields: dict[str, Any] = msgspec.to_builtins(failure)
        return fields


def bundle_of(options: EngineOptions) -> dict[str, float]:
    """Ray resources of a rank: CPU cores, and one GPU if the device is CUDA."""
    bundle = {"CPU": float(max(options.threads, 1))}
    return bundle | ({"GPU": 1.0} if options.device.startswith("cuda") else {})


def _connect(timeout: float) -> None:
    """Connect to this machine's Ray cluster. Raises ``PenstockError`` if it does not answer within ``timeout``
    seconds."""
    if not ray.is_initialized():
        _await_head(timeout)
        with _signal_handlers():
            _init()
    if ray.util.client.ray.is_connected():
        message = "a Ray Client (ray://…) cannot run the first rank; run Penstock on a node of the cluster"
        raise PenstockError(Code.UNSUPPORTED, message, FIELD)


def _await_head(timeout: float) -> None:
    """Wait until the cluster at ``RAY_ADDRESS`` answers. Without this, ``ray.init`` would wait for 15 minutes."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if not host or "/" in host:  # the address is "auto", "local", or that of a Ray Client
        return
    wait_log = WaitLog(timeout)
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
            return
        except (OSError, ValueError) as error:
            if wait_log.overdue or isinstance(error, ValueError):
                where = f"no Ray cluster answers at RAY_ADDRESS, {address},"
                message = f"{where} within {timeout:g} seconds (--node-timeout): {str(error).lower()}"
                raise PenstockError(Code.UNAVAILABLE, message, FIELD) from error
        wait_log.log(lambda: f"waiting for the Ray cluster at RAY_ADDRESS, {address}")
        time.sleep(POLL)


def _init() -> None:
    try:
        ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).splitlines()[0]
        message = (
            f"no Ray cluster runs on this machine ({reason}); start one with ray start --head, or join one with ray "
            "start --address …"
        )
        raise PenstockError(Code.UNAVAILABLE, message, FIELD) from error


@contextlib.contextmanager
def _signal_handlers() -> Iterator[None]:
    """Restore the handlers of SIGTERM and SIGINT afterwards, as ``ray.init`` replaces a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _cause(error: Exception) -> str:
    """Last line of a Ray error, which states the reason. The lines above it contain the actor and a traceback."""
    return str(error).strip().splitlines()[-1].strip()


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def _remove(group: Any, actors: list[Any]) -> None:
    """Kill the actors, and remove the placement group ``group`` unless it is None."""
    if not ray.is_initialized():
        return
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor)
    if group is not None:
        with contextlib.suppress(ray.exceptions.RayError):
            remove_placement_group(group)
