"""Storage of responses and conversations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from uuid import uuid4

import msgspec

from penstock.core import PenstockError
from penstock.core.errors import invalid

from .handler import Document
from .schema import CountTokensRequest, Item, conversation_of

if TYPE_CHECKING:  # these modules import optional dependencies
    from penstock.serve.storage.conversations import ConversationStore
    from penstock.serve.storage.responses import ResponseStore

logger = logging.getLogger(__name__)
T = TypeVar("T", bound=CountTokensRequest)

PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Item type → prefix of the ids of such items."""


class Stores(NamedTuple):
    """The stores of responses and conversations."""

    responses: ResponseStore
    conversations: ConversationStore


def input_items(request: CountTokensRequest) -> list[Document]:
    """The input items of a request as JSON objects, without ids."""
    given = request.input
    if isinstance(given, str):
        parts = [{"type": "input_text", "text": given}]
        given = [msgspec.convert({"role": "user", "content": parts}, Item)]
    items: list[Document] = msgspec.to_builtins(given)
    return [{key: value for key, value in item.items() if value is not None and key != "id"} for item in items]


async def with_conversation(
    request: T, size: int, stores: Stores, owner: str, max_size: int, reserve: Callable[[int], Awaitable[None]]
) -> tuple[T, int]:
    """Put the items of ``conversation`` or ``previous_response_id`` before the input of a request.

    Args:
        size: approximate number of characters of the request.
        owner: tenant of the request.
        max_size: maximum size of the request with the stored items, bytes.
        reserve: waits until memory for a number of bytes is free; called before the items are loaded.

    Returns:
        The request, and its new approximate number of characters.

    Raises ``PenstockError`` as ``ResponseStore.conversation``, ``ConversationStore.items`` and ``reserve`` do;
    ``invalid`` if the request has both fields.
    """
    if conversation := conversation_of(request):
        if request.previous_response_id is not None:
            raise invalid("previous_response_id", "cannot be combined with conversation; leave one out")
        await reserve(stored := await stores.conversations.items_size(owner, conversation, size, max_size))
        before = await stores.conversations.items(owner, conversation, size, max_size)
    elif request.previous_response_id is not None:
        previous = request.previous_response_id
        await reserve(stored := await stores.responses.conversation_size(owner, previous, size, max_size))
        before = await stores.responses.conversation(owner, previous, size, max_size)
    else:
        return request, size

    def joined() -> T:
        items = [*before, *input_items(request)]
        return msgspec.structs.replace(request, input=msgspec.convert(items, list[Item]))

    return await asyncio.to_thread(joined), size + stored  # converting long conversations is slow


class ResponseSaver:
    """Storage of the result of one request: stores the response, and adds input and output to a conversation.

    Args:
        owner: tenant of the request.
        items: input items of the request.
        stores_response: store the response object.
        conversation: id of the conversation to extend; None: no conversation.
    """

    def __init__(
        self, stores: Stores, owner: str, items: list[Document], stores_response: bool, conversation: str | None
    ) -> None:
        self.store = stores.responses
        self.owner = owner
        self.stores_response = stores_response
        self._conversations = stores.conversations
        self._items = items
        self._conversation = conversation

    async def __call__(self, document: Document) -> bool:
        """Store a finished response; returns True if the response object was stored. Storage failures are only logged,
        as the client gets the response in any case."""
        await self.extend(document)
        if not self.stores_response:
            return False
        try:
            await self.add(document)
        except PenstockError as error:
            logger.warning("cannot store the response %s: %s", document["id"], error)
            return False
        return True

    async def add(self, document: Document, worker: str | None = None, request: Document | None = None) -> None:
        """Store a response; arguments and errors as ``ResponseStore.add``."""
        name = document["id"].removeprefix("resp_")
        items = [item | {"id": f"in_{name}_{i}"} for i, item in enumerate(self._items)]
        await self.store.add(self.owner, document, items, worker, request)

    async def extend(self, document: Document) -> None:
        """Add the input of the request and the output of a response to the conversation, if there is one."""
        if self._conversation is None:
            return
        try:
            items = conversation_items([*self._items, *document["output"]])
            await self._conversations.append(self.owner, self._conversation, items)
        except PenstockError as error:
            logger.warning("cannot add the response %s to its conversation: %s", document["id"], error)


def conversation_items(items: list[Document]) -> list[Document]:
    """Complete items for a conversation: add new ids and a status, and convert the content to a list of parts."""
    return [_complete(item) for item in items]


def _complete(item: Document) -> Document:
    kind = item.get("type", "message")
    result = {**item, "type": kind, "id": f"{PREFIXES.get(kind, 'item')}_{uuid4().hex}"}
    result["status"] = item.get("status") or "completed"
    if kind == "reasoning":
        result.setdefault("summary", [])
    if isinstance(item.get("content"), str):
        text: Document = {"type": "input_text", "text": item["content"]}
        if item.get("role") == "assistant":
            text = {"type": "output_text", "text": item["content"], "annotations": []}
        result["content"] = [text]
    return result
