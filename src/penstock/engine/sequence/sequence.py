"""Sequences: tokens, how many of them are computed, and the KV blocks that hold their keys and values."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.core import EngineRequest, Logprob, PerfMetrics

from ..guided import Guide
from .pooling import PoolingState


class State(Enum):
    WAITING = auto()  # in the queue: new, or to be recomputed after preemption
    SWAPPED = auto()  # in the queue, its blocks in host memory
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One of a request's sequences.

    Always ``num_computed <= num_scheduled <= len(tokens) + num_pending``: keys and values of ``num_computed`` tokens
    are in the blocks; ``num_scheduled`` also counts the tokens that the ``inflight_steps`` steps in flight compute.
    These steps sample ``num_pending`` tokens. Only while ``num_draft_tokens`` are being verified, ``num_scheduled``
    counts these, too.

    """

    request: EngineRequest
    index: int
    """Index of the sequence in its request; all but the first, 0, are created by ``fork``."""
    seed: int
    """Seed of its random numbers; seed, position and index determine the number for each token."""
    arrival_order: int
    """Number of requests that arrived before the sequence's."""
    stop_token_ids: frozenset[int] = field(init=False)
    """Tokens that end the sequence."""
    prompt_length: int = field(init=False)
    max_len: int = field(init=False)
    """Maximum number of tokens, prompt and output."""
    state: State = State.WAITING
    tokens: list[int] = field(init=False)
    num_unforked: int = field(init=False)
    """Number of sequences that are still to be forked from it."""
    num_computed: int = 0
    num_scheduled: int = 0
    num_pending: int = 0
    inflight_steps: int = 0
    num_draft_tokens: int = 0
    paused: bool = False
    """True if it generates no tokens for now (``Scheduler.pause``)."""
    draft_len: int | None = None
    """Number of tokens to draft at a time; None before the first draft."""
    ngrams: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram of the output → position after its last occurrence (``NGramDrafter``)."""
    ngrams_end: int = field(init=False)
    """Number of leading tokens whose n-grams are in ``prompt_ngrams`` and ``ngrams``."""
    prompt_ngrams: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram of the prompt → position after its last occurrence; shared by all siblings."""
    blocks: list[int] = field(default_factory=list)
    """KV blocks on the device, in the order of the tokens."""
    host_blocks: list[int] = field(default_factory=list)
    """Blocks in the host tier, while it is swapped."""
    swapping_out: bool = False
    """True if the step that copies its blocks to the host tier is in flight: they cannot be swapped in yet."""
    reserved: int = 0
    """Number of free blocks reserved for it beyond ``blocks`` (``guaranteed_no_evict``)."""
    row: int = -1
    """Its row in the workers' batch; -1 for none."""
    sent_blocks: int = -1
    """Number of leading ``blocks`` that the workers know; -1 if they do not know the sequence."""
    resend_from: int | None = None
    """Position from which the workers have to be sent the tokens again, as they have other tokens or none there; None
    if they have the right ones."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Prefix cache hashes of its leading full blocks (``kv.block_hash.extend_block_hashes``)."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens found in the prefix cache at the first start; None before it has run."""
    num_imported: int | None = None
    """Number of prompt tokens that this engine or a prefill engine had in its prefix cache, if the prompt came from
    there; else None."""
    arrived: float = field(default_factory=time.monotonic)
    """Time of arrival, seconds on the monotonic clock."""
    queued: float = 0.0
    """Seconds from arrival to the first step; 0 once a delta has them."""
    first_scheduled: float = 0.0
    """Time of its first step, seconds on the monotonic clock."""
    first_token: float = 0.0
    """Time of its first token, likewise; 0 before it."""
    allocated_blocks: int = 0
    """Number of KV blocks allocated for it so far."""
    draft_tokens: int = 0
    """Number of tokens drafted for it so far."""
    accepted_tokens: int = 0
    """Number of these that were accepted."""
    num_candidates: int = 0
    """For a beam: number of likeliest next tokens that its search considers. 0 for a sequence that samples."""
    guide: Guide | None = None
    """State of its grammar and its reasoning limit; None if there is neither."""
    pooling_state: PoolingState | None = field(init=False)
    """For an embedding request: the hidden states pooled so far."""
    prompt_logprobs: list[list[Logprob]] | None = field(init=False)
    """Logprobs of the prompt's tokens so far; None if none are returned (any more)."""
    context_logits: list[bytes] | None = field(init=False)
    """Logits after the prompt's tokens so far, as in ``StepOutput``; None if none are returned (any more)."""

    def __post_init__(self) -> None:
        request, sampling = self.request, self.request.sampling
        assert sampling.max_tokens is not None, "set by Admission.validate_and_clamp"
        self.stop_token_ids = frozenset(
            sampling.stop_token_ids + (() if sampling.ignore_eos else request.eos_token_ids)
        )
        self.prompt_length = self.ngrams_end = len(request.prompt)
        self.max_len = self.prompt_length + (0 if request.pooling else sampling.max_tokens)
        self.tokens = list(request.prompt)
        self.num_unforked = 0 if self.index else sampling.num_sequences - 1
        self.pooling_state = PoolingState(request.pooling) if request.pooling else None
        self.prompt_logprobs = None if sampling.prompt_logprobs is None else []
        self.context_logits = [] if sampling.return_context_logits else None

    @property
    def perf(self) -> PerfMetrics | None:
        """Resources used so far, if its request asks for ``return_perf_metrics``."""
        if not self.request.sampling.return_perf_metrics:
            return None
        return PerfMetrics(self.first_scheduled, self.allocated_blocks, self.draft_tokens, self.accepted_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens."""
        return len(self.tokens) - self.prompt_length

    @property
    def has_started(self) -> bool:
        """True if it has had a step."""
        return self.num_cached_tokens is not None

    @property
    def is_partial_prefill(self) -> bool:
        """True if some of its tokens are scheduled, and more than one token is left to schedule (chunked prefill)."""
        return 0 < self.num_scheduled < len(self.tokens) - 1

    def reset_computed(self) -> None:
        """Reset what was computed, so that it is recomputed from its first token."""
        self.state = State.WAITING
        self.num_computed = self.num_scheduled = 0
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = []
        if self.context_logits is not None:
            self.context_logits = []
        if self.pooling_state:
            self.pooling_state.reset()

    @property
    def needs_all_hidden_states(self) -> bool:
        """True if the hidden states of all prompt tokens are needed, so that none may come from the prefix cache: for
        prompt logprobs, context logits and mean pooling."""
        returned = self.prompt_logprobs is not None or self.context_logits is not None
        return returned or (self.pooling_state is not None and self.pooling_state.needs_all_hidden_states)

    def fork(self, index: int, blocks: list[int]) -> Sequence:
        """A sibling with the same tokens, as sequence ``index``, in ``blocks``, whose references the caller counts."""
        sibling = Sequence(self.request, index, self.seed, self.arrival_order)
        sibling.tokens, sibling.block_hashes = list(self.tokens), list(self.block_hashes)
        sibling.num_computed, sibling.num_scheduled = self.num_computed, self.num_scheduled
        sibling.num_cached_tokens = self.num_cached_tokens
        sibling.blocks = blocks
        sibling.prompt_logprobs = sibling.context_logits = None
        sibling.guide = self.guide.copy() if self.guide else None
        sibling.prompt_ngrams = self.prompt_ngrams
        sibling.first_scheduled = self.first_scheduled
        return sibling
