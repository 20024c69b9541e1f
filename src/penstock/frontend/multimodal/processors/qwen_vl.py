"""Image processor of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and ERNIE 4.5 VL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.vision_config import ERNIE_VL, QWEN3_VL, QWEN_VL
from penstock.core.errors import invalid
from penstock.core.multimodal import ImageInput

from ..decoding import to_rgb
from ..prompts import ImageProcessor, ProcessorFiles, Reader
from ..tiles import Resizing, check_kwargs, read_resizing

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Ernie4_5_VLMoeImageProcessor")
MAX_ASPECT_RATIO = 200
MAX_VALUE = 2**31
KWARGS = ("min_pixels", "max_pixels", "size")
"""Supported names in ``mm_processor_kwargs``."""


@dataclass(frozen=True)
class QwenVLProcessor(ImageProcessor):
    """Resizes images to multiples of a feature's size, with about the same aspect ratio and a limited number of pixels
    (``smart_resize`` of Qwen2-VL)."""

    edge: int
    """Width and height of a feature in pixels."""
    min_pixels: int
    max_pixels: int
    resizing: Resizing

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> QwenVLProcessor:
        check_kwargs(kwargs, KWARGS)
        smallest, largest = read_pixel_limits(kwargs, self.min_pixels, self.max_pixels)
        if not all(isinstance(value, int) and 1 <= value <= MAX_VALUE for value in (smallest, largest)):
            given = f"min_pixels is {smallest!r:.20}, max_pixels is {largest!r:.20}"
            message = f"numbers of pixels must be integers of at least 1, and at most {MAX_VALUE}; {given}"
            raise invalid("mm_processor_kwargs", message, 1)
        return replace(self, min_pixels=smallest, max_pixels=largest)

    def __call__(self, image: Image, num_images: int = 1) -> ImageInput:
        height, width = smart_resize(image.height, image.width, self.edge, self.min_pixels, self.max_pixels)
        self.resizing.check(1, height, width)
        resized = self.resizing.resize(to_rgb(image), height, width)
        return self.resizing.image_input([resized], rows=height // self.edge, columns=width // self.edge)


def smart_resize(
    height: int, width: int, edge: int, min_pixels: int, max_pixels: int, frames: int = 1, rounded: int = 1
) -> tuple[int, int]:
    """New height and width: multiples of ``edge``, about the same aspect ratio, a number of pixels within the limits.

    Args:
        frames: number of frames; their total number of pixels is limited.
        rounded: ``frames``, rounded to a multiple of the number of frames that share features.

    Raises ``PenstockError`` (``invalid``) for an aspect ratio above ``MAX_ASPECT_RATIO``.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        message = f"an image of {width} x {height} pixels is too narrow, the largest aspect ratio is {MAX_ASPECT_RATIO}"
        raise invalid("image", message, MAX_ASPECT_RATIO)
    new = round(height / edge) * edge, round(width / edge) * edge
    if rounded * new[0] * new[1] > max_pixels:
        factor = math.sqrt(frames * height * width / max_pixels)
        new = (
            max(edge, math.floor(height / factor / edge) * edge),
            max(edge, math.floor(width / factor / edge) * edge),
        )
    elif rounded * new[0] * new[1] < min_pixels:
        factor = math.sqrt(min_pixels / (frames * height * width))
        new = math.ceil(height * factor / edge) * edge, math.ceil(width * factor / edge) * edge
    return new


def read_qwen_vl(files: ProcessorFiles) -> QwenVLProcessor:
    config, given = files.config, files.image_processor
    architecture, vision = config["architectures"][0], config["vision_config"]
    patch = int(given.get("patch_size") or vision.get("patch_size", 16 if architecture in QWEN3_VL else 14))
    merge = int(given.get("merge_size") or vision.get("spatial_merge_size", 2))
    smallest, largest = read_pixel_limits(given, 56 * 56, 28 * 28 * (6177 if architecture == ERNIE_VL else 1280))
    processor = QwenVLProcessor(
        placeholder=int(config.get("image_token_id", 100295 if architecture == ERNIE_VL else 151655)),
        edge=patch * merge,
        min_pixels=int(smallest),
        max_pixels=int(largest),
        resizing=read_resizing(files, PROCESSORS),
    )
    if processor.edge < 1:
        raise ValueError(f"patch_size {patch} times merge_size {merge} is less than 1")
    return processor


def read_pixel_limits(given: Mapping[str, Any], smallest: Any, largest: Any) -> tuple[Any, Any]:
    """Smallest and largest number of pixels, from ``min_pixels`` and ``max_pixels``; where absent, from ``size``."""
    size = given.get("size") or {}
    if not isinstance(size, Mapping):
        raise invalid("mm_processor_kwargs", f"size must have shortest_edge and longest_edge, is {size!r:.50}")
    smallest = size.get("shortest_edge", size.get("min_pixels", smallest))
    largest = size.get("longest_edge", size.get("max_pixels", largest))
    by_name = given.get("min_pixels"), given.get("max_pixels")
    return smallest if by_name[0] is None else by_name[0], largest if by_name[1] is None else by_name[1]


READERS: dict[str, Reader] = dict.fromkeys((*QWEN_VL, ERNIE_VL), read_qwen_vl)
