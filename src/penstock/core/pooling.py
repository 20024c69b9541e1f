"""What a request for an embedding may ask for."""

from __future__ import annotations

from typing import Literal

import msgspec

from .errors import invalid


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a prompt's hidden states, which are those after the last norm, become one vector.

    Raises ``PenstockError`` (``invalid``) where a value is out of range.
    """

    pooling_type: Literal["last", "mean"] = "last"
    """The last token's, or the mean over all."""
    normalize: bool = True
    """Divide it by its length."""
    dimensions: int | None = None
    """Keep so many of its first numbers, before it is normalized; None is all."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.dimensions < 1:
            raise invalid("dimensions", f"must be at least 1, is {self.dimensions}", 1)
