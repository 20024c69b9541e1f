"""Image processor of Pixtral and Mistral Small 3.1: images of any size, with a token after each row of features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.core.errors import invalid

from ..decoding import to_rgb
from ..prompts import ImageProcessor, ProcessorFiles, Reader, TokenizedImage
from ..tiles import Resizing, check_kwargs, read_count, read_edges, read_resizing

if TYPE_CHECKING:
    from PIL.Image import Image

BREAK, END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True)
class PixtralProcessor(ImageProcessor):
    """Resizes images to multiples of a feature's size, within a maximum size (Pixtral)."""

    row_end: int
    """Id of the token after each row of features except the last row."""
    image_end: int
    edge: int
    """Width and height of a feature in pixels."""
    size: tuple[int, int]
    """Largest height and width of images in pixels."""
    resizing: Resizing

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> PixtralProcessor:
        check_kwargs(kwargs, ("size",))
        if kwargs.get("size") is None:
            return self
        if not isinstance(kwargs["size"], Mapping) or kwargs["size"].keys() != {"longest_edge"}:
            raise invalid("mm_processor_kwargs", f"size must have only longest_edge, is {kwargs['size']!r:.50}")
        longest = read_count(kwargs["size"], "longest_edge", 0)
        return replace(self, size=(longest, longest))

    def __call__(self, image: Image, num_images: int = 1) -> TokenizedImage:
        height, width = image.height, image.width
        if (ratio := max(height / self.size[0], width / self.size[1])) > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = -(-height // self.edge), -(-width // self.edge)
        if not rows or not columns:
            message = f"an image of {image.width} x {image.height} pixels is too narrow to be resized to at most "
            raise invalid("image", f"{message}{self.size[1]} x {self.size[0]} pixels")
        height, width = rows * self.edge, columns * self.edge
        self.resizing.check(1, height, width)
        tile = self.resizing.resize(to_rgb(image), height, width)
        tokens = ([self.placeholder] * columns + [self.row_end]) * rows
        tokens[-1] = self.image_end
        return TokenizedImage(self.resizing.image_input([tile], num_features=len(tokens)), tokens)


def read_pixtral(files: ProcessorFiles) -> PixtralProcessor:
    config, size = files.config, files.image_processor.get("size") or {"longest_edge": 1024}
    longest = size.get("longest_edge") if isinstance(size, Mapping) else None
    row_end, image_end = files.token_id(BREAK), files.token_id(END)
    if row_end is None or image_end is None:
        raise ValueError(f"the tokenizer has no {BREAK} or {END}")
    return PixtralProcessor(
        placeholder=int(config["image_token_index"]),
        row_end=row_end,
        image_end=image_end,
        edge=int(config["vision_config"]["patch_size"]) * int(config.get("spatial_merge_size") or 1),
        size=(int(longest), int(longest)) if longest else read_edges(size, 1024),
        resizing=read_resizing(files, ("PixtralImageProcessor",)),
    )


READERS: dict[str, Reader] = {"Mistral3ForConditionalGeneration": read_pixtral}
