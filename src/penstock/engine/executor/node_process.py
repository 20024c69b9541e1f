"""The process of a node other than the first, without a server: starts its ranks when node 0 asks it to, and passes on
what node 0 and the ranks send each other."""

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
    GetPlaces,
    Join,
    Places,
    RankEnded,
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
    OWN_OPTIONS,
    POLL,
    Links,
    Listener,
    Progress,
    UnreachableError,
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
"""Seconds until a node that could not take part yet tries again."""
START_REPLIES = 3
"""Messages of a rank while it starts: the answers to ``Load``, ``Profile`` and ``InitCache``."""


class NodeProcess:
    """A node with ``node_rank`` 1 or more.

    Args:
        options: of the engine, as on node 0; the model's folder, the weight cache, threads and cores are this node's.
        logs: how the workers set up their logs; None leaves logging alone.
        secret: of the cluster; None reads ``cluster_secret_file``.

    Raises ``PenstockError`` where the options, the secret or the checkpoint do not allow a start.
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
        """Take part in one engine of node 0 after the other until ``stop``.

        Raises ``PenstockError``: ``unavailable`` where node 0 does not answer for ``node_timeout`` seconds, ``invalid``
        where it refuses this node.
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
                        logger.warning("lost %s: %s", self._where, str(error).lower() or "it did not answer in time")
                        self._stopped.wait(POLL)

    def stop(self) -> None:
        """Have ``run`` return, from another thread."""
        self._stopped.set()

    def _connect(self) -> NodeLink | None:
        """A connection to node 0, once it answers; None after ``stop``."""
        progress = Progress(self._options.node_timeout)
        while not self._stopped.is_set():
            try:
                return connect(self._master, self._secret)
            except SecretError as error:
                raise PenstockError(Code.INVALID, f"{self._where} {error}", "cluster_secret_file") from error
            except OSError as error:
                reason = error.strerror or str(error) or "no answer"
            if progress.overdue:
                words = f"{self._where} has not answered within {self._options.node_timeout:g} seconds (--node-timeout)"
                raise PenstockError(Code.UNAVAILABLE, f"{words}: {reason.lower()}", "master_addr")
            progress.say(lambda: f"waiting for {self._where}: {reason.lower()}")  # noqa: B023
            self._stopped.wait(POLL)
        return None

    def _take_part(self, link: NodeLink) -> bool:
        """Take part in one engine. Returns whether node 0 has ended it. Raises ``OSError`` where node 0 or
        another node is lost."""
        link.keep_alive((self._options.engine_iteration_timeout or DEFAULT_TIMEOUT) / 2)
        listener = Listener(link.socket.getsockname()[0], 0, self._secret)
        links: Links = defaultdict(list)
        try:
            join = Join(self._options.node_rank, self._options, self._digests, socket.gethostname(), listener.port)
            link.send(encode(join))
            start = self._await_start(link)
            if start is None:
                return False
            own = {name: getattr(self._options, name) for name in OWN_OPTIONS}
            options = msgspec.structs.replace(start.options, **own)
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
        asked = False
        try:
            link.send(encode(RanksStarted([process.pid for process in local.processes])))
            asked = _Relay(link, local, self._stopped, f"{NODE_READY} {node} of {options.nnodes}").run()
        finally:
            if not asked:
                local.kill()
            local.close(ask=False)
        return asked

    def _await_start(self, link: NodeLink) -> StartRanks | None:
        """Wait until all nodes have joined; None after ``stop``."""
        progress = Progress(float("inf"))
        while not self._stopped.is_set():
            try:
                message = decode(link.receive(time.monotonic() + POLL))
            except TimeoutError:
                progress.say(lambda: f"joined {self._where}, which waits for other nodes")
                continue
            if isinstance(message, Refused) and message.retry:
                self._stopped.wait(RETRY)
                raise NodeLostError(message.reason)
            if isinstance(message, Refused):
                raise PenstockError(Code.INVALID, f"{self._where} refuses this node: {message.reason}", "node_rank")
            if isinstance(message, StartRanks):
                return message
            raise NodeLostError("it has sent something else than was expected")
        return None

    def _check(self, link: NodeLink) -> None:
        """Raises ``NodeLostError`` after ``stop``, and where node 0 is lost."""
        if self._stopped.is_set():
            raise NodeLostError("stopped")
        link.fetch()


class _Relay:
    """Passes on the messages of node 0 to all ranks, and those of ranks to node 0.

    Args:
        ready: what to say in the log once the ranks have loaded the model.
    """

    def __init__(self, link: NodeLink, local: LocalRanks, stopped: threading.Event, ready: str) -> None:
        self._link = link
        self._local = local
        self._stopped = stopped
        self._ready = ready
        self._loading = START_REPLIES * len(local.processes)
        """Number of messages of the ranks until they have loaded the model."""
        local.poller.add_source(link)

    def run(self) -> bool:
        """Returns True once node 0 has ended the ranks by ``Close``; False after ``stop``, and where a rank has ended,
        of which node 0 is told. Raises ``NodeLostError``."""
        while not self._stopped.is_set():
            with contextlib.suppress(PeerLostError):  # seen below
                if self._from_node_0():
                    return True
                # While one message is passed on, others may have been read.
                if not any([self._from_rank(process) for process in self._local.processes]):
                    with contextlib.suppress(TimeoutError):
                        self._local.poller.wait(time.monotonic() + POLL)
            if ended := next((process for process in self._local.processes if process.end_reason is not None), None):
                self._link.fetch()  # where node 0 is lost, that is the cause
                told = RankEnded(ended.rank, ended.end_reason or "", ended.returncode == LINK_LOST)
                logger.error("%s ended: %s", ended, told.reason)
                self._link.send(encode(told), deadline=time.monotonic() + POLL * 10)
                return False
        return False

    def _from_node_0(self) -> bool:
        """Handle what has been fetched. Returns True after ``Close``."""
        while taken := self._link.take():
            channel, message = taken
            if channel == ALL_RANKS:
                for process in self._local.processes:
                    process.send(message, float("inf"))  # until node 0 is lost
                if message == CLOSE:
                    return True
            elif isinstance(decode(message), GetPlaces):
                self._link.send(encode(Places(self._local.places())))
        return False

    def _from_rank(self, process: RankProcess) -> bool:
        """Pass on the messages of a rank. Returns whether there were any."""
        passed_on = False
        while process.has_message():
            passed_on = True
            self._link.send(process.receive(float("inf")), process.rank)
            self._loading -= 1
            if not self._loading:
                logger.info(self._ready)
        return passed_on


def run_node(options: EngineOptions, logs: LogOptions | None = None, secret: bytes | None = None) -> None:
    """Be a node until this process is told to end; arguments and errors as for ``NodeProcess``."""
    logger.info("node %d of %d, process %d", options.node_rank, options.nnodes, os.getpid())
    NodeProcess(options, logs, secret).run()
