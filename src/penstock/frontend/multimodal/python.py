"""``multi_modal_data`` of the Python interface, in vLLM's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core import Code, PenstockError

from .media import IMAGE, VIDEO, MediaSource


def python_sources(data: Any) -> list[MediaSource]:
    """Images and videos of ``multi_modal_data``. Raises ``PenstockError`` (``unsupported``) for other kinds of data."""
    if not isinstance(data, Mapping) or (unknown := sorted(data.keys() - {IMAGE, VIDEO})):
        name = unknown[0] if isinstance(data, Mapping) else "this"
        message = f"multi_modal_data: {name} is not supported, only image and video are"
        raise PenstockError(Code.UNSUPPORTED, message, "multi_modal_data")
    sources: list[MediaSource] = []
    for kind in (IMAGE, VIDEO):
        given = data.get(kind)
        several = isinstance(given, list | tuple) and not (kind == VIDEO and _is_video(given))
        values = [] if given is None else list(given) if several else [given]
        sources += [MediaSource(value, f"multi_modal_data.{kind}[{i}]", kind) for i, value in enumerate(values)]
    return sources


def _is_video(given: list[Any] | tuple[Any, ...]) -> bool:
    """True for a single video: a pair of frames and metadata, or a list of frames."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        return True
    return bool(given) and all(getattr(frame, "ndim", 0) == 3 or hasattr(frame, "getbands") for frame in given)
