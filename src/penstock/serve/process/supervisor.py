"""The server's first process: it opens the ports, has engines and API processes run, and ends them."""

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
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from penstock.config.options import Configuration, ServerOptions
from penstock.core.errors import invalid

from ..models.messages import Load, ServedModel, Unload, WorkerStart
from .engines import Engines
from .workers import Workers

logger = logging.getLogger("penstock")

SO_ATTACH_FILTER = 26
"""Linux's, which Python has no name for."""
BACKLOG = 4096
"""Connections that wait to be accepted."""
TO_END = 10.0
"""Seconds beyond the time to drain after which an API process that does not end is killed."""


class Supervisor:
    """Serves models until told to stop.

    Args:
        configuration: whose server part all models share.
        models: those that there are.
        found: a configuration with its model's folder, which is fetched where it is not there.
        begun: when the command began, on the monotonic clock.
    """

    def __init__(
        self,
        configuration: Configuration,
        models: Sequence[ServedModel],
        found: Callable[[Configuration], Configuration],
        begun: float,
    ) -> None:
        self._configuration = configuration
        self._models = models
        self._found = found
        self._begun = begun
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
            starts = [self._worker(i, listeners) for i in range(options.api_server_count)]
            self._workers = Workers(starts, self._asked)
            self._engines = Engines(self._models, self._found, self._workers)
            told: asyncio.Task[object] = asyncio.create_task(self._stop.wait())
            tasks: list[asyncio.Task[object]] = [
                told,
                asyncio.create_task(self._workers.run()),
                asyncio.create_task(self._serve(listeners)),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if told in done:
                    return 0
                return 2 if self._workers.misconfigured else 1
            finally:
                self._stop.set()
                for listener in listeners:
                    turn_away(listener)
                    listener.close()
                await self._workers.close(self._configuration.engine.drain_timeout + TO_END)
                await self._engines.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _told_to_stop(self) -> None:
        if self._stop.is_set():
            logger.warning("told to stop again: stopping at once")
            self._workers.kill()
            self._engines.kill()
        else:
            logger.info("stopping: requests get %g seconds to end", self._configuration.engine.drain_timeout)
            self._stop.set()

    async def _serve(self, listeners: list[socket.socket]) -> None:
        """Load what is wanted at the start; returns when no engine can live any more."""
        facts: dict[str, object] = {}
        for model in self._models:
            if model.required and (ready := await self._engines.load(model.name)):
                facts = facts or {"kv_blocks": ready.blocks, "kernels": ready.fingerprint}
        await self._workers.wait_ready()
        facts = {"seconds": time.monotonic() - self._begun, **facts}
        options = self._configuration.server
        urls = [url_of(options, listener) for listener in listeners]
        where = f"at {urls.pop(0)}/v1" if options.port >= 0 else "without HTTP"
        names = ", ".join(name for model in self._engines.serving for name in model.names) or "no model"
        logger.info("ready: %s %s", names, where, extra={"facts": facts})
        for url in urls:
            logger.info("health and metrics at %s", url)
        if self._grpc_address:
            logger.info("gRPC at %s", self._grpc_address)
        await self._engines.lost.wait()

    async def _asked(self, asked: Load | Unload) -> None:
        """What a client wants. Raises ``PenstockError`` where it cannot be."""
        begun = time.monotonic()
        if isinstance(asked, Unload):
            await self._engines.unload(asked.name)
            logger.info("unloaded %s", asked.name, extra={"facts": {"seconds": time.monotonic() - begun}})
        elif ready := await self._engines.load(asked.name):
            facts = {"seconds": time.monotonic() - begun, "kv_blocks": ready.blocks}
            logger.info("loaded %s", asked.name, extra={"facts": facts})

    def _worker(self, number: int, listeners: list[socket.socket]) -> WorkerStart:
        return WorkerStart(
            parent=os.getpid(),
            number=number,
            configuration=self._configuration,
            sockets=tuple(listener.fileno() for listener in listeners),
            grpc_address=self._grpc_address,
        )


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
        raise invalid("grpc_port", "needs classes that are not installed; try pip install 'penstock-llm[grpc]'")
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
