"""What crosses the waist between text and tokens: requests down, deltas up. Plain data that msgspec can send."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .errors import Failure
from .pooling import PoolingParams
from .sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token, or (above the engine) a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    ERROR = "error"  # the delta's failure says which


class ReasoningSpan(msgspec.Struct, frozen=True, array_like=True):
    """What frames a sequence's thought before its answer, in tokens."""

    begin: int
    end: int
    answer: tuple[int, ...] = ()
    """What the model writes between the end of its thought and an answer. It is made to where the answer has a form, or
    its thought was ended for it."""
    begun: bool = False
    """Whether the prompt ends within the thought; otherwise the first token may begin it."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt in token ids and what to do with it."""

    request_id: str
    prompt: list[int]
    """Token ids, at least one."""
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence unless ``ignore_eos`` is set."""
    priority: int = 0
    """Lower runs first under the policy ``priority``."""
    deadline: float | None = None
    """On the machine's monotonic clock, seconds; past it the request fails with ``timeout``."""
    pooling: PoolingParams | None = None
    """Makes a vector of the prompt; then nothing is generated, and ``sampling`` is void."""
    external_id: str = ""
    """What its client calls it, where no two requests that have not ended may be called the same; nothing for any."""
    adapter: str = ""
    """The name of a LoRA adapter that is loaded; nothing for none."""
    cache_salt: str = ""
    """Requests share cached prefixes only with others of the same salt."""
    thought: ReasoningSpan | None = None
    """The thought that may come before the output, to which the output's form does not apply, or which is limited."""


class Vocabulary(msgspec.Struct, frozen=True):
    """What tokens spell. The engine hands it on to guided decoding, and knows nothing of it."""

    tokenizer: str
    """Hugging Face's ``tokenizer.json``."""
    eos: list[int]
    """Ids that end a sequence, at least one."""


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token's log probability (nats) and its rank, 1 for the likeliest."""

    token_id: int
    logprob: float
    rank: int


class PerfMetrics(msgspec.Struct, frozen=True, array_like=True):
    """What a sequence has taken so far."""

    first_scheduled: float
    """When it ran for the first time, on the machine's monotonic clock, seconds."""
    allocated_blocks: int
    """KV blocks allocated for it, those again that it lost when it was preempted."""
    draft_tokens: int
    """Guessed ahead for it, and how many of them were accepted."""
    accepted_tokens: int


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step added to one sequence of a request."""

    request_id: str
    sequence: int = 0
    """Which of the request's ``n`` sequences."""
    token_ids: list[int] = []
    logprobs: list[list[Logprob]] | None = None
    """For each new token, itself first, then the likeliest alternatives."""
    prompt_logprobs: list[list[Logprob]] | None = None
    """Once, with the first token: for each prompt token but the first."""
    context_logits: bytes | None = None
    """Likewise once: scores after each prompt token, ``[prompt tokens, vocabulary]`` float32."""
    generation_logits: bytes | None = None
    """Scores that each new token was chosen by, ``[tokens, vocabulary]`` float32."""
    cumulative_logprob: float | None = None
    """Of all tokens of a beam together."""
    embedding: bytes | None = None
    """The prompt's vector, float32, where that is asked for; with the end."""
    finished: FinishReason | None = None
    stop_token: int | None = None
    """The token that ended the sequence; it is the last of ``token_ids``."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    queued: float = 0.0
    """Seconds from arrival until it ran for the first time; with the first token."""
    perf: PerfMetrics | None = None
    """Where ``return_perf_metrics`` asks for it."""
    failure: Failure | None = None
