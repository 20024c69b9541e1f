"""``/v1/models`` in Anthropic's format, for requests with ``anthropic-version``; OpenAI's clients use the same path."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from penstock.core.errors import invalid
from penstock.core.numbers import read_decimal
from penstock.serve.http.access import Access
from penstock.serve.http.reply import Json
from penstock.serve.http.routes import Route, Routes
from penstock.serve.models.messages import DEFAULT_NAME
from penstock.serve.models.served_models import ServedModel, ServedModels

from .schema import ModelInfo, ModelList

HEADER = "anthropic-version"
"""Header that only Anthropic's clients send."""
MAX_LIMIT = 1000
"""Maximum number of models in a page."""
DEFAULT_LIMIT = 20


def is_anthropic_client(scope: Scope) -> bool:
    """Return True for requests of Anthropic's clients."""
    return HEADER in Headers(scope=scope)


class AnthropicRoute(Route):
    """A route that matches only requests of Anthropic's clients."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or not is_anthropic_client(scope):
            return Match.NONE, {}
        return super().matches(scope)


def add_model_routes(routes: Routes, served_models: ServedModels) -> None:
    """Add Anthropic's model routes. Call this before adding OpenAI's model routes, which match any request."""
    created = datetime.fromtimestamp(served_models.created, UTC).isoformat().replace("+00:00", "Z")

    def info(service: ServedModel, name: str) -> ModelInfo:
        engine = service.gateway.engine_pool.engine
        length = engine.max_model_len if engine else None
        return ModelInfo(id=name, display_name=name, created_at=created, max_input_tokens=length, max_tokens=length)

    async def list_models(raw_request: Request) -> Response:
        models = [info(service, name) for service in served_models.listed() for name in service.all_names]
        return Json(_page(models, raw_request.query_params))

    async def retrieve_model(raw_request: Request) -> Response:
        name = raw_request.path_params["name"]
        service = served_models.find(name)
        return Json(info(service, service.name if name == DEFAULT_NAME else name))

    routes.append(AnthropicRoute("/v1/models", list_models, access=Access.INFERENCE, methods=["GET"]))
    routes.append(AnthropicRoute("/v1/models/{name:path}", retrieve_model, access=Access.INFERENCE, methods=["GET"]))


def _page(models: list[ModelInfo], query: QueryParams) -> ModelList:
    """The page that ``after_id``, ``before_id`` and ``limit`` select. Raises ``PenstockError`` (``invalid``)."""
    limit = read_decimal(given := query.get("limit", str(DEFAULT_LIMIT)), MAX_LIMIT)
    if not limit:
        raise invalid("limit", f"must be a number from 1 to {MAX_LIMIT}, is {given[:20]!r}", MAX_LIMIT)
    ids = [model.id for model in models]
    after, before = query.get("after_id"), query.get("before_id")
    for field, name in (("after_id", after), ("before_id", before)):
        if name is not None and name not in ids:
            message = f"{name[:100]!r} is not the id of a served model; send the first_id or last_id of a page"
            raise invalid(field, message)
    if after is not None:
        models = models[ids.index(after) + 1 :]
    elif before is not None:
        models = models[: ids.index(before)][::-1]
    page = models[:limit]
    if after is None and before is not None:
        page = page[::-1]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return ModelList(data=page, has_more=len(models) > len(page), first_id=first, last_id=last)
