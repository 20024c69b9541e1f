"""What an OpenAI-compatible server streams: server-sent events, read as bytes come and decoded no further than needed.

The client may share its cores with the server it measures, so nothing is built here that nobody reads.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"


class Delta(msgspec.Struct):
    """Of a chat's chunk; thinking counts as text under either of its names."""

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
    def says(self) -> bool:
        """Whether a reader sees something new; a chat's first chunk often has a role and no more."""
        delta = self.delta
        return bool(
            self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls))
        )


class PromptTokensDetails(msgspec.Struct):
    """How many of the prompt's tokens came from the prefix cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The server's own count of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class Chunk(msgspec.Struct):
    """An event's payload. After its last choice a server sends one with ``usage`` alone, if it was asked to."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class EventReader:
    """Cuts a byte stream into the payloads of its ``data:`` lines, wherever the network cut it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Payloads that are complete now, ``[DONE]`` among them."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


decode_chunk = msgspec.json.Decoder(Chunk).decode


def error_message(body: bytes) -> str:
    """The sentence in an error's body: OpenAI's, vLLM's older or FastAPI's shape, or what there is of another."""
    try:
        found: Any = msgspec.json.decode(body)
        for name in ("error", "message", "detail"):
            if isinstance(found, dict) and name in found:
                found = found[name]
        text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
    except msgspec.DecodeError:
        text = body.decode(errors="replace")
    return " ".join(text.split())[:300]
