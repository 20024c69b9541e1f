"""Outputs of the engine for a request, step by step. Encoded with msgspec."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .errors import Failure


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token, or a stop string (matched in the frontend)
    LENGTH = "length"  # max_tokens reached, or the context is full
    CANCELLED = "cancelled"  # aborted by the client
    ERROR = "error"  # an error ended the sequence (TokenDelta.failure)


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token's log probability (nats) and its rank (1: most likely)."""

    token_id: int
    logprob: float
    rank: int


class PerfMetrics(msgspec.Struct, frozen=True, array_like=True):
    """Resources used by a sequence so far."""

    first_scheduled: float
    """Time of the first step, seconds on the monotonic clock."""
    allocated_blocks: int
    """Number of KV blocks allocated, including reallocations after preemptions."""
    draft_tokens: int
    """Number of tokens drafted by speculative decoding."""
    accepted_tokens: int
    """Number of draft tokens accepted."""


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output of one step for one sequence of a request."""

    request_id: str
    sequence: int = 0
    """Index of the sequence in its request."""
    token_ids: list[int] = []
    """New tokens."""
    logprobs: list[list[Logprob]] | None = None
    """For each new token: the token itself, then the most likely alternatives."""
    prompt_logprobs: list[list[Logprob]] | None = None
    """Logprobs of each prompt token except the first; only with the first output token."""
    context_logits: bytes | None = None
    """Logits after each prompt token, ``[prompt tokens, vocabulary]`` float32; only with the first output token."""
    generation_logits: bytes | None = None
    """Logits from which each new token was sampled, ``[tokens, vocabulary]`` float32."""
    cumulative_logprob: float | None = None
    """Sum of the logprobs of all tokens of a beam."""
    embedding: bytes | None = None
    """Embedding of the prompt, float32; in the last delta of an embedding request."""
    finished: FinishReason | None = None
    """Reason for the end of the sequence; None while it continues."""
    stop_token: int | None = None
    """Token that ended the sequence: the last of ``token_ids``."""
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    queued: float = 0.0
    """Seconds from arrival to the first step; only with the first output token."""
    perf: PerfMetrics | None = None
    """Set if the request has ``return_perf_metrics``."""
    failure: Failure | None = None
    """Error that ended the sequence; None without an error."""
    lowered_tools: tuple[str, ...] = ()
    """Names of the tools whose schemas the grammar cannot express, so that their arguments are any JSON; ``*``: calls
    are not constrained. Only with the first output token."""
