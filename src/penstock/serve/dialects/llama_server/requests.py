"""llama-server's requests. A field that is null is taken as absent."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.serve.chat.request import Message, TokenId, Tool

Mixed = list[str | TokenId]
"""One prompt of texts and token ids."""
PromptField = str | Annotated[list[str | TokenId | Mixed], msgspec.Meta(min_length=1)]
"""A text; token ids, perhaps mixed with texts; or several of these."""


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields of all requests that generate."""

    model: str | None = None
    """By default the first one."""
    stream: bool | None = None
    n_predict: Annotated[int, msgspec.Meta(ge=-2)] | None = None
    """-1, the default, and -2 are as many as the context holds; 0 reads the prompt only."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float | bool] | list[tuple[TokenId | str, float | bool]] | None = None
    """Of tokens, or of all tokens of texts; false forbids them."""
    n_probs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of likeliest tokens to return with each token."""
    grammar: str | None = None
    """In GBNF."""
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: PromptField


class InfillFile(msgspec.Struct, kw_only=True):
    text: str
    filename: str = "tmp"


class InfillRequest(GenerationRequest, kw_only=True):
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[InfillFile] = []
    """Other files, before the prefix."""
    prompt: str = ""
    """Begins the answer."""


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    content: PromptField
    model: str | None = None


class TemplateRequest(msgspec.Struct, kw_only=True):
    messages: list[Message]
    model: str | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    content: str
    model: str | None = None
    add_special: bool | None = None
    """Add the tokenizer's special tokens; false by default."""
    with_pieces: bool | None = None
    """Return each token's text, too, or its bytes where they are no text."""
