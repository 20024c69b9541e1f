"""``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.core import Failure
from penstock.core.errors import invalid
from penstock.serve.chat.prompt import ChatPrompt
from penstock.serve.dialects.endpoints import DialectRoutes
from penstock.serve.dialects.openai.schema import ErrorResponse, error_of
from penstock.serve.http.access import Access
from penstock.serve.http.body import read_object
from penstock.serve.http.error_format import ErrorFormat, rename_field
from penstock.serve.http.openapi import reference
from penstock.serve.http.paging import page_document, page_query
from penstock.serve.http.reply import Json, Reply
from penstock.serve.http.request_record import RequestRecord, record_of
from penstock.serve.http.routes import Routes
from penstock.serve.models.served_models import ServedModel, ServedModels

from . import conversations
from .convert import num_characters, read, to_chat_request
from .events import Events
from .handler import ResponseHandler
from .references import resolve_references
from .schema import (
    ConversationRequest,
    ConversationUpdate,
    CountTokensRequest,
    ItemsRequest,
    ResponsesRequest,
    conversation_of,
)
from .stored import Background, Keeper, Stores, input_items, with_conversation

if TYPE_CHECKING:  # what it imports may not be installed
    from penstock.serve.storage.responses import ResponseStore

T = TypeVar("T", bound=CountTokensRequest)

SCHEMAS = (ResponsesRequest, CountTokensRequest, ConversationRequest, ConversationUpdate, ItemsRequest)
SCHEMA_PREFIX = "responses."
"""Prefix of schema names in the OpenAPI document."""
FIELD_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Field names of chats → those of responses, for errors."""
MAX_LISTED = 100
"""Items of a page of a response's input."""


class ResponsesErrorFormat(ErrorFormat):
    """OpenAI's error format, with field names of responses.

    Args:
        names: field names of chats → those of responses.
        events: the stream's event counter, which an error continues.
    """

    dialect = "responses"

    def __init__(self, names: Mapping[str, str], events: Events) -> None:
        super().__init__(names)
        self._events = events

    def document(self, failure: Failure) -> ErrorResponse:
        return error_of(failure)

    def stream_error(self, failure: Failure) -> bytes:
        error = error_of(rename_field(failure, self._names)).error
        return self._events.event("error", code=error.type, message=error.message, param=error.param, error=error)


ERROR_FORMAT = ResponsesErrorFormat({}, Events())
"""Until a request has been read."""


class ResponsesRoutes:
    """The endpoints that compute.

    Args:
        stores: where responses and conversations are kept; None where they are not.
    """

    def __init__(self, served_models: ServedModels, stores: Stores | None) -> None:
        self._served_models = served_models
        self._stores = stores
        self.background = Background()

    async def create(self, raw_request: Request) -> Response:
        record, events, stores = record_of(raw_request.scope), Events(), self._stores
        error_format = ResponsesErrorFormat(FIELD_NAMES, events)
        request, service, size = await self._read(raw_request, ResponsesRequest, error_format)
        keeper = await self._served_models.parse(record, size, lambda: (0, self._keeper(record, request)))
        stored = keeper is not None and keeper.stores_response
        if stores and stored and (request.store or request.background):  # others have the answer anyway
            await stores.responses.check_room(record.tenant)
        whole, size = await self._with_conversation(request, size, record)

        def handle() -> tuple[int, ResponseHandler]:
            return 0, ResponseHandler(service, record, whole, size, events, keeper, stored)

        handler = await self._served_models.parse(record, size, handle)
        if not request.background:
            return Reply.of(service, handler, error_format, request.stream)
        if request.stream:
            raise invalid("stream", "cannot be combined with background; retrieve the response instead")
        if keeper is None or not stored:
            raise invalid("background", "needs a response that is stored; leave store out")
        return Json(await self.background.start(service, handler, keeper))

    async def count_input_tokens(self, raw_request: Request) -> Response:
        record = record_of(raw_request.scope)
        request, service, size = await self._read(raw_request, CountTokensRequest)
        whole, size = await self._with_conversation(request, size, record)

        def prompt_of() -> tuple[int, ChatPrompt]:
            chat = to_chat_request(whole, service.template_variables, service.sees_images)
            service.adapter_of(chat.model)
            return 0, ChatPrompt(service, chat, size, record)

        prompt = await self._served_models.parse(record, size, prompt_of)
        return Json({"object": "response.input_tokens", "input_tokens": await prompt.count_tokens()})

    async def _read(
        self, raw_request: Request, schema: type[T], error_format: ErrorFormat | None = None
    ) -> tuple[T, ServedModel, int]:
        """A request with the items that its input refers to, its model, and about how many characters it has.

        Args:
            error_format: that of the request once its body has been converted.
        """
        record = record_of(raw_request.scope)

        def parse(body: bytes) -> tuple[T, ServedModel, int]:
            request = read(read_object(body), schema, record.unknown, self._stores is not None)
            record.error_format = error_format
            service = self._served_models.find(request.model)
            service.gateway.check_characters(num_characters(request))
            return request, service, len(body)

        models = self._served_models
        request, service, size = await models.read(raw_request, parse, models.max_body_size)
        if isinstance(given := request.input, str):
            return request, service, size
        reserve = partial(models.reserve, record)
        items, size = await resolve_references(
            given, self._stores, record.tenant, "input", size, models.max_body_size, reserve
        )
        return msgspec.structs.replace(request, input=items), service, size

    async def _with_conversation(self, request: T, size: int, record: RequestRecord) -> tuple[T, int]:
        """The request with the items of its conversation, and about how many characters it has then."""
        if self._stores is None:
            return request, size
        models = self._served_models
        return await with_conversation(
            request, size, self._stores, record.tenant, models.max_body_size, partial(models.reserve, record)
        )

    def _keeper(self, record: RequestRecord, request: ResponsesRequest) -> Keeper | None:
        """Keeps the response of a request, or adds it to a conversation; None where neither is asked for."""
        conversation, stores_response = conversation_of(request), request.store is not False
        if self._stores is None or not (stores_response or conversation):
            return None
        items = input_items(request)
        return Keeper(self._stores, record.tenant, items, stores_response, conversation)


class StoredRoutes:
    """The endpoints of stored responses."""

    def __init__(self, store: ResponseStore, background: Background) -> None:
        self._store = store
        self._background = background

    async def retrieve(self, raw_request: Request) -> Response:
        if raw_request.query_params.get("stream") == "true":
            raise invalid("stream", "a stored response is returned whole; leave it out")
        stored = await self._store.get(_tenant(raw_request), raw_request.path_params["name"])
        return Json(stored)

    async def delete(self, raw_request: Request) -> Response:
        name = raw_request.path_params["name"]
        await self._store.delete(_tenant(raw_request), name)
        self._background.cancel(name)
        return Json({"id": name, "object": "response", "deleted": True})

    async def cancel(self, raw_request: Request) -> Response:
        name = raw_request.path_params["name"]
        stored = await self._store.cancel(_tenant(raw_request), name)
        self._background.cancel(name)
        return Json(stored)

    async def list_input(self, raw_request: Request) -> Response:
        query = page_query(raw_request, MAX_LISTED)
        found = await self._store.input_page(_tenant(raw_request), raw_request.path_params["name"], query)
        return Json(page_document(found))


def add_routes(routes: Routes, served_models: ServedModels, stores: Stores | None) -> None:
    """Add the routes of OpenAI's Responses and Conversations APIs.

    Args:
        stores: where responses and conversations are kept; None where they are not.
    """
    routes.error_formats.add(ERROR_FORMAT, "/v1/responses")
    failure = reference(ErrorResponse)
    added = DialectRoutes(routes, served_models, schemas=SCHEMAS, prefix=SCHEMA_PREFIX, failure=failure)
    endpoints = ResponsesRoutes(served_models, stores)
    access, path = Access.PRIVATE if stores else Access.INFERENCE, "/v1/responses"
    added.post(path, endpoints.create, "Create a response", ResponsesRequest, access=access, streamed=True)
    count = "Count a response's input tokens"
    added.post(f"{path}/input_tokens", endpoints.count_input_tokens, count, CountTokensRequest, access=access)
    if stores is None:
        return
    conversations.add_routes(added, stores)
    stored, add = StoredRoutes(stores.responses, endpoints.background), partial(added.add, access=Access.PRIVATE)
    add("/v1/responses/{name}", stored.retrieve, "A stored response")
    add("/v1/responses/{name}", stored.delete, "Delete a stored response", method="DELETE")
    add("/v1/responses/{name}/cancel", stored.cancel, "Cancel a background response", method="POST")
    add("/v1/responses/{name}/input_items", stored.list_input, "The input of a stored response")


def _tenant(raw_request: Request) -> str:
    return record_of(raw_request.scope).tenant
