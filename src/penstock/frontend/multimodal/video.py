"""Video preprocessing of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: frame sampling, resizing, and timestamps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.multimodal import ImageInput

from .processors.qwen_vl import MAX_VALUE, read_pixel_limits, smart_resize

if TYPE_CHECKING:
    from PIL.Image import Image

SAMPLING_KWARGS = ("fps", "num_frames", "min_frames", "max_frames", "do_sample_frames")
"""Names in ``mm_processor_kwargs`` that apply to videos only."""
KWARGS = ("min_pixels", "max_pixels", "size", *SAMPLING_KWARGS)
UNKNOWN_FPS = 24.0
"""Default frames per second of a video without metadata, as in transformers."""


class Video(NamedTuple):
    """Preprocessed video."""

    frames: tuple[ImageInput, ...]
    """Groups of ``temporal_patch_size`` frames, in order, without offsets in the prompt."""
    timestamps: tuple[str, ...]
    """Text before each group; empty if all groups share one placeholder."""


class VideoProcessor(msgspec.Struct, frozen=True, kw_only=True):
    """Samples and resizes the frames of videos (transformers' ``Qwen2VLVideoProcessor`` and
    ``Qwen3VLVideoProcessor``)."""

    placeholder: int
    """Id of the token that stands for one video feature in a prompt."""
    edge: int
    """Width and height of a feature in pixels (patch size times merge size)."""
    temporal_patch_size: int
    """Number of frames that share features."""
    min_pixels: int
    max_pixels: int
    """Limits of the number of pixels: of each resized frame, or with ``timestamps`` of all frames together."""
    timestamps: bool
    """True for Qwen3-VL: timestamps are text before the frames, and the first and last frame are always sampled."""
    tokens_per_second: float = 0.0
    """Temporal positions per second (Qwen2.5-VL); 0: one position per group of frames."""
    fps: float | None = 2.0
    num_frames: int | None = None
    """Number of frames to sample, per second or in total; both None: all frames."""
    min_frames: int = 4
    max_frames: int = 768
    """Limits of the number of frames sampled with ``fps``."""
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 0
    """Maximum number of features with ``cap_pixels_per_frame``: per frame with ``timestamps``, otherwise per video."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: int = 3
    """Number of the resampling filter in Pillow; 3: bicubic."""
    frame_limit: int = 768
    """Maximum number of sampled frames (``max_video_frames``)."""
    pixel_limit: int = 2**27
    """Maximum total number of pixels of the resized frames (``max_video_pixels``)."""

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> VideoProcessor:
        """Apply ``mm_processor_kwargs``. Raises ``PenstockError`` for unknown names and invalid values."""
        if unknown := sorted(kwargs.keys() - set(KWARGS)):
            message = f"{unknown[0]!r:.50} is not supported, only {', '.join(KWARGS)} are"
            raise PenstockError(Code.UNSUPPORTED, f"mm_processor_kwargs: {message}", "mm_processor_kwargs")
        smallest, largest = read_pixel_limits(kwargs, self.min_pixels, self.max_pixels)
        changes: dict[str, Any] = {"min_pixels": smallest, "max_pixels": largest}
        changes |= {name: kwargs[name] for name in ("min_frames", "max_frames") if kwargs.get(name) is not None}
        fps, num_frames = kwargs.get("fps"), kwargs.get("num_frames")
        if fps is not None and num_frames is not None:
            raise invalid("mm_processor_kwargs", "fps and num_frames cannot be combined: set one of them")
        if fps is not None or num_frames is not None or kwargs.get("do_sample_frames") is False:
            changes |= {"fps": fps, "num_frames": num_frames}
        whole = [value for name, value in changes.items() if name != "fps" and value is not None]
        if not all(type(value) is int and 1 <= value <= MAX_VALUE for value in whole):
            message = f"numbers of pixels and frames must be integers of at least 1, are {whole!r:.80}"
            raise invalid("mm_processor_kwargs", message, 1)
        if fps is not None and not (isinstance(fps, int | float) and 0 < fps < math.inf):
            raise invalid("mm_processor_kwargs", f"fps must be more than 0, is {fps!r:.50}", 0)
        return msgspec.structs.replace(self, **changes)

    def sample(self, total: int, fps: float) -> list[int]:
        """Indices of the frames to sample, in order.

        Args:
            total: number of frames of the video.
            fps: frames per second of the video.

        Raises ``PenstockError`` (``invalid``) for too many frames.
        """
        import numpy as np

        temporal = self.temporal_patch_size
        if self.num_frames is None and self.fps is None:
            indices = list(range(total)) if total <= self.frame_limit else []
            count = total
        elif self.timestamps:
            count = self.num_frames or int(min(total / fps * (self.fps or 1), total))
            count = min(count if self.num_frames else min(max(count, self.min_frames), self._max_frames), total)
            indices = [] if count > self.frame_limit else np.linspace(0, total - 1, count).round().astype(int).tolist()
        else:
            if self.num_frames is None:
                maximum = min(self._max_frames, total) // temporal * temporal
                count = int(min(max(total / fps * (self.fps or 1), self.min_frames), maximum)) // temporal * temporal
            else:
                count = min(round(self.num_frames / temporal), total // temporal) * temporal
            count = count or min(total, temporal)
            positions = np.arange(0, total, total / count) if count <= self.frame_limit else np.empty(0)
            indices = positions.astype(np.float32).astype(int).tolist()
        if count > self.frame_limit:
            message = f"has {count} frames, more than max_video_frames ({self.frame_limit}); sample fewer (fps)"
            raise invalid("video", message, self.frame_limit)
        return indices

    def resized(self, frame: Image, size: tuple[int, int]) -> bytes:
        """Resize a frame to ``size`` (height, width); returns ``[height, width, 3]`` uint8, RGB.

        Resizes the width first, as PyTorch does. Pillow would sometimes resize the height first, which changes pixels.
        """
        height, width = size
        rows = frame.convert("RGB").resize((width, frame.height), self.resample)
        return rows.resize((width, height), self.resample).tobytes()

    @property
    def _max_frames(self) -> int:
        return min(self.max_frames, self.frame_limit)

    def size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of the resized frames. Raises ``PenstockError`` (``invalid``) for an extreme aspect ratio or
        too many pixels."""
        edge, temporal, largest = self.edge, self.temporal_patch_size, self.max_pixels
        if self.timestamps:
            num_frames = max(num_frames, temporal)
            if self.cap_pixels_per_frame:
                share = min(self.max_video_tokens * edge**2, self.max_pixels // num_frames)
                largest = max(share, int(self.min_pixels * 1.05)) * num_frames
            if (scale := max(edge / height, edge / width)) > 1:
                height, width = int(height * scale), int(width * scale)
            frames = num_frames, round(num_frames / temporal) * temporal
        else:
            if self.cap_pixels_per_frame:
                share = int(self.max_video_tokens * edge**2 * 0.9) * temporal // num_frames
                largest = max(min(largest, share), int(self.min_pixels * 1.05))
            frames = 1, 1
        resized = smart_resize(height, width, edge, self.min_pixels, largest, *frames)
        if num_frames * resized[0] * resized[1] > self.pixel_limit:
            size = f"{num_frames} frames of {resized[1]} x {resized[0]} pixels"
            message = f"has {size} after resizing, more than max_video_pixels ({self.pixel_limit})"
            raise invalid("video", f"{message}; sample fewer or smaller frames", self.pixel_limit)
        return resized

    def __call__(
        self,
        frames: Sequence[bytes | memoryview],
        size: tuple[int, int],
        indices: Sequence[int],
        total: int,
        fps: float,
    ) -> Video:
        """Create a video from its resized frames.

        Args:
            frames: pixels of each frame, ``[height, width, 3]`` uint8, RGB.
            size: height and width.
            indices: indices of the frames in the video.
            total, fps: as for ``sample``.
        """
        temporal, (height, width) = self.temporal_patch_size, size
        rows, columns = height // self.edge, width // self.edge
        interval = self._interval(len(indices) / total * fps)
        made: list[ImageInput] = []
        timestamps: list[str] = []
        for start in range(0, len(frames), temporal):
            group = frames[start : start + temporal]
            pixels = b"".join(group)
            digest = hashlib.blake2b(
                repr((rows, columns, len(group), height, width, self.mean, self.std)).encode(), digest_size=32
            )
            digest.update(pixels)
            if self.timestamps:
                last = indices[min(start + temporal, len(indices)) - 1]
                timestamps.append(f"<{(indices[start] / fps + last / fps) / 2:.1f} seconds>")
            made.append(
                ImageInput(
                    *(digest.digest(), 0, rows, columns, height, width, pixels, self.mean, self.std, len(group)),
                    continues=start > 0 and not self.timestamps,
                    time=0 if self.timestamps else int(interval * (start // temporal)),
                )
            )
        return Video(tuple(made), tuple(timestamps))

    def _interval(self, fps: float) -> Any:
        """Temporal distance between groups of frames in positions, float32, if ``fps`` frames per second are
        sampled."""
        import numpy as np

        seconds = np.float32(self.temporal_patch_size / fps)
        return np.float32(self.tokens_per_second) * seconds if self.tokens_per_second else np.float32(1)
