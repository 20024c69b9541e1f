"""Images and videos in chat messages, in the formats of OpenAI, vLLM and FastDeploy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .media import IMAGE, VIDEO, MediaSource

KINDS = {
    "image_url": (IMAGE, "image_url"),
    "input_image": (IMAGE, "image_url"),
    "image_pil": (IMAGE, "image_pil"),
    "image": (IMAGE, "image"),
    "video_url": (VIDEO, "video_url"),
    "video": (VIDEO, "video"),
}
"""Kind of media, and name of the field with the image or video, by type of content part."""
BY_URL = ("image_url", "input_image", "video_url")
"""Types of content parts with a URL as value."""


def split_media(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[MediaSource]]:
    """Replace images and videos in messages with ``{"type": "image"}`` and ``{"type": "video"}``, as chat templates
    expect; returns the messages, and the media in order.

    Raises ``PenstockError``: ``unsupported`` for parts of other types, ``invalid`` for parts with missing fields.
    """
    sources: list[MediaSource] = []
    result: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        if isinstance(content := message.get("content"), list):
            parts = [_part(part, f"messages[{i}].content[{j}]", sources) for j, part in enumerate(content)]
            message = {**message, "content": parts}
        result.append(message)
    return result, sources


def move_tool_media(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """Move images and videos in tool results to the following user message, for chat templates that do not support
    them in tool results.

    Args:
        messages: as returned by ``split_media``.

    Returns the new messages, or None if no tool result has media.
    """
    result: list[Mapping[str, Any]] = []
    media: list[Any] = []
    moved = False
    for message in [*messages, {}]:
        content = message.get("content")
        if message.get("role") == "tool" and isinstance(content, list):
            media += [part for part in content if part["type"] != "text"]
            text = "\n".join(part["text"] for part in content if part["type"] == "text")
            message = {**message, "content": text}
        elif media and message.get("role") != "tool":
            if message.get("role") == "user":
                parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
                message = {**message, "content": [*media, *parts]}
            else:
                result.append({"role": "user", "content": media})
            media, moved = [], True
        result.append(message)
    return result[:-1] if moved else None


def _part(part: Any, path: str, sources: list[MediaSource]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in KINDS:
        message = f"{path}: {str(kind)[:50]} is not supported, only text, image_url and video_url are"
        raise PenstockError(Code.UNSUPPORTED, message, path)
    media, field = KINDS[kind]
    value = part.get(field)
    if kind in BY_URL:
        value = value.get("url") if isinstance(value, Mapping) else value
        if not isinstance(value, str):
            raise invalid(f"{path}.{field}", "must be an object with a url, or a URL")
    sources.append(MediaSource(value, path, media))
    return {"type": media}
