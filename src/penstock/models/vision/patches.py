"""Pixels and positions of the patches of images and frames."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.core.multimodal import ImageInput


def normalized_patches(image: ImageInput, patch: int, merge: int, temporal: int) -> np.ndarray:
    """Normalized pixels of an image's patches, ``[patches, 3 * temporal * patch * patch]`` float32 (``pixel_values`` of
    transformers), grouped by feature. The last frame of an image with fewer than ``temporal`` frames is repeated.

    Args:
        patch: edge of a patch in pixels.
        merge: number of patches along each edge of the square that is merged to one feature.
        temporal: number of frames per patch.
    """
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.num_frames, image.height, image.width, 3)
    frames = _normalized(pixels, image)[np.minimum(np.arange(temporal), image.num_frames - 1)]
    split = frames.reshape(temporal, image.rows, merge, patch, image.columns, merge, patch, 3)
    patches = split.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    return patches.reshape(image.length * merge**2, 3 * temporal * patch * patch)


def tile_patches(image: ImageInput, patch: int) -> np.ndarray:
    """Normalized pixels of the patches of an image's tiles, ``[tiles, patches, 3 * patch * patch]`` float32, row by
    row. Pixels at the right and bottom that do not fill a patch are dropped, as in a convolution."""
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.tiles, image.height, image.width, 3)
    rows, columns = image.height // patch, image.width // patch
    normalized = _normalized(pixels[:, : rows * patch, : columns * patch], image)
    split = normalized.reshape(image.tiles, rows, patch, columns, patch, 3).transpose(0, 1, 3, 5, 2, 4)
    return split.reshape(image.tiles, rows * columns, 3 * patch * patch)


def _normalized(pixels: np.ndarray, image: ImageInput) -> np.ndarray:
    """Normalize pixels as transformers' processors do, to float32."""
    scaled = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
    result: np.ndarray = (scaled - np.array(image.mean, np.float32)) / np.array(image.std, np.float32)
    return result


def patch_positions(rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, ``[features, merge * merge]`` int64 each, grouped by feature.

    Args:
        rows, columns: number of rows and columns of features.
        merge: number of patches along each edge of the square that is merged to one feature.
    """
    grid = torch.arange(rows * merge * columns * merge).view(rows, merge, columns, merge).transpose(1, 2)
    indices = grid.reshape(rows * columns, merge**2)
    return indices // (columns * merge), indices % (columns * merge)
