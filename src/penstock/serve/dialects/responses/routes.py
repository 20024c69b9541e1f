"""OpenAI's Responses API: ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.core import Failure
from penstock.core.errors import invalid
from penstock.core.numbers import read_decimal
from penstock.serve.chat.prompt import ChatPrompt
from penstock.serve.dialects.endpoints import DialectRoutes, tenant_of
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
from .background import Background, with_seed
from .convert import num_characters, read, to_chat_request
from .events import EventLog, Events
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
from .stored import ResponseSaver, Stores, input_items, with_conversation

if TYPE_CHECKING:  # this module imports optional dependencies
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
"""Field name in chat requests → field name in Responses requests, for errors."""
MAX_EVENTS = 2**31 - 1
"""Maximum of the query parameter ``starting_after``."""
MAX_LISTED = 100
"""Maximum number of input items in a page."""


class ResponsesErrorFormat(ErrorFormat):
    """OpenAI's error format, with the field names of Responses requests.

    Args:
        names: field name in chat requests → field name in Responses requests.
        events: encoder of the stream's events; an error event gets the next sequence number.
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
"""Error format of requests that are not parsed yet."""


class ResponsesRoutes:
    """Endpoints to create responses and count input tokens.

    Args:
        stores: storage of responses and conversations; None: nothing is stored.
    """

    def __init__(self, served_models: ServedModels, stores: Stores | None, background: Background | None) -> None:
        self._served_models = served_models
        self._stores = stores
        self._background = background

    async def create(self, raw_request: Request) -> Response:
        record, events, stores = record_of(raw_request.scope), Events(), self._stores
        error_format = ResponsesErrorFormat(FIELD_NAMES, events)
        request, service, size = await self._read(raw_request, ResponsesRequest, error_format)
        saver = await self._served_models.parse(record, size, lambda: (0, self._saver(record, request)))
        stored = saver is not None and saver.stores_response
        # a full storage is an error only if the request explicitly requires storage
        if stores and stored and (request.store or request.background):
            await stores.responses.check_room(record.tenant)
        full_request, size = await self._with_conversation(request, size, record)
        log = EventLog()
        if request.background:
            full_request = with_seed(full_request)
            events = log if request.stream else events

        def handle() -> tuple[int, ResponseHandler]:
            return 0, ResponseHandler(service, record, full_request, size, events, saver, stored)

        handler = await self._served_models.parse(record, size, handle)
        if not request.background:
            return Reply.of(service, handler, error_format, request.stream)
        if saver is None or not stored or self._background is None:
            raise invalid("background", "requires a stored response, but store is false; leave store out")
        queued = await self._background.start(service, handler, saver, full_request, log)
        return _stream(self._background, record.tenant, queued["id"]) if request.stream else Json(queued)

    async def count_input_tokens(self, raw_request: Request) -> Response:
        record = record_of(raw_request.scope)
        request, service, size = await self._read(raw_request, CountTokensRequest)
        full_request, size = await self._with_conversation(request, size, record)

        def prompt_of() -> tuple[int, ChatPrompt]:
            chat = to_chat_request(full_request, service.template_variables, service.sees_images)
            service.adapter_of(chat.model)
            return 0, ChatPrompt(service, chat, size, record)

        prompt = await self._served_models.parse(record, size, prompt_of)
        return Json({"object": "response.input_tokens", "input_tokens": await prompt.count_tokens()})

    async def _read(
        self, raw_request: Request, schema: type[T], error_format: ErrorFormat | None = None
    ) -> tuple[T, ServedModel, int]:
        """Read a request and resolve the item references in its input.

        Args:
            error_format: error format of the request after its body has been converted.

        Returns:
            The request, its model, and its approximate number of characters.
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
        """Put the items of the conversation before the input; returns the request and its new number of characters."""
        if self._stores is None:
            return request, size
        models = self._served_models
        return await with_conversation(
            request, size, self._stores, record.tenant, models.max_body_size, partial(models.reserve, record)
        )

    def _saver(self, record: RequestRecord, request: ResponsesRequest) -> ResponseSaver | None:
        """The ``ResponseSaver`` of a request; None if the response is not stored and there is no conversation."""
        conversation, stores_response = conversation_of(request), request.store is not False
        if self._stores is None or not (stores_response or conversation):
            return None
        items = input_items(request)
        return ResponseSaver(self._stores, record.tenant, items, stores_response, conversation)


class StoredRoutes:
    """Endpoints to retrieve, delete and cancel stored responses, and to list their input items."""

    def __init__(self, store: ResponseStore, background: Background) -> None:
        self._store = store
        self._background = background

    async def retrieve(self, raw_request: Request) -> Response:
        owner, name, query = tenant_of(raw_request), raw_request.path_params["name"], raw_request.query_params
        if query.get("stream") != "true":
            return Json(await self._store.get(owner, name))
        after = -1
        if (given := query.get("starting_after")) is not None:
            number = read_decimal(given, MAX_EVENTS)
            if number is None:
                raise invalid("starting_after", f"must be the sequence number of an event, is {given!r:.50}")
            after = number
        return _stream(self._background, owner, name, after)

    async def delete(self, raw_request: Request) -> Response:
        name = raw_request.path_params["name"]
        await self._store.delete(tenant_of(raw_request), name)
        self._background.cancel(name)
        return Json({"id": name, "object": "response", "deleted": True})

    async def cancel(self, raw_request: Request) -> Response:
        name = raw_request.path_params["name"]
        stored = await self._store.cancel(tenant_of(raw_request), name)
        self._background.cancel(name)
        return Json(stored)

    async def list_input(self, raw_request: Request) -> Response:
        query = page_query(raw_request, MAX_LISTED)
        found = await self._store.input_page(tenant_of(raw_request), raw_request.path_params["name"], query)
        return Json(page_document(found))


class _Unlimited:
    """Limiter of streams that only read stored responses."""

    def admit(self) -> AbstractContextManager[None]:
        return nullcontext()


def _stream(background: Background, owner: str, name: str, after: int = -1) -> Reply:
    """Stream the events of a background response with sequence numbers above ``after``."""
    error_format = ResponsesErrorFormat({}, Events())
    return Reply(_Unlimited(), background.follow(owner, name, after), error_format, streamed=True)


def add_routes(
    routes: Routes, served_models: ServedModels, stores: Stores | None, background: Background | None
) -> None:
    """Add the routes of OpenAI's Responses and Conversations APIs.

    Args:
        stores: storage of responses and conversations; None: nothing is stored.
        background: computes responses in the background; None without ``stores``.
    """
    routes.error_formats.add(ERROR_FORMAT, "/v1/responses")
    failure = reference(ErrorResponse)
    api = DialectRoutes(routes, served_models, schemas=SCHEMAS, prefix=SCHEMA_PREFIX, failure=failure)
    endpoints = ResponsesRoutes(served_models, stores, background)
    access, path = Access.PRIVATE if stores else Access.INFERENCE, "/v1/responses"
    api.post(path, endpoints.create, "Create a response", ResponsesRequest, access=access, streamed=True)
    summary = "Count the input tokens of a response"
    api.post(f"{path}/input_tokens", endpoints.count_input_tokens, summary, CountTokensRequest, access=access)
    if stores is None or background is None:
        return
    conversations.add_routes(api, stores)
    stored, add = StoredRoutes(stores.responses, background), partial(api.add, access=Access.PRIVATE)
    query = ("stream", "starting_after")
    add("/v1/responses/{name}", stored.retrieve, "Retrieve a stored response", streamed=True, query=query)
    add("/v1/responses/{name}", stored.delete, "Delete a stored response", method="DELETE")
    add("/v1/responses/{name}/cancel", stored.cancel, "Cancel a background response", method="POST")
    add("/v1/responses/{name}/input_items", stored.list_input, "List the input items of a stored response")
