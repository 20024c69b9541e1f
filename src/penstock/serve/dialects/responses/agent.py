"""Handler of one request of the Responses API with MCP tools: the agent loop.

In each round, the model is run, and the tools that it calls are called. The loop ends with a round without calls of MCP
tools, with calls that the client must approve or execute, or at a limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec

from penstock.core.errors import invalid
from penstock.frontend.outputs import RequestOutput
from penstock.serve.chat.generation import ChatGeneration
from penstock.serve.chat.request import ChatRequest
from penstock.serve.http.reply import encode
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel

from .approvals import ApprovedCall, resolve_approvals
from .convert import to_chat_request
from .document import Document, ResponseDocument
from .events import Events, usage_of
from .handler import incomplete_reason, item_status, response_name, status_of
from .mcp_items import McpItemStream, input_list, listed_tools, to_items
from .mcp_servers import McpServers
from .mcp_toolset import McpToolset
from .schema import CountTokensRequest, NamedTool, ResponsesRequest

TOO_MANY_ROUNDS = "max_tool_calls"
"""Reason of an incomplete response that has reached the maximum number of rounds."""


class AgentRequest:
    """A request with MCP tools, prepared for the prompt.

    Raises ``PenstockError`` (``invalid``) for contradictory items in its input.

    Args:
        toolset: MCP servers of the request.
    """

    def __init__(self, request: CountTokensRequest, toolset: McpToolset) -> None:
        items = input_list(request.input)
        self.toolset = toolset
        self.approved: list[ApprovedCall]
        """Calls to execute before the first round."""
        self._items, self.approved = resolve_approvals(items)
        self._listed = listed_tools(items)
        self._request = request
        for call in self.approved:
            if call.label not in toolset.servers:
                raise invalid("tools", f"have no MCP server {call.label!r:.80}, whose call was approved; add it")
        choice = request.tool_choice
        if isinstance(choice, NamedTool) and choice.type == "mcp" and choice.server_label not in toolset.servers:
            raise invalid("tool_choice.server_label", "is not the label of an MCP server of tools")

    def unlisted(self) -> list[str]:
        """Use the tools that the input lists; returns the labels of the other servers, whose tools must be loaded."""
        for label, tools in self._listed.items():
            if label in self.toolset.servers:
                self.toolset.use(label, tools)
        return [label for label in self.toolset.servers if label not in self._listed]

    def chat(self, service: ServedModel, output: list[Document], **changes: object) -> ChatRequest:
        """The chat request of a round. Raises ``PenstockError`` as ``to_chat_request``.

        Args:
            output: output items of the previous rounds.
            changes: changed fields of the request.
        """
        given, tools = self._request, []
        prompt_tools = self.toolset.prompt_tools
        labels = {server.path: label for label, server in self.toolset.servers.items()}
        for i, tool in enumerate(given.tools or []):
            label = labels.get(f"tools[{i}]")
            if label is None:
                tools.append(tool)
            elif label in prompt_tools:
                tools.append(prompt_tools[label])
        items = [*self._items, *to_items(output)]
        request = msgspec.structs.replace(given, input=items, tools=tools or None, **changes)
        return to_chat_request(request, service.template_variables, service.sees_images)


class Round(ChatGeneration):
    """One run of the model in the agent loop.

    Args:
        begun: time when the round began on the monotonic clock; None: when the request arrived.
    """

    def __init__(
        self, service: ServedModel, record: RequestRecord, request: ChatRequest, size: int, begun: float | None
    ) -> None:
        super().__init__(service, record, request, size, keeps_body=True)
        if begun is not None:
            self._options["arrived"] = begun
        if begun is not None and service.timeout is not None:
            self._options["timeout"] = max(service.timeout - (begun - record.arrived), 0.0)

    async def format_full(self, outputs: list[RequestOutput]) -> bytes:
        return b""  # not used: ``AgentHandler`` formats the response


class AgentHandler:
    """Handler of one Responses request with MCP tools.

    Args:
        size: approximate number of characters of the request.
        save: stores the finished response (a ``ResponseSaver``); returns True if the response object was stored.
        stores: True if the response object is going to be stored.

    Raises ``PenstockError`` if the request is invalid, or not supported by this model or server.
    """

    def __init__(
        self,
        service: ServedModel,
        record: RequestRecord,
        request: ResponsesRequest,
        size: int,
        events: Events,
        servers: McpServers,
        save: Callable[[Document], Awaitable[bool]] | None = None,
        stores: bool = False,
    ) -> None:
        self._service = service
        self._record = record
        self._size = size
        self._event = events.event
        self._save = save
        self._max_rounds = servers.max_rounds
        self._max_tokens = request.max_output_tokens
        self._streams = bool(request.stream)
        requested = servers.requested(request.tools or [])
        self._toolset = McpToolset(requested, servers.connections, request.max_tool_calls, record.span)
        self._agent = AgentRequest(request, self._toolset)
        self._agent.chat(service, [], tool_choice=None)  # report errors before any tool is called
        name = response_name(record, save is not None)
        self.model = service.adapter_of(request.model) or service.name
        """Name of the model or adapter used."""
        self._document = ResponseDocument(request, name, self.model, stores)
        self._items = McpItemStream(name, events.event, request.tools or [], self._toolset)
        self._usage: Document | None = None
        self._status = "in_progress"
        self._reason = "max_output_tokens"
        self._is_finished = False
        """True if the last round needs no further round."""

    async def full(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as one JSON document."""
        yield encode(await self._store(await self.computed()))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events."""
        begin = self._begin()
        async with aclosing(self._run()) as parts:
            async for events in parts:
                if begin or events:  # a failure before the first event becomes an error response
                    yield begin + events
                    begin = b""
        document = await self._store(self._finished_response())
        yield begin + self._event(f"response.{self._status}", response=document)

    async def computed(self) -> Document:
        """Run the loop, and return the finished response. Raises ``PenstockError`` if the request fails."""
        if self._streams:
            self._begin()
        async with aclosing(self._run()) as parts:
            async for _ in parts:
                pass
        document = self._finished_response()
        if self._streams:
            self._event(f"response.{self._status}", response=document)
        return document

    def pending(self, status: str) -> Document:
        """The response object before there is any output."""
        return self._document.build([], status)

    @property
    def kept_items(self) -> list[Document]:
        """Output items that the response has if it fails: tools may have been called."""
        return self._items.items

    def _begin(self) -> bytes:
        """Encode the first events."""
        empty = self.pending("in_progress")
        return self._event("response.created", response=empty) + self._event("response.in_progress", response=empty)

    def _finished_response(self) -> Document:
        return self._document.build(self._items.items, self._status, self._usage, self._reason)

    async def _store(self, document: Document) -> Document:
        """Store the finished response if requested; returns it with the field ``store`` set to the result."""
        if self._save:
            document["store"] = await self._save(document)
        return document

    async def _run(self) -> AsyncGenerator[bytes, None]:
        """Run the loop. Yields the events of the output items."""
        try:
            async with aclosing(self._prepare()) as parts:
                async for events in parts:
                    yield events
            for number in range(1, self._max_rounds + 1):
                async with aclosing(self._round(number)) as parts:
                    async for events in parts:
                        yield events
                if self._is_finished:
                    return
            self._status, self._reason = "incomplete", TOO_MANY_ROUNDS
        finally:
            self._toolset.close()

    async def _prepare(self) -> AsyncGenerator[bytes, None]:
        """List the tools, and call those that the client has approved. Yields the events of the items."""
        for label in self._agent.unlisted():
            self._record.calls_tools = True
            try:
                tools = await self._toolset.load(label)
            finally:
                self._record.calls_tools = False
            yield self._items.list_tools(label, tools)
        for call in self._agent.approved:
            yield self._items.approved_call(call)
        async with aclosing(self._call_tools()) as results:
            async for events in results:
                yield events

    async def _round(self, number: int) -> AsyncGenerator[bytes, None]:
        """Run the model, and call the tools that it has called. Yields the events of the items.

        Args:
            number: number of the round, from 1.
        """
        items, first = self._items, len(self._items.items)
        async with aclosing(self._generate(number == 1)) as output:
            async for events in output:
                yield events
        if self._status == "incomplete":
            self._is_finished = True
            yield items.cancel_calls()
            return
        kinds = {item["type"] for item in items.items[first:]}
        self._is_finished = not items.pending or not kinds.isdisjoint(("function_call", "mcp_approval_request"))
        async with aclosing(self._call_tools()) as results:
            async for events in results:
                yield events
        if not self._is_finished and self._tokens_left() == 0:
            self._is_finished, self._status, self._reason = True, "incomplete", "max_output_tokens"

    async def _generate(self, is_first: bool) -> AsyncGenerator[bytes, None]:
        """Run the model. Yields the events of its output."""
        changes: dict[str, object] = {} if is_first else {"tool_choice": None}  # a forced call must not repeat
        if self._max_tokens is not None:
            changes["max_output_tokens"] = self._tokens_left()
        begun = None if is_first else time.monotonic()
        output = list(self._items.items)
        size = self._size + self._toolset.size + sum(len(item.get("output") or "") for item in output)

        def prepare() -> Round:
            chat = self._agent.chat(self._service, output, **changes)
            return Round(self._service, self._record, chat, size, begun)

        generation = await self._service.parser.parse(self._record.sender, size, prepare)
        last: RequestOutput | None = None
        async with aclosing(await generation.outputs()) as outputs:
            async for _, last in outputs:
                yield self._items.add(generation.delta(last.outputs[0]))
        assert last is not None
        self._status, self._reason = status_of(generation, last), incomplete_reason(last)
        self._usage = _sum(self._usage, usage_of(last))
        yield self._items.end(item_status(generation, last))

    async def _call_tools(self) -> AsyncGenerator[bytes, None]:
        """Call the pending tools, several at the same time. Yields the events of the results, in order."""
        indexes, self._items.pending = self._items.pending, []
        items = [self._items.items[index] for index in indexes]
        calls = [
            asyncio.create_task(self._toolset.call(item["server_label"], item["name"], item["arguments"]))
            for item in items
        ]
        fields = self._record.log_fields
        if calls:
            fields["tool_calls"] = fields.get("tool_calls", 0) + len(calls)
        self._record.calls_tools = True
        try:
            for index, call in zip(indexes, calls, strict=True):
                yield self._items.finish_call(index, await call)
        finally:
            self._record.calls_tools = False
            for call in calls:
                call.cancel()

    def _tokens_left(self) -> int | None:
        """Number of tokens that may still be generated; None: no limit."""
        if self._max_tokens is None:
            return None
        used: int = self._usage["output_tokens"] if self._usage else 0
        return max(self._max_tokens - used, 0)


def _sum(usage: Document | None, more: Document) -> Document:
    """Sum of the token counts of several rounds."""
    if usage is None:
        return more
    return {
        name: _sum(usage[name], count) if isinstance(count, dict) else usage[name] + count
        for name, count in more.items()
    }
