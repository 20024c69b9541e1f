"""The response object of the Responses API."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from .schema import ResponsesRequest, Tool, conversation_of

Document = dict[str, Any]
"""A response object of the Responses API."""
ECHOED_FIELDS = (
    "instructions max_output_tokens max_tool_calls metadata previous_response_id reasoning temperature text "
    "tool_choice tools top_p user service_tier"
).split()
"""Fields of the request that the response repeats."""
SECRETS = ("headers", "authorization")
"""Fields of a tool that are neither repeated nor stored."""


class ResponseDocument:
    """Builder of the response object of one request.

    Args:
        name: id of the response, without ``resp_``.
        model: name of the model or adapter.
        stores: True if the response object is going to be stored.
        begun: response object of a background response that another process has begun; None: a new response.
    """

    def __init__(
        self, request: ResponsesRequest, name: str, model: str, stores: bool, begun: Document | None = None
    ) -> None:
        self._request = msgspec.structs.replace(request, input="")
        self._name = name
        self._model = model
        self._stores = stores
        self._created = begun["created_at"] if begun else int(time.time())

    def build(
        self, items: list[Document], status: str, usage: Document | None = None, reason: str = "max_output_tokens"
    ) -> Document:
        """The response object.

        Args:
            items: output items.
            usage: token counts; None while the response is in progress.
            reason: reason of the status ``incomplete``.
        """
        request = self._request
        echoed = {name: msgspec.to_builtins(getattr(request, name)) for name in ECHOED_FIELDS}
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": request.background is True,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "model": self._model,
            "output": items,
            "usage": usage,
            **echoed,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": echoed["tool_choice"] or "auto",
            "tools": [_echo(tool) for tool in request.tools or []],
            "text": echoed["text"] or {"format": {"type": "text"}},
            "store": self._stores,
            "conversation": {"id": conversation} if (conversation := conversation_of(request)) else None,
            "truncation": "disabled",
        }


def _echo(tool: Tool) -> Document:
    """A tool of the request, without secrets. Fields that only MCP tools have are omitted if they are absent."""
    result: Document = msgspec.to_builtins(tool)
    return {
        name: value
        for name, value in result.items()
        if name not in SECRETS and (value is not None or name in FUNCTION_FIELDS)
    }


FUNCTION_FIELDS = ("name", "description", "parameters", "strict", "tools")
"""Fields of functions and namespaces, which are repeated even if they are null."""
