"""Patches of images and frames: their pixels, and their places."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.core.multimodal import ImageInput


def normalized_patches(image: ImageInput, patch: int, merge: int, temporal: int) -> np.ndarray:
    """The pixels of an image in patches, ``[patches, 3 * temporal * patch * patch]`` float32: those of one feature
    after the other, the last frame repeated up to ``temporal``. They are ``pixel_values`` of transformers'
    processor."""
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.num_frames, image.height, image.width, 3)
    frames = _normalized(pixels, image)[np.minimum(np.arange(temporal), image.num_frames - 1)]
    split = frames.reshape(temporal, image.rows, merge, patch, image.columns, merge, patch, 3)
    patches = split.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    return patches.reshape(image.length * merge**2, 3 * temporal * patch * patch)


def tile_patches(image: ImageInput, patch: int) -> np.ndarray:
    """The pixels of an image's tiles in patches, ``[tiles, patches, 3 * patch * patch]`` float32: of each tile row by
    row. What is left at the right and below is dropped, as a convolution does."""
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.tiles, image.height, image.width, 3)
    rows, columns = image.height // patch, image.width // patch
    normalized = _normalized(pixels[:, : rows * patch, : columns * patch], image)
    split = normalized.reshape(image.tiles, rows, patch, columns, patch, 3).transpose(0, 1, 3, 5, 2, 4)
    return split.reshape(image.tiles, rows * columns, 3 * patch * patch)


def _normalized(pixels: np.ndarray, image: ImageInput) -> np.ndarray:
    """Pixels as transformers' processors normalize them, float32."""
    scaled = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
    result: np.ndarray = (scaled - np.array(image.mean, np.float32)) / np.array(image.std, np.float32)
    return result


def patch_positions(rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column of each patch, ``[features, merge * merge]`` int64 each: those of one feature after the other.

    Args:
        rows, columns: of features.
        merge: patches of a feature's edge.
    """
    grid = torch.arange(rows * merge * columns * merge).view(rows, merge, columns, merge).transpose(1, 2)
    places = grid.reshape(rows * columns, merge**2)
    return places // (columns * merge), places % (columns * merge)
