"""Stored responses: their conversations, and those that are computed in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from uuid import uuid4

import msgspec

from penstock.core import Failure, PenstockError
from penstock.core.errors import invalid
from penstock.engine.service.client import STOPPING
from penstock.serve.http.reply import RequestLimiter
from penstock.serve.http.unexpected import unexpected

from .handler import Document, ResponseHandler
from .schema import CountTokensRequest, Item, conversation_of

if TYPE_CHECKING:  # what it imports may not be installed
    from penstock.serve.storage.conversations import ConversationStore
    from penstock.serve.storage.responses import ResponseStore

BEAT_INTERVAL = 2.0
"""Seconds between two signs of life of a background response."""
logger = logging.getLogger(__name__)
T = TypeVar("T", bound=CountTokensRequest)


PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Of ids, by type."""


class Stores(NamedTuple):
    """Where responses and conversations are kept."""

    responses: ResponseStore
    conversations: ConversationStore


def input_items(request: CountTokensRequest) -> list[Document]:
    """The items of a request's own input, without ids."""
    given = request.input
    if isinstance(given, str):
        parts = [{"type": "input_text", "text": given}]
        given = [msgspec.convert({"role": "user", "content": parts}, Item)]
    items: list[Document] = msgspec.to_builtins(given)
    return [{key: value for key, value in item.items() if value is not None and key != "id"} for item in items]


async def with_conversation(
    request: T, size: int, stores: Stores, owner: str, max_size: int, reserve: Callable[[int], Awaitable[None]]
) -> tuple[T, int]:
    """The request with the items of its ``conversation``, or of ``previous_response_id``, before its input, and about
    how many characters it has then.

    Args:
        size: about how many characters the request has.
        max_size: bytes of the largest request, stored items included.
        reserve: waits until there is memory for so many bytes; called before the items are loaded.

    Raises as ``ResponseStore.conversation``, ``ConversationStore.items`` and ``reserve``, and ``invalid`` where it has
    both.
    """
    if conversation := conversation_of(request):
        if request.previous_response_id is not None:
            raise invalid("previous_response_id", "cannot be combined with conversation, which has all items")
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

    return await asyncio.to_thread(joined), size + stored  # a long conversation would hold up others


class Keeper:
    """Keeps what is to be kept of one request: its response, and in a conversation what was said.

    Args:
        items: its own input.
        stores_response: whether the response itself is kept.
        conversation: the conversation to which input and output are added.
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
        """Keep a finished response; returns whether it is stored, and logs where that fails: the answer is there in any
        case."""
        await self.extend(document)
        if not self.stores_response:
            return False
        try:
            await self.add(document)
        except PenstockError as error:
            logger.warning("a response is not stored: %s", error)
            return False
        return True

    async def add(self, document: Document) -> None:
        name = document["id"].removeprefix("resp_")
        items = [item | {"id": f"in_{name}_{i}"} for i, item in enumerate(self._items)]
        await self.store.add(self.owner, document, items)

    async def extend(self, document: Document) -> None:
        """Add the request's input and a response's output to the conversation, if it has one."""
        if self._conversation is None:
            return
        try:
            items = conversation_items([*self._items, *document["output"]])
            await self._conversations.append(self.owner, self._conversation, items)
        except PenstockError as error:
            logger.warning("a response is not added to its conversation: %s", error)


class Background:
    """The responses that this process computes in the background."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, service: RequestLimiter, handler: ResponseHandler, keeper: Keeper) -> Document:
        """Store a response that is queued, and begin to compute it."""
        queued = handler.pending("queued")
        await keeper.add(queued)
        name = queued["id"]
        self._tasks[name] = asyncio.create_task(self._run(name, service, handler, keeper))
        self._tasks[name].add_done_callback(lambda _: self._tasks.pop(name, None))
        return queued

    def cancel(self, name: str) -> None:
        """Stop computing a response, if this process does; others find it out within ``BEAT_INTERVAL``."""
        if task := self._tasks.get(name):
            task.cancel()

    async def _run(self, name: str, service: RequestLimiter, handler: ResponseHandler, keeper: Keeper) -> None:
        store, owner = keeper.store, keeper.owner

        async def compute() -> None:
            with service.admit():
                if await store.advance(owner, handler.pending("in_progress")):
                    document = await handler.computed()
                    if await store.advance(owner, document):
                        await keeper.extend(document)

        work = asyncio.create_task(compute())
        try:
            while not work.done():
                await asyncio.wait([work], timeout=BEAT_INTERVAL)
                if not work.done() and not await _is_wanted(store, owner, name):
                    return
            await work
        except PenstockError as error:
            await self._fail(handler, keeper, error.failure)
        except asyncio.CancelledError:  # the server is stopping, or the response was cancelled or deleted
            await self._fail(handler, keeper, STOPPING)
        except Exception as error:
            await self._fail(handler, keeper, unexpected(error))
        finally:
            work.cancel()

    async def _fail(self, handler: ResponseHandler, keeper: Keeper, failure: Failure) -> None:
        """Store that it failed, unless it was cancelled or deleted."""
        try:
            await keeper.store.advance(keeper.owner, handler.failed(failure))
        except PenstockError as error:
            logger.error("a background response has failed, which could not be stored: %s", error)


async def _is_wanted(store: ResponseStore, owner: str, name: str) -> bool:
    try:
        return await store.beat(owner, name)
    except PenstockError as error:  # the database may answer again
        logger.warning("a background response goes on: %s", error)
        return True


def conversation_items(items: list[Document]) -> list[Document]:
    """Items with ids of their own, a status, and content in parts.

    Args:
        items: as they are sent, or the output of a response.
    """
    return [_complete(item) for item in items]


def _complete(item: Document) -> Document:
    kind = item.get("type", "message")
    whole = {**item, "type": kind, "id": f"{PREFIXES.get(kind, 'item')}_{uuid4().hex}"}
    whole["status"] = item.get("status") or "completed"
    if kind == "reasoning":
        whole.setdefault("summary", [])
    if isinstance(item.get("content"), str):
        text: Document = {"type": "input_text", "text": item["content"]}
        if item.get("role") == "assistant":
            text = {"type": "output_text", "text": item["content"], "annotations": []}
        whole["content"] = [text]
    return whole
