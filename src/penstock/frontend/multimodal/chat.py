"""Images in the messages of chats, in the forms of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .media import ImageSource

KINDS = {"image_url": "image_url", "input_image": "image_url", "image_pil": "image_pil", "image": "image"}
"""Content parts that are images, each with the name of the field that has it."""


def split_images(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[ImageSource]]:
    """Messages with ``{"type": "image"}`` in place of images, as chat templates read them, and the images in order.

    Raises ``PenstockError``: ``unsupported`` for parts of other types, ``invalid`` for parts without what they need.
    """
    sources: list[ImageSource] = []
    result: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        if isinstance(content := message.get("content"), list):
            parts = [_part(part, f"messages[{i}].content[{j}]", sources) for j, part in enumerate(content)]
            message = {**message, "content": parts}
        result.append(message)
    return result, sources


def _part(part: Any, path: str, sources: list[ImageSource]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in KINDS:
        words = f"{path}: {str(kind)[:50]} is not supported, only text and image_url are"
        raise PenstockError(Code.UNSUPPORTED, words, path)
    value = part.get(KINDS[kind])
    if kind in ("image_url", "input_image"):
        value = value.get("url") if isinstance(value, Mapping) else value
        if not isinstance(value, str):
            raise invalid(f"{path}.image_url", "must be an object with a url")
    sources.append(ImageSource(value, path))
    return {"type": "image"}
