"""Serving HTTP in one process, on a socket that the supervisor opened. It knows text, no model, and loads no torch."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Iterator
from typing import BinaryIO

import uvicorn

from penstock.core.errors import invalid
from penstock.core.profiles import load
from penstock.engine.client import STOPPING
from penstock.frontend.gateway import Gateway
from penstock.frontend.prompts import Preparer

from . import kserve, paddlenlp
from .app import build
from .metrics import Metrics
from .protocol import protocol
from .service import Service
from .start import WorkerStart

TO_ACCEPT = 0.2
"""Seconds in which connections that had been made when the server was told to stop are accepted."""
LAST_WORDS = 5.0
"""Seconds that streams get to say that the server is stopping, after the time to drain."""


class Server(uvicorn.Server):
    """uvicorn, which leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(start: WorkerStart, report: BinaryIO) -> None:
    """Serve until told to stop; a line in the report says when requests are welcome.

    Raises ``PenstockError`` with one sentence where the configuration does not allow it.
    """
    configuration = start.configuration
    options, drain = configuration.server, configuration.engine.drain_timeout
    preparer = Preparer(configuration.engine.model, configuration.model)
    preparer.tokenizer.check_template()
    gateway = Gateway(start.engine, preparer)
    profile = load(options.compat)
    metrics = Metrics(start.names[0], configuration.engine, profile.metrics if profile else None)
    service = Service(gateway, options, start.names, metrics)
    models = kserve.registry_of(service, paddlenlp.OverGrpc(service))
    listeners = [socket.socket(fileno=descriptor) for descriptor in start.sockets]
    state_ports = frozenset(listener.getsockname()[1] for listener in listeners[1:])
    server = Server(
        uvicorn.Config(
            build(service, models, state_ports),
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
        from .kserve import rpc as over_grpc

        rpc = over_grpc.Server(models, start.grpc_address, options)
        await rpc.start()

    async def tell() -> None:
        await gateway.engine.ready()
        with contextlib.suppress(BrokenPipeError), report:
            report.write(b"ready\n")

    def stop() -> None:
        loop.call_later(TO_ACCEPT, setattr, server, "should_exit", True)
        if rpc:
            loop.call_later(TO_ACCEPT, rpc.stop, drain + LAST_WORDS)
        loop.call_later(drain, gateway.engine.refuse, STOPPING)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # a terminal's goes to the whole group; the supervisor decides
    _ = preparer.tokenizer.vocabulary  # made now, while the engine reads its weights, not when the first request comes
    telling = asyncio.create_task(tell())
    gc.freeze()  # what is there now stays, and need not be looked through again and again
    gc.enable()
    await server.serve(sockets=listeners)
    telling.cancel()
    if rpc:
        await rpc.stopped()
    await gateway.close()
