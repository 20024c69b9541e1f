"""``/v1/conversations``."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.serve.dialects.openai.responses import ErrorResponse, encode
from penstock.serve.http.access import Access
from penstock.serve.http.body import convert, read_object
from penstock.serve.http.openapi import OBJECT, operation, reference
from penstock.serve.http.paging import page_document, page_query
from penstock.serve.http.request_record import record_of
from penstock.serve.http.routes import Routes
from penstock.serve.models.served_models import ServedModels

from .items import conversation_items
from .parse import check_items
from .references import resolve_references
from .requests import ConversationRequest, ConversationUpdate, Item, ItemsRequest
from .stored import Stores

T = TypeVar("T", bound=msgspec.Struct)
MAX_LISTED = 100
"""Items of a page."""


class ConversationRoutes:
    """The endpoints of conversations."""

    def __init__(self, served_models: ServedModels, stores: Stores) -> None:
        self._served_models = served_models
        self._stores = stores
        self._store = stores.conversations

    async def create(self, raw_request: Request) -> Response:
        request, size = await self._read(raw_request, ConversationRequest)
        items = await self._items(raw_request, request.items or [], size)
        return _json(await self._store.add(_tenant(raw_request), request.metadata or {}, items))

    async def retrieve(self, raw_request: Request) -> Response:
        return _json(await self._store.get(_tenant(raw_request), _name(raw_request)))

    async def update(self, raw_request: Request) -> Response:
        request, _ = await self._read(raw_request, ConversationUpdate)
        return _json(await self._store.update(_tenant(raw_request), _name(raw_request), request.metadata or {}))

    async def delete(self, raw_request: Request) -> Response:
        name = _name(raw_request)
        await self._store.delete(_tenant(raw_request), name)
        return _json({"id": name, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, raw_request: Request) -> Response:
        query = page_query(raw_request, MAX_LISTED)
        return _json(page_document(await self._store.page(_tenant(raw_request), _name(raw_request), query)))

    async def create_items(self, raw_request: Request) -> Response:
        request, size = await self._read(raw_request, ItemsRequest)
        items = await self._items(raw_request, request.items, size)
        await self._store.append(_tenant(raw_request), _name(raw_request), items)
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return _json({"object": "list", "data": items, **ends, "has_more": False})

    async def retrieve_item(self, raw_request: Request) -> Response:
        item = raw_request.path_params["item"]
        return _json(await self._store.item(_tenant(raw_request), _name(raw_request), item))

    async def delete_item(self, raw_request: Request) -> Response:
        item = raw_request.path_params["item"]
        return _json(await self._store.delete_item(_tenant(raw_request), _name(raw_request), item))

    async def _items(self, raw_request: Request, given: list[Item], size: int) -> list[dict[str, Any]]:
        """Items to store of a body of ``size`` bytes. Raises ``PenstockError`` where no request could have
        them."""
        models, record = self._served_models, record_of(raw_request.scope)
        resolved, _ = await resolve_references(
            given, self._stores, record.tenant, "items", size, models.max_body_size, partial(models.reserve, record)
        )

        def kept() -> list[dict[str, Any]]:
            check_items(resolved)
            documents: list[dict[str, Any]] = msgspec.to_builtins(resolved)
            return conversation_items([{k: v for k, v in item.items() if v is not None} for item in documents])

        return await asyncio.to_thread(kept)  # many items would hold up others

    async def _read(self, raw_request: Request, schema: type[T]) -> tuple[T, int]:
        """The body and its size."""
        unknown, largest = record_of(raw_request.scope).unknown, self._served_models.max_body_size
        return await self._served_models.read(
            raw_request,
            lambda body: (convert(read_object(body or b"{}"), schema, unknown, "pydantic"), len(body)),
            largest,
        )


def add_routes(routes: Routes, served_models: ServedModels, stores: Stores, prefix: str) -> None:
    """Add the routes of OpenAI's conversations.

    Args:
        prefix: of schema names in the OpenAPI document.
    """
    endpoints, failure = ConversationRoutes(served_models, stores), reference(ErrorResponse)
    add = partial(routes.add, access=Access.PRIVATE, described=operation(OBJECT, failure))

    def posts(path: str, endpoint: Any, schema: type, summary: str) -> None:
        described = operation(OBJECT, failure, reference(schema, prefix))
        add(path, endpoint, method="POST", summary=summary, described=described)

    whole, items = "/v1/conversations/{name}", "/v1/conversations/{name}/items"
    posts("/v1/conversations", endpoints.create, ConversationRequest, "Begin a conversation")
    add(whole, endpoints.retrieve, summary="A conversation")
    posts(whole, endpoints.update, ConversationUpdate, "Replace the metadata of a conversation")
    add(whole, endpoints.delete, method="DELETE", summary="Delete a conversation")
    add(items, endpoints.list_items, summary="The items of a conversation")
    posts(items, endpoints.create_items, ItemsRequest, "Add items to a conversation")
    add(f"{items}/{{item}}", endpoints.retrieve_item, summary="An item of a conversation")
    add(f"{items}/{{item}}", endpoints.delete_item, method="DELETE", summary="Delete an item of a conversation")


def _name(raw_request: Request) -> str:
    name: str = raw_request.path_params["name"]
    return name


def _tenant(raw_request: Request) -> str:
    return record_of(raw_request.scope).tenant


def _json(document: Any) -> Response:
    return Response(encode(document), media_type="application/json")
