"""Videos of Python code: frames that are decoded already."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.errors import invalid

from .decoding import as_image
from .video import UNKNOWN_FPS, Video, VideoProcessor


def process_frames(value: Any, processor: VideoProcessor, max_pixels: int) -> Video:
    """A video of frames.

    Args:
        value: an array ``[frames, height, width, 3]`` of uint8, or a list of images; or a pair of these and what is
            known of them: ``fps``, and where they were taken from a longer video, ``total_num_frames`` and
            ``frames_indices``. Frames are chosen where ``fps`` is known and ``frames_indices`` is not.
        max_pixels: of a frame.

    Raises ``PenstockError`` (``invalid``) for anything else, and what exceeds a limit.
    """
    frames, known = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    if not isinstance(known, Mapping) or not hasattr(frames, "__len__") or getattr(frames, "ndim", 4) != 4:
        raise invalid("video", "must be an array [frames, height, width, 3] of uint8, a list of images, or bytes")
    if not (count := len(frames)):
        raise invalid("video", "has no frames")
    fps, total, indices = _metadata(known, count)
    if indices or not known.get("fps"):
        processor = msgspec.structs.replace(processor, fps=None, num_frames=None)
    taken = processor.sample(count, fps)
    images = [as_image(frames[index], max_pixels, "video") for index in taken]
    size = processor.size(len(images), images[0].height, images[0].width)
    return processor([processor.resized(image, size) for image in images], size, indices or taken, total, fps)


def _metadata(known: Mapping[str, Any], count: int) -> tuple[float, int, list[int]]:
    """Frames per second and number of frames of the whole video, and which of them there are; none where that is all.

    Raises ``PenstockError`` (``invalid``) where they are wrong.
    """
    try:
        fps = float(known.get("fps") or UNKNOWN_FPS)
        total = int(known.get("total_num_frames") or count)
        given = known.get("frames_indices")
        indices = [] if given is None else [int(index) for index in given]
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid("video", f"has broken metadata: {error}") from error
    if not 0 < fps < math.inf or (indices and (len(indices) != count or not 0 <= min(indices) <= max(indices) < total)):
        raise invalid("video", "has metadata that do not fit its frames")
    return fps, total if indices else count, indices
