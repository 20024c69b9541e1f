"""The supervisor: opens the ports, and starts and stops engine processes and API processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import resource
import secrets
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from penstock.config.options import Configuration, ServerOptions
from penstock.core.errors import invalid
from penstock.engine.executor.cluster_secret import read_secret
from penstock.frontend.mcp import check_installed, load_mcp_config
from penstock.tracing import check as check_tracing

from ..models.messages import (
    ApiProcessStart,
    Idle,
    ModelEntry,
    Operate,
    Register,
    Request,
    SetKeepAlive,
    Unload,
    Wake,
)
from .api_processes import ApiProcesses
from .instances import Instances
from .metrics_files import metrics_folder
from .registration import stay_registered
from .server_record import RecordFile
from .supervised_models import SupervisedModels

logger = logging.getLogger("penstock")

SO_ATTACH_FILTER = 26
"""Linux socket option that Python's ``socket`` does not define."""
BACKLOG = 4096
"""Maximum number of connections waiting to be accepted."""
RECORD_INTERVAL = 0.5
"""Seconds between two updates of the server's record."""
KILL_TIMEOUT = 10.0
"""Seconds after ``drain_timeout`` after which a running API process is killed."""


class Supervisor:
    """Serves models until SIGTERM.

    Args:
        configuration: configuration of the server; its ``server`` section applies to all models.
        models: all models, loaded or not.
        fetch: downloads the model if needed; returns the configuration with a local folder as ``engine.model``.
        started: start time of the command, on the monotonic clock.
        record: record of the server for ``penstock ps``.
    """

    def __init__(
        self,
        configuration: Configuration,
        models: Sequence[ModelEntry],
        fetch: Callable[[Configuration], Configuration],
        started: float,
        record: RecordFile,
    ) -> None:
        self._configuration = configuration
        self._entries = models
        self._fetch = fetch
        self._started = started
        self._record = record
        self._is_ready = False
        """True once the required models are loaded."""
        self._stop = asyncio.Event()
        self._grpc_address = ""
        self._instances: Instances | None = None
        self._registration: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Run until SIGTERM. Returns the exit status: 0 after SIGTERM, 1 if a process died too often, 2 if an API
        process is misconfigured.

        Raises ``PenstockError`` if the server cannot start.
        """
        options = self._configuration.server
        check_certificate(options)
        check_storage(options)
        check_tracing(self._configuration.log)
        if options.mcp_config:
            load_mcp_config(options.mcp_config)
        if options.allow_mcp_urls:
            check_installed("allow_mcp_urls")
        raise_file_limit()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        if not os.isatty(0):  # a terminal that is closed sends SIGHUP, too: the server then ends with it
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._restart_engines)
        with (
            metrics_folder(),
            listening_sockets(options) as listeners,
            reserved_grpc_address(options) as self._grpc_address,
        ):
            starts = [self._api_process_start(i, listeners) for i in range(options.api_server_count)]
            self._api_processes = ApiProcesses(starts, self._handle)
            if self._configuration.engine.role == "router" or options.prefill_instances:
                self._instances = Instances(
                    self._entries[0].configuration, lambda used: self._models.set_instances(used)
                )
            self._models = SupervisedModels(self._entries, self._fetch, self._api_processes, self._instances)
            self._record.update(url=url_of(options, listeners[0]) if options.port >= 0 else "")
            self._record.update(grpc_address=self._grpc_address)
            stopped: asyncio.Task[object] = asyncio.create_task(self._stop.wait())
            tasks: list[asyncio.Task[object]] = [
                stopped,
                asyncio.create_task(self._keep_record()),
                asyncio.create_task(self._api_processes.run()),
                asyncio.create_task(self._serve(listeners)),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if stopped in done:
                    return 0
                return 2 if self._api_processes.misconfigured else 1
            finally:
                self._stop.set()
                self._update_record()
                if self._registration:
                    self._registration.cancel()
                    await asyncio.gather(self._registration, return_exceptions=True)
                if self._restarting:
                    self._restarting.cancel()
                for listener in listeners:
                    stop_accepting(listener)
                    listener.close()
                await self._api_processes.close(self._configuration.engine.drain_timeout + KILL_TIMEOUT)
                await self._models.close()
                if self._restarting:
                    await asyncio.gather(self._restarting, return_exceptions=True)
                if self._instances:
                    await self._instances.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            logger.warning("second signal: killing all processes")
            self._api_processes.kill()
            self._models.kill()
        else:
            logger.info(
                "stopping: waiting up to %g seconds for open requests", self._configuration.engine.drain_timeout
            )
            self._models.stop_restarting()
            self._stop.set()

    async def _keep_record(self) -> None:
        """Update the server's record until cancelled."""
        while True:
            self._update_record()
            self._record.refresh()
            await asyncio.sleep(RECORD_INTERVAL)

    def _update_record(self) -> None:
        models = self._models.states
        loaded = set(models.values()) - {"unloaded", "unloading"}
        state = "sleeping" if loaded == {"sleeping"} else "starting"
        if "ready" in loaded or not loaded:
            state = "ready"
        if not self._is_ready:
            state = "starting"
        if self._stop.is_set():
            state = "draining"
        self._record.update(models=models, state=state, device=self._models.device or self._record.record.device)

    def _restart_engines(self) -> None:
        """Replace the engine processes (SIGHUP)."""
        if self._stop.is_set() or (self._restarting and not self._restarting.done()):
            logger.info("SIGHUP is ignored: the server is stopping, or is restarting its engines already")
            return
        if self._configuration.engine.role == "router":
            logger.info("SIGHUP is ignored: a router has no engines")
            return
        logger.info("SIGHUP: restarting the engines")
        self._restarting = asyncio.create_task(self._models.restart())

    async def _serve(self, listeners: list[socket.socket]) -> None:
        """Load the required models. Returns when the last engine has exceeded its restart limit."""
        fields: dict[str, object] = {}
        if self._configuration.engine.role == "router":
            logger.info("waiting for instances at %s", url_of(self._configuration.server, listeners[0]))
        for model in self._entries:
            if model.required and (ready := await self._models.load(model.name)):
                fields = fields or {"kv_blocks": ready.num_blocks, "kernels": ready.fingerprint}
        await self._api_processes.wait_ready()
        self._is_ready = True
        self._update_record()
        fields = {"seconds": time.monotonic() - self._started, **fields}
        options = self._configuration.server
        urls = [url_of(options, listener) for listener in listeners]
        page = f" (web page: {urls[0]}/)" if options.web and options.port >= 0 else ""
        address = f"at {urls.pop(0)}/v1{page}" if options.port >= 0 else "without HTTP"
        names = ", ".join(name for model in self._models.serving for name in model.names) or "no model"
        logger.info("ready: %s %s", names, address, extra={"fields": fields})
        for url in urls:
            logger.info("health and metrics at %s", url)
        if self._grpc_address:
            logger.info("gRPC at %s", self._grpc_address)
        if options.router_address:
            secret = read_secret(self._configuration.engine.cluster_secret_file, make=True)
            registering = stay_registered(options.router_address, secret, lambda: self._models.reports)
            self._registration = asyncio.create_task(registering)
        await self._models.lost.wait()

    async def _handle(self, request: Request) -> None:
        """Execute a request of an API process. Raises ``PenstockError`` if the request fails."""
        started = time.monotonic()
        match request:
            case Register(_, name, engines, leaves):
                if self._instances:
                    self._instances.register(name, engines, leaves)
            case Operate(_, name, operation):
                await self._models.operate(name, operation)
            case Wake(_, name):
                await self._models.wake(name)
            case Idle(_, name):
                await self._models.unload_idle(name)
            case SetKeepAlive(_, name, seconds):
                self._models.set_keep_alive(name, seconds)
            case Unload(_, name):
                await self._models.unload(name)
                logger.info("unloaded %s", name, extra={"fields": {"seconds": time.monotonic() - started}})
            case _:
                if ready := await self._models.load(request.name):
                    fields = {"seconds": time.monotonic() - started, "kv_blocks": ready.num_blocks}
                    logger.info("loaded %s", request.name, extra={"fields": fields})

    def _api_process_start(self, number: int, listeners: list[socket.socket]) -> ApiProcessStart:
        return ApiProcessStart(
            parent=os.getpid(),
            number=number,
            place=secrets.token_hex(8),
            configuration=self._configuration,
            sockets=tuple(listener.fileno() for listener in listeners),
            grpc_address=self._grpc_address,
        )


@contextlib.contextmanager
def listening_sockets(options: ServerOptions) -> Iterator[list[socket.socket]]:
    """Open the listening sockets. They stay open while API processes (re)start, so that no connection is refused.

    The first socket serves every path (unless ``port`` is -1), the other sockets only health and metrics.

    Raises ``PenstockError`` (``invalid``) if an address cannot be bound.
    """
    ports = {"port": options.port, "health_port": options.health_port, "metrics_port": options.metrics_port}
    if options.health_port == options.metrics_port > 0:
        del ports["metrics_port"]  # one listener serves both options
    with contextlib.ExitStack() as stack:
        enabled = [(name, port) for name, port in ports.items() if port >= 0]
        yield [stack.enter_context(_listen(options.host, port, name)) for name, port in enabled]


def _listen(host: str, port: int, name: str, listen: bool = True) -> socket.socket:
    """Bind a socket to the address; with ``listen`` it accepts connections."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if listen:
            return socket.create_server(address, family=family, backlog=BACKLOG)
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Connections of a previous server may be in TIME_WAIT.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            bound.close()
            raise
        return bound
    except socket.gaierror as error:
        message = f"{host} cannot be resolved ({(error.strerror or str(error)).lower()})"
        raise invalid("host", f"{message}; use an address of this machine, such as 127.0.0.1 or 0.0.0.0") from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        flag = "--host" if error.errno == errno.EADDRNOTAVAIL else f"--{name.replace('_', '-')}"
        raise invalid(name, f"cannot listen on {host}:{port}: {reason.lower()}; use another {flag}") from error


@contextlib.contextmanager
def reserved_grpc_address(options: ServerOptions) -> Iterator[str]:
    """Reserve the address on which every API process opens a gRPC socket; empty without gRPC.

    gRPC cannot use existing sockets, so the port is reserved by a socket that never listens. It is bound exclusively,
    which detects a port in use, and then gets ``SO_REUSEPORT``.

    Raises ``PenstockError`` (``invalid``) if the address cannot be bound, or gRPC is not installed.
    """
    if options.grpc_port < 0:
        yield ""
        return
    if find_spec("tritonclient") is None or find_spec("grpc") is None:
        raise invalid("grpc_port", "requires packages that are not installed: pip install 'penstock-llm[grpc]'")
    with _listen(options.host, options.grpc_port, "grpc_port", listen=False) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        host, port = bound.getsockname()[:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def stop_accepting(listener: socket.socket) -> None:
    """Refuse new connections without resetting those that are established but not accepted yet.

    Closing a socket resets the connections in its backlog, although their clients may have sent a request. A packet
    filter therefore drops SYN packets while the API processes accept the backlog; the client retries the SYN a second
    later, when the port is closed. Does nothing if packet filters are not available.
    """
    load_byte, jump_if_set, return_value = 0x30, 0x45, 0x06  # classic BPF (McCanne and Jacobson, 1993)
    flags, syn, drop, keep = 13, 0x02, 0, 0xFFFFFFFF
    steps = [(load_byte, 0, 0, flags), (jump_if_set, 0, 1, syn), (return_value, 0, 0, drop), (return_value, 0, 0, keep)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    with contextlib.suppress(OSError):
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(steps), ctypes.addressof(program))
        )


def check_certificate(options: ServerOptions) -> None:
    """Raise ``PenstockError`` (``invalid``) if a certificate or key file is missing, or a key is set without
    certificate."""
    if options.ssl_keyfile and not options.ssl_certfile:
        raise invalid("ssl_certfile", "is missing; ssl_keyfile requires it")
    for name in ("ssl_certfile", "ssl_keyfile"):
        if (path := getattr(options, name)) and not Path(path).is_file():
            raise invalid(name, f"{path} is not a file: give the path of a PEM file")


def check_storage(options: ServerOptions) -> None:
    """Raise ``PenstockError`` (``invalid``) if storage is on and a package that it requires is not installed."""
    name = "storage_dir" if options.storage_dir else "storage_url"
    missing = [module for module in ("sqlalchemy", "python_multipart") if find_spec(module) is None]
    if getattr(options, name) and missing:
        raise invalid(name, f"requires {missing[0]}, which is not installed: pip install 'penstock-llm[storage]'")


def url_of(options: ServerOptions, listener: socket.socket) -> str:
    """URL of a listener for clients on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(options.host, options.host)
    if ":" in host:
        host = f"[{host}]"
    return f"{'https' if options.ssl_certfile else 'http'}://{host}:{listener.getsockname()[1]}"


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit: each connection needs a file descriptor."""
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
