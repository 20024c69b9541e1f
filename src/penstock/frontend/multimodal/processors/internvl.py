"""Image processor of InternVL: a grid of tiles close to the image's aspect ratio, and a thumbnail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from ..decoding import to_rgb
from ..prompts import ImageProcessor, ProcessorFiles, Reader, TokenizedImage
from ..tiles import Resizing, check_kwargs, read_count, read_edges, read_resizing

if TYPE_CHECKING:
    from PIL.Image import Image

NAMES = {"start_image_token": "<img>", "end_image_token": "</img>"}
"""Keys of tokens in ``tokenizer_config.json``, with default tokens."""
MAX_TILES = 256


@dataclass(frozen=True)
class InternVLProcessor(ImageProcessor):
    """Splits images into square tiles, followed by a thumbnail (InternVL)."""

    start: int
    end: int
    """Ids of the tokens before and after an image's features."""
    edge: int
    """Width and height of a tile in pixels."""
    num_features: int
    """Number of features of a tile."""
    resizing: Resizing
    tiled: bool = True
    min_tiles: int = 1
    max_tiles: int = 12

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> InternVLProcessor:
        check_kwargs(kwargs, ("crop_to_patches", "min_patches", "max_patches"))
        tiled = kwargs.get("crop_to_patches")
        if not isinstance(tiled, bool | None):
            raise invalid("mm_processor_kwargs", f"crop_to_patches must be true or false, is {tiled!r:.50}")
        smallest = read_count(kwargs, "min_patches", self.min_tiles, MAX_TILES)
        largest = read_count(kwargs, "max_patches", self.max_tiles, MAX_TILES)
        if smallest > largest:
            message = f"min_patches must be at most max_patches ({largest}), is {smallest}"
            raise invalid("mm_processor_kwargs", message, largest)
        return replace(self, tiled=self.tiled if tiled is None else tiled, min_tiles=smallest, max_tiles=largest)

    def __call__(self, image: Image, num_images: int = 1) -> TokenizedImage:
        """Split the image into tiles, row by row; if there are several, a thumbnail of the image follows."""
        edge = self.edge
        columns, rows = self._grid(image.height, image.width) if self.tiled and self.max_tiles > 1 else (1, 1)
        count = rows * columns + (rows * columns > 1)
        self.resizing.check(count, edge, edge)
        image = to_rgb(image)
        canvas = self.resizing.resize(image, edge * rows, edge * columns)
        corners = product(range(0, edge * rows, edge), range(0, edge * columns, edge))
        tiles = [canvas.crop((left, top, left + edge, top + edge)) for top, left in corners]
        if len(tiles) > 1:
            tiles.append(self.resizing.resize(image, edge, edge))
        features = count * self.num_features
        tokens = [self.start, *[self.placeholder] * features, self.end]
        return TokenizedImage(self.resizing.image_input(tiles, num_features=features), tokens, 1)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Columns and rows of tiles, with the aspect ratio closest to the image's. Among equal ratios, the largest grid
        that has fewer than twice the image's pixels."""
        numbers = range(1, self.max_tiles + 1)
        grids = [grid for grid in product(numbers, numbers) if self.min_tiles <= grid[0] * grid[1] <= self.max_tiles]
        best, best_difference = (1, 1), float("inf")
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            difference = abs(width / height - columns / rows)
            larger = width * height > 0.5 * self.edge * self.edge * columns * rows
            if difference < best_difference or (difference == best_difference and larger):
                best, best_difference = (columns, rows), difference
        return best


def read_internvl(files: ProcessorFiles) -> InternVLProcessor:
    config, given = files.config, files.image_processor
    size, edge = read_edges(given.get("size"), 448), config["vision_config"]["image_size"]
    edge = int(edge[0] if isinstance(edge, list) else edge)
    if size != (edge, edge):
        message = f"{files.folder} has an image processor for tiles of {size}, and an encoder for {edge} pixels: "
        message += "both must be equal"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    start, end = (files.token_id(str(files.tokenizer.get(name) or default)) for name, default in NAMES.items())
    if start is None or end is None:
        raise ValueError(f"the tokenizer has no {' or no '.join(NAMES.values())}")
    processor = InternVLProcessor(
        placeholder=int(config["image_token_id"]),
        start=start,
        end=end,
        edge=edge,
        num_features=int(config["image_seq_length"]),
        resizing=read_resizing(files, ("GotOcr2ImageProcessor",)),
    )
    return processor.with_kwargs({name: given.get(name) for name in ("min_patches", "max_patches")})


READERS: dict[str, Reader] = {"InternVLForConditionalGeneration": read_internvl}
