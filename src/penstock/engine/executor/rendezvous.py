"""Rendezvous of nodes: all nodes connect to node 0; then they connect their ranks to the ranks of other nodes."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock import demo
from penstock.checkpoint.checkpoint_digest import file_digests
from penstock.config.options import EngineOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.version import __version__

from .cluster_secret import read_secret
from .fork_server import FORK_TIMEOUT
from .layout import RankInfo, connections, ranks_of
from .messages import PeerSocket
from .node_link import DEFAULT_TIMEOUT, NodeLink, NodeLostError, SecretError, accept, connect, keep_rank_link_alive
from .node_messages import Join, LinkRanks, RanksStarted, Refused, StartRanks, decode, encode
from .remote_node import RemoteNode

logger = logging.getLogger(__name__)

SAME_OPTIONS = (
    "nnodes",
    "tensor_parallel_size",
    "enable_expert_parallel",
    "num_redundant_experts",
    "expert_load",
    "pipeline_parallel_size",
    "pipeline_parallel_layers",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "block_size",
    "max_model_len",
    "load_format",
    "seed",
)
"""Options that must be equal on all nodes. Options in neither this list nor ``PER_NODE_OPTIONS`` are node 0's."""
PER_NODE_OPTIONS = (
    "model",
    "weight_cache_dir",
    "weight_cache_size",
    "cpu_binding",
    "threads",
    "device",
    "ops",
    "node_rank",
    "expert_placement",
)
"""Options that may differ between nodes. Each node uses its value of them."""
PLACEMENT = "expert_placement"
"""Key of the expert placement's file in ``model_digests``."""
LOG_INTERVAL = 10.0
"""Interval between two log lines of a ``WaitLog``, seconds."""
LINK_TIMEOUT = 60.0
"""Maximum seconds to connect the ranks after all nodes have joined."""
POLL = 0.2
"""Interval at which waiting loops check for events, seconds."""
BACKLOG = 64
MAX_HANDSHAKES = 64
"""Maximum number of connections being authenticated. A further connection closes the oldest one, so that peers that
send nothing cannot block nodes."""

Links = dict[int, list[PeerSocket]]
"""Connections to ranks on other nodes, by world rank."""


class UnreachableError(OSError):
    """A connection between two nodes cannot be made. The message names the node."""


def model_digests(options: EngineOptions) -> dict[str, str]:
    """Digests of the checkpoint's files, by name, and of the expert placement's file (``PLACEMENT``)."""
    digests = file_digests(Path(options.model) if options.model else demo.CHAT)
    if options.expert_placement:
        digests[PLACEMENT] = hashlib.sha256(Path(options.expert_placement).read_bytes()).hexdigest()
    return digests


def check_nodes(options: EngineOptions) -> None:
    """Raise ``PenstockError`` if ``nnodes``, ``node_rank`` and the parallel sizes do not fit together."""
    world = options.tensor_parallel_size * options.pipeline_parallel_size
    if world % options.nnodes:
        message = (
            f"{world} ranks (tensor_parallel_size times pipeline_parallel_size) cannot be divided among "
            f"{options.nnodes} nodes"
        )
        raise invalid("nnodes", message, options.nnodes)
    if options.node_rank >= options.nnodes:
        message = f"{options.node_rank} is not below nnodes, {options.nnodes}; ranks of nodes start from 0"
        raise invalid("node_rank", message, options.nnodes - 1)
    if options.nnodes > 1 and options.data_parallel_size > 1:
        message = (
            f"a model on several nodes has one engine; data_parallel_size must be 1, not {options.data_parallel_size}"
        )
        raise PenstockError(Code.UNSUPPORTED, message, "data_parallel_size", 1)


def all_ranks(options: EngineOptions) -> list[RankInfo]:
    return ranks_of(options.tensor_parallel_size, options.pipeline_parallel_size, options.nnodes)


class Listener:
    """Accepts connections from nodes that know the secret.

    Raises ``PenstockError`` (``invalid``) if it cannot listen on the address.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._secret = secret
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(address, family=family, backlog=BACKLOG)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
            message = f"cannot listen on {host}:{port}: {reason.lower()}"
            advice = "give an address of this machine, or another master_port"
            raise invalid("master_addr", f"{message}; {advice}") from error
        self.port: int = self._socket.getsockname()[1]
        self._accepted: queue.SimpleQueue[NodeLink] = queue.SimpleQueue()
        self._handshakes: list[socket.socket] = []
        """Connections being authenticated, oldest first."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def next(self, timeout: float) -> NodeLink | None:
        """The next authenticated connection; None after ``timeout`` seconds without one."""
        with contextlib.suppress(queue.Empty):
            return self._accepted.get(timeout=timeout)
        return None

    def close(self) -> None:
        self._closed.set()
        _wake(self._socket)
        self._socket.close()
        with self._lock:
            for connected in self._handshakes:
                _wake(connected)
        while link := self.next(0):
            link.close()

    def _run(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError as error:  # the connection failed, or this process has no free file descriptor
                if self._closed.is_set():
                    return
                logger.warning("cannot accept a node's connection: %s", (error.strerror or str(error)).lower())
                self._closed.wait(POLL)
                continue
            with self._lock:
                if len(self._handshakes) == MAX_HANDSHAKES:
                    _wake(self._handshakes.pop(0))
                self._handshakes.append(connected)
            threading.Thread(target=self._authenticate, args=(connected,), daemon=True).start()

    def _authenticate(self, connected: socket.socket) -> None:
        try:
            host = connected.getpeername()[0]
            link = accept(connected, self._secret)
        except SecretError as error:
            logger.warning("refused a connection from %s: it %s", host, error)
            return
        except OSError:  # the peer sent nothing, or has closed the connection
            return
        finally:
            with self._lock, contextlib.suppress(ValueError):  # ``_run`` has removed it for a newer connection
                self._handshakes.remove(connected)
        self._accepted.put(link)


def _wake(connected: socket.socket) -> None:
    """End another thread's blocking call on a socket."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


class WaitLog:
    """Logs a message every ``LOG_INTERVAL`` seconds during a wait.

    Args:
        timeout: limit of the wait, seconds.
    """

    def __init__(self, timeout: float) -> None:
        self._begun = time.monotonic()
        self._next = self._begun + POLL  # waits shorter than POLL are not logged
        self._timeout = timeout

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self._begun > self._timeout

    def log(self, message: Callable[[], str]) -> None:
        """Log a message with the time waited, if ``LOG_INTERVAL`` seconds have passed since the last log line."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + LOG_INTERVAL
            limit = f" of {self._timeout:g}" if self._timeout < float("inf") else ""
            logger.info("%s (%.0f%s seconds)", message(), now - self._begun, limit)


# --- Node 0 -----------------------------------------------------------------------------------------------------------


def gather_nodes(
    options: EngineOptions, secret: bytes | None = None, check: Callable[[], None] = lambda: None
) -> tuple[list[RemoteNode], Links]:
    """Wait for the other nodes, and start their ranks. Returns the nodes, and the connections of this node's ranks.

    Args:
        secret: secret shared by the nodes; None: read from ``cluster_secret_file``.
        check: called while waiting; raises to stop waiting.

    Raises ``PenstockError`` if a node does not join within ``node_timeout``.
    """
    secret = read_secret(options.cluster_secret_file, make=True) if secret is None else secret
    digests = model_digests(options)
    listener = Listener(options.master_addr, options.master_port, secret)
    joined: dict[int, tuple[NodeLink, Join]] = {}
    links: Links = defaultdict(list)
    try:
        _await_nodes(options, digests, listener, joined, check)
        session = os.urandom(16)
        addresses = [("", 0)] + [(link.host, join.port) for link, join in (joined[rank] for rank in sorted(joined))]
        for link, join in joined.values():
            try:
                link.send(encode(StartRanks(session, options, addresses)), deadline=time.monotonic() + LINK_TIMEOUT)
            except NodeLostError as error:
                raise NodeLostError(f"{_name(link, join)}: {error}") from error
        accept_links(listener, session, all_ranks(options), 0, options, links, lambda: _check_alive(joined))
        infos, nodes = all_ranks(options), []
        started = _await_ranks(joined)
        for rank, (link, join) in sorted(joined.items()):
            pids = started[rank].pids
            nodes.append(RemoteNode(link, join, [info for info in infos if info.node == rank], pids))
        logger.info("all %d nodes have joined: %s", options.nnodes, ", ".join(node.name for node in nodes))
        return nodes, links
    except BaseException as error:
        for link, _ in joined.values():
            link.close()
        close_links(links)
        if isinstance(error, OSError | msgspec.MsgspecError):
            raise PenstockError(Code.UNAVAILABLE, f"a node was lost while ranks were started: {error}") from error
        raise
    finally:
        listener.close()


def _await_nodes(
    options: EngineOptions,
    digests: dict[str, str],
    listener: Listener,
    joined: dict[int, tuple[NodeLink, Join]],
    check: Callable[[], None],
) -> None:
    """Wait until all other nodes have joined, and add them to ``joined``, by node rank. Raises ``PenstockError`` after
    ``node_timeout``."""
    wait_log = WaitLog(options.node_timeout)
    while missing := [rank for rank in range(1, options.nnodes) if rank not in joined]:
        check()
        where = f"{options.master_addr}:{options.master_port}"
        names = f"node{'s' if missing[1:] else ''} {', '.join(map(str, missing))} of {options.nnodes}"
        if wait_log.overdue:
            message = f"{names} did not join at {where} within {options.node_timeout:g} seconds (--node-timeout)"
            raise PenstockError(Code.UNAVAILABLE, message, "nnodes")
        wait_log.log(lambda: f"waiting at {where} for {names}")  # noqa: B023
        link = listener.next(POLL)
        for rank in [rank for rank, (other, _) in joined.items() if not _is_alive(other)]:
            logger.warning("node %d (%s) has closed its connection", rank, joined[rank][0].host)
            joined.pop(rank)[0].close()
        if link is None:
            continue
        try:
            join = _join(link)
            if reason := _refusal(options, digests, joined, link, join):
                host = link.host
                retry = join is not None and reason == _taken(joined, join)
                link.send(encode(Refused(reason, retry)), deadline=time.monotonic() + POLL)
                link.close()
                logger.warning("refused node %s (%s): %s", join.node_rank if join else "?", host, reason)
            elif join:
                link.keep_alive((options.engine_iteration_timeout or DEFAULT_TIMEOUT) / 2)
                joined[join.node_rank] = link, join
                logger.info("node %d (%s, %s) has joined", join.node_rank, join.host_name, link.host)
        except OSError as error:
            logger.warning("a node at %s has not joined: %s", link.host, error)
            link.close()


def _await_ranks(joined: dict[int, tuple[NodeLink, Join]]) -> dict[int, RanksStarted]:
    """Wait until all nodes have started their ranks. Raises ``OSError`` if a node is lost or fails to start them."""
    started: dict[int, RanksStarted] = {}
    wait_log = WaitLog(FORK_TIMEOUT)
    while missing := [rank for rank in joined if rank not in started]:
        for rank in missing:
            link, join = joined[rank]
            name = _name(link, join)
            try:
                message = decode(link.receive(time.monotonic() + POLL))
            except TimeoutError:
                if wait_log.overdue:
                    raise TimeoutError(f"{name} has not started its ranks in {FORK_TIMEOUT:g} seconds") from None
                wait_log.log(lambda: f"waiting for {name} to start its ranks")  # noqa: B023
                continue
            except NodeLostError as error:
                raise NodeLostError(f"{name}: {error}") from error
            if not isinstance(message, RanksStarted):
                raise NodeLostError(f"{name}: {message.reason if isinstance(message, Refused) else message}")
            started[rank] = message
    return started


def _join(link: NodeLink) -> Join | None:
    """Receive a node's ``Join``. Returns None for any other message, for example from another version."""
    message = link.receive(time.monotonic() + LINK_TIMEOUT / 4)
    with contextlib.suppress(msgspec.MsgspecError):
        decoded = decode(message)
        return decoded if isinstance(decoded, Join) else None
    return None


def _refusal(
    options: EngineOptions,
    digests: dict[str, str],
    joined: dict[int, tuple[NodeLink, Join]],
    link: NodeLink,
    join: Join | None,
) -> str:
    """Reason to refuse a node; empty if it may join."""
    if link.version != __version__:
        return f"it runs Penstock {link.version}, and node 0 runs {__version__}: install the same version on all nodes"
    if join is None:
        return "its connection belongs to an earlier start of the engine: restart the node"
    for name in SAME_OPTIONS:
        here, there = getattr(options, name), getattr(join.options, name)
        if here != there:
            return f"{name} is {there!r} on the node and {here!r} on node 0: give all nodes the same value"
    if not 0 < join.node_rank < options.nnodes:
        return f"node_rank is {join.node_rank}, but must be from 1 to {options.nnodes - 1}"
    if join.model.get(PLACEMENT) != digests.get(PLACEMENT):
        return "its expert_placement file differs from node 0's: give all nodes the same file"
    if any(join.model[name] != digest for name, digest in digests.items() if name in join.model):
        return "its checkpoint differs from node 0's: give all nodes the same files"
    return _taken(joined, join)


def _taken(joined: dict[int, tuple[NodeLink, Join]], join: Join) -> str:
    """Reason to refuse a node, which may try again later, if its ``node_rank`` has joined already; empty otherwise. The
    earlier connection may belong to the same node, and its loss may not be detected yet."""
    if join.node_rank not in joined:
        return ""
    return f"{joined[join.node_rank][0].host} has already joined as node_rank {join.node_rank}; give each node another"


def _check_alive(joined: dict[int, tuple[NodeLink, Join]]) -> None:
    for link, join in joined.values():
        if not _is_alive(link):
            raise NodeLostError(f"{_name(link, join)} has closed its connection")


def _name(link: NodeLink, join: Join) -> str:
    return f"node {join.node_rank} ({join.host_name}, {link.host})"


def _is_alive(link: NodeLink) -> bool:
    try:
        link.fetch()
    except NodeLostError:
        return False
    return True


# --- Every node -------------------------------------------------------------------------------------------------------


def accept_links(
    listener: Listener,
    session: bytes,
    ranks: list[RankInfo],
    node: int,
    options: EngineOptions,
    links: Links,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Accept the connections from ranks of higher nodes to this node's ranks, and add them to ``links``.

    Args:
        check: called while waiting; raises to stop waiting.

    Raises ``UnreachableError`` after ``LINK_TIMEOUT``.
    """
    missing = {pair for pair in connections(ranks) if ranks[pair[0]].node == node}
    deadline = time.monotonic() + LINK_TIMEOUT
    while missing:
        check()
        if time.monotonic() > deadline:
            nodes = sorted({ranks[higher].node for _, higher in missing})
            names = ", ".join(map(str, nodes))
            raise UnreachableError(
                f"nodes {names} have not connected their ranks to node {node} within {LINK_TIMEOUT:g} seconds"
            )
        if not (link := listener.next(POLL)):
            continue
        try:
            hello = decode(link.receive(time.monotonic() + POLL * 10))
        except (OSError, msgspec.MsgspecError):
            link.close()
            continue
        if isinstance(hello, LinkRanks) and hello.session == session and (hello.lower, hello.higher) in missing:
            missing.remove((hello.lower, hello.higher))
            _add(links, hello.lower, hello.higher, link, options)
        else:
            link.close()


def connect_links(
    secret: bytes,
    session: bytes,
    ranks: list[RankInfo],
    node: int,
    addresses: list[tuple[str, int]],
    options: EngineOptions,
    links: Links,
) -> None:
    """Connect this node's ranks to the ranks of lower nodes, and add the connections to ``links``.

    Raises ``UnreachableError`` if a node cannot be reached, and ``OSError`` if a connection is lost.
    """
    for lower, higher in connections(ranks):
        if ranks[higher].node == node:
            peer = ranks[lower].node
            try:
                link = connect(addresses[peer], secret)
            except (OSError, SecretError) as error:
                host, port = addresses[peer]
                message = f"node {peer} at {host}:{port} cannot be reached: {error}; check network and firewall"
                raise UnreachableError(message) from error
            link.send(encode(LinkRanks(session, lower, higher)), deadline=time.monotonic() + LINK_TIMEOUT)
            _add(links, higher, lower, link, options)


def _add(links: Links, rank: int, peer: int, link: NodeLink, options: EngineOptions) -> None:
    keep_rank_link_alive(link.socket, (options.engine_iteration_timeout or DEFAULT_TIMEOUT) / 2)
    links[rank].append(PeerSocket(link.socket.detach(), peer))


def close_links(links: Links) -> None:
    for sockets in links.values():
        for each in sockets:
            os.close(each.descriptor)
    links.clear()
