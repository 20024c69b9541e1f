"""Videos given as decoded frames in the Python interface."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.errors import invalid

from .decoding import as_image
from .video import UNKNOWN_FPS, Video, VideoProcessor


def process_frames(value: Any, processor: VideoProcessor, max_pixels: int) -> Video:
    """Create a video from frames.

    Args:
        value: uint8 array ``[frames, height, width, 3]``, or a list of images; or a pair of these and metadata:
            ``fps``, and for frames sampled from a longer video ``total_num_frames`` and ``frames_indices``. Frames are
            sampled if ``fps`` is given and ``frames_indices`` is not.
        max_pixels: largest number of pixels of a frame.

    Raises ``PenstockError`` (``invalid``) for a value of another type, or an exceeded limit.
    """
    frames, metadata = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if not isinstance(metadata, Mapping) or not hasattr(frames, "__len__") or getattr(frames, "ndim", 4) != 4:
        kind = type(frames).__name__
        message = f"must be a uint8 array [frames, height, width, 3], a list of images, or bytes, is a {kind}"
        raise invalid("video", message)
    if not (count := len(frames)):
        raise invalid("video", "has no frames")
    fps, total, indices = _read_metadata(metadata, count)
    if indices or not metadata.get("fps"):
        processor = msgspec.structs.replace(processor, fps=None, num_frames=None)
    sampled = processor.sample(count, fps)
    images = [as_image(frames[index], max_pixels, "video") for index in sampled]
    size = processor.size(len(images), images[0].height, images[0].width)
    return processor([processor.resized(image, size) for image in images], size, indices or sampled, total, fps)


def _read_metadata(metadata: Mapping[str, Any], count: int) -> tuple[float, int, list[int]]:
    """Frames per second and number of frames of the whole video, and indices of the given frames (empty: all).

    Raises ``PenstockError`` (``invalid``) for invalid metadata.
    """
    try:
        fps = float(metadata.get("fps") or UNKNOWN_FPS)
        total = int(metadata.get("total_num_frames") or count)
        given = metadata.get("frames_indices")
        indices = [] if given is None else [int(index) for index in given]
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid("video", f"has invalid metadata: {error}") from error
    if not 0 < fps < math.inf or (indices and (len(indices) != count or not 0 <= min(indices) <= max(indices) < total)):
        given = f"fps {fps:g}, total_num_frames {total}, {len(indices)} frames_indices for {count} frames"
        raise invalid("video", f"has metadata that do not match its frames: {given}")
    return fps, total if indices else count, indices
