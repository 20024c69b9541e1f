"""Which format each matrix of a model is kept in."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.ops import PLAIN, Format


@dataclass(frozen=True)
class Scheme:
    """Embedding and head keep 8 bits where layers have 4: they are few of the work and much of the quality."""

    layers: Format = PLAIN
    head: Format = PLAIN


UNCHANGED = Scheme()
W8A8, WINT8 = Format(8, activations=8), Format(8)
SCHEMES = {
    "none": UNCHANGED,
    "w8a8": Scheme(W8A8, W8A8),
    "w4a8": Scheme(Format(4, 128, 8), W8A8),
    "w4a8-g32": Scheme(Format(4, 32, 8), W8A8),
    "wint8": Scheme(WINT8, WINT8),
    "wint4": Scheme(Format(4, 128), WINT8),
    "wint4-g32": Scheme(Format(4, 32), WINT8),
}
"""By the name of ``--quantization``."""
