"""The HTTP application: every dialect's routes over one service, behind one door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock import __version__
from penstock.core import Code, Failure, PenstockError

from . import openai
from .door import Keys, Log
from .openai.routes import SHAPE, components
from .record import record_of
from .reply import INTERNAL, refuse
from .service import Service

NO_KEY = Failure(Code.UNAUTHORIZED, "an API key is missing or wrong: send Authorization: Bearer KEY")


def build(service: Service) -> ASGIApp:
    """The application that serves it all."""
    app = FastAPI(
        title="Penstock", version=__version__, summary="LLM serving with OpenAI's API.", docs_url=None, redoc_url=None
    )
    openai.add_routes(app, service)
    _add_state(app, service)
    app.add_exception_handler(PenstockError, _failed)
    app.add_exception_handler(HTTPException, _failed)
    app.add_exception_handler(Exception, _failed)
    describe = app.openapi

    def described() -> dict[str, Any]:
        document = describe()
        document.setdefault("components", {}).setdefault("schemas", {}).update(components())
        return document

    app.openapi = described  # type: ignore[method-assign]
    front: ASGIApp = app
    if service.options.api_key:
        front = Keys(front, service.options.api_key, _no_key)
    if service.options.allowed_origins:
        origins = list(service.options.allowed_origins)
        front = CORSMiddleware(
            front, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
        )
    return Log(front, service.metrics, SHAPE.error)


def _add_state(app: FastAPI, service: Service) -> None:
    """How the server is doing."""
    engine = service.gateway.engine

    async def live() -> Response:
        return Response()

    async def health() -> Response:
        engine.check()
        return Response()

    async def version() -> Response:
        found: dict[str, Any] = {"version": __version__}
        if engine.engine:
            found |= {"kernels": engine.engine.fingerprint, "batch_invariant": engine.engine.batch_invariant}
        return JSONResponse(found)

    async def metrics() -> Response:
        return Response(service.metrics.page(engine.stats), media_type=CONTENT_TYPE_LATEST)

    app.add_api_route("/live", live, summary="This process answers", response_class=Response)
    app.add_api_route("/health", health, summary="The engine serves", response_class=Response)
    app.add_api_route("/ready", health, summary="Requests are welcome", response_class=Response)
    app.add_api_route("/version", version, summary="Version, and the kernels that decide a result's bits")
    app.add_api_route("/metrics", metrics, summary="Prometheus metrics", response_class=Response)


class _Refused(Response):
    def __init__(self, failure: Failure, status: int | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._failure = failure
        self._status = status
        self._more = headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).failure = self._failure
        await refuse(send, self._failure, SHAPE.error, self._status, self._more)


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, PenstockError):
        return _Refused(error.failure)
    if not isinstance(error, HTTPException):
        return _Refused(INTERNAL)
    words = f"{request.method} {request.url.path}: {error.detail}"
    code = Code.NOT_FOUND if error.status_code == 404 else Code.INVALID
    return _Refused(Failure(code, words), error.status_code, error.headers)


async def _no_key(scope: Scope, send: Send) -> None:
    record_of(scope).failure = NO_KEY
    await refuse(send, NO_KEY, SHAPE.error)
