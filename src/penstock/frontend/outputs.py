"""Outputs of requests, with vLLM's class and field names."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import TYPE_CHECKING

import msgspec

from penstock.core import Failure, LoRARequest, PenstockError, PerfMetrics
from penstock.text import Message

from .request_times import RequestMetrics, RequestTimes

if TYPE_CHECKING:
    import torch


class Logprob(msgspec.Struct, gc=False):  # there may be millions, which the garbage collector must not traverse
    """Log probability (natural logarithm) and rank (1: most likely) of a token."""

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = dict[int, Logprob]
"""Logprobs at one position by token id: the token itself first, then the most likely tokens."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request."""

    index: int
    text: str = ""
    message: Message | None = None
    """Parsed answer to a chat: reasoning, content and tool calls."""
    reasoning_tokens: int = 0
    """Number of reasoning tokens, including the end marker."""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    generation_logits: bytearray | None = None
    """Logits from which each of ``token_ids`` was sampled, ``[tokens, vocabulary]`` float32."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``cancelled`` or ``error``; None while the sequence is running."""
    stop_reason: int | str | None = None
    """Stop token or stop string that ended the sequence; None for an EOS token."""
    failure: Failure | None = None
    perf: PerfMetrics | None = None
    """Set with ``return_perf_metrics``; with beam search, the first beam has the metrics of the request."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class Resume:
    """A request that lost its engine, and continues on another one."""

    reason: str
    """``engine_died``, ``engine_lost`` (no connection to its host), or ``engine_stopping``."""
    num_tokens: int
    """Number of tokens that the other engine computes again: prompt and output."""
    lost: float = field(default_factory=time.monotonic)
    """Time at which the engine was lost, seconds on the monotonic clock."""
    continued: float | None = None
    """Time of the next output, seconds on the monotonic clock; None until it arrives."""
    changed_engine: str = ""
    """Kernels and weights of the other engine if its results may differ (``resume_across_fingerprints``)."""


@dataclass(slots=True)
class RequestOutput:
    """Cumulative output of a request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One item per prompt token; None for the first token."""
    context_logits: bytes | None = None
    """Logits after each prompt token, ``[prompt tokens, vocabulary]`` float32."""
    embedding: bytes | None = None
    """Pooled vector of a pooling request, float32."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    num_discarded_tokens: int = 0
    """Number of tokens of ``best_of`` sequences that are not returned."""
    times: RequestTimes = field(default_factory=RequestTimes)
    weights_versions: list[str] = field(default_factory=list)
    """Versions of the weights used, in order; several if the weights were updated while the request was running."""

    lowered_tools: tuple[str, ...] = ()
    """``TokenDelta.lowered_tools``."""
    resumes: list[Resume] = field(default_factory=list)
    """Losses of the request's engine so far."""
    lora_request: LoRARequest | None = None
    """LoRA adapter of the request; None: the base model."""

    @property
    def metrics(self) -> RequestMetrics:
        """Times of the request, under vLLM's names."""
        return RequestMetrics.of(self.times, sum(len(output.token_ids) for output in self.outputs), self.finished)

    @property
    def is_waiting(self) -> bool:
        """True while the request waits to continue after the loss of its engine."""
        return bool(self.resumes) and self.resumes[-1].continued is None and not self.finished

    def add_weights(self, version: str) -> None:
        """Record the version of the weights used by the last step."""
        if not self.weights_versions or self.weights_versions[-1] != version:
            self.weights_versions.append(version)

    @property
    def weights_version(self) -> str:
        """Version of the weights used for the last tokens; empty before the first token."""
        return self.weights_versions[-1] if self.weights_versions else ""

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """Embedding vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """Embedding of a prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """Convert an output. Raises ``PenstockError`` if the request failed."""
        vector = EmbeddingOutput(embedding_of(output))
        return cls(output.request_id, output.prompt, output.prompt_token_ids, vector, output.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """Probability of each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """Class probabilities of a prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: ClassificationOutput

    @classmethod
    def of(cls, output: RequestOutput) -> ClassificationRequestOutput:
        """Convert an output. Raises ``PenstockError`` if the request failed."""
        probabilities = ClassificationOutput(embedding_of(output))
        return cls(output.request_id, output.prompt, output.prompt_token_ids, probabilities)


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """Pooled vector, or one vector per token."""

    data: torch.Tensor
    """``[size]`` or ``[tokens, size]``, float32, on the CPU."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and bool((self.data == other.data).all())


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """Pooled vector or vectors of a prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput

    @classmethod
    def of(cls, output: RequestOutput, per_token: bool) -> PoolingRequestOutput:
        """Convert an output. Raises ``PenstockError`` if the request failed.

        Args:
            per_token: the output has one vector per token.
        """
        import torch  # deferred: the server's API processes do not load it

        data = torch.tensor(vectors_of(output) if per_token else embedding_of(output))
        return cls(output.request_id, output.prompt, output.prompt_token_ids, PoolingOutput(data))


def vectors_of(output: RequestOutput) -> list[list[float]]:
    """Per-token vectors of an output. Raises ``PenstockError`` if the request failed."""
    numbers = embedding_of(output)
    size = len(numbers) // len(output.prompt_token_ids)
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]


def embedding_of(output: RequestOutput) -> list[float]:
    """Pooled vector of an output as a list. Raises ``PenstockError`` if the request failed."""
    if failure := output.outputs[0].failure:
        raise PenstockError.of(failure)
    return array("f", output.embedding or b"").tolist()


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Cosine similarity of two vectors; 0 if a vector is zero."""
    lengths = math.sqrt(math.fsum(x * x for x in a) * math.fsum(x * x for x in b))
    return math.fsum(map(mul, a, b)) / lengths if lengths else 0.0


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Score of two texts: a cross-encoder's output, or the cosine similarity of their embeddings."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """Score of two texts, with their token ids."""

    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Token ids of both texts, concatenated."""


@dataclass(frozen=True, slots=True)
class Loglikelihood:
    """Log probability of a continuation given its prompt."""

    token_ids: list[int]
    logprobs: list[float]
    """Log probability (natural logarithm) of each token."""
    is_greedy: bool
    """True if greedy decoding would have generated the continuation."""

    @property
    def logprob(self) -> float:
        """Log probability of the whole continuation."""
        return sum(self.logprobs)

    @classmethod
    def of(cls, output: RequestOutput, start: int) -> Loglikelihood:
        """Convert an output with ``prompt_logprobs``. Its prompt contains the continuation, from token ``start`` on.

        Raises ``PenstockError`` if the request failed.
        """
        failure = output.outputs[0].failure
        if failure:
            raise PenstockError.of(failure)
        token_ids = output.prompt_token_ids[start:]
        positions = (output.prompt_logprobs or [])[start:]
        logprobs = [(position or {})[token_id] for position, token_id in zip(positions, token_ids, strict=True)]
        return cls(token_ids, [f.logprob for f in logprobs], all(f.rank == 1 for f in logprobs))
