"""A replica on Ray: one process that is both supervisor and API process of a model, and a separate engine process."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import ray
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.cli.serve import download_model
from penstock.cli.served_models import served_models
from penstock.config import logs, secrets
from penstock.config.options import Configuration
from penstock.config.profiles import load
from penstock.core import Code, PenstockError
from penstock.engine.executor.ray_executor import PLACEMENT_GROUP
from penstock.engine.service.engine_processes import EngineProcesses
from penstock.frontend.gateway import Gateway
from penstock.serve.models.messages import Failed, ModelEntry, Ready
from penstock.serve.process.metrics_files import metrics_folder
from penstock.tracing import start_tracer

from .autoscaling import autoscaling_stats

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's environment variable with the configuration of a driver process. The engine of a replica is a driver."""

if TYPE_CHECKING:
    from penstock.serve.models.manager import ModelManager
    from penstock.tracing import Tracer


class Replica:
    """A model with its engine and the server's ASGI application. Create and use it in one event loop."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._resources = ExitStack()
        self._engines: EngineProcesses | None = None
        self._manager: ModelManager | None = None
        self._tracer: Tracer | None = None

    async def start(self) -> None:
        """Start the engine; returns when it accepts requests. Raises ``PenstockError`` if it cannot start."""
        secrets.register(self._configuration)
        logs.set_up(self._configuration.log, "replica")
        try:
            self._resources.enter_context(metrics_folder())
            (model,) = served_models(self._configuration)
            configuration = await asyncio.to_thread(download_model, self._configuration)
            if group := ray.util.get_current_placement_group():
                context = ray.get_runtime_context()
                os.environ |= {
                    PLACEMENT_GROUP: group.id.hex(),
                    "RAY_ADDRESS": context.gcs_address,
                    JOB_CONFIG: json.dumps({"runtime_env": context.runtime_env}),
                }
            self._engines = EngineProcesses(configuration.engine, configuration.log)
            await self._engines.start()
            self._watch = asyncio.create_task(self._engines.watch())
            await self._serve(
                msgspec.structs.replace(model, configuration=configuration, engines=self._engines.addresses)
            )
        except BaseException:
            await self.close()
            raise

    async def _serve(self, model: ModelEntry) -> None:
        # Imported after metrics_folder, which selects the multiprocess mode of the metrics library.
        from penstock.serve.app import build
        from penstock.serve.dialects import kserve, paddlenlp
        from penstock.serve.metrics import Metrics
        from penstock.serve.models.manager import ModelManager
        from penstock.serve.models.served_models import ServedModels

        options = model.configuration.server
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_message(message: msgspec.Struct) -> None:
            if isinstance(message, Failed):
                ready.set_exception(PenstockError.of(message.failure))
            elif isinstance(message, Ready):
                ready.set_result(None)

        profile = load(options.compat)
        metrics = Metrics(profile.metrics if profile else None, options.metrics_aliases)
        self._tracer = start_tracer(model.configuration.log, "replica")
        if self._tracer:
            self._tracer.counts.listener = metrics.record_spans
        served = ServedModels(options, metrics, self._tracer)
        self._manager = manager = ModelManager(served, on_message, unloads=False)
        repository = kserve.ModelRepository(served, manager, [paddlenlp.PaddleNLPModel(served)])
        await manager.update((model,))
        await ready
        (service,) = served
        self.gateway: Gateway = service.gateway
        self.app: ASGIApp = _ServeAdapter(build(served, repository))

    @property
    def autoscaling_stats(self) -> dict[str, float]:
        return autoscaling_stats(self.gateway.engine_pool.stats)

    def check(self) -> None:
        """Raise ``PenstockError`` if the engine has died too often and is not restarted. During a restart of the
        engine, the replica counts as healthy."""
        if self._watch.done():
            raise PenstockError(Code.UNAVAILABLE, "the engine has died too often and is not restarted: see its log")

    async def close(self) -> None:
        """Stop the engine after open requests have finished."""
        if self._engines:
            await self._engines.close()
        if self._manager:
            await self._manager.close()
        if self._tracer:
            await asyncio.to_thread(self._tracer.close)
        self._resources.close()


class _ServeAdapter:
    """Middleware for Ray Serve. Removes the application's ``route_prefix`` from paths, which Ray Serve passes in the
    path and in ``root_path``; removes ``X-Request-Id`` from responses, as Ray Serve adds it again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        prefix = scope.get("root_path", "")
        if prefix and scope["path"].startswith(prefix):
            scope = {**scope, "path": scope["path"].removeprefix(prefix) or "/", "root_path": ""}

        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_without_id)


async def _lifespan(receive: Receive, send: Send) -> None:
    """Acknowledge lifespan events: the replica starts and stops its engine."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
