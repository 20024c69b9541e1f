"""Requests of Text Generation Inference. A field that is null is taken as absent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

MAX_TOP_TOKENS = 5
"""As its option ``max_top_n_tokens`` is by default."""


class Grammar(msgspec.Struct, kw_only=True):
    """A constraint on the answer."""

    type: Literal["json", "json_schema", "regex"]
    value: str | dict[str, Any]
    """A JSON Schema, an object with one as ``schema``, or a regular expression."""


class Parameters(msgspec.Struct, kw_only=True):
    adapter_id: str | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Sequences to generate, of which the likeliest is returned."""
    decoder_input_details: bool | None = None
    """Return the prompt's tokens, too."""
    details: bool | None = None
    """Return tokens with log probabilities."""
    do_sample: bool | None = None
    """Otherwise greedy, unless one of the parameters of sampling is given."""
    frequency_penalty: float | None = None
    grammar: Grammar | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """100 by default."""
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    """Return the prompt before the answer."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    stop: list[str] | None = None
    """Strings that end the answer, which ends with the one that did."""
    temperature: Annotated[float, msgspec.Meta(gt=0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    top_n_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_TOKENS)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    truncate: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Tokens of the prompt's end that are read."""
    typical_p: float | None = None
    watermark: bool | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    inputs: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)


class CompatGenerateRequest(GenerateRequest, kw_only=True):
    """Of ``/``."""

    stream: bool = False
