"""Reader of a checkpoint's video processor configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.config_json import CONFIG, read_config_json
from penstock.checkpoint.vision_config import QWEN2_5_VL, QWEN3_VL, QWEN_VL
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .placeholders import Placeholders
from .processors.qwen_vl import read_pixel_limits
from .prompts import ImageProcessor
from .tiles import CLIP, HALF, channels
from .video import VideoProcessor

PROCESSORS = ("Qwen2VLVideoProcessor", "Qwen2_5_VLVideoProcessor", "Qwen3VLVideoProcessor")
FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
"""Files with the configuration; the first existing file is used. Older checkpoints have only the last file, which the
image processor also reads."""
FPS = 2.0
"""Default frames per second to sample, as in Qwen's code."""


def read_video_processor(
    folder: Path, kwargs: Mapping[str, Any], frame_limit: int, pixel_limit: int
) -> VideoProcessor | None:
    """Read the video processor of a checkpoint; None for a model without videos.

    Args:
        kwargs: ``mm_processor_kwargs`` for videos.
        frame_limit, pixel_limit: as in ``VideoProcessor``.

    Raises ``PenstockError``: ``invalid`` if a file is malformed, ``unsupported`` for another kind of processor.
    """
    if not (folder / CONFIG).is_file():
        return None
    config = read_config_json(folder, weights=False)
    if (architecture := next(iter(config.get("architectures") or [""]))) not in QWEN_VL:
        return None
    given, timestamps = _read(folder), architecture in QWEN3_VL
    if (kind := given.get("video_processor_type", PROCESSORS[0])) not in PROCESSORS:
        message = f"the video processor {kind!r:.50} of {folder} is not supported; supported: {', '.join(PROCESSORS)}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    try:
        vision = config["vision_config"]
        edge = int(given.get("patch_size") or vision.get("patch_size", 16 if timestamps else 14))
        edge *= int(given.get("merge_size") or vision.get("spatial_merge_size", 2))
        unit = 32 if timestamps else 28
        pixels = {"size": given.get("size")} if timestamps else given
        smallest, largest = read_pixel_limits(pixels, 128 * unit**2, 768 * unit**2)
        num_frames, colours = given.get("num_frames"), HALF if timestamps else CLIP
        processor = VideoProcessor(
            placeholder=int(config.get("video_token_id", 151656)),
            edge=edge,
            temporal_patch_size=int(given.get("temporal_patch_size") or vision.get("temporal_patch_size", 2)),
            min_pixels=int(smallest),
            max_pixels=int(largest),
            timestamps=timestamps,
            tokens_per_second=float(vision.get("tokens_per_second", 4)) if architecture == QWEN2_5_VL else 0.0,
            fps=None if num_frames else float(given.get("fps") or FPS),
            num_frames=int(num_frames) if num_frames else None,
            min_frames=int(given.get("min_frames") or 4),
            max_frames=int(given.get("max_frames") or 768),
            cap_pixels_per_frame=bool(given.get("cap_pixels_per_frame")),
            max_video_tokens=int(given.get("max_video_tokens") or (768 if timestamps else 128_000)),
            mean=channels(given.get("image_mean", colours[0])),
            std=channels(given.get("image_std", colours[1])),
            resample=int(given.get("resample", 3)),
            frame_limit=frame_limit,
            pixel_limit=pixel_limit,
        )
        if min(processor.edge, processor.temporal_patch_size) < 1 or not 0 <= processor.resample <= 5:
            sizes = f"patch_size times merge_size is {edge}, temporal_patch_size is {processor.temporal_patch_size}"
            raise ValueError(f"{sizes} (at least 1 each), resample is {processor.resample} (0 to 5)")
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise invalid("model", f"{CONFIG} or the video processor of {folder} is invalid: {error}") from error
    return processor.with_kwargs(kwargs)


def _read(folder: Path) -> dict[str, Any]:
    """Configuration of the video processor; empty if no file has one."""
    for name in FILES:
        if not (folder / name).is_file():
            continue
        try:
            result = json.loads((folder / name).read_text(encoding="utf-8"))
            if name == FILES[0] and "video_processor" not in result:
                continue
            return dict(result.get("video_processor", result))
        except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
            raise invalid("model", f"{folder / name} is malformed: {error}") from error
    return {}


def read_placeholders(folder: Path, images: ImageProcessor, videos: VideoProcessor | None) -> Placeholders:
    """Read the placeholder tokens of a checkpoint."""
    config = read_config_json(folder, weights=False)
    start, end = (
        int(config.get(f"vision_{side}_token_id", token)) for side, token in (("start", 151652), ("end", 151653))
    )
    return Placeholders(images.placeholder, videos.placeholder if videos else -1, start, end, images.marker)
