"""What an engine is doing, for people who look at it: a message of the engine process."""

from __future__ import annotations

import msgspec


class SequenceState(msgspec.Struct, frozen=True):
    """A sequence that has not ended."""

    id: str
    """End of its request's id, and behind a slash its index in the request if that is not 0."""
    state: str
    """``running``, ``waiting``, or ``preempted``."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    computed_tokens: int
    """Tokens whose keys and values are computed."""
    output_tokens: int
    seconds: float
    """Since its request arrived."""
    blocks: list[int]
    """Its KV blocks, in the order of the tokens."""


class StepPart(msgspec.Struct, frozen=True, array_like=True):
    """What a step computed of one sequence."""

    id: str
    tokens: int
    """Drafts included."""
    is_prefill: bool


class Step(msgspec.Struct, frozen=True):
    """A step that was computed."""

    ago: float
    """Seconds from its begin until the snapshot."""
    seconds: float
    parts: list[StepPart]


class Snapshot(msgspec.Struct, frozen=True):
    """The state of an engine."""

    block_size: int
    """Tokens in a KV block."""
    cells: str
    """A digit for each ``blocks_per_cell`` KV blocks (the last may have fewer): 0 free, 1 free with a cached prefix,
    2 of one sequence, 3 shared by several; the largest of a cell. Empty where there are very many blocks."""
    blocks_per_cell: int
    sequences: list[SequenceState]
    hidden: int
    """Sequences that are not among them."""
    steps: list[Step]
    """The last ones, oldest first, as far as somebody was watching."""
