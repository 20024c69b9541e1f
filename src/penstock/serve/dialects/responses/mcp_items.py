"""Items of MCP servers: output items with their events, and lists of tools in the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.core.errors import invalid
from penstock.frontend.mcp import McpTool
from penstock.serve.chat.generation import CallDelta

from .approvals import ApprovedCall
from .convert import namespaces
from .events import Item as Document
from .events import OutputItemStream
from .mcp_toolset import CallResult, McpToolset
from .schema import Item, Tool


class McpItemStream(OutputItemStream):
    """Builder of the output items of a response with MCP tools, and of their events.

    Calls of MCP tools become items ``mcp_call``, which ``finish_call`` ends, or ``mcp_approval_request``.

    Args:
        name: as ``OutputItemStream``; ``event``, too.
        tools: tools of the request.
        toolset: MCP servers of the request.
    """

    def __init__(
        self,
        name: str,
        event: Callable[..., bytes],
        tools: list[Tool],
        toolset: McpToolset,
    ) -> None:
        super().__init__(name, event, namespaces(tools))
        self._toolset = toolset
        self._functions = {tool.name for tool in tools if tool.type == "function"}.union(self._namespaces)
        self.pending: list[int] = []
        """Indexes of the items ``mcp_call`` whose tools have not been called yet."""

    def list_tools(self, label: str, tools: list[McpTool]) -> bytes:
        """Add an item ``mcp_list_tools``; returns the encoded events."""
        item: Document = {"type": "mcp_list_tools", "server_label": label, "tools": [], "error": None}
        events = self._add_item(item) + self._item_event("response.mcp_list_tools.in_progress")
        item = self.items[-1]
        item["tools"] = [msgspec.to_builtins(tool) for tool in tools]
        return events + self._item_event("response.mcp_list_tools.completed") + self._item_done()

    def approved_call(self, call: ApprovedCall) -> bytes:
        """Add an item ``mcp_call`` for a call that the client has approved; returns the encoded events."""
        events = self._begin_call(call.label, call.name, call.request_id)
        return events + self._add_arguments(call.arguments) + self.end()

    def finish_call(self, index: int, result: CallResult) -> bytes:
        """End the item ``mcp_call`` of a finished call; returns the encoded events."""
        status = "completed" if result.error is None else "failed"
        self.items[index] |= {"output": result.output, "error": result.error, "status": status}
        return self._item_event(f"response.mcp_call.{status}", index) + self._item_done(index)

    def cancel_calls(self) -> bytes:
        """End the items of calls that are not executed; returns the encoded events."""
        indexes, self.pending = self.pending, []
        for index in indexes:
            self.items[index]["status"] = "incomplete"
        return b"".join([self._item_done(index) for index in indexes])

    def end(self, status: str = "completed") -> bytes:
        kind = self.items[-1]["type"] if self._open else ""
        if kind not in ("mcp_call", "mcp_approval_request"):
            return super().end(status)
        self._open, item = False, self.items[-1]
        if kind == "mcp_approval_request":
            if status != "completed":  # the arguments are incomplete: nothing can be approved
                self.items.pop()
                return b""
            return self._event("response.output_item.added", output_index=len(self.items) - 1, item=item) + (
                self._item_done()
            )
        if status != "completed":
            item["status"] = status
            return self._item_done()
        self.pending.append(len(self.items) - 1)
        return self._item_event("response.mcp_call_arguments.done", arguments=item["arguments"])

    def _call(self, part: CallDelta) -> bytes:
        if part.id and part.name not in self._functions and (found := self._toolset.find(part.name)):
            ended = self.end()
            if not found.needs_approval:
                return ended + self._begin_call(found.label, found.name) + self._add_arguments(part.arguments)
            request = {"server_label": found.label, "name": found.name, "arguments": part.arguments}
            kind = "mcp_approval_request"
            self.items.append({"id": self._new_id(kind), "type": kind, **request})
            self._open = True
            return ended
        if part.id or self.items[-1]["type"] == "function_call":
            return super()._call(part)
        return self._add_arguments(part.arguments)

    def _begin_call(self, label: str, name: str, approval: str | None = None) -> bytes:
        item: Document = {"type": "mcp_call", "server_label": label, "name": name, "arguments": ""}
        item |= {"approval_request_id": approval, "output": None, "error": None, "status": "in_progress"}
        self._open = True
        return self._add_item(item) + self._item_event("response.mcp_call.in_progress")

    def _add_arguments(self, text: str) -> bytes:
        self.items[-1]["arguments"] += text
        if not text or self.items[-1]["type"] == "mcp_approval_request":
            return b""
        return self._item_event("response.mcp_call_arguments.delta", delta=text)

    def _add_item(self, item: Document) -> bytes:
        self.items.append({"id": self._new_id(item["type"]), **item})
        return self._event("response.output_item.added", output_index=len(self.items) - 1, item=self.items[-1])


def listed_tools(items: list[Item]) -> dict[str, list[McpTool]]:
    """Tools that the input of a request lists (``mcp_list_tools``), by server label.

    Raises ``PenstockError`` (``invalid``) for malformed items.
    """
    found: dict[str, list[McpTool]] = {}
    for i, item in enumerate(items):
        if item.type == "mcp_list_tools" and item.server_label is not None and not item.error:
            try:
                found[item.server_label] = msgspec.convert(item.tools or [], list[McpTool])
            except msgspec.ValidationError as error:
                raise invalid(f"input[{i}].tools", f"are not tools of an MCP server: {error}") from error
    return found


def input_list(given: str | list[Item]) -> list[Item]:
    """Input of a request as a list of items."""
    return [Item(role="user", content=given)] if isinstance(given, str) else given


def to_items(documents: list[dict[str, Any]]) -> list[Item]:
    """Output items of a response as input items of the next round."""
    return msgspec.convert(documents, list[Item])
