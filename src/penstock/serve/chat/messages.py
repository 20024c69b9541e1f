"""Conversion of messages, tools and content from any dialect to OpenAI's format, and to the chat template's input."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.serve.http.body import ElementCount, require
from penstock.text.generic_tools import NO_TOOLS

from .request import ROLES, MediaURL, Message, Tool
from .request import ContentPart as OpenAIPart

TEXT = {"text": "text"}
"""Name of the field with the text, by type of content part."""
CHAT_TEXT = {"text": "text", "refusal": "refusal"}
"""``TEXT`` with the additional part type of OpenAI's chat API."""


class ContentPart(Protocol):
    """A part of a message's content in any dialect."""

    @property
    def type(self) -> str: ...


Part = TypeVar("Part", bound=ContentPart)


class TemplateFields(Protocol):
    """Request fields that are passed to the chat template."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...


def text_of(content: str | Sequence[ContentPart], path: str, kinds: Mapping[str, str] = TEXT) -> str:
    """Like ``content_of``, for content that may only have text."""
    text = content_of(content, path, None, kinds)
    assert isinstance(text, str)
    return text


def content_of(
    content: str | Sequence[Part],
    path: str,
    media_of: Callable[[Part, str], dict[str, Any] | None] | None,
    kinds: Mapping[str, str] = TEXT,
) -> str | list[dict[str, Any]]:
    """Convert a message's content: to one text, parts joined by line breaks, or, with images or videos, to a list of
    parts in OpenAI's format.

    Args:
        path: path of the content in its request, for errors.
        media_of: converts an image or video part (part, path) to OpenAI's format, and returns None for other parts;
            None if only text is supported.
        kinds: name of the field with the text, by type of content part.

    Raises ``PenstockError``: ``unsupported`` for a part of another type, ``invalid`` for a text part without text.
    """
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        where = f"{path}[{i}]"
        if media_of and (media := media_of(part, where)) is not None:
            parts.append(media)
        elif (field := kinds.get(part.type)) is None:
            supported = "text, images and videos are" if media_of else "text is"
            message = f"{where}: {part.type[:50]} is not supported, only {supported}"
            raise PenstockError(Code.UNSUPPORTED, message, where)
        else:
            parts.append({"type": "text", "text": require(getattr(part, field), f"{where}.{field}")})
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join([part["text"] for part in parts])


def function_call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Return an entry of an assistant message's ``tool_calls``."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(call_id: str, content: str | list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message with a tool's result."""
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def function_tool(name: str, description: str | None, parameters: Any, strict: bool | None = None) -> dict[str, Any]:
    """Return an entry of a request's ``tools``."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def named_tool(name: str | None) -> dict[str, Any]:
    """Return the ``tool_choice`` that forces a call of one tool."""
    return {"type": "function", "function": {"name": name}}


def json_schema_format(schema: Any, name: str = "answer") -> dict[str, Any]:
    """Return the ``response_format`` of a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def effort_fields(effort: str | None, variables: Collection[str]) -> dict[str, Any]:
    """Return ``reasoning_effort`` with OpenAI's levels, if the template reads it.

    Args:
        variables: names that the model's chat template reads.
    """
    if not effort or "reasoning_effort" not in variables:
        return {}
    return {"reasoning_effort": "xhigh" if effort == "max" else effort}


def template_options(request: TemplateFields, tools: Sequence[Tool] | None, calls_tools: bool) -> dict[str, Any]:
    """Return the keyword arguments of ``ChatTemplate.render`` other than the messages.

    Args:
        tools: tools listed in the prompt.
        calls_tools: the chat template has a known tool call format.

    Raises ``PenstockError``: ``invalid`` for reserved names in ``chat_template_kwargs``, ``unsupported`` for tools that
    the template does not support.
    """
    options = dict(request.chat_template_kwargs or {})
    reserved = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
    if wrong := [name for name in reserved if name in options]:
        message = f"must not contain {wrong[0]}: use the request's field {wrong[0]} instead"
        raise invalid("chat_template_kwargs", message)
    if tools:
        if not calls_tools:
            raise PenstockError(Code.UNSUPPORTED, NO_TOOLS, "tools")
        options["tools"] = [msgspec.to_builtins(tool) for tool in tools]
        for tool in options["tools"]:
            tool["function"] = {name: value for name, value in tool["function"].items() if value is not None}
    is_continued = bool(request.continue_final_message)
    options["continue_final_message"] = is_continued
    options["add_generation_prompt"] = (
        not is_continued if request.add_generation_prompt is None else request.add_generation_prompt
    )
    return options


def messages_of(messages: list[Message], images: bool = False) -> list[dict[str, Any]]:
    """Convert messages to template input: content as one text, arguments of calls as objects.

    Args:
        images: messages may contain images and videos; the content of a message with media is a list of parts. The
            chat template determines for which roles media are rendered.

    Raises ``PenstockError``: ``unsupported`` for content other than text, images and videos; ``invalid`` if the
    arguments of all calls have too many elements.
    """
    count = ElementCount("messages[].tool_calls[].function.arguments")
    return [_message(message, f"messages[{i}]", images, count) for i, message in enumerate(messages)]


def _message(message: Message, path: str, images: bool, count: ElementCount) -> dict[str, Any]:
    if message.role not in ROLES:
        raise invalid(f"{path}.role", f"{message.role[:50]!r} is not one of {', '.join(ROLES)}")
    result: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message, path, images),
    }
    if message.tool_calls:
        result["tool_calls"] = [
            function_call(call.id, call.function.name, _arguments(call.function.arguments, count))
            for call in message.tool_calls
        ]
    reasoning = message.reasoning_content or message.reasoning
    rest = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    if not (message.tool_calls and result["content"]):  # gpt-oss's template rejects thinking together with content
        rest["thinking"] = reasoning
    return result | {name: value for name, value in rest.items() if value is not None}


def _content(message: Message, path: str, images: bool) -> str | list[dict[str, Any]]:
    if message.content is None:
        if message.role != "assistant":
            raise invalid(f"{path}.content", f"is missing; a {message.role} message requires it")
        return ""
    if images:
        return content_of(message.content, f"{path}.content", _media, CHAT_TEXT)
    return text_of(message.content, f"{path}.content", CHAT_TEXT)


MEDIA_FIELDS = {"image_url": "image_url", "video_url": "video_url", "video": "video"}
"""Name of the field with the URL, by type of image or video part."""


def _media(part: OpenAIPart, path: str) -> dict[str, Any] | None:
    if (field := MEDIA_FIELDS.get(part.type)) is None:
        return None
    value = require(getattr(part, field), f"{path}.{field}")
    url = require(value.url, f"{path}.{field}.url") if isinstance(value, MediaURL) else value
    kind = "image_url" if field == "image_url" else "video_url"
    return {"type": kind, kind: {"url": url}}


def _arguments(given: str | Mapping[str, Any] | None, count: ElementCount) -> Any:
    """Decode arguments to an object. Text that is not a JSON object is kept, as a model may have written it."""
    if not isinstance(given, str):
        return given or {}
    count.add(given.encode(errors="replace"))
    try:
        result = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return result if isinstance(result, dict) else given
