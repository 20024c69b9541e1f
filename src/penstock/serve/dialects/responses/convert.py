"""Conversion of Responses requests to a chat request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.serve.chat.messages import (
    content_of,
    effort_fields,
    function_call,
    function_tool,
    json_schema_format,
    named_tool,
    text_of,
    tool_result,
)
from penstock.serve.chat.request import ROLES, ChatRequest
from penstock.serve.http.body import check_supported, convert, require
from penstock.serve.http.unknown_fields import UnknownFields

from .approvals import resolve_approvals
from .schema import (
    STORED_FIELDS,
    CountTokensRequest,
    Format,
    Item,
    NamedTool,
    Part,
    ResponsesRequest,
    Tool,
)

T = TypeVar("T", bound=CountTokensRequest)

TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Type of a text part → field that contains the text."""
MCP_ITEMS = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response")
"""Items of MCP servers that are not part of the prompt."""
CHAT_FIELDS = "stream temperature top_p top_k min_p seed stop ignore_eos cache_salt priority".split()
"""Fields with the same name and meaning in chat requests."""
BUILT_IN_TOOLS = ("web_search", "web_search_preview")
"""OpenAI's built-in tools that agents list in every request, to any server. Ignored if the request has other tools, and
no MCP server is configured for them."""


def read(
    fields: dict[str, Any], schema: type[T], unknown: UnknownFields, stores: bool, hosted: Collection[str] = ()
) -> T:
    """Convert the JSON object of a request.

    Args:
        stores: True if the server stores responses; otherwise ``STORED_FIELDS`` are rejected.
        hosted: built-in tools of OpenAI for which an MCP server is configured.

    Raises ``PenstockError``: ``unsupported`` for unsupported fields, ``invalid`` for wrong values.
    """
    if not stores:
        check_supported(fields, STORED_FIELDS)
    request = convert(fields, schema, unknown)
    dropped = [name for name in BUILT_IN_TOOLS if name not in hosted]
    if request.tools and any(tool.type not in dropped for tool in request.tools):
        for i, tool in enumerate(request.tools):
            if tool.type in dropped:
                unknown.ignore(f"tools[{i}].", tool.type, ("function", "namespace"), "tools[].")
        request.tools = [tool for tool in request.tools if tool.type not in dropped]
    return request


def num_characters(request: CountTokensRequest) -> int:
    """Number of characters of the messages in a request's input, without images."""
    if not isinstance(request.input, list):
        return len(request.input or "")
    contents = [item.content for item in request.input]
    return sum(
        len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content)
        for content in contents
        if content
    )


def qualified(namespace: str | None, name: str) -> str:
    """The name of a function in the prompt: ``NAMESPACE__NAME``, or ``NAME`` without a namespace."""
    return f"{namespace}__{name}" if namespace else name


def namespaces(tools: list[Tool] | None) -> dict[str, tuple[str, str]]:
    """Name in the prompt (``qualified``) → namespace and name, for all functions in namespaces."""
    return {
        qualified(tool.name, function.name): (tool.name, function.name)
        for tool in tools or []
        if tool.type == "namespace" and tool.name
        for function in tool.tools or []
        if function.name
    }


def to_chat_request(request: CountTokensRequest, variables: Collection[str], images: bool = False) -> ChatRequest:
    """Convert a Responses request to a chat request.

    Args:
        variables: variables that the model's chat template reads.
        images: allow images in messages and function call outputs.

    Raises ``PenstockError``: ``invalid`` (contradictory fields), ``unsupported`` (content other than text and images).
    """
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    result: dict[str, Any] = {"model": request.model, "parallel_tool_calls": request.parallel_tool_calls}
    if isinstance(request, ResponsesRequest):
        result |= {name: getattr(request, name) for name in CHAT_FIELDS} | {"max_tokens": request.max_output_tokens}
    result["messages"] = messages + _messages(request.input, images)
    if request.tools:
        result["tools"] = [
            function for i, tool in enumerate(request.tools) for function in _functions(tool, f"tools[{i}]")
        ]
    if isinstance(choice := request.tool_choice, NamedTool):
        label = choice.server_label if choice.type == "mcp" else None
        result["tool_choice"] = named_tool(qualified(label, choice.name))
    else:
        result["tool_choice"] = request.tool_choice
    forced_call = result["tool_choice"] not in (None, "auto", "none")  # a forced call has no text to constrain
    if request.text and request.text.format and not forced_call:
        result["response_format"] = _format(request.text.format)
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning and (effort := request.reasoning.effort):
        result |= effort_fields(effort, variables)
        if "enable_thinking" in variables:
            kwargs.setdefault("enable_thinking", effort != "none")
    if kwargs:
        result["chat_template_kwargs"] = kwargs
    return msgspec.convert(result, ChatRequest)


def check_items(items: list[Item]) -> None:
    """Validate items that are to be stored. Raises ``PenstockError`` as ``to_chat_request`` does."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        _add(messages, item, f"items[{i}]", images=True)


def _messages(items: str | list[Item], images: bool) -> list[dict[str, Any]]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    items, approved = resolve_approvals(items)
    if approved:
        raise invalid("tools", f"have no MCP server {approved[0].label!r:.80}, whose call was approved; add it")
    for i, item in enumerate(items):
        _add(messages, item, f"input[{i}]", images)
    return messages


def _add(messages: list[dict[str, Any]], item: Item, path: str, images: bool) -> None:
    """Append an item as a message, or merge it into the preceding assistant message."""
    if item.type == "message":
        if item.role not in ROLES:
            raise invalid(f"{path}.role", f"must be one of {', '.join(ROLES)}, is {item.role!r:.50}")
        if item.role == "assistant":
            _add_answer(messages, _text(item.content, f"{path}.content"))
        else:
            messages.append({"role": item.role, "content": _content(item.content, f"{path}.content", images)})
    elif item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) else []
        thought = "".join(part.text or "" for part in parts)
        if thought and _ends_with_assistant(messages) and messages[-1].get("tool_calls"):
            messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + thought
        elif thought:
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    elif item.type == "function_call":
        if not _ends_with_assistant(messages):
            messages.append({"role": "assistant", "content": ""})
        name, arguments = require(item.name, f"{path}.name"), require(item.arguments, f"{path}.arguments")
        call = function_call(require(item.call_id, f"{path}.call_id"), qualified(item.namespace, name), arguments)
        messages[-1].setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output":
        content = _content(item.output, f"{path}.output", images)
        messages.append(tool_result(require(item.call_id, f"{path}.call_id"), content))
    elif item.type == "mcp_call":
        if not _ends_with_assistant(messages):
            messages.append({"role": "assistant", "content": ""})
        name, arguments = require(item.name, f"{path}.name"), require(item.arguments, f"{path}.arguments")
        call = function_call(f"{len(messages):09}", qualified(item.server_label, name), arguments or "{}")
        messages[-1].setdefault("tool_calls", []).append(call)
        messages.append(tool_result(call["id"], _mcp_result(item, f"{path}.output")))
    elif item.type not in MCP_ITEMS:
        message = f"{path}.type: {item.type[:50]} is not supported; use message, reasoning, function_call"
        raise PenstockError(Code.UNSUPPORTED, f"{message} or function_call_output", f"{path}.type")


def _mcp_result(item: Item, path: str) -> str:
    """Text of the result of an ``mcp_call``, for the model."""
    if item.error:
        error = item.error if isinstance(item.error, str) else msgspec.json.encode(item.error).decode()
        return f"Error: {error}"
    return _text(item.output, path) if item.output is not None else "Error: the call was not completed"


def _add_answer(messages: list[dict[str, Any]], text: str) -> None:
    """Append assistant text. Text after reasoning or a tool call is merged into the message with the reasoning or tool
    call, so that tool results follow this message directly."""
    last = messages[-1] if _ends_with_assistant(messages) else None
    if last and not last["content"]:
        last["content"] = text
    elif last and last.get("tool_calls"):
        last["content"] += f"\n{text}"
    else:
        messages.append({"role": "assistant", "content": text})


def _ends_with_assistant(messages: list[dict[str, Any]]) -> bool:
    return bool(messages) and messages[-1]["role"] == "assistant"


def _text(content: str | list[Part] | None, path: str) -> str:
    if content is None:
        raise invalid(path, "is missing; send a text or a list of parts")
    return text_of(content, path, TEXT_PARTS)


def _content(content: str | list[Part] | None, path: str, images: bool) -> str | list[dict[str, Any]]:
    if content is None or not images:
        return _text(content, path)
    return content_of(content, path, _image, TEXT_PARTS)


def _image(part: Part, path: str) -> dict[str, Any] | None:
    if part.type != "input_image":
        return None
    if part.file_id is not None:
        raise PenstockError(
            Code.UNSUPPORTED, f"{path}.file_id: the server stores no images; send image_url", f"{path}.file_id"
        )
    return {"type": "image_url", "image_url": {"url": require(part.image_url, f"{path}.image_url")}}


def _functions(tool: Tool, path: str, namespace: str | None = None) -> list[dict[str, Any]]:
    """Convert a tool to tools of a chat request: one function, or all functions of a namespace."""
    if tool.type == "namespace" and namespace is None:
        name, functions = require(tool.name, f"{path}.name"), require(tool.tools, f"{path}.tools")
        return [one for i, each in enumerate(functions) for one in _functions(each, f"{path}.tools[{i}]", name)]
    if tool.type == "mcp":
        message = f"{path}.type: mcp: this server calls no tools of MCP servers: start it with --mcp-config"
        raise PenstockError(Code.UNSUPPORTED, message, f"{path}.type")
    if tool.type != "function":
        message = f"{path}.type: {tool.type[:50]} is not supported; use function"
        raise PenstockError(Code.UNSUPPORTED, message, f"{path}.type")
    name = qualified(namespace, require(tool.name, f"{path}.name"))
    return [function_tool(name, tool.description, tool.parameters, tool.strict)]


def _format(text_format: Format) -> dict[str, Any]:
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    if text_format.schema is None:
        raise invalid("text.format.schema", "is missing; the format json_schema requires it")
    return json_schema_format(text_format.schema, text_format.name or "answer")
