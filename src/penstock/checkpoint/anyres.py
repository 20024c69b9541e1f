"""How LLaVA-OneVision (Li et al., 2024) cuts images of any resolution into tiles, and the features of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ASPECT_RATIO = "anyres_max_"


class FeatureGrid(NamedTuple):
    """The features of an image's tiles side by side, without those of padding."""

    top: int
    left: int
    rows: int
    columns: int
    shrunk: tuple[int, int] | None
    """Rows and columns to which they are reduced where they are too many."""

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns in the prompt, before a token is added to each row."""
        return self.shrunk or (self.rows, self.columns)


class Anyres(NamedTuple):
    """What ``config.json`` says of tiles."""

    resolutions: tuple[tuple[int, int], ...]
    """Height and width of what images may be cut into tiles from."""
    edge: int
    """Pixels of a tile's edge."""
    grid: int
    """Features of a tile's edge."""
    max_tiles: int
    """Tiles whose features a prompt may have without being reduced."""

    def best_resolution(self, height: int, width: int) -> tuple[int, int]:
        """The resolution that keeps the most of an image's pixels, and wastes the fewest."""

        def merit(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            effective = min(int(width * scale) * int(height * scale), width * height)
            return effective, effective - resolution[0] * resolution[1]

        return max(self.resolutions, key=merit)

    def features(self, height: int, width: int, tiles: tuple[int, int]) -> FeatureGrid:
        """The features of an image.

        Args:
            height, width: of the image, before it was resized.
            tiles: rows and columns of tiles.
        """
        rows, columns = (count * self.grid for count in tiles)
        top = left = 0
        if width / height > columns / rows:
            top = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (rows / height), 7))) // 2
        rows, columns = rows - 2 * top, columns - 2 * left
        ratio = math.sqrt(rows * columns / (self.max_tiles * self.grid**2))
        shrunk = (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else None
        return FeatureGrid(top, left, rows, columns, shrunk)


def read_anyres(config: Mapping[str, Any]) -> Anyres:
    """Read a ``config.json``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` where it is wrong."""
    vision, aspect = config["vision_config"], str(config["vision_aspect_ratio"])
    edge, patch = int(vision["image_size"]), int(vision["patch_size"])
    resolutions = tuple((int(height), int(width)) for height, width in config["image_grid_pinpoints"])
    if not aspect.startswith(ASPECT_RATIO) or not aspect.removeprefix(ASPECT_RATIO).isdecimal():
        raise ValueError(f"vision_aspect_ratio is {aspect:.40}, and must be {ASPECT_RATIO} and a number")
    if not resolutions or any(size % edge or size < 1 for size in _flat(resolutions)) or patch < 1:
        raise ValueError(f"image_grid_pinpoints must be multiples of image_size ({edge})")
    return Anyres(resolutions, edge, edge // patch, max(int(aspect.removeprefix(ASPECT_RATIO)), 1))


def _flat(resolutions: Sequence[tuple[int, int]]) -> list[int]:
    return [size for resolution in resolutions for size in resolution]
