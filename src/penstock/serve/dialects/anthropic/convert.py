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


def to_chat_request(request: CountTokensRequest, variables: Collection[str], images: bool = False) -> ChatRequest:
    """The chat request for a message request.

    Args:
        variables: names that the model's chat template reads.
        images: whether messages and tool results may have images.

    Raises ``PenstockError``: ``invalid`` for contradictions, ``unsupported`` for content that is not text, or an image.
    """
    messages: list[dict[str, Any]] = []
    if system := text_of(request.system or "", "system"):
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{i}]", images)
    result: dict[str, Any] = {"model": request.model, "messages": messages, "include_reasoning": False}
    if messages and messages[-1]["role"] == "assistant":  # the answer continues it
        if messages[-1].get("tool_calls"):
            raise invalid(f"messages[{len(request.messages)}]", "is missing: a tool_result for each tool_use before it")
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
        thinks = request.thinking is not None and request.thinking.type != "disabled"
        result["chat_template_kwargs"] = {"enable_thinking": thinks}
    return msgspec.convert(result | _tools(request) | _sampling(request), ChatRequest)


def _sampling(request: CountTokensRequest) -> dict[str, Any]:
    if not isinstance(request, MessagesRequest):
        return {}
    thinking = request.thinking
    if thinking and thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise invalid("thinking.budget_tokens", "is missing")
        if thinking.budget_tokens >= request.max_tokens:
            raise invalid("thinking.budget_tokens", "must be less than max_tokens", request.max_tokens)
    names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
    return {name: getattr(request, name) for name in names} | {"stop": request.stop_sequences or None}


def _tools(request: CountTokensRequest) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if request.tools:
        result["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    if choice := request.tool_choice:
        if (choice.name is None) == (choice.type == "tool"):
            raise invalid("tool_choice.name", "requires the type tool")
        result["tool_choice"] = named_tool(choice.name) if choice.type == "tool" else CHOICES[choice.type]
        if choice.disable_parallel_tool_use:
            result["parallel_tool_calls"] = False
    return result


def _tool(tool: Tool, path: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        message = f"{path}.type: {tool.type[:50]} is not supported, only custom is"
        raise PenstockError(Code.UNSUPPORTED, message, f"{path}.type")
    name, schema = require(tool.name, f"{path}.name"), require(tool.input_schema, f"{path}.input_schema")
    return function_tool(name, tool.description, schema)


def _messages(message: Message, path: str, images: bool) -> list[dict[str, Any]]:
    """A message, after the tool results that it contains."""
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
            found = _result(block, f"{where}.content", images)
            results.append(tool_result(_call_id(block.tool_use_id, f"{where}.tool_use_id"), found))
        elif block.type == "tool_use" and message.role == "assistant":
            name = require(block.name, f"{where}.name")
            calls.append(function_call(_call_id(block.id, f"{where}.id"), name, block.input or {}))
        elif block.type == "thinking" and message.role == "assistant":
            thought += require(block.thinking, f"{where}.thinking")
        elif block.type != "redacted_thinking":
            text = f"{where}: {block.type[:50]} is not supported in a message of the {message.role}"
            raise PenstockError(Code.UNSUPPORTED, text, where)
    if not (parts or calls or thought):
        return results
    has_images = any(part["type"] != "text" for part in parts)
    content = parts if has_images else "\n".join(part["text"] for part in parts)
    result: dict[str, Any] = {"role": message.role, "content": content}
    if thought:
        result["reasoning_content"] = thought
    if calls:
        result["tool_calls"] = calls
    return [*results, result]


def _result(block: Block, path: str, images: bool) -> str | list[dict[str, Any]]:
    """The content of a tool result."""
    return content_of(block.content or "", path, _image) if images else text_of(block.content or "", path)


def _image(block: Block, path: str) -> dict[str, Any] | None:
    """An image in OpenAI's form; None for other blocks."""
    return {"type": "image_url", "image_url": {"url": _image_url(block, path)}} if block.type == "image" else None


def _image_url(block: Block, path: str) -> str:
    source = require(block.source, f"{path}.source")
    if source.type == "url":
        return require(source.url, f"{path}.source.url")
    if source.type != "base64":
        words = f"{path}.source.type: {source.type[:50]} is not supported, only base64 and url are"
        raise PenstockError(Code.UNSUPPORTED, words, f"{path}.source.type")
    return f"data:{source.media_type or ''};base64,{require(source.data, f'{path}.source.data')}"


def _call_id(call_id: str | None, path: str) -> str:
    """A call's id without Anthropic's prefix, as the model's chat template expects it."""
    return require(call_id, path).removeprefix(CALL_ID_PREFIX)
