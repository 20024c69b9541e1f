"""Videos as the processors of Qwen2-VL, Qwen2.5-VL and Qwen3-VL take them: which frames, how large, at which times."""

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
"""Fields of ``mm_processor_kwargs`` that are for videos alone."""
KWARGS = ("min_pixels", "max_pixels", "size", *SAMPLING_KWARGS)
UNKNOWN_FPS = 24.0
"""Frames per second of a video that does not say it, as in transformers."""


class Video(NamedTuple):
    """A video as a prompt has it."""

    frames: tuple[ImageInput, ...]
    """Frames that share features, one after the other; their ``offset`` is to be set."""
    timestamps: tuple[str, ...]
    """Text before each of them; empty where their places in the prompt follow each other."""


class VideoProcessor(msgspec.Struct, frozen=True, kw_only=True):
    """How a video's frames are chosen, resized and placed (transformers' ``Qwen2VLVideoProcessor`` and
    ``Qwen3VLVideoProcessor``)."""

    placeholder: int
    """The token that stands for a feature in prompts."""
    edge: int
    """Pixels of a feature's edge."""
    temporal_patch_size: int
    """Frames that share features."""
    min_pixels: int
    max_pixels: int
    """Of a frame once it is resized; with ``timestamps`` of all frames together."""
    timestamps: bool
    """Qwen3-VL: the time of frames is text before them, and frames are taken from the first to the last."""
    tokens_per_second: float = 0.0
    """Positions in time of a second (Qwen2.5-VL); 0 counts features."""
    fps: float | None = 2.0
    num_frames: int | None = None
    """How many frames are taken: so many in a second, or so many in all; with neither, all of them."""
    min_frames: int = 4
    max_frames: int = 768
    """Limits of the number that ``fps`` gives."""
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 0
    """With the former, features that limit a frame's pixels: of a frame with ``timestamps``, else of the video."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: int = 3
    """Pillow's filter: 3 is bicubic."""
    frame_limit: int = 768
    """Frames that are taken, at most."""
    pixel_limit: int = 2**27
    """Pixels of all frames together once they are resized, at most."""

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> VideoProcessor:
        """The processor with ``mm_processor_kwargs``. Raises ``PenstockError`` for unknown names and wrong values."""
        if unknown := sorted(kwargs.keys() - set(KWARGS)):
            words = f"{unknown[0]!r:.50} is not supported, only {', '.join(KWARGS)} are"
            raise PenstockError(Code.UNSUPPORTED, f"mm_processor_kwargs: {words}", "mm_processor_kwargs")
        smallest, largest = read_pixel_limits(kwargs, self.min_pixels, self.max_pixels)
        changes: dict[str, Any] = {"min_pixels": smallest, "max_pixels": largest}
        changes |= {name: kwargs[name] for name in ("min_frames", "max_frames") if kwargs.get(name) is not None}
        fps, num_frames = kwargs.get("fps"), kwargs.get("num_frames")
        if fps is not None and num_frames is not None:
            raise invalid("mm_processor_kwargs", "fps and num_frames exclude each other")
        if fps is not None or num_frames is not None or kwargs.get("do_sample_frames") is False:
            changes |= {"fps": fps, "num_frames": num_frames}
        whole = [value for name, value in changes.items() if name != "fps" and value is not None]
        if not all(type(value) is int and 1 <= value <= MAX_VALUE for value in whole):
            raise invalid("mm_processor_kwargs", "numbers of pixels and frames must be whole numbers from 1 on", 1)
        if fps is not None and not (isinstance(fps, int | float) and 0 < fps < math.inf):
            raise invalid("mm_processor_kwargs", "fps must be more than 0", 0)
        return msgspec.structs.replace(self, **changes)

    def sample(self, total: int, fps: float) -> list[int]:
        """The frames to take, in order.

        Args:
            total: number of frames.
            fps: frames per second.

        Raises ``PenstockError`` (``invalid``) where there are too many.
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
                most = min(self._max_frames, total) // temporal * temporal
                count = int(min(max(total / fps * (self.fps or 1), self.min_frames), most)) // temporal * temporal
            else:
                count = min(round(self.num_frames / temporal), total // temporal) * temporal
            count = count or min(total, temporal)
            places = np.arange(0, total, total / count) if count <= self.frame_limit else np.empty(0)
            indices = places.astype(np.float32).astype(int).tolist()
        if count > self.frame_limit:
            words = f"has {count} frames, more than max_video_frames ({self.frame_limit}); take fewer by fps"
            raise invalid("video", words, self.frame_limit)
        return indices

    def resized(self, frame: Image, size: tuple[int, int]) -> bytes:
        """A frame's pixels, ``[height, width, 3]`` uint8, RGB.

        The rows are resized first, as PyTorch does; Pillow alone would begin with the columns where that is faster.

        Args:
            size: height and width.
        """
        height, width = size
        rows = frame.convert("RGB").resize((width, frame.height), self.resample)
        return rows.resize((width, height), self.resample).tobytes()

    @property
    def _max_frames(self) -> int:
        return min(self.max_frames, self.frame_limit)

    def size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of the resized frames. Raises ``PenstockError`` (``invalid``) for a video that is too long
        for its width, or too large."""
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
            words = f"would be {num_frames} frames of {resized[1]} x {resized[0]} pixels, more than max_video_pixels"
            raise invalid("video", f"{words} ({self.pixel_limit}); take fewer or smaller ones", self.pixel_limit)
        return resized

    def __call__(
        self,
        frames: Sequence[bytes | memoryview],
        size: tuple[int, int],
        indices: Sequence[int],
        total: int,
        fps: float,
    ) -> Video:
        """A video of its resized frames.

        Args:
            frames: ``[height, width, 3]`` uint8, RGB, each.
            size: height and width.
            indices: which frames of the file these are.
            total, fps: as of ``sample``.
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
        """Positions in time from one feature to the next, float32.

        Args:
            fps: of the frames that are taken.
        """
        import numpy as np

        seconds = np.float32(self.temporal_patch_size / fps)
        return np.float32(self.tokens_per_second) * seconds if self.tokens_per_second else np.float32(1)
