"""Outputs of requests, under vLLM's names."""

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
    """A token's log probability (natural logarithm) and rank, 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = dict[int, Logprob]
"""The logprobs at one position, by token id: the token itself first, then the likeliest alternatives."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's sequences."""

    index: int
    text: str = ""
    message: Message | None = None
    """A chat's parsed answer: reasoning, content and tool calls."""
    reasoning_tokens: int = 0
    """Number of reasoning tokens, the end marker included."""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    generation_logits: bytearray | None = None
    """The logits that each of ``token_ids`` was sampled from, ``[tokens, vocabulary]`` float32."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``cancelled`` or ``error``; None while the sequence is generated."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for an EOS token."""
    failure: Failure | None = None
    perf: PerfMetrics | None = None
    """With ``return_perf_metrics``; with beams, the first one's is for all."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestTimes:
    """Times of a request, seconds on the monotonic clock."""

    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    queued: float = 0.0
    """Seconds from arrival to the first step."""
    sent: float | None = None
    """When it was sent to the engine."""
    detokenizing: float = 0.0
    """Of a traced request: seconds that making text of its tokens has taken."""


@dataclass(slots=True)
class RequestOutput:
    """A request's output so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """For each prompt token; None for the first, which has none."""
    context_logits: bytes | None = None
    """Logits after each prompt token, ``[prompt tokens, vocabulary]`` float32."""
    embedding: bytes | None = None
    """The prompt's embedding, float32, of an embedding request."""
    num_cached_tokens: int = 0
    num_discarded_tokens: int = 0
    """Tokens of sequences that ``best_of`` generated and did not return."""
    times: RequestTimes = field(default_factory=RequestTimes)
    weights_versions: list[str] = field(default_factory=list)
    """Versions of the weights that it was computed with, in order: one, unless they changed meanwhile and running
    requests went on with the new ones."""

    def add_weights(self, version: str) -> None:
        """Record that what was added last was computed with this version of the weights."""
        if not self.weights_versions or self.weights_versions[-1] != version:
            self.weights_versions.append(version)

    @property
    def weights_version(self) -> str:
        """Version of the weights that its last tokens were computed with; empty before the first."""
        return self.weights_versions[-1] if self.weights_versions else ""

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """An embedding with its prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """Raises ``PenstockError`` where the request failed."""
        vector = EmbeddingOutput(embedding_of(output))
        return cls(output.request_id, output.prompt, output.prompt_token_ids, vector, output.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The probability of each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """Probabilities of classes with their prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: ClassificationOutput

    @classmethod
    def of(cls, output: RequestOutput) -> ClassificationRequestOutput:
        """Raises ``PenstockError`` where the request failed."""
        probabilities = ClassificationOutput(embedding_of(output))
        return cls(output.request_id, output.prompt, output.prompt_token_ids, probabilities)


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """What was pooled: a vector, or one for each token."""

    data: list[float] | list[list[float]]


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """What was pooled, with its prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput

    @classmethod
    def of(cls, output: RequestOutput, of_tokens: bool) -> PoolingRequestOutput:
        """Raises ``PenstockError`` where the request failed.

        Args:
            of_tokens: whether there is a vector for each token.
        """
        data = PoolingOutput(vectors_of(output) if of_tokens else embedding_of(output))
        return cls(output.request_id, output.prompt, output.prompt_token_ids, data)


def vectors_of(output: RequestOutput) -> list[list[float]]:
    """The vectors of an output's tokens; raises ``PenstockError`` where the request failed."""
    numbers = embedding_of(output)
    size = len(numbers) // len(output.prompt_token_ids)
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]


def embedding_of(output: RequestOutput) -> list[float]:
    """The embedding of an output as numbers; raises ``PenstockError`` where the request failed."""
    if failure := output.outputs[0].failure:
        raise PenstockError.of(failure)
    return array("f", output.embedding or b"").tolist()


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of the angle between two vectors; 0 where one is zero."""
    lengths = math.sqrt(math.fsum(x * x for x in a) * math.fsum(x * x for x in b))
    return math.fsum(map(mul, a, b)) / lengths if lengths else 0.0


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The similarity of two texts: the cosine of the angle between their embeddings."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A similarity score with its prompts."""

    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Token ids of both texts, concatenated."""


@dataclass(frozen=True, slots=True)
class Loglikelihood:
    """The log probability of a continuation after its prompt."""

    token_ids: list[int]
    logprobs: list[float]
    """Log probability of each token, natural logarithm."""
    is_greedy: bool
    """Whether greedy decoding would have generated the continuation."""

    @property
    def logprob(self) -> float:
        """Log probability of the whole continuation."""
        return sum(self.logprobs)

    @classmethod
    def of(cls, output: RequestOutput, start: int) -> Loglikelihood:
        """From an output with ``prompt_logprobs`` whose prompt ends with the continuation, from ``start`` on.

        Raises ``PenstockError`` where the request failed.
        """
        failure = output.outputs[0].failure
        if failure:
            raise PenstockError.of(failure)
        token_ids = output.prompt_token_ids[start:]
        positions = (output.prompt_logprobs or [])[start:]
        logprobs = [(position or {})[token_id] for position, token_id in zip(positions, token_ids, strict=True)]
        return cls(token_ids, [f.logprob for f in logprobs], all(f.rank == 1 for f in logprobs))
