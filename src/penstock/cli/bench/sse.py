"""Reading the server-sent events of an OpenAI-compatible server with little decoding.

The client may share its cores with the server it measures, so it decodes no more than it needs.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"


class Delta(msgspec.Struct):
    """The delta of a chat's chunk; reasoning counts as text under either of its names."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    """A completion's piece of ``text``, or a chat's ``delta``."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether the chunk has text; a chat's first chunk often has a role alone."""
        delta = self.delta
        return bool(
            self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls))
        )


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The server's own count of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Chunk(msgspec.Struct):
    """An event's payload; the last one of a stream may have ``usage`` alone."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class EventReader:
    """Splits a byte stream into the payloads of its ``data:`` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Payloads that are complete now, ``[DONE]`` among them."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


decode_chunk = msgspec.json.Decoder(Chunk).decode


def error_message(body: bytes) -> str:
    """The message of an error body in OpenAI's, vLLM's older or FastAPI's format, or the body itself."""
    try:
        error: Any = msgspec.json.decode(body)
        for name in ("error", "message", "detail"):
            if isinstance(error, dict) and name in error:
                error = error[name]
        text = error if isinstance(error, str) else msgspec.json.encode(error).decode()
    except msgspec.DecodeError:
        text = body.decode(errors="replace")
    return " ".join(text.split())[:300]
