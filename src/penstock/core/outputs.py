"""Outputs: what the engine returns for a request, step by step. Encoded with msgspec."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .errors import Failure


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token, or (above the engine) a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    ERROR = "error"  # see the delta's failure


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token's log probability (nats) and its rank, 1 for the likeliest."""

    token_id: int
    logprob: float
    rank: int


class PerfMetrics(msgspec.Struct, frozen=True, array_like=True):
    """Resources that a sequence has used so far."""

    first_scheduled: float
    """Time of its first step, seconds on the monotonic clock."""
    allocated_blocks: int
    """KV blocks allocated, those allocated again after a preemption included."""
    draft_tokens: int
    """Tokens drafted by speculative decoding."""
    accepted_tokens: int
    """Draft tokens that were accepted."""


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step added to one sequence of a request."""

    request_id: str
    sequence: int = 0
    """Index of the sequence in its request."""
    token_ids: list[int] = []
    logprobs: list[list[Logprob]] | None = None
    """For each new token: the token itself first, then the likeliest alternatives."""
    prompt_logprobs: list[list[Logprob]] | None = None
    """Once, with the first token: for each prompt token except the first."""
    context_logits: bytes | None = None
    """Once, with the first token: logits after each prompt token, ``[prompt tokens, vocabulary]`` float32."""
    generation_logits: bytes | None = None
    """Logits that each new token was sampled from, ``[tokens, vocabulary]`` float32."""
    cumulative_logprob: float | None = None
    """Sum over all tokens of a beam."""
    embedding: bytes | None = None
    """The prompt's embedding, float32; in the last delta of an embedding request."""
    finished: FinishReason | None = None
    stop_token: int | None = None
    """The token that ended the sequence; it is the last of ``token_ids``."""
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    queued: float = 0.0
    """Seconds from arrival to the first step; in the delta with the first token."""
    perf: PerfMetrics | None = None
    """With ``return_perf_metrics``."""
    failure: Failure | None = None
