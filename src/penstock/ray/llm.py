"""Penstock as an engine of Ray Serve LLM: ``LLMConfig(server_cls="penstock.ray.llm:PenstockServer", …)``.

Ray Serve LLM imports its request classes from vLLM or SGLang, one of which must be installed. Its engine interface is
not public, so the extra ``ray`` pins the minor release that this module supports.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import msgspec
from fastapi import FastAPI
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    EmbeddingResponse,
    ErrorInfo,
    ErrorResponse,
    ScoreResponse,
    TokenizeResponse,
)
from ray.llm._internal.serve.core.engine.protocol import LLMEngine
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer

from penstock.config.options import Configuration
from penstock.core import Code, PenstockError

from .asgi_client import post
from .configuration import configuration_of, deployment_options, with_cores
from .replica import Replica

NO_TRANSCRIPTIONS = "transcriptions are not supported on Ray Serve LLM: deploy penstock.ray:app instead"
FORWARDED_HEADERS = frozenset(("authorization", "x-api-key", "user-agent"))
"""Headers of the client that are forwarded to the replica's application."""


def configuration_from(config: LLMConfig) -> Configuration:
    """Resolve the configuration of a Ray Serve LLM model. ``engine_kwargs`` has options by Penstock's or vLLM's names.

    Raises ``PenstockError`` for unknown, invalid and unsupported options.
    """
    source = config.model_loading_config
    if config.placement_group_config:
        message = "is not supported, as ranks run on the replica's node: set num_cpus in ray_actor_options"
        raise PenstockError(Code.UNSUPPORTED, f"placement_group_config: {message}", "placement_group_config")
    if source.model_source is not None and not isinstance(source.model_source, str):
        message = "must be a folder or a name on the hub; cloud mirrors are not supported"
        raise PenstockError(Code.UNSUPPORTED, f"model_source: {message}", "model_source")
    given = {
        "model": source.model_source or source.model_id,
        "served_model_name": source.model_id,
        "tokenizer": source.tokenizer_source,
        **config.engine_kwargs,
    }
    if config.lora_config is not None:
        given |= {"enable_lora": True, "max_loras": config.lora_config.max_num_adapters_per_replica}
    return configuration_of(given)


def _endpoint(path: str, kind: Any) -> Callable[..., AsyncGenerator[Any, None]]:
    """Create an engine method that posts its request to ``path`` of the replica's application. The method yields the
    events of a stream as text, or one ``kind`` or ``ErrorResponse``."""

    async def method(self: PenstockEngine, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        fields = request.model_dump(mode="json", exclude_unset=True)
        given = raw_request_info.headers if raw_request_info else {}
        headers = {name: value for name, value in given.items() if name.lower() in FORWARDED_HEADERS}
        headers["content-type"] = "application/json"
        if request_id := fields.pop("request_id", None):
            headers["x-request-id"] = str(request_id)
        body = msgspec.json.encode(fields)
        status, received = 0, b""
        decode = codecs.getincrementaldecoder("utf-8")().decode
        async with aclosing(post(self.replica.app, path, body, headers)) as parts:
            async for part in parts:
                if isinstance(part, int):
                    status = part
                elif status == 200 and fields.get("stream"):
                    yield decode(part)
                else:
                    received += part
        if not received:
            return
        answer = msgspec.json.decode(received)
        if status == 200:
            if kind is DetokenizeResponse:
                answer["text"] = answer["prompt"]  # name of the field in SGLang
            yield kind.model_validate(answer)
        else:
            error = answer.get("error", {})
            yield _error(status, error.get("message", ""), error.get("type", ""), error.get("param"))

    return method


def _missing(name: str) -> Callable[..., Any]:
    """Create an engine method that raises ``NotImplementedError``."""

    async def method(*args: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"Penstock's engine does not support {name}")

    return method


class PenstockEngine(LLMEngine):  # type: ignore[misc]
    """Engine of Ray Serve LLM that forwards requests to the ASGI application of a ``Replica``."""

    def __init__(self, llm_config: LLMConfig) -> None:
        actor = llm_config.deployment_config.get("ray_actor_options") or {}
        configuration, _ = with_cores(configuration_from(llm_config), actor.get("num_cpus"))
        self.replica = Replica(configuration)

    async def start(self) -> None:
        await self.replica.start()

    async def shutdown(self) -> None:
        await self.replica.close()

    async def check_health(self) -> None:
        self.replica.check()

    def routing_stats(self) -> dict[str, Any]:
        return {}

    async def build_asgi_app(self) -> FastAPI:
        """Application with all dialects, for direct streaming. Ray Serve LLM adds routes and middleware."""
        app = FastAPI(openapi_url=None)
        app.mount("/", self.replica.app)
        return app

    chat = _endpoint("/v1/chat/completions", ChatCompletionResponse)
    completions = _endpoint("/v1/completions", CompletionResponse)
    embeddings = _endpoint("/v1/embeddings", EmbeddingResponse)
    score = _endpoint("/v1/score", ScoreResponse)
    tokenize = _endpoint("/tokenize", TokenizeResponse)
    detokenize = _endpoint("/detokenize", DetokenizeResponse)

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        yield _error(501, NO_TRANSCRIPTIONS, "not_implemented_error")

    async def reset_prefix_cache(self) -> None:
        await self.replica.gateway.engine_pool.reset_prefix_cache()

    async def resolve_lora(self, lora_model: Any) -> None:
        """Load an adapter downloaded by Ray Serve LLM; requests select it by ``model_id``."""
        client = self.replica.gateway.engine_pool
        if lora_model.model_id not in client.adapters:
            await client.load_adapter(lora_model.model_id, lora_model.local_path)

    sleep, wakeup, pause, resume = map(_missing, ("sleep", "wakeup", "pause", "resume"))
    start_profile, stop_profile, collective_rpc = map(_missing, ("start_profile", "stop_profile", "collective_rpc"))


class PenstockServer(LLMServer):  # type: ignore[misc] # untyped base class
    """Server of Ray Serve LLM with Penstock's engine."""

    _default_engine_cls = PenstockEngine

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """Options of the deployment: ``deployment_config``, completed by Penstock's defaults."""
        given = copy.deepcopy(llm_config.deployment_config)
        actor = given.get("ray_actor_options") or {}
        configuration, num_cpus = with_cores(configuration_from(llm_config), actor.get("num_cpus"))
        runtime_env = {**actor.get("runtime_env", {}), **(llm_config.runtime_env or {})}
        actor = {"num_cpus": num_cpus, **actor, "runtime_env": runtime_env}
        if llm_config.accelerator_type:
            actor = {"num_gpus": 1, "accelerator_type": llm_config.accelerator_type, **actor}
        return {**deployment_options(configuration), **given, "ray_actor_options": actor}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Metrics for the policy ``penstock.ray.autoscaling:Autoscaling``."""
        return self.engine.replica.autoscaling_stats if self.engine else {}


def _error(status: int, message: str, kind: str, param: str | None = None) -> Any:
    return ErrorResponse(error=ErrorInfo(message=message, type=kind, param=param, code=status))
