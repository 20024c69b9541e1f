"""Image processor of Gemma 3: images are resized to a square, with optional crops (pan and scan)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from ..decoding import to_rgb
from ..prompts import Crops, ImageProcessor, ProcessorFiles, Reader
from ..tiles import BILINEAR, HALF, Resizing, check_kwargs, read_count, read_edges, read_resizing

if TYPE_CHECKING:
    from PIL.Image import Image

NAMES = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
"""Keys of tokens in ``tokenizer_config.json``, with default tokens."""
MAX_CROPS = 64


@dataclass(frozen=True)
class PanAndScan:
    """Crops of images with a large aspect ratio."""

    enabled: bool = False
    min_size: int = 256
    """Smallest width or height of a crop in pixels."""
    max_crops: int = 4
    min_ratio: float = 1.2
    """Smallest aspect ratio (longer to shorter side) of an image that is cropped."""

    def with_kwargs(self, given: Mapping[str, Any]) -> PanAndScan:
        """Apply the given options that are not None. Raises ``PenstockError`` (``invalid``) for invalid values."""
        ratio, enabled = given.get("pan_and_scan_min_ratio_to_activate"), given.get("do_pan_and_scan")
        if ratio is not None and not (isinstance(ratio, int | float) and 0 < ratio < math.inf):
            message = f"pan_and_scan_min_ratio_to_activate must be more than 0, is {ratio!r:.50}"
            raise invalid("mm_processor_kwargs", message, 0)
        if not isinstance(enabled, bool | None):
            raise invalid("mm_processor_kwargs", f"do_pan_and_scan must be true or false, is {enabled!r:.50}")
        return PanAndScan(
            self.enabled if enabled is None else enabled,
            read_count(given, "pan_and_scan_min_crop_size", self.min_size),
            read_count(given, "pan_and_scan_max_num_crops", self.max_crops, MAX_CROPS),
            self.min_ratio if ratio is None else float(ratio),
        )

    def boxes(self, height: int, width: int) -> list[tuple[int, int, int, int]]:
        """Left, top, right and bottom of each crop of an image, in pixels; empty if the image is not cropped."""
        longer, shorter = max(height, width), min(height, width)
        if not self.enabled or longer / shorter < self.min_ratio:
            return []
        count = min(longer // self.min_size, math.floor(longer / shorter + 0.5))
        count = min(self.max_crops, max(2, count))
        length = math.ceil(longer / count)
        if min(length, shorter) < self.min_size:
            return []
        spans = [(start, min(start + length, longer)) for start in range(0, longer, length)]
        if width >= height:
            return [(start, 0, end, height) for start, end in spans]
        return [(0, start, width, end) for start, end in spans]


KWARGS = (
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
)
"""Supported names in ``mm_processor_kwargs``."""


@dataclass(frozen=True)
class Gemma3Processor(ImageProcessor):
    """Resizes images and their crops to squares (Gemma 3)."""

    image_start: int
    """Id of the token that chat templates write for an image."""
    names: tuple[str, str, str]
    """Tokens of the start, a feature, and the end of an image."""
    size: tuple[int, int]
    num_features: int
    resizing: Resizing
    pan_and_scan: PanAndScan

    @property
    def marker(self) -> int:
        return self.image_start

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> Gemma3Processor:
        check_kwargs(kwargs, KWARGS)
        return replace(self, pan_and_scan=self.pan_and_scan.with_kwargs(kwargs))

    def __call__(self, image: Image, num_images: int = 1) -> Crops:
        """Resize the image and its crops."""
        boxes = self.pan_and_scan.boxes(image.height, image.width)
        self.resizing.check(1 + len(boxes), *self.size)
        image = to_rgb(image)
        start, placeholder, end = self.names
        one = f"\n\n{start}{placeholder}{end}\n\n"
        text = one
        if boxes:
            crops = " ".join([one] * len(boxes))
            text = f"Here is the original image {one} and here are some crops to help you see better {crops}"
        pictures = [image, *map(image.crop, boxes)]
        tiles = [self.resizing.resize(picture, *self.size) for picture in pictures]
        fields = {"num_features": self.num_features, "bidirectional": True}
        return Crops(tuple(self.resizing.image_input([tile], **fields) for tile in tiles), text)


def read_gemma3(files: ProcessorFiles) -> Gemma3Processor:
    resizing = read_resizing(files, ("Gemma3ImageProcessor",), HALF, BILINEAR)
    config, given = files.config, files.image_processor
    size, edge = read_edges(given.get("size"), 224), int(config["vision_config"]["image_size"])
    if size != (edge, edge):
        message = f"{files.folder} has an image processor for {size[1]} x {size[0]} pixels, and an encoder for {edge}: "
        message += "both must be equal"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    start, placeholder, end = (str(files.tokenizer.get(name) or default) for name, default in NAMES.items())
    image_start = files.token_id(start)
    if image_start is None:
        raise ValueError(f"the tokenizer has no {start}")
    return Gemma3Processor(
        placeholder=int(config["image_token_index"]),
        image_start=image_start,
        names=(start, placeholder, end),
        size=size,
        num_features=int(config["mm_tokens_per_image"]),
        resizing=resizing,
        pan_and_scan=PanAndScan().with_kwargs(given),
    )


READERS: dict[str, Reader] = {"Gemma3ForConditionalGeneration": read_gemma3}
