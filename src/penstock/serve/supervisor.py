"""The server's first process: it starts the engine and the API processes, and starts again what dies."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec

from penstock.core.errors import invalid
from penstock.core.options import Configuration, ServerOptions
from penstock.core.profiles import load
from penstock.engine.launcher import Deaths, EngineProcess, end, in_words

from .start import WRONG, WorkerStart

logger = logging.getLogger("penstock")

SO_ATTACH_FILTER = 26
"""Linux's, which Python has no name for."""
BACKLOG = 4096
"""Connections that wait to be accepted."""
TO_END = 10.0
"""Seconds beyond the time to drain after which an API process that does not end is killed."""


class Supervisor:
    """Serves a model until told to stop.

    Args:
        configuration: whose model is a folder.
        names: under which clients ask for it.
        begun: when the command began, on the monotonic clock.
    """

    def __init__(self, configuration: Configuration, names: tuple[str, ...], begun: float) -> None:
        self._configuration = configuration
        self._names = names
        self._begun = begun
        self._engine = EngineProcess(configuration.engine, configuration.log)
        self._workers: dict[int, Process] = {}
        self._met: dict[int, asyncio.Event] = {i: asyncio.Event() for i in range(configuration.server.api_server_count)}
        """Set once the API process of this number has met the engine."""
        self._stop = asyncio.Event()
        self._grpc_address = ""

    async def run(self) -> int:
        """Returns the exit status: 0 when told to stop, 1 when a process has died too often, 2 when one cannot start.

        Raises ``PenstockError`` with one sentence where the server cannot start.
        """
        options = self._configuration.server
        check_certificate(options)
        raise_file_limit()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._told_to_stop)
        with metrics_folder(), listening(options) as listeners, reserved(options) as self._grpc_address:
            told: asyncio.Task[object] = asyncio.create_task(self._stop.wait())
            tasks: list[asyncio.Task[object]] = [
                asyncio.create_task(self._keep(i, listeners)) for i in range(options.api_server_count)
            ]
            tasks += [told, asyncio.create_task(self._run_engine(listeners))]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if told in done:
                    return 0
                return 2 if any(worker.returncode == WRONG for worker in self._workers.values()) else 1
            finally:
                self._stop.set()
                for listener in listeners:
                    turn_away(listener)
                    listener.close()
                patience = self._configuration.engine.drain_timeout + TO_END
                await asyncio.gather(*(end(worker, patience) for worker in self._workers.values()))
                await self._engine.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _told_to_stop(self) -> None:
        if self._stop.is_set():
            logger.warning("told to stop again: stopping at once")
            for worker in self._workers.values():
                with contextlib.suppress(ProcessLookupError):
                    worker.kill()
            self._engine.kill()
        else:
            logger.info("stopping: requests get %g seconds to end", self._configuration.engine.drain_timeout)
            self._stop.set()

    async def _run_engine(self, listeners: list[socket.socket]) -> None:
        """Returns when the engine dies too often."""
        ready = await self._engine.start()
        await asyncio.gather(*(met.wait() for met in self._met.values()))
        if (profile := load(self._configuration.server.compat)) and (
            greeting := profile.greeting(ready.blocks, self._configuration.engine)
        ):
            logger.info(greeting)
        facts = {"seconds": time.monotonic() - self._begun, "kv_blocks": ready.blocks, "kernels": ready.fingerprint}
        options, names = self._configuration.server, ", ".join(self._names)
        urls = [url_of(options, listener) for listener in listeners]
        where = f"at {urls.pop(0)}/v1" if options.port >= 0 else "without HTTP"
        logger.info("ready: %s %s", names, where, extra={"facts": facts})
        for url in urls:
            logger.info("health and metrics at %s", url)
        if self._grpc_address:
            logger.info("gRPC at %s", self._grpc_address)
        await self._engine.watch()

    async def _keep(self, number: int, listeners: list[socket.socket]) -> None:
        """Run an API process, and another when it dies; returns when they die too often."""
        deaths = Deaths()
        while True:
            worker = self._workers[number] = await self._launch(number, listeners)
            assert worker.stdout is not None
            if await worker.stdout.readline():
                self._met[number].set()
            status = await worker.wait()
            if status == WRONG:  # it has said why
                return
            if self._stop.is_set():
                await asyncio.Event().wait()
            _forget(worker.pid)
            logger.error("API process %d (process %d) ended: %s", number, worker.pid, in_words(status))
            if deaths.too_many():
                logger.error("API processes have died too often and are not started again")
                return

    async def _launch(self, number: int, listeners: list[socket.socket]) -> Process:
        start = WorkerStart(
            parent=os.getpid(),
            number=number,
            configuration=self._configuration,
            names=self._names,
            engine=self._engine.address,
            sockets=tuple(listener.fileno() for listener in listeners),
            grpc_address=self._grpc_address,
        )
        command = [sys.executable, "-m", "penstock.serve.worker"]
        worker = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, pass_fds=start.sockets)
        assert worker.stdin is not None
        worker.stdin.write(msgspec.json.encode(start))
        worker.stdin.close()
        return worker


@contextlib.contextmanager
def listening(options: ServerOptions) -> Iterator[list[socket.socket]]:
    """Sockets that accept connections, so that none is refused while API processes start, or start again: the first for
    everything, unless HTTP is off, others for how the server is doing.

    Raises ``PenstockError`` (``invalid``) where an address cannot be had.
    """
    ports = {"port": options.port, "health_port": options.health_port, "metrics_port": options.metrics_port}
    if options.health_port == options.metrics_port > 0:
        del ports["metrics_port"]  # one listener tells both
    with contextlib.ExitStack() as stack:
        wanted = [(name, port) for name, port in ports.items() if port >= 0]
        yield [stack.enter_context(_listen(options.host, port, name)) for name, port in wanted]


def _listen(host: str, port: int, name: str, listen: bool = True) -> socket.socket:
    """A socket that has the address; ``listen`` accepts connections there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if listen:
            return socket.create_server(address, family=family, backlog=BACKLOG)
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a server before may linger
            bound.bind(address)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            bound.close()
            raise
        return bound
    except OSError as error:
        words = error.strerror or str(error)
        flag = f"--{name.replace('_', '-')}"
        raise invalid(name, f"cannot listen on {host}:{port}: {words.lower()}; try another {flag}") from error


@contextlib.contextmanager
def reserved(options: ServerOptions) -> Iterator[str]:
    """Where API processes listen for gRPC, each with a socket of its own on one port; nothing where none does.

    gRPC takes no sockets that others have opened. So one that never listens keeps the port: it is bound to it alone, by
    which a port that is taken is found, and then lets others share it.

    Raises ``PenstockError`` (``invalid``) where the address cannot be had, or gRPC's classes are not installed.
    """
    if options.grpc_port < 0:
        yield ""
        return
    if find_spec("tritonclient") is None or find_spec("grpc") is None:
        raise invalid("grpc_port", "needs classes that are not installed; try pip install 'penstock[grpc]'")
    with _listen(options.host, options.grpc_port, "grpc_port", listen=False) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        host, port = kept.getsockname()[:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def turn_away(listener: socket.socket) -> None:
    """From now on no connection is made, and none that was made breaks.

    Closing alone resets connections that nobody has accepted yet, of clients who may have sent their request. So the
    first packet of a new one is dropped by a filter, those made before are accepted in the meantime, and the dropped
    packet's repetition, a second later, finds the port closed. Where there are no such filters, closing must do.
    """
    load_byte, jump_if_set, give_back = 0x30, 0x45, 0x06  # classic BPF (McCanne and Jacobson, 1993)
    flags, syn, drop, keep = 13, 0x02, 0, 0xFFFFFFFF
    steps = [(load_byte, 0, 0, flags), (jump_if_set, 0, 1, syn), (give_back, 0, 0, drop), (give_back, 0, 0, keep)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    with contextlib.suppress(OSError):
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(steps), ctypes.addressof(program))
        )


@contextlib.contextmanager
def metrics_folder() -> Iterator[None]:
    """Where API processes count together: they know it by the environment."""
    with tempfile.TemporaryDirectory(prefix="penstock-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        yield


def check_certificate(options: ServerOptions) -> None:
    """Raises ``PenstockError`` (``invalid``) where a file of the certificate is not there."""
    if options.ssl_keyfile and not options.ssl_certfile:
        raise invalid("ssl_certfile", "is missing; give it with ssl_keyfile")
    for name in ("ssl_certfile", "ssl_keyfile"):
        if (path := getattr(options, name)) and not Path(path).is_file():
            raise invalid(name, f"{path} is no file")


def url_of(options: ServerOptions, listener: socket.socket) -> str:
    """Where a client on this machine finds it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(options.host, options.host)
    if ":" in host:
        host = f"[{host}]"
    return f"{'https' if options.ssl_certfile else 'http'}://{host}:{listener.getsockname()[1]}"


def raise_file_limit() -> None:
    """As many open files as are allowed: a connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _forget(pid: int) -> None:
    """What a dead process counts no more: how many requests it has open."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(pid)
