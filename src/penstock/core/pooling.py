"""Parameters of an embedding request."""

from __future__ import annotations

from typing import Literal

import msgspec

from .errors import invalid


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a prompt's hidden states (after the last norm) are pooled into one vector.

    Raises ``PenstockError`` (``invalid``) where a value is out of range.
    """

    pooling_type: Literal["last", "mean"] = "last"
    """The last token's hidden state, or the mean over all tokens."""
    normalize: bool = True
    """Scale the vector to length 1."""
    dimensions: int | None = None
    """Number of leading dimensions to keep, before normalization; None is all."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.dimensions < 1:
            raise invalid("dimensions", f"must be at least 1, is {self.dimensions}", 1)
