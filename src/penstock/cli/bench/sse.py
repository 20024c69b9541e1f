"""Parser of the server-sent events of an OpenAI-compatible server.

It decodes only the fields that it needs, as the client may share its cores with the server that it measures.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"


class Delta(msgspec.Struct):
    """Delta of a chat chunk. Servers use either of the two names for reasoning."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    """Choice of a chunk: ``text`` of a completion, or ``delta`` of a chat."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """True if the chunk has text, reasoning or tool calls; the first chunk of a chat often has only a role."""
        delta = self.delta
        return bool(
            self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls))
        )

    @property
    def output(self) -> str:
        """Text and reasoning of the chunk."""
        delta = self.delta or Delta()
        return (self.text or "") + (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts reported by the server."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Chunk(msgspec.Struct):
    """Payload of an event; the last event of a stream may have only ``usage``."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class EventReader:
    """Splits a byte stream into the payloads of its ``data:`` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Add received bytes; returns the payloads completed by them, including ``[DONE]``."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


decode_chunk = msgspec.json.Decoder(Chunk).decode


def error_message(body: bytes) -> str:
    """Message of an error body in the format of OpenAI, older vLLM or FastAPI; otherwise the body."""
    try:
        error: Any = msgspec.json.decode(body)
        for name in ("error", "message", "detail"):
            if isinstance(error, dict) and name in error:
                error = error[name]
        text = error if isinstance(error, str) else msgspec.json.encode(error).decode()
    except msgspec.DecodeError:
        text = body.decode(errors="replace")
    return " ".join(text.split())[:300]
