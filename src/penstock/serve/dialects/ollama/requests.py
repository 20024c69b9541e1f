"""Ollama's requests. A field that is null is taken as absent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Think = bool | Literal["low", "medium", "high"]
KeepAlive = str | float
Format = Literal["", "json"] | dict[str, Any]


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    """In base64."""
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    """Of the call whose result this is, as clients have named it there."""


class OllamaRequest(msgspec.Struct, kw_only=True):
    """Fields of all requests."""

    model: str | None = None
    """One of the served models, with or without ``:latest``."""
    options: dict[str, Any] | None = None
    """Sampling parameters under Ollama's names."""
    keep_alive: KeepAlive | None = None
    """No effect: models stay loaded."""


class ShowRequest(OllamaRequest, kw_only=True):
    name: str | None = None
    """Older name of ``model``."""
    verbose: bool | None = None
    """No effect."""


class OllamaGeneration(OllamaRequest, kw_only=True):
    """Fields of all requests that generate."""

    stream: bool | None = None
    """True by default."""
    format: Format | None = None
    """``json``, or a JSON Schema of the answer."""
    think: Think | None = None
    """Whether the model reasons; a word is passed to the chat template as ``reasoning_effort``."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None


class ChatRequest(OllamaGeneration, kw_only=True):
    messages: list[OllamaMessage] = []
    """Without any, the answer is that the model is loaded."""
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(OllamaGeneration, kw_only=True):
    prompt: str = ""
    """Without one, the answer is that the model is loaded."""
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    """Continue the prompt as it is, without the chat template."""
    suffix: str | None = None
    """Text after the answer, which fills in the middle."""
    template: str | None = None
    context: list[int] | None = None


class EmbedRequest(OllamaRequest, kw_only=True):
    input: str | list[str]
    truncate: bool | None = None
    """Whether texts that are too long are cut, true by default; otherwise they are refused."""
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None


class EmbeddingsRequest(OllamaRequest, kw_only=True):
    prompt: str
