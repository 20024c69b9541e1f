"""Routes of the web page: its files (no API key required), and its data (API key required)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock import demo
from penstock.version import __version__

from ..dialects.openai.schema import ErrorResponse
from ..http.access import Access
from ..http.openapi import OBJECT, operation, reference
from ..http.routes import Route, Routes
from ..models.served_models import ServedModel, ServedModels
from ..shared_result import SharedResult
from .files import PAGES, STATIC, PageFile, library_files, page_paths, static_files
from .live import INTERVAL, state_of

PAGE_PATHS = page_paths()
"""Paths of the page's files."""
LAZY = ("/web/live/", "/web/docs/")
"""Prefixes of files that are loaded when they are first needed."""
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 24 24'%3E"
    "%3Crect width='24' height='24' rx='6' fill='%230a5fb8'/%3E"
    "%3Cpath d='M4 8h6c5 0 4 8 9 8h1' fill='none' stroke='white' stroke-width='3' stroke-linecap='round'/%3E%3C/svg%3E"
)
"""Icon of the page in browser tabs."""


def add_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add the routes of the page and its data."""
    root = served_models.options.root_path.rstrip("/")
    files, libraries = list(static_files()), list(library_files())
    pages = [PageFile(path, _page(name, root, files, libraries).encode(), ".html") for path, name in PAGES.items()]
    for file in (*pages, *files, *libraries):
        routes.append(Route(file.path, file.answer, access=Access.PUBLIC))

    state = SharedResult(partial(state_of, served_models), INTERVAL)

    async def models(_: Request) -> Response:
        return JSONResponse({"models": [_described(service) for service in served_models]})

    async def live(_: Request) -> Response:
        return Response(await state.get(), media_type="application/json")

    described = operation(OBJECT, reference(ErrorResponse))
    add = partial(routes.add, access=Access.INFERENCE, described=described)
    add("/web/models", models, summary="Models and their capabilities, for the playground")
    add("/web/live", live, summary="State of the engines, for the live view")


def _page(name: str, root: str, files: Sequence[PageFile], libraries: Sequence[PageFile]) -> str:
    """An HTML document: loads style sheets and modules in parallel, and names the libraries and their addresses."""
    eager = [file.path[1:] for file in files if not file.path.startswith(LAZY)]
    links = [f'<link rel="stylesheet" href="{path}">' for path in eager if path.endswith(".css")]
    links += [f'<link rel="modulepreload" href="{path}">' for path in eager if path.endswith(".js")]
    addresses = {file.path.rpartition("/")[2]: f"{root}{file.path}?{file.digest}" for file in libraries}
    page = (STATIC / name).read_text(encoding="utf-8")
    values = {
        "root": escape(root),
        "version": __version__,
        "icon": ICON,
        "links": "\n".join(links),
        "libraries": escape(json.dumps(addresses)),
    }
    for key, value in values.items():
        page = page.replace("{" + key + "}", value)
    return page


def _described(service: ServedModel) -> dict[str, Any]:
    pool = service.gateway.engine_pool
    engine = pool.engine
    tools, reasoning = service.gateway.input_processor.chats.response_formats()
    return {
        "name": service.name,
        "names": [*service.names, *pool.adapters],
        "built_in": Path(service.configuration.engine.model or demo.CHAT) == demo.CHAT,
        "context": engine.max_model_len if engine else None,
        "chat": service.gateway.input_processor.tokenizer.template_source is not None,
        "images": service.sees_images,
        "tools": tools is not None,
        "reasoning": reasoning is not None,
    }
