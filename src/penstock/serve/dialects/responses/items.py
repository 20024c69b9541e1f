"""Items of conversations, as OpenAI's API returns them."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Of ids, by type."""

Document = dict[str, Any]


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
