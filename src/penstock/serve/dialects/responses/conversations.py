"""OpenAI's Conversations API: ``/v1/conversations``."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.serve.dialects.endpoints import DialectRoutes, tenant_of
from penstock.serve.http.access import Access
from penstock.serve.http.paging import page_document, page_query
from penstock.serve.http.reply import Json
from penstock.serve.http.request_record import record_of

from .convert import check_items
from .references import resolve_references
from .schema import ConversationRequest, ConversationUpdate, Item, ItemsRequest
from .stored import Stores, conversation_items

MAX_LISTED = 100
"""Maximum number of items in a page."""


class ConversationRoutes:
    """Endpoints to create, retrieve, change and delete conversations and conversation items."""

    def __init__(self, api: DialectRoutes, stores: Stores) -> None:
        self._api = api
        self._stores = stores
        self._store = stores.conversations

    async def create(self, raw_request: Request) -> Response:
        request, size = await self._api.read(raw_request, ConversationRequest, media=True, optional=True)
        items = await self._items(raw_request, request.items or [], size)
        return Json(await self._store.add(tenant_of(raw_request), request.metadata or {}, items))

    async def retrieve(self, raw_request: Request) -> Response:
        return Json(await self._store.get(tenant_of(raw_request), _name(raw_request)))

    async def update(self, raw_request: Request) -> Response:
        request, _ = await self._api.read(raw_request, ConversationUpdate, media=True, optional=True)
        return Json(await self._store.update(tenant_of(raw_request), _name(raw_request), request.metadata or {}))

    async def delete(self, raw_request: Request) -> Response:
        name = _name(raw_request)
        await self._store.delete(tenant_of(raw_request), name)
        return Json({"id": name, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, raw_request: Request) -> Response:
        query = page_query(raw_request, MAX_LISTED)
        return Json(page_document(await self._store.page(tenant_of(raw_request), _name(raw_request), query)))

    async def create_items(self, raw_request: Request) -> Response:
        request, size = await self._api.read(raw_request, ItemsRequest, media=True, optional=True)
        items = await self._items(raw_request, request.items, size)
        await self._store.append(tenant_of(raw_request), _name(raw_request), items)
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return Json({"object": "list", "data": items, **ends, "has_more": False})

    async def retrieve_item(self, raw_request: Request) -> Response:
        item = raw_request.path_params["item"]
        return Json(await self._store.item(tenant_of(raw_request), _name(raw_request), item))

    async def delete_item(self, raw_request: Request) -> Response:
        item = raw_request.path_params["item"]
        return Json(await self._store.delete_item(tenant_of(raw_request), _name(raw_request), item))

    async def _items(self, raw_request: Request, given: list[Item], size: int) -> list[dict[str, Any]]:
        """Resolve and validate the items of a request with a body of ``size`` bytes; returns the items to store. Raises
        ``PenstockError`` for items that are not valid in a Responses request."""
        models, record = self._api.served_models, record_of(raw_request.scope)
        resolved, _ = await resolve_references(
            given, self._stores, record.tenant, "items", size, models.max_body_size, partial(models.reserve, record)
        )

        def prepare() -> list[dict[str, Any]]:
            check_items(resolved)
            documents: list[dict[str, Any]] = msgspec.to_builtins(resolved)
            return conversation_items(documents)

        return await asyncio.to_thread(prepare)  # preparing many items is slow


def add_routes(api: DialectRoutes, stores: Stores) -> None:
    """Add the routes of OpenAI's Conversations API."""
    endpoints, add = ConversationRoutes(api, stores), partial(api.add, access=Access.PRIVATE)
    post = partial(add, method="POST")
    path, items = "/v1/conversations/{name}", "/v1/conversations/{name}/items"
    post("/v1/conversations", endpoints.create, "Create a conversation", request=ConversationRequest)
    add(path, endpoints.retrieve, "Retrieve a conversation")
    post(path, endpoints.update, "Replace the metadata of a conversation", request=ConversationUpdate)
    add(path, endpoints.delete, "Delete a conversation", method="DELETE")
    add(items, endpoints.list_items, "List the items of a conversation")
    post(items, endpoints.create_items, "Add items to a conversation", request=ItemsRequest)
    add(f"{items}/{{item}}", endpoints.retrieve_item, "Retrieve an item of a conversation")
    add(f"{items}/{{item}}", endpoints.delete_item, "Delete an item of a conversation", method="DELETE")


def _name(raw_request: Request) -> str:
    name: str = raw_request.path_params["name"]
    return name
