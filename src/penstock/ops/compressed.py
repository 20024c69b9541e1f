"""Sizes of compressed entries in a KV cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Compression:
    """How consecutive tokens are compressed to an entry (``reference.compress``)."""

    dim: int
    """Elements of an entry."""
    rate: int
    """Number of tokens per entry."""
    overlap: bool
    """An entry also has the tokens of the entry before it."""
    offset: int
    """Index of the entry's first element in the vector of its last token."""
    eps: float
    """Epsilon of the norm."""
    state: str
    """Name of the state (``StateSpec``): the last tokens."""
    inputs: str
    """Name of the inputs of drafts (``StateSpec``)."""

    @property
    def channels(self) -> int:
        """Number of values of a token, and of gates."""
        return self.dim * (2 if self.overlap else 1)

    @property
    def span(self) -> int:
        """Number of tokens of an entry, with those of the entry before it."""
        return self.rate * (2 if self.overlap else 1)
