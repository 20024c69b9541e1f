"""Snapshot of an engine's state for live monitoring: a message of the engine process."""

from __future__ import annotations

import msgspec


class SequenceState(msgspec.Struct, frozen=True):
    """A sequence that has not ended."""

    id: str
    """Last characters of the request id, then ``/`` and the sequence's index in the request if the index is not 0."""
    state: str
    """State of the sequence: ``running``, ``waiting``, or ``preempted``."""
    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens found in the prefix cache."""
    computed_tokens: int
    """Number of tokens with computed keys and values."""
    output_tokens: int
    seconds: float
    """Seconds since the request arrived."""
    blocks: list[int]
    """Ids of the sequence's KV blocks, in token order."""


class StepPart(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one sequence in a step."""

    id: str
    tokens: int
    """Number of tokens computed for the sequence, including draft tokens."""
    is_prefill: bool


class Step(msgspec.Struct, frozen=True):
    """A step that the engine has computed."""

    ago: float
    """Seconds from the start of the step until the snapshot."""
    seconds: float
    """Duration of the step, seconds."""
    parts: list[StepPart]


class Snapshot(msgspec.Struct, frozen=True):
    """The state of an engine at one time: KV blocks, sequences and the last steps."""

    block_size: int
    """Number of tokens per KV block."""
    cells: str
    """Map of the KV blocks: one digit per cell of ``blocks_per_cell`` blocks (the last cell may have fewer), which is
    the maximum of its blocks' states. 0: free, 1: free with a cached prefix, 2: used by one sequence, 3: shared. Empty
    above 2**18 blocks."""
    blocks_per_cell: int
    sequences: list[SequenceState]
    hidden: int
    """Number of sequences that are left out of ``sequences``."""
    steps: list[Step]
    """Recorded steps, oldest first."""
