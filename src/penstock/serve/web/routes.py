"""Routes of the web page: its files (no API key required), and its data (API key required)."""

from __future__ import annotations

import hashlib
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.version import __version__

from ..dialects.openai.schema import ErrorResponse
from ..http.access import Access
from ..http.openapi import OBJECT, operation, reference
from ..http.routes import Endpoint, Route, Routes
from ..models.served_models import ServedModel, ServedModels
from ..shared_result import SharedResult
from .live import INTERVAL, state_of

STATIC = Path(__file__).with_name("static")
MEDIA_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}
PAGE_PATHS = frozenset(("/", *(f"/web/{path.name}" for path in STATIC.iterdir() if path.suffix != ".html")))
"""Paths of the page's files."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: the page never executes model output and contacts no other host."""


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add the routes of the page and its data."""
    root = served_models.options.root_path.rstrip("/")
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    page = page.replace("{root}", escape(root)).replace("{version}", __version__)
    routes.append(Route("/", _file(page.encode(), ".html"), access=Access.PUBLIC))
    for path in STATIC.iterdir():
        if path.suffix != ".html":
            routes.append(Route(f"/web/{path.name}", _file(path.read_bytes(), path.suffix), access=Access.PUBLIC))

    state = SharedResult(partial(state_of, served_models), INTERVAL)

    async def models(_: Request) -> Response:
        return JSONResponse({"models": [_described(service) for service in served_models]})

    async def live(_: Request) -> Response:
        return Response(await state.get(), media_type="application/json")

    described = operation(OBJECT, reference(ErrorResponse))
    add = partial(routes.add, access=Access.INFERENCE, described=described)
    add("/web/models", models, summary="Models and their capabilities, for the playground")
    add("/web/live", live, summary="State of the engines, for the live view")


def _described(service: ServedModel) -> dict[str, Any]:
    pool = service.gateway.engine_pool
    engine = pool.engine
    tools, reasoning = service.gateway.input_processor.chats.response_formats()
    return {
        "name": service.name,
        "names": [*service.names, *pool.adapters],
        "context": engine.max_model_len if engine else None,
        "chat": service.gateway.input_processor.tokenizer.template_source is not None,
        "images": service.sees_images,
        "tools": tools is not None,
        "reasoning": reasoning is not None,
    }


def _file(content: bytes, suffix: str) -> Endpoint:
    """Endpoint of a static file. Answers 304 if the client's ETag matches."""
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "etag": etag,
        "cache-control": "no-cache",
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=MEDIA_TYPES[suffix], headers=headers)

    return answer
