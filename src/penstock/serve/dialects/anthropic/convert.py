"""Conversion of Anthropic's messages to a chat request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

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
from penstock.serve.chat.request import ChatRequest
from penstock.serve.http.body import require

from .schema import CALL_ID_PREFIX, Block, CountTokensRequest, Message, MessagesRequest, Tool

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Anthropic's ``tool_choice`` type → ``tool_choice`` of a chat request."""


def to_chat_request(request: CountTokensRequest, variables: Collection[str], images: bool = False) -> ChatRequest:
    """Convert a Messages request to a chat request.

    Args:
        variables: variables that the model's chat template reads.
        images: allow images in messages and tool results.

    Raises ``PenstockError``: ``invalid`` (contradictory fields), ``unsupported`` (content other than text and images).
    """
    messages: list[dict[str, Any]] = []
    if system := text_of(request.system or "", "system"):
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{i}]", images)
    result: dict[str, Any] = {"model": request.model, "messages": messages, "include_reasoning": False}
    if messages and messages[-1]["role"] == "assistant":  # prefill: generation continues this message
        if messages[-1].get("tool_calls"):
            raise invalid(f"messages[{len(request.messages)}]", "is missing: each tool_use needs a tool_result")
        result |= {"continue_final_message": True}
    if thinking := request.thinking:
        result["include_reasoning"] = thinking.type != "disabled" and thinking.display != "omitted"
        if thinking.type == "enabled":
            result["reasoning_max_tokens"] = thinking.budget_tokens
    if config := request.output_config:
        if config.format:
            result["response_format"] = json_schema_format(config.format.schema)
        result |= effort_fields(config.effort, variables)
    if "enable_thinking" in variables:
        enabled = request.thinking is not None and request.thinking.type != "disabled"
        result["chat_template_kwargs"] = {"enable_thinking": enabled}
    return msgspec.convert(result | _tools(request) | _sampling(request), ChatRequest)


def _sampling(request: CountTokensRequest) -> dict[str, Any]:
    if not isinstance(request, MessagesRequest):
        return {}
    thinking = request.thinking
    if thinking and thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise invalid("thinking.budget_tokens", "is missing; the thinking type enabled requires it")
        if thinking.budget_tokens >= request.max_tokens:
            message = f"must be less than max_tokens ({request.max_tokens}), is {thinking.budget_tokens}"
            raise invalid("thinking.budget_tokens", message, request.max_tokens)
    names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
    return {name: getattr(request, name) for name in names} | {"stop": request.stop_sequences or None}


def _tools(request: CountTokensRequest) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if request.tools:
        result["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if choice := request.tool_choice:
        if (choice.name is None) == (choice.type == "tool"):
            missing, excess = "is missing; the type tool requires it", f"requires the type tool, not {choice.type}"
            raise invalid("tool_choice.name", missing if choice.name is None else excess)
        result["tool_choice"] = named_tool(choice.name) if choice.type == "tool" else CHOICES[choice.type]
        if choice.disable_parallel_tool_use:
            result["parallel_tool_calls"] = False
    return result


def _tool(tool: Tool, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        message = f"{path}.type: {tool.type[:50]} is not supported; use custom"
        raise PenstockError(Code.UNSUPPORTED, message, f"{path}.type")
    name, schema = require(tool.name, f"{path}.name"), require(tool.input_schema, f"{path}.input_schema")
    return function_tool(name, tool.description, schema)


def _messages(message: Message, path: str, images: bool) -> list[dict[str, Any]]:
    """Convert a message to chat messages: one for each tool result, then one for the other blocks."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    parts: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thought = ""
    for i, block in enumerate(message.content):
        where = f"{path}.content[{i}]"
        if block.type == "text":
            parts.append({"type": "text", "text": require(block.text, f"{where}.text")})
        elif block.type == "image" and images and message.role == "user":
            parts.append({"type": "image_url", "image_url": {"url": _image_url(block, where)}})
        elif block.type == "tool_result" and message.role == "user":
            content = _result(block, f"{where}.content", images)
            results.append(tool_result(_call_id(block.tool_use_id, f"{where}.tool_use_id"), content))
        elif block.type == "tool_use" and message.role == "assistant":
            name = require(block.name, f"{where}.name")
            calls.append(function_call(_call_id(block.id, f"{where}.id"), name, block.input or {}))
        elif block.type == "thinking" and message.role == "assistant":
            thought += require(block.thinking, f"{where}.thinking")
        elif block.type != "redacted_thinking":
            error = f"{where}: {block.type[:50]} is not supported in messages with the role {message.role}"
            raise PenstockError(Code.UNSUPPORTED, error, where)
    if not (parts or calls or thought):
        return results
    has_images = any(part["type"] != "text" for part in parts)
    text_or_parts = parts if has_images else "\n".join(part["text"] for part in parts)
    result: dict[str, Any] = {"role": message.role, "content": text_or_parts}
    if thought:
        result["reasoning_content"] = thought
    if calls:
        result["tool_calls"] = calls
    return [*results, result]


def _result(block: Block, path: str, images: bool) -> str | list[dict[str, Any]]:
    """The text of a tool result, or a list of text and image parts if ``images`` is true."""
    return content_of(block.content or "", path, _image) if images else text_of(block.content or "", path)


def _image(block: Block, path: str) -> dict[str, Any] | None:
    """An image in OpenAI's form; None for other blocks."""
    return {"type": "image_url", "image_url": {"url": _image_url(block, path)}} if block.type == "image" else None


def _image_url(block: Block, path: str) -> str:
    source = require(block.source, f"{path}.source")
    if source.type == "url":
        return require(source.url, f"{path}.source.url")
    if source.type != "base64":
        message = f"{path}.source.type: {source.type[:50]} is not supported; use base64 or url"
        raise PenstockError(Code.UNSUPPORTED, message, f"{path}.source.type")
    return f"data:{source.media_type or ''};base64,{require(source.data, f'{path}.source.data')}"


def _call_id(call_id: str | None, path: str) -> str:
    """The id of a tool call without Anthropic's prefix, as the chat template expects it."""
    return require(call_id, path).removeprefix(CALL_ID_PREFIX)
