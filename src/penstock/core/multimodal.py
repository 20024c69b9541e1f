"""Images and videos of a request: pixels as bytes, and the place of their features among the prompt's tokens."""

from __future__ import annotations

import msgspec

PATCHES = 4
"""Patches of a feature: its edge has two."""


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """An image, or a few successive frames of a video that share features, decoded and resized as its model's
    processor does.

    The prompt has a placeholder token for each of the image's features.
    """

    content_hash: bytes
    """Of pixels, grid and normalization: equal for images with equal features."""
    offset: int
    """Index of its first placeholder in the prompt."""
    rows: int
    columns: int
    """The grid of its features, in the order of the placeholders: row after row; 0 where they have no positions of
    their own (M-RoPE), but those of tokens."""
    height: int
    width: int
    pixels: bytes
    """``[num_frames, tiles, height, width, 3]`` uint8, RGB."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    """Normalization of the channels, after a division by 255."""
    num_frames: int = 1
    continues: bool = False
    """Whether it goes on the video of the one before it, right behind its placeholders: positions in time, height and
    width of both count from the same place."""
    time: int = 0
    """Its position in time, counted from the start of its video."""
    num_features: int = 0
    """Where there is no grid."""
    tiles: int = 1
    """Pictures of one size that it was cut into, which are encoded each by itself."""
    grid: tuple[int, int] = (1, 1)
    """Rows and columns of tiles; there may be one more, of the whole image."""
    original_size: tuple[int, int] = (0, 0)
    """Height and width before it was resized, where features depend on them."""
    bidirectional: bool = False
    """Whether its tokens attend to each other in both directions: a step computes all of them, or none."""

    @property
    def length(self) -> int:
        """Number of its features, and of its placeholders."""
        return self.num_features or self.rows * self.columns

    @property
    def num_patches(self) -> int:
        """About the number of patches that an encoder makes its features of."""
        return PATCHES * self.length

    @property
    def end(self) -> int:
        """Index after its last placeholder."""
        return self.offset + self.length
