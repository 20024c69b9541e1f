"""``mm_processor_kwargs`` of requests and options, split by images and videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import invalid

from .video import SAMPLING_KWARGS

NESTED = ("images_kwargs", "videos_kwargs")


def image_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for images: ``images_kwargs``, and the top-level arguments except those that apply to videos only."""
    flat = {name: value for name, value in given.items() if name not in (*SAMPLING_KWARGS, *NESTED)}
    return {**flat, **_nested(given, "images_kwargs")}


def video_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for videos: ``videos_kwargs``, and all top-level arguments."""
    flat = {name: value for name, value in given.items() if name not in NESTED}
    return {**flat, **_nested(given, "videos_kwargs")}


def _nested(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(value := given.get(name) or {}, Mapping):
        raise invalid("mm_processor_kwargs", f"{name} must be an object, is {value!r:.50}")
    return value


def merge_media_kwargs(processor: Mapping[str, Any], media_io: Mapping[str, Any]) -> dict[str, Any]:
    """Add vLLM's ``media_io_kwargs`` to ``mm_processor_kwargs``: ``num_frames`` (-1: all frames) or ``fps`` of videos.

    Raises ``PenstockError`` (``invalid``) if ``media_io_kwargs`` are invalid.
    """
    video = media_io.get("video") or {}
    if unknown := sorted(media_io.keys() - {"video"}):
        raise invalid("media_io_kwargs", f"{unknown[0]!r:.50} is not supported, only video is")
    if not isinstance(video, Mapping) or video.keys() - {"num_frames", "fps"}:
        raise invalid("media_io_kwargs", f"video must be an object with num_frames or fps, is {video!r:.80}")
    sampling = {name: value for name, value in video.items() if value != -1}
    if video.get("num_frames") == -1 and not sampling:
        sampling = {"do_sample_frames": False}
    return {**processor, "videos_kwargs": {**_nested(processor, "videos_kwargs"), **sampling}}
