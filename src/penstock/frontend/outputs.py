"""What callers get back, under the names that vLLM's users know."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul

import msgspec

from penstock.core import Failure, PenstockError, PerfMetrics
from penstock.text import Message


class Logprob(msgspec.Struct, gc=False):  # there may be millions, which the garbage collector need not look through
    """How likely a token was: natural logarithm, and rank, 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = dict[int, Logprob]
"""By token id: the token itself first, then the likeliest alternatives."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's sequences."""

    index: int
    text: str = ""
    message: Message | None = None
    """A chat's answer read: its thought, content and calls of tools."""
    reasoning_tokens: int = 0
    """Tokens of the thought, with the one that ends it."""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    generation_logits: bytearray | None = None
    """The scores that each of ``token_ids`` was chosen by, ``[tokens, vocabulary]`` float32."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``cancelled`` or ``error``; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token or stop string, unless the model's own end of turn ended it."""
    failure: Failure | None = None
    perf: PerfMetrics | None = None
    """What it has taken so far, where that was asked for; of beams the first one's is that of all."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class Times:
    """When it happened, in seconds on the monotonic clock."""

    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    queued: float = 0.0
    """Seconds until it ran for the first time."""


@dataclass(slots=True)
class RequestOutput:
    """A request with all its sequences so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """For each prompt token; None for the first, which nothing predicts."""
    context_logits: bytes | None = None
    """Scores of what may follow each prompt token, ``[prompt tokens, vocabulary]`` float32."""
    embedding: bytes | None = None
    """The prompt's vector, float32, where that was asked for."""
    num_cached_tokens: int = 0
    num_discarded_tokens: int = 0
    """Of sequences that were made and not chosen (``best_of``)."""
    times: Times = field(default_factory=Times)

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt as a vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """An embedding with what it is of."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """Raises ``PenstockError`` where the request failed."""
        vector = EmbeddingOutput(floats_of(output))
        return cls(output.request_id, output.prompt, output.prompt_token_ids, vector, output.num_cached_tokens)


def floats_of(output: RequestOutput) -> list[float]:
    """The vector of a request for one; raises ``PenstockError`` where it failed."""
    if failure := output.outputs[0].failure:
        raise PenstockError.of(failure)
    return array("f", output.embedding or b"").tolist()


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Of the angle between two vectors; 0 where one has no length."""
    lengths = math.sqrt(math.fsum(x * x for x in a) * math.fsum(x * x for x in b))
    return math.fsum(map(mul, a, b)) / lengths if lengths else 0.0


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How near two texts are: the cosine of the angle between their embeddings."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A score with what it is of."""

    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Of both texts, one after the other."""


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is."""

    token_ids: list[int]
    logprobs: list[float]
    """Of each of its tokens, natural logarithms."""
    is_greedy: bool
    """Whether each token is the likeliest where it stands."""

    @property
    def logprob(self) -> float:
        """Of the whole continuation."""
        return sum(self.logprobs)

    @classmethod
    def of(cls, output: RequestOutput, start: int) -> Score:
        """From an output with ``prompt_logprobs`` whose prompt ends with the continuation, from ``start`` on.

        Raises ``PenstockError`` where the request failed.
        """
        failure = output.outputs[0].failure
        if failure:
            raise PenstockError.of(failure)
        token_ids = output.prompt_token_ids[start:]
        told = (output.prompt_logprobs or [])[start:]
        found = [(position or {})[token_id] for position, token_id in zip(told, token_ids, strict=True)]
        return cls(token_ids, [f.logprob for f in found], all(f.rank == 1 for f in found))
