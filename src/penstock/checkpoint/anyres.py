"""Tiles of images of any resolution (anyres), and their features, in LLaVA-OneVision (Li et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

ASPECT_RATIO = "anyres_max_"
"""Prefix of ``vision_aspect_ratio``, before the maximum number of tiles."""


class FeatureGrid(NamedTuple):
    """The part without padding of the joined feature grid of all tiles, in features."""

    top: int
    left: int
    rows: int
    columns: int
    shrunk: tuple[int, int] | None
    """Rows and columns after downscaling; None: not downscaled."""

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns in the prompt, without the newline token of each row."""
        return self.shrunk or (self.rows, self.columns)


class Anyres(NamedTuple):
    """Tile settings of ``config.json``."""

    resolutions: tuple[tuple[int, int], ...]
    """Height and width, in pixels, that images are resized to before they are cut into tiles."""
    edge: int
    """Edge of a tile in pixels."""
    grid: int
    """Number of image features per row (and column) of a tile."""
    max_tiles: int
    """Number of tiles above which features are downscaled."""

    def best_resolution(self, height: int, width: int) -> tuple[int, int]:
        """The resolution that keeps most of an image's pixels; in a tie, the one with the least padding."""

        def merit(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            effective = min(int(width * scale) * int(height * scale), width * height)
            return effective, effective - resolution[0] * resolution[1]

        return max(self.resolutions, key=merit)

    def features(self, height: int, width: int, tiles: tuple[int, int]) -> FeatureGrid:
        """The feature grid of an image.

        Args:
            height, width: pixels of the image before it was resized.
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
    """Read the tile settings. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for invalid settings."""
    vision, aspect = config["vision_config"], str(config["vision_aspect_ratio"])
    edge, patch = int(vision["image_size"]), int(vision["patch_size"])
    resolutions = tuple((int(height), int(width)) for height, width in config["image_grid_pinpoints"])
    if not aspect.startswith(ASPECT_RATIO) or not aspect.removeprefix(ASPECT_RATIO).isdecimal():
        raise ValueError(f"vision_aspect_ratio is {aspect:.40}; it must be {ASPECT_RATIO}N with a number N")
    if not resolutions or any(size % edge or size < 1 for each in resolutions for size in each) or patch < 1:
        message = f"image_grid_pinpoints is {resolutions!s:.60}; it must list multiples of image_size ({edge})"
        raise ValueError(f"{message}, and patch_size ({patch}) must be at least 1")
    return Anyres(resolutions, edge, edge // patch, max(int(aspect.removeprefix(ASPECT_RATIO)), 1))
