"""``/v1/conversations``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.serve.dialects.openai.responses import ErrorResponse, encode
from penstock.serve.http.body import convert, read_object
from penstock.serve.http.openapi import OBJECT, operation, reference
from penstock.serve.http.paging import page
from penstock.serve.http.request_record import record_of
from penstock.serve.http.routes import Routes
from penstock.serve.models.served_models import ServedModels

from .items import conversation_items
from .parse import check_items
from .requests import ConversationRequest, ConversationUpdate, Item, ItemsRequest

if TYPE_CHECKING:  # what it imports may not be installed
    from penstock.serve.storage.conversations import ConversationStore

T = TypeVar("T", bound=msgspec.Struct)
MAX_LISTED = 100
"""Items of a page."""


class ConversationRoutes:
    """The endpoints of conversations."""

    def __init__(self, served_models: ServedModels, store: ConversationStore) -> None:
        self._served_models = served_models
        self._store = store

    async def create(self, raw_request: Request) -> Response:
        request = await self._read(raw_request, ConversationRequest)
        items = _items(request.items or [])
        return _json(await self._store.add(_tenant(raw_request), request.metadata or {}, items))

    async def retrieve(self, raw_request: Request) -> Response:
        return _json(await self._store.get(_tenant(raw_request), _name(raw_request)))

    async def update(self, raw_request: Request) -> Response:
        request = await self._read(raw_request, ConversationUpdate)
        return _json(await self._store.update(_tenant(raw_request), _name(raw_request), request.metadata or {}))

    async def delete(self, raw_request: Request) -> Response:
        name = _name(raw_request)
        await self._store.delete(_tenant(raw_request), name)
        return _json({"id": name, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, raw_request: Request) -> Response:
        items = await self._store.items(_tenant(raw_request), _name(raw_request))
        return _json(page(raw_request, items[::-1], MAX_LISTED))

    async def create_items(self, raw_request: Request) -> Response:
        request = await self._read(raw_request, ItemsRequest)
        items = _items(request.items)
        await self._store.append(_tenant(raw_request), _name(raw_request), items)
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return _json({"object": "list", "data": items, **ends, "has_more": False})

    async def retrieve_item(self, raw_request: Request) -> Response:
        item = raw_request.path_params["item"]
        return _json(await self._store.item(_tenant(raw_request), _name(raw_request), item))

    async def delete_item(self, raw_request: Request) -> Response:
        item = raw_request.path_params["item"]
        return _json(await self._store.delete_item(_tenant(raw_request), _name(raw_request), item))

    async def _read(self, raw_request: Request, schema: type[T]) -> T:
        unknown, largest = record_of(raw_request.scope).unknown, self._served_models.max_body_size
        return await self._served_models.read(
            raw_request, lambda body: convert(read_object(body or b"{}"), schema, unknown), largest
        )


def add_routes(routes: Routes, served_models: ServedModels, store: ConversationStore, prefix: str) -> None:
    """Add the routes of OpenAI's conversations.

    Args:
        prefix: of schema names in the OpenAPI document.
    """
    endpoints, failure = ConversationRoutes(served_models, store), reference(ErrorResponse)
    add = partial(routes.add, described=operation(OBJECT, failure))

    def posts(path: str, endpoint: Any, schema: type, summary: str) -> None:
        described = operation(OBJECT, failure, reference(schema, prefix))
        routes.add(path, endpoint, method="POST", summary=summary, described=described)

    whole, items = "/v1/conversations/{name}", "/v1/conversations/{name}/items"
    posts("/v1/conversations", endpoints.create, ConversationRequest, "Begin a conversation")
    add(whole, endpoints.retrieve, summary="A conversation")
    posts(whole, endpoints.update, ConversationUpdate, "Replace the metadata of a conversation")
    add(whole, endpoints.delete, method="DELETE", summary="Delete a conversation")
    add(items, endpoints.list_items, summary="The items of a conversation")
    posts(items, endpoints.create_items, ItemsRequest, "Add items to a conversation")
    add(f"{items}/{{item}}", endpoints.retrieve_item, summary="An item of a conversation")
    add(f"{items}/{{item}}", endpoints.delete_item, method="DELETE", summary="Delete an item of a conversation")


def _items(given: list[Item]) -> list[dict[str, Any]]:
    """What is kept of items. Raises ``PenstockError`` where no request could have them."""
    check_items(given)
    documents: list[dict[str, Any]] = msgspec.to_builtins(given)
    return conversation_items([{k: v for k, v in item.items() if v is not None} for item in documents])


def _name(raw_request: Request) -> str:
    name: str = raw_request.path_params["name"]
    return name


def _tenant(raw_request: Request) -> str:
    return record_of(raw_request.scope).tenant


def _json(document: Any) -> Response:
    return Response(encode(document), media_type="application/json")
