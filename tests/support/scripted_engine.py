"""A server in the test's event loop with an engine that returns scripted tokens in scripted steps.

HTTP, dialects, chat template, tokenizer and parsers are the real server's.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import httpx2
import openai
from prometheus_client import REGISTRY

from penstock import demo
from penstock.config.options import Configuration, ModelOptions, ServerOptions
from penstock.core import EngineRequest, FinishReason, TokenDelta
from penstock.engine.service.messages import Ready
from penstock.engine.service.pool import EnginePool
from penstock.frontend.gateway import Gateway
from penstock.frontend.input_processor import InputProcessor
from penstock.serve.app import build
from penstock.serve.dialects.kserve import ModelRepository
from penstock.serve.metrics import Metrics
from penstock.serve.models.keep_alive import KeepAlive
from penstock.serve.models.manager import ModelManager
from penstock.serve.models.messages import ModelEntry
from penstock.serve.models.served_models import ServedModels
from penstock.serve.process.api_server import open_storage

READY = Ready(1, 1 << 20, 8192, 1 << 16, 16, "scripted", True, {})


def clear_registry() -> None:
    """Remove all metrics of this process, so that another application can be built in it."""
    for collector in list(REGISTRY._collector_to_names):
        REGISTRY.unregister(collector)


class ScriptedEngines(EnginePool):
    """Engine pool that answers each request with the token ids of ``steps`` and the finish reason ``finished``."""

    def __init__(self, gateway: Gateway) -> None:
        ignore = lambda *arguments: None  # noqa: E731
        super().__init__((), ignore, ignore, lambda name: (), ignore, ignore, dict, ignore, 0)
        self._gateway = gateway
        self._tasks: set[asyncio.Task[None]] = set()
        self.requests: list[EngineRequest] = []
        """Requests received so far."""
        self.steps: Sequence[list[int]] = ()
        self.finished = FinishReason.STOP

    def require_engine(self) -> Ready:
        return READY

    def add(self, request: EngineRequest) -> None:
        self.requests.append(request)
        task = asyncio.create_task(self._answer(request.request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, name: str) -> None:
        for i, step in enumerate(self.steps):
            last = i == len(self.steps) - 1
            delta = TokenDelta(request_id=name, token_ids=step, finished=self.finished if last else None)
            inbox = self._gateway._open.get(name)
            if inbox is None:  # the client has disconnected
                return
            self._gateway._on_deltas([delta], "")
            while inbox.size and name in self._gateway._open:  # wait until the step is read: steps must not be joined
                await asyncio.sleep(0)

    def release(self, request_id: str, abort: bool, output: list[int] | None = None) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def finish_sequence(self, request_id: str, sequence: int) -> None: ...
    def pause(self, request_id: str, paused: bool) -> None: ...


class ScriptedServer:
    """The server with its clients ``http``, ``openai`` and ``anthropic``, and its engine pool ``engines``."""

    def __init__(self, model: str, options: ModelOptions, server_options: ServerOptions) -> None:
        clear_registry()
        self.input_processor = InputProcessor(model, options)
        gateway = Gateway((), self.input_processor)
        gateway.engine_pool = self.engines = ScriptedEngines(gateway)
        served_models = ServedModels(server_options, Metrics())
        served = ModelEntry(names=("default",), configuration=Configuration(), kserve={"ensemble": "ensemble"})
        served_models.set_models((served,))
        self.served = served_models.add(served, gateway, KeepAlive(gateway.engine_pool))
        self.body_memory = served_models.body_memory
        self._gateway = gateway
        self.thinking = self.hide_reasoning = self.single_tool_call = False
        """Options of a test's requests: enable reasoning, omit it from the response, at most one tool call."""
        repository = ModelRepository(served_models, ModelManager(served_models, io.BytesIO()))
        storage = open_storage(Configuration(server=server_options), served_models)
        app: Any = build(served_models, repository, storage=storage)
        transport: dict[str, Any] = {"base_url": "http://scripted", "timeout": 60}
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), **transport)
        http2 = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), **transport)
        self.openai = openai.AsyncOpenAI(base_url="http://scripted/v1", api_key="none", http_client=self.http)
        self.anthropic = anthropic.AsyncAnthropic(base_url="http://scripted", api_key="none", http_client=http2)

    def say(self, *steps: str, finished: FinishReason = FinishReason.STOP) -> None:
        """Answer the next requests with these texts, one per step."""
        self.engines.steps, self.engines.finished = [self.encode(step) for step in steps], finished

    @property
    def prompt(self) -> str:
        """Prompt of the last request, as text."""
        token_ids = self.engines.requests[-1].prompt
        return self.input_processor.tokenizer.decode(token_ids, skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        return self.input_processor.tokenizer.encode(text, add_special_tokens=False)

    async def close(self) -> None:
        await self.http.aclose()
        await self.anthropic.close()
        await self._gateway.close()


@asynccontextmanager
async def scripted_server(
    model: str = str(demo.CHAT), server_options: ServerOptions | None = None, **options: Any
) -> AsyncIterator[ScriptedServer]:
    """Context with a scripted server.

    Args:
        options: fields of ``ModelOptions``.
    """
    server = ScriptedServer(model, ModelOptions(**options), server_options or ServerOptions())
    try:
        yield server
    finally:
        await server.close()
