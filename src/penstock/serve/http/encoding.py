"""JSON documents and server-sent events."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
"""The last event of a stream in OpenAI's API."""


def event(document: object) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(document) + b"\n\n"


def named_event(kind: str, document: object) -> bytes:
    """One server-sent event with its type."""
    return b"event: " + kind.encode() + b"\n" + event(document)


class Json(Response):
    """A document as JSON."""

    media_type = "application/json"

    def __init__(self, document: object, status: int = 200) -> None:
        super().__init__(encode(document), status)
