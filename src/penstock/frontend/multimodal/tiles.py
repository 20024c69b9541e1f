"""Shared code of the families' image processors: options, resizing, and tiles."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.multimodal import ImageInput

from .prompts import ProcessorFiles

if TYPE_CHECKING:
    from PIL.Image import Image

CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
"""Mean and standard deviation of the channels (red, green, blue)."""
BILINEAR, BICUBIC = 2, 3
"""Numbers of resampling filters in Pillow."""
STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
"""Preprocessing steps that must not be disabled."""
Pixel = tuple[float, float, float]


class Resizing(NamedTuple):
    """Resizing and normalization of images."""

    mean: Pixel
    std: Pixel
    resample: int
    """Number of the resampling filter in Pillow."""
    limit: int
    """Maximum total number of pixels of the tiles of an image."""

    def check(self, tiles: int, height: int, width: int) -> None:
        """Raise ``PenstockError`` (``invalid``) if tiles of this size exceed the limit."""
        if tiles * height * width > self.limit:
            size = f"{tiles} tiles of {width} x {height}" if tiles > 1 else f"{width} x {height}"
            message = f"would be resized to {size} pixels, more than max_image_pixels ({self.limit})"
            raise invalid("image", message, self.limit)

    def resize(self, image: Image, height: int, width: int) -> Image:
        return image.resize((width, height), self.resample)

    def image_input(self, tiles: Sequence[Image], **fields: Any) -> ImageInput:
        """Create the engine's input for an image. The caller sets its ``offset``.

        Args:
            tiles: tiles of the image, all of the same size.
            fields: other fields of ``ImageInput``.
        """
        width, height = tiles[0].size
        shape = (len(tiles), height, width, self.mean, self.std, sorted(fields.items()))
        digest = hashlib.blake2b(repr(shape).encode(), digest_size=32)
        pixels = b"".join(tile.tobytes() for tile in tiles)
        digest.update(pixels)
        return ImageInput(
            content_hash=digest.digest(),
            offset=0,
            height=height,
            width=width,
            pixels=pixels,
            mean=self.mean,
            std=self.std,
            tiles=len(tiles),
            **({"rows": 0, "columns": 0} | fields),
        )


def read_resizing(
    files: ProcessorFiles,
    kinds: Sequence[str],
    colours: tuple[Pixel, Pixel] = CLIP,
    resample: int = BICUBIC,
) -> Resizing:
    """Read the resizing options, which all image processors have.

    Args:
        kinds: class names of supported processors, without ``Fast`` or ``Pil``.
        colours: default mean and standard deviation.
        resample: default filter.

    Raises ``PenstockError`` (``unsupported``) for another processor or disabled steps, and ``TypeError`` or
    ``ValueError`` for invalid values.
    """
    given = files.image_processor
    kind = str(given.get("image_processor_type") or kinds[0])
    if kind.removesuffix("Fast").removesuffix("Pil") not in kinds:
        message = f"the image processor {kind!r:.50} of {files.folder} is not supported; supported: {', '.join(kinds)}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    for name in STEPS:
        if given.get(name) is False:
            message = f"the image processor of {files.folder} has {name} false, which is not supported"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
    mean, std = (
        channels(given.get(name) or default) for name, default in zip(("image_mean", "image_std"), colours, strict=True)
    )
    chosen = given.get("resample")
    result = Resizing(mean, std, resample if chosen is None else int(chosen), files.limit)
    if not 0 <= result.resample <= 5 or 0.0 in result.std:
        raise ValueError(f"resample is {result.resample} (0 to 5 allowed), and image_std {result.std} (not 0)")
    return result


def read_edges(size: Any, default: int) -> tuple[int, int]:
    """Height and width of a configured ``size``. Raises ``TypeError`` or ``ValueError`` if it is invalid."""
    size = {"height": default, "width": default} if size is None else size
    if not isinstance(size, Mapping):
        size = {"height": size, "width": size}
    edges = size.get("shortest_edge"), size.get("shortest_edge")
    height, width = (int(size.get(name) or edge) for name, edge in zip(("height", "width"), edges, strict=True))
    if height < 1 or width < 1:
        raise ValueError(f"size is {dict(size)}; height and width must be at least 1")
    return height, width


def check_kwargs(kwargs: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ``PenstockError`` (``unsupported``) for unknown names in ``mm_processor_kwargs``."""
    if unknown := sorted(kwargs.keys() - set(known)):
        only = f"only {', '.join(known)} are" if known else "this model's image processor has no options"
        message = f"mm_processor_kwargs: {unknown[0]!r:.50} is not supported, {only}"
        raise PenstockError(Code.UNSUPPORTED, message, "mm_processor_kwargs")


def read_count(kwargs: Mapping[str, Any], name: str, default: int, largest: int = 2**31) -> int:
    """Positive integer in ``mm_processor_kwargs``. Raises ``PenstockError`` (``invalid``) if it is out of range."""
    value = kwargs.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= largest:
        message = f"{name} must be an integer from 1 to {largest}, is {value!r:.50}"
        raise invalid("mm_processor_kwargs", message, largest)
    return value


def channels(given: Any) -> Pixel:
    """Convert a list of three numbers to a pixel (red, green, blue)."""
    red, green, blue = map(float, given)
    return red, green, blue
