"""Other systems' options of CUDA graphs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.config.cuda_graphs import CANDIDATES

from . import json_object


def sizes(text: str) -> tuple[int, ...]:
    """Batch sizes in JSON, or separated by commas or spaces. Raises ``ValueError``."""
    return tuple(int(word) for word in re.split(r"[\s,]+", text.strip("[] ")) if word)


def up_to(text: str) -> tuple[int, ...]:
    """The usual batch sizes up to a largest one. Raises ``ValueError``."""
    largest = int(text)
    return tuple(sorted({*(size for size in CANDIDATES if size < largest), largest}))


def read_json(text: str, use: str, modes: Iterable[str]) -> Mapping[str, Any]:
    """The settings for a JSON object with ``cudagraph_capture_sizes``, whose other keys say how models are compiled.

    Args:
        use: key that turns graphs on and off.
        modes: values of it that turn them off, as text in lower case.

    Raises ``ValueError`` where it is none, or sizes are not numbers.
    """
    given, result = json_object(text), dict[str, Any]()
    if (value := given.get(use)) is not None:
        result["enforce_eager"] = str(value).lower() in modes
    if chosen := given.get("cudagraph_capture_sizes"):
        if not isinstance(chosen, list):
            raise ValueError("cudagraph_capture_sizes is not a list")
        result["cudagraph_capture_sizes"] = tuple(int(size) for size in chosen)
    return result
