"""The process of a node other than node 0. It starts the node's ranks, and relays messages between node 0 and these
ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import defaultdict

import msgspec

from penstock.config.options import EngineOptions, LogOptions
from penstock.core import Code, PenstockError

from ..exit_status import LINK_LOST
from ..step import encoder
from .cluster_secret import read_secret
from .local_ranks import LocalRanks
from .messages import Close
from .node_link import ALL_RANKS, DEFAULT_TIMEOUT, NodeLink, NodeLostError, SecretError, connect
from .node_messages import (
    NODE_READY,
    GetProgress,
    Join,
    RankEnded,
    RankProgress,
    RanksStarted,
    Refused,
    StartRanks,
    decode,
    encode,
)
from .poller import PeerLostError
from .rank_process import RankProcess
from .remote_node import MAX_MESSAGE
from .rendezvous import (
    PER_NODE_OPTIONS,
    POLL,
    Links,
    Listener,
    UnreachableError,
    WaitLog,
    accept_links,
    all_ranks,
    check_nodes,
    close_links,
    connect_links,
    model_digests,
)

logger = logging.getLogger(__name__)

CLOSE = encoder.encode(Close())
RETRY = 2.0
"""Seconds until a refused node that may join later (``Refused.retry``) connects again."""
START_REPLIES = 3
"""Number of replies that a rank sends while it starts: to ``LoadModel``, ``ProfileMemory`` and ``InitCache``."""


class NodeProcess:
    """A node with ``node_rank`` 1 or more.

    Args:
        options: options of the engine as on node 0, except for ``PER_NODE_OPTIONS``.
        logs: logging options of the workers; None: leave logging unconfigured.
        secret: secret shared by the nodes; None: read from ``cluster_secret_file``.

    Raises ``PenstockError`` if the options, the secret or the checkpoint are invalid.
    """

    def __init__(self, options: EngineOptions, logs: LogOptions | None = None, secret: bytes | None = None) -> None:
        check_nodes(options)
        self._options = options
        self._logs = logs
        self._secret = read_secret(options.cluster_secret_file, make=False) if secret is None else secret
        self._digests = model_digests(options)
        self._master = options.master_addr, options.master_port
        self._where = f"node 0 at {options.master_addr}:{options.master_port}"
        self._stopped = threading.Event()

    def run(self) -> None:
        """Join node 0's engines, one after another, until ``stop``.

        Raises ``PenstockError``: ``unavailable`` if node 0 does not answer for ``node_timeout`` seconds, ``invalid``
        if it refuses this node.
        """
        while not self._stopped.is_set():
            link = self._connect()
            if link is None:
                return
            with link.socket:
                try:
                    if self._take_part(link):
                        logger.info("%s has ended its engine", self._where)
                except UnreachableError as error:
                    logger.warning("%s", error)
                    self._stopped.wait(POLL)
                except (OSError, msgspec.MsgspecError) as error:
                    if not self._stopped.is_set():
                        logger.warning("lost %s: %s", self._where, str(error).lower() or "no answer in time")
                        self._stopped.wait(POLL)

    def stop(self) -> None:
        """Make ``run`` return. Called from another thread."""
        self._stopped.set()

    def _connect(self) -> NodeLink | None:
        """Wait for node 0 and connect to it. Returns None after ``stop``."""
        wait_log = WaitLog(self._options.node_timeout)
        while not self._stopped.is_set():
            try:
                return connect(self._master, self._secret)
            except SecretError as error:
                raise PenstockError(Code.INVALID, f"{self._where} {error}", "cluster_secret_file") from error
            except OSError as error:
                reason = error.strerror or str(error) or "no answer"
            if wait_log.overdue:
                timeout = f"{self._options.node_timeout:g} seconds (--node-timeout)"
                message = f"{self._where} has not answered within {timeout}: {reason.lower()}; is it started?"
                raise PenstockError(Code.UNAVAILABLE, message, "master_addr")
            wait_log.log(lambda: f"waiting for {self._where}: {reason.lower()}")  # noqa: B023
            self._stopped.wait(POLL)
        return None

    def _take_part(self, link: NodeLink) -> bool:
        """Join node 0, and run this node's ranks until the engine ends. Returns True if node 0 has ended the engine.
        Raises ``OSError`` if a node is lost."""
        link.keep_alive((self._options.engine_iteration_timeout or DEFAULT_TIMEOUT) / 2)
        listener = Listener(link.socket.getsockname()[0], 0, self._secret)
        links: Links = defaultdict(list)
        try:
            join = Join(self._options.node_rank, self._options, self._digests, socket.gethostname(), listener.port)
            link.send(encode(join))
            start = self._await_start(link)
            if start is None:
                return False
            node_options = {name: getattr(self._options, name) for name in PER_NODE_OPTIONS}
            options = msgspec.structs.replace(start.options, **node_options)
            ranks, node = all_ranks(options), options.node_rank
            addresses = [self._master, *start.addresses[1:]]
            connect_links(self._secret, start.session, ranks, node, addresses, options, links)
            accept_links(listener, start.session, ranks, node, options, links, lambda: self._check(link))
        except BaseException as error:
            close_links(links)
            if isinstance(error, UnreachableError):
                link.send(encode(Refused(str(error))))
            raise
        finally:
            listener.close()
        try:
            local = LocalRanks(options, self._logs, [rank for rank in ranks if rank.node == node], links)
        except (PenstockError, OSError) as error:
            link.send(encode(Refused(str(error))))
            raise
        link.limit = MAX_MESSAGE
        closed = False
        try:
            link.send(encode(RanksStarted([process.pid for process in local.processes])))
            closed = _Relay(link, local, self._stopped, f"{NODE_READY} {node} of {options.nnodes}").run()
        finally:
            if not closed:
                local.kill()
            local.close(send_close=False)
        return closed

    def _await_start(self, link: NodeLink) -> StartRanks | None:
        """Wait until all nodes have joined and node 0 starts the ranks. Returns None after ``stop``."""
        wait_log = WaitLog(float("inf"))
        while not self._stopped.is_set():
            try:
                message = decode(link.receive(time.monotonic() + POLL))
            except TimeoutError:
                wait_log.log(lambda: f"joined {self._where}, which waits for other nodes")
                continue
            if isinstance(message, Refused) and message.retry:
                self._stopped.wait(RETRY)
                raise NodeLostError(message.reason)
            if isinstance(message, Refused):
                raise PenstockError(Code.INVALID, f"{self._where} refuses this node: {message.reason}", "node_rank")
            if isinstance(message, StartRanks):
                return message
            raise NodeLostError(f"node 0 has sent {type(message).__name__} instead of StartRanks")
        return None

    def _check(self, link: NodeLink) -> None:
        """Raise ``NodeLostError`` after ``stop``, and if node 0 is lost."""
        if self._stopped.is_set():
            raise NodeLostError("this node was stopped")
        link.fetch()


class _Relay:
    """Relays node 0's messages to all ranks, and the ranks' messages to node 0.

    Args:
        ready: line to log once the ranks have loaded the model.
    """

    def __init__(self, link: NodeLink, local: LocalRanks, stopped: threading.Event, ready: str) -> None:
        self._link = link
        self._local = local
        self._stopped = stopped
        self._ready = ready
        self._loading = START_REPLIES * len(local.processes)
        """Number of replies still expected before all ranks have loaded the model."""
        local.poller.add_source(link)

    def run(self) -> bool:
        """Relay until the end. Returns True if node 0 has sent ``Close``; False after ``stop``, and if a rank has
        ended, which is reported to node 0. Raises ``NodeLostError``."""
        while not self._stopped.is_set():
            with contextlib.suppress(PeerLostError):  # the ended rank is reported below
                if self._from_node_0():
                    return True
                # Sending a message may fetch further messages, so wait only if no message was sent.
                if not any([self._from_rank(process) for process in self._local.processes]):
                    with contextlib.suppress(TimeoutError):
                        self._local.poller.wait(time.monotonic() + POLL)
            if ended := next((process for process in self._local.processes if process.end_reason is not None), None):
                self._link.fetch()  # raises if node 0 is lost, which is then the cause of the rank's end
                report = RankEnded(ended.rank, ended.end_reason or "", ended.returncode == LINK_LOST)
                logger.error("%s ended: %s", ended, report.reason)
                self._link.send(encode(report), deadline=time.monotonic() + POLL * 10)
                return False
        return False

    def _from_node_0(self) -> bool:
        """Handle the fetched messages of node 0. Returns True after ``Close``."""
        while taken := self._link.take():
            channel, message = taken
            if channel == ALL_RANKS:
                for process in self._local.processes:
                    process.send(message, float("inf"))  # node 0 has the deadline, and closes the connection after it
                if message == CLOSE:
                    return True
            elif isinstance(decode(message), GetProgress):
                self._link.send(encode(RankProgress(self._local.progress())))
        return False

    def _from_rank(self, process: RankProcess) -> bool:
        """Relay the messages of a rank to node 0. Returns True if the rank had sent a message."""
        relayed = False
        while process.has_message():
            relayed = True
            self._link.send(process.receive(float("inf")), process.rank)
            self._loading -= 1
            if not self._loading:
                logger.info(self._ready)
        return relayed


def run_node(options: EngineOptions, logs: LogOptions | None = None, secret: bytes | None = None) -> None:
    """Run a ``NodeProcess`` in this process. Takes its arguments, and raises its errors."""
    logger.info("node %d of %d, process %d", options.node_rank, options.nnodes, os.getpid())
    NodeProcess(options, logs, secret).run()
