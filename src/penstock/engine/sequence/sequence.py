"""Sequences: their tokens, the number of computed tokens, and the KV blocks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from penstock.core import Code, EngineRequest, Failure, GeneratedSequence, Logprob, PenstockError, PerfMetrics
from penstock.core.requests import NUM_CLEARING_TOKENS

from ..guided import Guide
from .draft_state import DraftState
from .pooling import PoolingState


class State(Enum):
    """State of a sequence in the scheduler."""

    WAITING = auto()  # in the queue: new, or to be recomputed after preemption
    SWAPPED = auto()  # in the queue, with its blocks in host memory
    RUNNING = auto()  # in the running batch
    FINISHED = auto()  # ended for any reason


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A sequence of a request.

    Invariant: ``num_computed <= num_scheduled <= len(tokens) + num_pending``. The blocks contain the KV of
    ``num_computed`` tokens. ``num_scheduled`` also counts the tokens that the ``inflight_steps`` steps in flight
    compute; these steps sample ``num_pending`` tokens. While ``num_draft_tokens`` draft tokens are being verified,
    ``num_scheduled`` includes them, and may exceed the upper bound.
    """

    request: EngineRequest
    index: int
    """Index of the sequence in its request. Sequence 0 is the first; the others are created by ``fork``."""
    seed: int
    """Random seed; seed, index and position determine the random number of each token."""
    arrival_order: int
    """Number of requests that arrived before this sequence's request."""
    stop_token_ids: frozenset[int] = field(init=False)
    """Tokens that end the sequence."""
    prompt_length: int = field(init=False)
    """Number of prompt tokens."""
    max_len: int = field(init=False)
    """Maximum number of tokens, prompt and output."""
    state: State = State.WAITING
    tokens: list[int] = field(init=False)
    """Token ids of prompt and output so far."""
    num_unforked: int = field(init=False)
    """Number of sequences still to be forked from this one."""
    num_computed: int = 0
    num_scheduled: int = 0
    num_pending: int = 0
    inflight_steps: int = 0
    num_draft_tokens: int = 0
    paused: bool = False
    """True while the sequence is paused (``Scheduler.pause``)."""
    drafts: DraftState = field(default_factory=DraftState)
    """Estimates of speculative decoding."""
    blocks: list[int] = field(default_factory=list)
    """KV blocks on the device, in the order of the tokens."""
    host_blocks: list[int] = field(default_factory=list)
    """Blocks in host memory, while the sequence is swapped."""
    host_state: int = -1
    """Slot of the swap space with the recurrent state, while the sequence is swapped; -1: none."""
    swapping_out: bool = False
    """True while the step that swaps out the sequence's blocks is in flight: they cannot be swapped in yet."""
    reserved: int = 0
    """Number of free blocks reserved for the sequence beyond ``blocks`` (``guaranteed_no_evict``)."""
    row: int = -1
    """Row in the workers' batch; -1 without a row."""
    sent_blocks: int = -1
    """Number of leading ``blocks`` that the workers know; -1 if they do not know the sequence."""
    resend_from: int | None = None
    """Position of the first token that is missing or outdated in the workers: tokens from there on have to be sent;
    None if the workers are up to date."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Prefix cache hashes of the leading full blocks (``kv.block_hash.extend_block_hashes``)."""
    snapshot: int = -1
    """Snapshot of the recurrent state from which the sequence starts; -1: from its first token."""
    state_slots: list[int] = field(default_factory=list)
    """Slots of the host tier from which the snapshot is loaded when the sequence starts; empty: it is valid."""
    swapped_state: int = -1
    """Slot of the swap space from which the sequence starts after it was swapped; -1: from ``snapshot``."""
    fork_at: int = 0
    """Number of leading tokens with keys and values in the prefix cache, but without a snapshot, when the sequence
    started: a snapshot is made there; 0: none."""
    exports_state: bool = False
    """True for a prompt of another instance: a snapshot is made after its last token."""
    exported_snapshot: int = -1
    """Snapshot after the last token of the prompt, for ``exports_state``; -1: none."""
    last_snapshot: bytes = b""
    """Hash of the last snapshot within the output, which the next one replaces."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens found in the prefix cache at the first step; None before the first step."""
    num_imported: int | None = None
    """If the prompt's KV was imported: number of prompt tokens that this engine or the prefill engine had in its prefix
    cache. Else None."""
    arrived: float = field(default_factory=time.monotonic)
    """Time of arrival, seconds on the monotonic clock."""
    queued: float = 0.0
    """Seconds from arrival to the first step; 0 once a delta has reported it."""
    first_scheduled: float = 0.0
    """Time of the first step, seconds on the monotonic clock; 0 before that step."""
    first_token: float = 0.0
    """Time of the first output token, seconds on the monotonic clock; 0 before that token."""
    allocated_blocks: int = 0
    """Number of KV blocks allocated so far."""
    draft_tokens: int = 0
    """Number of draft tokens so far."""
    accepted_tokens: int = 0
    """Number of accepted draft tokens so far."""
    num_candidates: int = 0
    """Number of candidate next tokens for a beam; 0 without beam search."""
    guide: Guide | None = None
    """State of the grammar and the reasoning limit; None if the request has neither."""
    lowered_tools: tuple[str, ...] = ()
    """``TokenDelta.lowered_tools`` of the next delta."""
    num_stale: int = 0
    """Number of steps in flight whose results are discarded (``discard_pending``)."""
    pooling_state: PoolingState | None = field(init=False)
    """Hidden states pooled so far; None unless the request is an embedding request."""
    prompt_logprobs: list[list[Logprob]] | None = field(init=False)
    """Logprobs of the prompt so far; None if not requested, or already returned."""
    context_logits: list[bytes] | None = field(init=False)
    """Logits of the prompt so far (``StepOutput.context_logits``); None if not requested, or already returned."""

    def __post_init__(self) -> None:
        request, sampling = self.request, self.request.sampling
        assert sampling.max_tokens is not None, "set by Admission.validate_and_clamp"
        self.stop_token_ids = frozenset(
            sampling.stop_token_ids + (() if sampling.ignore_eos else request.eos_token_ids)
        )
        self.prompt_length = len(request.prompt)
        self.max_len = self.prompt_length + (0 if request.pooling else sampling.max_tokens)
        self.tokens = list(request.prompt)
        self.num_unforked = 0 if self.index else sampling.num_sequences - 1
        self.pooling_state = PoolingState(request.pooling) if request.pooling else None
        self.prompt_logprobs = None if sampling.prompt_logprobs is None else []
        self.context_logits = [] if sampling.return_context_logits else None

    def resume(self, generated: GeneratedSequence) -> None:
        """Append the output that another engine has generated and returned. Call this before ``set_guide``."""
        self.tokens += generated.token_ids
        self.num_unforked = 0
        self.prompt_logprobs = self.context_logits = None
        if generated.finished:
            self.state, self.num_computed = State.FINISHED, len(self.tokens)

    def set_guide(self, guide: Guide | None) -> None:
        """Use a new guide for the next token. Raises ``PenstockError`` (``internal``) if it rejects the tokens of a
        resumed sequence."""
        for token in self.tokens[self.prompt_length :]:
            if guide and not guide.accept_token(token):
                message = "the grammar rejects the output of the engine that began the request"
                raise PenstockError.of(guide.failure or Failure(Code.INTERNAL, message))
        self.guide = guide

    @property
    def active_guide(self) -> Guide | None:
        """The guide, unless it is idle."""
        return self.guide if self.guide and not self.guide.is_idle else None

    @property
    def jumps_forward(self) -> bool:
        """True if tokens that the guide forces may be appended without sampling. False if the request returns logprobs
        or logits, if a stop string might match within the forced tokens, or while a sampled token is in flight and not
        discarded."""
        sampling = self.request.sampling
        returned = sampling.logprobs is not None or sampling.return_generation_logits
        return self.num_pending == self.num_stale and not returned and not sampling.stop

    def discard_pending(self) -> None:
        """Discard the results of the steps in flight, which were planned before the guide needed a bitmask, or replaced
        a token: the tokens after ``num_computed`` are computed again."""
        if self.num_pending:
            self.num_stale, self.num_scheduled = self.num_pending, self.num_computed

    @property
    def perf(self) -> PerfMetrics | None:
        """Resources used so far; None without ``return_perf_metrics``."""
        if not self.request.sampling.return_perf_metrics:
            return None
        return PerfMetrics(self.first_scheduled, self.allocated_blocks, self.draft_tokens, self.accepted_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens."""
        return len(self.tokens) - self.prompt_length

    @property
    def has_started(self) -> bool:
        """True if the sequence has had a step, in this engine or in another one."""
        return self.num_cached_tokens is not None or bool(self.request.resumed)

    @property
    def is_suspect(self) -> bool:
        """True if engines died in steps with its request, and it has generated few tokens since."""
        resumed = self.request.resumed
        first = len(resumed[self.index].token_ids) if resumed else 0
        return self.request.deaths > 0 and self.num_output_tokens < first + NUM_CLEARING_TOKENS

    @property
    def is_partial_prefill(self) -> bool:
        """True if some tokens are scheduled, and more than one token is not scheduled yet (chunked prefill)."""
        return 0 < self.num_scheduled < len(self.tokens) - 1

    def reset_computed(self) -> None:
        """Discard all results, so that the sequence is recomputed from its first token."""
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
        """True if the hidden states of all prompt tokens are needed (prompt logprobs, context logits, pooling of more
        than the last token), so that the prefix cache cannot be used."""
        returned = self.prompt_logprobs is not None or self.context_logits is not None
        return returned or (self.pooling_state is not None and self.pooling_state.needs_all_hidden_states)

    def fork(self, index: int, blocks: list[int]) -> Sequence:
        """Create sequence ``index`` of the request with the same tokens, in ``blocks``. The caller has to increment the
        blocks' reference counts."""
        sibling = Sequence(self.request, index, self.seed, self.arrival_order)
        sibling.tokens, sibling.block_hashes = list(self.tokens), list(self.block_hashes)
        sibling.num_computed, sibling.num_scheduled = self.num_computed, self.num_scheduled
        sibling.num_cached_tokens = self.num_cached_tokens
        sibling.blocks = blocks
        sibling.prompt_logprobs = sibling.context_logits = None
        sibling.guide = self.guide.copy() if self.guide else None
        sibling.first_scheduled = self.first_scheduled
        return sibling
