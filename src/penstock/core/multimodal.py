"""Images and videos of a request: preprocessed pixels, and the positions of their placeholder tokens."""

from __future__ import annotations

import msgspec

PATCHES = 4
"""Number of patches per feature (2 × 2)."""


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """An image, or consecutive frames of a video that share features, preprocessed by the model's processor.

    The prompt has one placeholder token per feature.
    """

    content_hash: bytes
    """Hash of pixels, grid and normalization: equal for images with equal features."""
    offset: int
    """Index of the first placeholder in the prompt."""
    rows: int
    columns: int
    """Grid of features, row-major, for M-RoPE positions; 0: features have ordinary token positions."""
    height: int
    """Height of a tile, pixels."""
    width: int
    """Width of a tile, pixels."""
    pixels: bytes
    """``[num_frames, tiles, height, width, 3]`` uint8, RGB."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    """Mean and standard deviation of the channels, for normalization after division by 255."""
    num_frames: int = 1
    """Number of frames that share the features; 1 for an image."""
    continues: bool = False
    """True if these frames continue the video of the previous input, whose placeholders end directly before
    ``offset``. The M-RoPE positions of both inputs have the same origin."""
    time: int = 0
    """Temporal M-RoPE position, from the start of the video."""
    num_features: int = 0
    """Number of features if there is no grid."""
    tiles: int = 1
    """Number of tiles of equal size, encoded separately."""
    grid: tuple[int, int] = (1, 1)
    """Rows and columns of tiles; ``tiles`` may count an additional thumbnail of the whole image."""
    original_size: tuple[int, int] = (0, 0)
    """Height and width before resizing, for models whose features depend on them."""
    bidirectional: bool = False
    """True if the placeholder tokens attend to each other in both directions; a step then computes all or none."""

    @property
    def length(self) -> int:
        """Number of features, equal to the number of placeholders."""
        return self.num_features or self.rows * self.columns

    @property
    def num_patches(self) -> int:
        """Approximate number of patches that the encoder processes."""
        return PATCHES * self.length

    @property
    def end(self) -> int:
        """Index after the last placeholder."""
        return self.offset + self.length
