"""The HTTP application: the routes of all dialects, health and metrics, wrapped in the middleware."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.config.options import Configuration
from penstock.core import Code, Failure, PenstockError
from penstock.core.errors import INTERNAL
from penstock.core.machine_errors import exhausted
from penstock.version import __version__

from . import health
from .dialects import (
    anthropic,
    cohere,
    fastdeploy,
    instances,
    kserve,
    llama_server,
    ollama,
    openai,
    operations,
    paddlenlp,
    responses,
    sglang,
    tgi,
)
from .dialects.bladellm import BladeLLM
from .dialects.dispatch import SharedPathDialect, add_shared_routes
from .dialects.openai.batches.routes import Batches
from .dialects.openai.batches.routes import add_routes as add_batch_routes
from .dialects.vllm import development, management
from .dialects.vllm import generate as vllm
from .http import unknown_fields
from .http.access import Access, OriginPolicy, origins_of
from .http.middleware import (
    FINGERPRINT_HEADER,
    RESUMED_HEADER,
    TRUNCATED_HEADER,
    WEB_PREFIX,
    WEIGHTS_HEADER,
    ApiKeyMiddleware,
    ApiKeys,
    HealthPortMiddleware,
    Refuse,
    RequestLogMiddleware,
    RootPathMiddleware,
)
from .http.openapi import components
from .http.reply import refuse
from .http.request_record import record_of
from .http.routes import ErrorFormats, Route, Routes
from .models.served_models import ServedModels
from .web import PAGE_PATHS
from .web import add_routes as add_web_routes

if TYPE_CHECKING:  # these modules import SQLAlchemy (extra storage)
    from .storage.conversations import ConversationStore
    from .storage.responses import ResponseStore
    from .storage.usage import Usage


class Storage(NamedTuple):
    """Stores of client data."""

    responses: ResponseStore
    background: responses.Background
    conversations: ConversationStore
    usage: Usage
    batches: Batches | None
    """Store of batches; None without ``storage_dir``."""


HEALTH_ONLY = Failure(Code.NOT_FOUND, "this port serves only health and metrics: use the port set with --port")
FILE_PATHS = ("/v1/files", "/v1/batches")
"""Prefixes of the paths that need ``storage_dir``; a database (``storage_url``) is not enough."""
STORED_PATHS = ("/v1/responses", "/v1/conversations", *FILE_PATHS)
"""Prefixes of the paths that need storage."""
STORAGE_OFF = "storage is off: start the server with --storage-dir"
NO_KEY = Failure(Code.UNAUTHORIZED, "an API key is missing or wrong: send Authorization: Bearer KEY, or x-api-key")


def build(
    served_models: ServedModels,
    repository: kserve.ModelRepository,
    health_ports: frozenset[int] = frozenset(),
    configuration: Configuration | None = None,
    register: instances.Register | None = None,
    storage: Storage | None = None,
    mcp: responses.McpServers | None = None,
) -> ASGIApp:
    """Build the ASGI application.

    Args:
        repository: models of the KServe v2 protocol.
        health_ports: ports that serve only health and metrics.
        configuration: configuration of the server, for the routes of instances and routers (with ``register``).
        register: see ``instances.add_routes``.
        storage: stores of responses, conversations, files and batches; None if storage is off.
        mcp: MCP servers whose tools requests may use; None: none.
    """
    blade = BladeLLM(served_models)
    default: SharedPathDialect = openai.OpenAI(served_models, vllm.check if vllm.is_ascend(served_models) else None)
    if served_models.options.compat == fastdeploy.NAME:
        default = fastdeploy.FastDeploy(served_models)
    paddle = paddlenlp.PaddleNLP(served_models)
    dialects: list[SharedPathDialect] = [blade, paddle, default]
    by_head = [blade.error_format_of, paddle.error_format_of, anthropic.error_format_of]
    error_formats = ErrorFormats(default.error_format, by_head)
    routes = Routes(error_formats)
    add_shared_routes(routes, served_models, dialects, openai.shared_paths())
    anthropic.add_routes(routes, served_models)
    openai.add_routes(routes, served_models)
    stores = responses.Stores(storage.responses, storage.conversations) if storage else None
    background = storage.background if storage else None
    responses.add_routes(routes, served_models, stores, background, mcp)
    without_storage: tuple[str, ...] = FILE_PATHS if storage else STORED_PATHS
    if storage and storage.batches:
        without_storage = ()
        add_batch_routes(routes, served_models, storage.batches)
    ollama.add_routes(routes, served_models)
    cohere.add_routes(routes, served_models)
    operator = operations.Operator(served_models, repository.model_manager)
    fastdeploy.add_routes(routes, served_models, operator)
    vllm.add_routes(routes, served_models)
    llama_server.add_routes(routes, served_models)
    tgi.add_routes(routes, served_models)
    management.add_routes(routes, served_models)
    operations.add_routes(routes, operator)
    development.add_routes(routes, operator)
    sglang.add_routes(routes, operator)
    kserve.add_routes(routes, repository)
    if configuration and register:
        instances.add_routes(routes, served_models, configuration, register)
    health.add_routes(routes, served_models, storage.usage if storage else None)
    if served_models.options.web:
        add_web_routes(routes, served_models)

    async def failed(request: Request, error: Exception) -> Response:
        path = request.scope["path"]
        if isinstance(error, HTTPException) and error.status_code == 404 and path.startswith(without_storage):
            error = PenstockError(Code.NOT_FOUND, f"{request.method} {request.url.path}: {STORAGE_OFF}")
        return _ErrorResponse(*_failure_of(request, error), error_formats)

    def refusing(failure: Failure) -> Refuse:
        async def answer(scope: Scope, send: Send) -> None:
            record_of(scope).failure = failure
            await refuse(send, failure, error_formats.of(scope))

        return answer

    prefix = served_models.options.root_path.rstrip("/")
    _add_document(routes, served_models.options.strict_requests, prefix)
    app = Starlette(routes=routes, exception_handlers={PenstockError: failed, HTTPException: failed, Exception: failed})
    options = served_models.options
    app.state.origins = OriginPolicy(options.allowed_origins, options.host)
    wrapped: ASGIApp = app
    if options.api_key or options.admin_api_key:
        page = PAGE_PATHS if options.web else frozenset[str]()
        wrapped = ApiKeyMiddleware(wrapped, ApiKeys(options.api_key, options.admin_api_key), refusing(NO_KEY), page)
    exposed = ["x-request-id", WEIGHTS_HEADER, TRUNCATED_HEADER, unknown_fields.HEADER, RESUMED_HEADER]
    allow_mismatch = configuration is not None and configuration.engine.allow_fingerprint_mismatch
    if allow_mismatch:
        exposed.append(FINGERPRINT_HEADER)
    if origins := origins_of(options.allowed_origins):
        wrapped = CORSMiddleware(
            wrapped, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
        )
    if health_ports:
        wrapped = HealthPortMiddleware(wrapped, health_ports, refusing(HEALTH_ONLY))
    wrapped = RequestLogMiddleware(
        wrapped,
        served_models.metrics,
        error_formats,
        served_models.options.strict_requests,
        served_models.tracer,
        (lambda: served_models.fingerprints) if allow_mismatch else None,
    )
    return RootPathMiddleware(wrapped, prefix) if prefix else wrapped


def _add_document(routes: Routes, strict: bool, root: str) -> None:
    """Serve the OpenAPI document. It is built at the first request, in a thread, so that the loop is not blocked."""
    building = asyncio.Lock()
    encoded = b""

    def build() -> bytes:
        schemas: dict[str, Any] = {}
        for prefix, types in routes.schemas.items():
            schemas |= components(types, prefix, strict)
        for route in routes:
            for described in routes.operations.get(route.path_format, {}).values():
                described.setdefault("tags", [_tag(routes, route)])
        document: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {"title": "Penstock", "summary": "LLM serving with OpenAI's API.", "version": __version__},
            "paths": routes.operations,
            "components": {"schemas": schemas},
        }
        if root:
            document["servers"] = [{"url": root}]
        return msgspec.json.encode(document)

    async def described(_: Request) -> Response:
        nonlocal encoded
        async with building:
            encoded = encoded or await asyncio.to_thread(build)
        return Response(encoded, media_type="application/json")

    routes.append(Route("/openapi.json", described, access=Access.INFERENCE))


def _tag(routes: Routes, route: Route) -> str:
    """Tag of an operation: the dialect of its path, or "operations" for routes of the default dialect that are not for
    inference."""
    error_format = routes.error_formats.of_path(route.path)
    if error_format is routes.error_formats.default and route.access is not Access.INFERENCE:
        return "operations"
    return "web page" if route.path.startswith(WEB_PREFIX) else error_format.dialect


class _ErrorResponse(Response):
    def __init__(
        self, failure: Failure, status: int | None, headers: Mapping[str, str] | None, error_formats: ErrorFormats
    ) -> None:
        super().__init__()
        self._failure = failure
        self._status = status
        self._more = headers or {}
        self._error_formats = error_formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).failure = self._failure
        await refuse(send, self._failure, self._error_formats.of(scope), self._status, self._more)


def _failure_of(request: Request, error: Exception) -> tuple[Failure, int | None, Mapping[str, str] | None]:
    """Convert an exception to a failure, with status and headers if they differ from the failure's defaults."""
    if isinstance(error, PenstockError):
        return error.failure, None, None
    if not isinstance(error, HTTPException):
        return exhausted(error) or INTERNAL, None, None
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: Code.NOT_FOUND, 405: Code.NOT_ALLOWED}.get(error.status_code, Code.INVALID)
    return Failure(code, message), error.status_code, error.headers
