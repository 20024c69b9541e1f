"""How a matrix may be kept: as it is, or as integers with scales."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A weight is an integer times a scale, which the inputs of a group share for each output.

    Integers are rounded to nearest: 8 bits are -127 to 127 with the largest magnitude as 127, 4 bits are -8 to 7 with
    the largest magnitude as -8.
    """

    bits: int = 0
    """Of an integer: 8 or 4; 0 keeps the weights as they are."""
    group: int = 0
    """Inputs that share a scale, a multiple of 8; 0 is all."""
    activations: int = 0
    """8: what the matrix is multiplied with is rounded, too, each row with its own scale; 0: it is not."""

    def __post_init__(self) -> None:
        if self.group % 8:
            raise ValueError(f"a group of {self.group}: multiples of 8 are known")


PLAIN = Format()
