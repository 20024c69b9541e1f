"""What callers get back, under the names that vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core import Failure


@dataclass(slots=True)
class Logprob:
    """How likely a token was: natural logarithm, and rank, 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


Position = dict[int, Logprob]
"""By token id: the token itself first, then the likeliest alternatives."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's sequences."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Position] | None = None
    finish_reason: str | None = None
    """``stop``, ``length``, ``cancelled`` or ``error``; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token or stop string, unless the model's own end of turn ended it."""
    failure: Failure | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request with all its sequences so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Position | None] | None = None
    """For each prompt token; None for the first, which nothing predicts."""
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)
