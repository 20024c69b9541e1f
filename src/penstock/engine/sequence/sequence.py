"""One sequence of a request: its tokens, how far they are computed, and where their keys and values lie."""

from __future__ import annotations

import time
from enum import Enum, auto

from penstock.core import EngineRequest, Logprob, PerfMetrics

from ..guided import Guide
from .pooling import Pooled


class State(Enum):
    WAITING = auto()  # in the queue: new, or preempted with its blocks given back
    SWAPPED = auto()  # in the queue, its blocks in host memory
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Tokens and blocks of one of the request's ``n`` sequences.

    Always ``num_computed <= num_scheduled <= len(tokens) + num_pending``: keys and values of ``num_computed`` tokens
    are in the blocks, ``num_scheduled`` counts those of steps in flight too, and these sample ``num_pending`` tokens.
    Only while ``num_draft_tokens`` are being verified, ``num_scheduled`` counts these, too.
    """

    __slots__ = (
        "accepted_tokens",
        "allocated_blocks",
        "arrived",
        "block_hashes",
        "blocks",
        "cached",
        "context_logits",
        "draft_len",
        "draft_tokens",
        "first_scheduled",
        "guide",
        "host_blocks",
        "index",
        "inflight_steps",
        "max_len",
        "num_candidates",
        "num_computed",
        "num_draft_tokens",
        "num_pending",
        "num_scheduled",
        "order",
        "paused",
        "pooled",
        "prompt_length",
        "prompt_logprobs",
        "queued",
        "read",
        "replaced",
        "request",
        "reserved",
        "row",
        "seed",
        "seen",
        "seen_in_prompt",
        "sent_blocks",
        "state",
        "stops",
        "tokens",
    )

    def __init__(self, request: EngineRequest, index: int, seed: int, order: int) -> None:
        sampling = request.sampling
        assert sampling.max_tokens is not None, "the scheduler has put a number"
        self.request = request
        self.index = index
        self.seed = seed
        """Of the random draws; with the position and the index it fixes every draw."""
        self.order = order
        """Of arrival, over all requests."""
        self.stops = frozenset(sampling.stop_token_ids + (() if sampling.ignore_eos else request.eos_token_ids))
        self.prompt_length = len(request.prompt)
        self.max_len = self.prompt_length + (0 if request.pooling else sampling.max_tokens)
        """Tokens it may have."""
        self.state = State.WAITING
        self.tokens = list(request.prompt)
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0
        self.inflight_steps = 0
        self.num_draft_tokens = 0
        self.paused = False
        """Whether it waits for what it has made to be read."""
        self.draft_len: int | None = None
        """Draft tokens at a time; None before the first."""
        self.seen: dict[tuple[int, ...], int] = {}
        """n-grams of its output, and where the tokens after their last occurrence begin (``NGramDrafter``)."""
        self.read = self.prompt_length
        """Tokens that ``seen`` covers."""
        self.seen_in_prompt: dict[tuple[int, ...], int] = {}
        """n-grams of the prompt likewise, shared by all siblings."""
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        self.reserved = 0
        """Blocks set aside for it beyond those it has."""
        self.row = -1
        """Its row in the workers' batch while it runs."""
        self.sent_blocks = -1
        """Of ``blocks``, how many the workers know; -1 where they do not know the sequence."""
        self.replaced: int | None = None
        """The first token that is another than the workers sampled; None where there is none."""
        self.block_hashes: list[bytes] = []
        """Names of its full blocks in the prefix cache (``prefix.extend``)."""
        self.cached: int | None = None
        """Prompt tokens whose keys and values were found there at first; None before it has run."""
        self.arrived = time.monotonic()
        self.queued = 0.0
        """Seconds it waited at first, until they are told."""
        self.first_scheduled = 0.0
        """When it ran for the first time."""
        self.allocated_blocks = 0
        """KV blocks allocated for it so far."""
        self.draft_tokens = self.accepted_tokens = 0
        """Guessed ahead for it so far, and how many of them rightly."""
        self.num_candidates = 0
        """Of a beam: next tokens that its search looks at; 0 for a sequence that samples."""
        self.guide: Guide | None = None
        """Its way through the form that its output has."""
        self.pooled = Pooled(request.pooling) if request.pooling else None
        """What becomes the prompt's vector, where that is all that is wanted."""
        self.prompt_logprobs: list[list[Logprob]] | None = None if sampling.prompt_logprobs is None else []
        """Those of the prompt so far; None where they are not wanted or given already."""
        self.context_logits: list[bytes] | None = [] if sampling.return_context_logits else None
        """Likewise the scores after the prompt's tokens."""

    @property
    def perf(self) -> PerfMetrics | None:
        """What it has taken, where its request asks for that."""
        if not self.request.sampling.return_perf_metrics:
            return None
        return PerfMetrics(self.first_scheduled, self.allocated_blocks, self.draft_tokens, self.accepted_tokens)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def is_partial_prefill(self) -> bool:
        """Whether some of its known tokens are computed or planned, and more than the newest one are not."""
        return 0 < self.num_scheduled < len(self.tokens) - 1

    def forget_computed(self) -> None:
        """It waits to be computed again, from its beginning."""
        self.state = State.WAITING
        self.num_computed = self.num_scheduled = 0
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = []
        if self.context_logits is not None:
            self.context_logits = []
        if self.pooled:
            self.pooled.reset()

    @property
    def limits(self) -> Guide | None:
        """What limits its next token; None where any may come."""
        return self.guide if self.guide and not self.guide.free else None

    @property
    def wants_all(self) -> bool:
        """Whether something is wanted of each of its prompt's tokens, which those found in a cache do not tell."""
        told = self.prompt_logprobs is not None or self.context_logits is not None
        return told or (self.pooled is not None and self.pooled.of_all)

    def fork(self, index: int, blocks: list[int]) -> Sequence:
        """A sibling that goes on from here with ``blocks``, of which the caller becomes another holder."""
        twin = Sequence(self.request, index, self.seed, self.order)
        twin.tokens, twin.block_hashes = list(self.tokens), list(self.block_hashes)
        twin.num_computed, twin.num_scheduled, twin.cached = self.num_computed, self.num_scheduled, self.cached
        twin.blocks = blocks
        twin.prompt_logprobs = twin.context_logits = None
        twin.guide = self.guide.copy() if self.guide else None
        twin.seen_in_prompt = self.seen_in_prompt
        twin.first_scheduled = self.first_scheduled
        return twin
