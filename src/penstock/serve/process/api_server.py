"""Serving HTTP in one process, on a socket that the supervisor opened. It knows text, no model, and loads no torch."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import BinaryIO

import uvicorn

from penstock.config.profiles import load
from penstock.core.errors import invalid
from penstock.engine.service.client import STOPPING

from ..app import build
from ..dialects import kserve, paddlenlp
from ..http.protocol import protocol
from ..metrics import Metrics
from ..models.manager import ModelManager
from ..models.messages import WorkerStart
from ..models.registry import ModelRegistry
from .loop_watchdog import Watchdog

TO_ACCEPT = 0.2
"""Seconds in which connections that had been made when the server was told to stop are accepted."""
LAST_WORDS = 5.0
"""Seconds that streams get to say that the server is stopping, after the time to drain."""


class Server(uvicorn.Server):
    """uvicorn, which leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(start: WorkerStart, report: BinaryIO, heard: bytes) -> None:
    """Serve until told to stop; lines in the report say which models' requests are welcome.

    Args:
        heard: what has been read of standard input after the first line.

    Raises ``PenstockError`` with one sentence where the configuration does not allow it.
    """
    options, drain = start.options, start.configuration.engine.drain_timeout
    profile = load(options.compat)
    metrics = Metrics(profile.metrics if profile else None)
    registry = ModelRegistry(options, metrics)
    model_manager = ModelManager(registry, report)
    models = kserve.ModelRepository(registry, model_manager, [paddlenlp.PaddleNLPModel(registry)])
    listeners = [socket.socket(fileno=descriptor) for descriptor in start.sockets]
    only_state = listeners if options.port < 0 else listeners[1:]
    state_ports = frozenset(listener.getsockname()[1] for listener in only_state)
    server = Server(
        uvicorn.Config(
            build(registry, models, state_ports),
            http=protocol(options.client_timeout, options.max_header_size),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=4096,
            timeout_keep_alive=options.timeout_keep_alive,
            timeout_graceful_shutdown=int(drain + LAST_WORDS),
            ssl_certfile=options.ssl_certfile or None,
            ssl_keyfile=options.ssl_keyfile or None,
            server_header=False,
        )
    )

    try:
        server.config.load()
    except OSError as error:  # ssl's own are of this kind
        raise invalid("ssl_certfile", f"the certificate or its key cannot be used: {error}") from error

    rpc = None
    if start.grpc_address:
        from ..dialects.kserve import grpc_server as over_grpc

        rpc = over_grpc.Server(models, start.grpc_address, options)
        await rpc.start()

    def stop() -> None:
        loop.call_later(TO_ACCEPT, setattr, server, "should_exit", True)
        if rpc:
            loop.call_later(TO_ACCEPT, rpc.stop, drain + LAST_WORDS)
        loop.call_later(drain, model_manager.refuse, STOPPING)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # a terminal's goes to the whole group; the supervisor decides
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(model_manager.listen(heard)), group.create_task(models.follow())]
        watchdog = Watchdog(metrics.event_loop_holds)
        await server.serve(sockets=listeners)
        watchdog.close()
        for task in tasks:
            task.cancel()
    if rpc:
        await rpc.stopped()
    await model_manager.close()
