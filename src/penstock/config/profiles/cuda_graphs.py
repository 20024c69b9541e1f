"""Parsing of other systems' CUDA graph options."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.config.cuda_graphs import CANDIDATES

from . import json_object


def sizes(text: str) -> tuple[int, ...]:
    """Parse batch sizes in JSON, or separated by commas or spaces. Raises ``ValueError``."""
    return tuple(int(word) for word in re.split(r"[\s,]+", text.strip("[] ")) if word)


def up_to(text: str) -> tuple[int, ...]:
    """Default batch sizes up to the given one, which is included. Raises ``ValueError``."""
    largest = int(text)
    return tuple(sorted({*(size for size in CANDIDATES if size < largest), largest}))


def read_json(text: str, use: str, modes: Iterable[str]) -> Mapping[str, Any]:
    """Parse a JSON object with ``cudagraph_capture_sizes`` to settings; other compilation options are ignored.

    Args:
        use: key that turns graphs on and off.
        modes: values of ``use`` that turn graphs off, in lower case.

    Raises ``ValueError`` for an invalid object.
    """
    given, result = json_object(text), dict[str, Any]()
    if (value := given.get(use)) is not None:
        result["enforce_eager"] = str(value).lower() in modes
    if chosen := given.get("cudagraph_capture_sizes"):
        if not isinstance(chosen, list):
            raise ValueError("cudagraph_capture_sizes is not a list")
        result["cudagraph_capture_sizes"] = tuple(int(size) for size in chosen)
    return result
