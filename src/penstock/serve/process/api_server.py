"""The server of one API process: HTTP and gRPC on the supervisor's sockets. Does not import torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import uvicorn

from penstock.config.options import Configuration, ServerOptions
from penstock.config.profiles import load
from penstock.config.storage_limits import storage_limits
from penstock.core.errors import invalid
from penstock.engine.service.client import STOPPING
from penstock.tracing import start_tracer

from ..app import Storage, build
from ..dialects import kserve, paddlenlp
from ..dialects.openai.batches.routes import Batches
from ..dialects.openai.batches.worker import BatchWorker
from ..dialects.responses import Background, Stores
from ..http.access import unmatched
from ..http.middleware import tenant_of
from ..http.protocol import protocol
from ..metrics import Metrics
from ..models.manager import ModelManager
from ..models.messages import ALIVE_INTERVAL, Alive, ApiProcessStart, encode_line
from ..models.served_models import ServedModels
from . import metrics_files
from .descriptors import DescriptorWatch
from .loop_watchdog import Watchdog

logger = logging.getLogger(__name__)

ACCEPT_GRACE = 0.2
"""Seconds after SIGTERM during which established connections are still accepted."""
SECONDS_PER_DAY = 86_400.0
FLUSH_GRACE = 5.0
"""Seconds after ``drain_timeout`` for streams to send their final error."""


class Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def open_storage(configuration: Configuration, served_models: ServedModels, place: str = "") -> Storage | None:
    """Open the stores of client data; None if storage is off. Raises ``PenstockError`` if they cannot be opened.

    Args:
        place: see ``Background``.
    """
    options, engine = configuration.server, configuration.engine
    if not (options.storage_dir or options.storage_url):
        return None
    from ..storage.batches import BatchStore
    from ..storage.conversations import ConversationLimits, ConversationStore
    from ..storage.database import Database
    from ..storage.files import FileStore
    from ..storage.responses import ResponseStore
    from ..storage.usage import Quotas, Usage

    retention = options.storage_retention * SECONDS_PER_DAY
    each, total = (storage_limits(getattr(options, name), name) for name in ("storage_quota", "storage_limit"))
    quotas = Quotas(each, total, served_models.metrics.record_storage_refusal)
    database = Database(options)
    responses, usage = ResponseStore(database, retention, quotas), Usage(database)
    limits = ConversationLimits(options.max_conversation_items, options.max_conversation_bytes)
    conversations = ConversationStore(database, retention, quotas, limits)
    background = Background(served_models, Stores(responses, conversations), place)
    if not options.storage_dir:
        return Storage(responses, background, conversations, usage, None)
    folder = Path(options.storage_dir).expanduser() / "files"
    files = FileStore(database, folder, retention, options.max_file_size, quotas)
    batches = BatchStore(database, retention, quotas)
    concurrency = options.batch_concurrency or max(1, engine.max_num_seqs // 2 // options.api_server_count)
    worker = BatchWorker(served_models, batches, files, concurrency)
    return Storage(responses, background, conversations, usage, Batches(files, options.max_file_size, batches, worker))


async def _remove_expired(storage: Storage) -> None:
    """Remove expired data until cancelled."""
    from ..storage.retention import remove_expired

    batch_stores = (storage.batches.files, storage.batches.batches) if storage.batches else ()
    await remove_expired([storage.responses, storage.conversations, *batch_stores])


async def _report_alive(send: Callable[[msgspec.Struct], None]) -> None:
    """Report that the event loop runs, and check the file descriptors, until cancelled."""
    descriptors = DescriptorWatch()
    while True:
        send(Alive())
        descriptors.check()
        await asyncio.sleep(ALIVE_INTERVAL)


def log_access(options: ServerOptions) -> None:
    """Warn about entries of ``--allowed-origins`` that match no page, and about routes without API key."""
    for entry in unmatched(options.allowed_origins):
        message = "--allowed-origins: %r matches no page; an origin has the form https://ui.example.com:3000"
        logger.warning(message, entry)
    if options.admin_api_key and not options.api_key:
        logger.warning("--admin-api-key without --api-key: only routes that change the server require a key")


async def run(start: ApiProcessStart, report: BinaryIO, buffered: bytes) -> None:
    """Serve until SIGTERM.

    Args:
        report: pipe to the supervisor.
        buffered: bytes of standard input that were read after the first message.

    Raises ``PenstockError`` if the configuration is wrong.
    """
    options, drain = start.options, start.configuration.engine.drain_timeout
    profile = load(options.compat)
    metrics_files.allocate(start.number)
    try:
        metrics = Metrics(profile.metrics if profile else None, options.metrics_aliases)
    except OSError as error:
        raise metrics_files.not_writable(error) from error
    tracer = start_tracer(start.configuration.log, "api")
    if tracer:
        tracer.counts.listener = metrics.record_spans
    served_models = ServedModels(options, metrics, tracer)

    def send(message: msgspec.Struct) -> None:
        with contextlib.suppress(BrokenPipeError):
            report.write(encode_line(message))
            report.flush()

    if start.number == 0:
        log_access(options)
    storage = open_storage(start.configuration, served_models, start.place)
    if storage and len(set(options.api_key)) > 1 and start.number == 0:
        tenants = [storage.usage.public_name(tenant_of(key.encode())) for key in options.api_key]
        logger.info("tenant labels in the metrics, in the order of --api-key: %s", ", ".join(tenants))
    model_manager = ModelManager(served_models, send)
    repository = kserve.ModelRepository(served_models, model_manager, [paddlenlp.PaddleNLPModel(served_models)])
    listeners = [socket.socket(fileno=descriptor) for descriptor in start.sockets]
    health_listeners = listeners if options.port < 0 else listeners[1:]
    health_ports = frozenset(listener.getsockname()[1] for listener in health_listeners)
    http = protocol(options.client_timeout, options.max_header_size)
    server = Server(
        uvicorn.Config(
            build(served_models, repository, health_ports, start.configuration, model_manager.register, storage),
            http=http,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=4096,
            timeout_keep_alive=options.timeout_keep_alive,
            timeout_graceful_shutdown=int(drain + FLUSH_GRACE),
            ssl_certfile=options.ssl_certfile or None,
            ssl_keyfile=options.ssl_keyfile or None,
            server_header=False,
        )
    )

    try:
        server.config.load()
    except OSError as error:  # includes ssl.SSLError
        raise invalid("ssl_certfile", f"the certificate or its key cannot be used: {error}") from error

    rpc = None
    if start.grpc_address:
        from ..dialects.kserve import grpc_server as over_grpc

        rpc = over_grpc.GrpcServer(repository, start.grpc_address, options)
        await rpc.start()

    def stop() -> None:
        http.draining = True
        loop.call_later(ACCEPT_GRACE, setattr, server, "should_exit", True)
        if rpc:
            loop.call_later(ACCEPT_GRACE, rpc.stop, drain + FLUSH_GRACE)
        loop.call_later(drain, model_manager.refuse, STOPPING)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop)
    for number in (signal.SIGINT, signal.SIGHUP):  # they may reach the whole group; the supervisor handles them
        loop.add_signal_handler(number, lambda: None)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_report_alive(send))]
        tasks += [group.create_task(model_manager.listen(buffered)), group.create_task(repository.follow())]
        if storage:
            tasks.append(group.create_task(_remove_expired(storage)))
            tasks.append(group.create_task(storage.background.run()))
        if storage and storage.batches:
            tasks.append(group.create_task(storage.batches.worker.run()))
        watchdog = Watchdog(metrics.event_loop_holds)
        await server.serve(sockets=listeners)
        watchdog.close()
        for task in tasks:
            task.cancel()
    if rpc:
        await rpc.stopped()
    await model_manager.close()
    if tracer:
        await asyncio.to_thread(tracer.close)
