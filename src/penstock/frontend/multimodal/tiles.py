"""What the processors of several families share: options of image processors, resizing, and tiles of an image."""

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
"""Mean and standard deviation of channels."""
BILINEAR, BICUBIC = 2, 3
"""Pillow's filters."""
STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
Pixel = tuple[float, float, float]


class Resizing(NamedTuple):
    """How a processor makes pixels of images."""

    mean: Pixel
    std: Pixel
    resample: int
    """Pillow's filter."""
    limit: int
    """Pixels of an image's tiles together, at most."""

    def check(self, tiles: int, height: int, width: int) -> None:
        """Raise ``PenstockError`` (``invalid``) for more pixels than an image may have."""
        if tiles * height * width > self.limit:
            size = f"{tiles} tiles of {width} x {height}" if tiles > 1 else f"{width} x {height}"
            words = f"would be resized to {size} pixels, more than max_image_pixels ({self.limit})"
            raise invalid("image", words, self.limit)

    def resize(self, image: Image, height: int, width: int) -> Image:
        """The image in that size."""
        return image.resize((width, height), self.resample)

    def image_input(self, tiles: Sequence[Image], **fields: Any) -> ImageInput:
        """An image of its tiles, which are of one size; its ``offset`` is to be set.

        Args:
            fields: others of ``ImageInput``.
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
    """Read what all image processors have.

    Args:
        kinds: names of processors that do the same, without ``Fast`` or ``Pil``.
        colours, resample: where the file does not say.

    Raises ``PenstockError`` (``unsupported``) for another processor, or steps that are left out, and ``TypeError`` or
    ``ValueError`` where values are wrong.
    """
    given = files.image_processor
    kind = str(given.get("image_processor_type") or kinds[0])
    if kind.removesuffix("Fast").removesuffix("Pil") not in kinds:
        raise PenstockError(Code.UNSUPPORTED, f"{files.folder} has the image processor {kind!r:.50}", "model")
    for name in STEPS:
        if given.get(name) is False:
            raise PenstockError(Code.UNSUPPORTED, f"{files.folder} has an image processor with {name} false", "model")
    mean, std = (
        channels(given.get(name) or default) for name, default in zip(("image_mean", "image_std"), colours, strict=True)
    )
    chosen = given.get("resample")
    result = Resizing(mean, std, resample if chosen is None else int(chosen), files.limit)
    if not 0 <= result.resample <= 5 or 0.0 in result.std:
        raise ValueError("resample or image_std is out of range")
    return result


def read_edges(size: Any, default: int) -> tuple[int, int]:
    """Height and width of ``size``. Raises ``TypeError`` or ``ValueError`` where it is wrong."""
    size = {"height": default, "width": default} if size is None else size
    if not isinstance(size, Mapping):
        size = {"height": size, "width": size}
    edges = size.get("shortest_edge"), size.get("shortest_edge")
    height, width = (int(size.get(name) or edge) for name, edge in zip(("height", "width"), edges, strict=True))
    if height < 1 or width < 1:
        raise ValueError(f"size is {dict(size)}")
    return height, width


def check_kwargs(kwargs: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ``PenstockError`` (``unsupported``) for ``mm_processor_kwargs`` that a model's processor does not have."""
    if unknown := sorted(kwargs.keys() - set(known)):
        only = f"only {', '.join(known)} are" if known else "this model's processor has none"
        words = f"mm_processor_kwargs: {unknown[0]!r:.50} is not supported, {only}"
        raise PenstockError(Code.UNSUPPORTED, words, "mm_processor_kwargs")


def count_of(kwargs: Mapping[str, Any], name: str, default: int, largest: int = 2**31) -> int:
    """A number of ``mm_processor_kwargs``. Raises ``PenstockError`` (``invalid``) where it is out of range."""
    value = kwargs.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= largest:
        raise invalid("mm_processor_kwargs", f"{name} must be a whole number from 1 to {largest}", largest)
    return value


def channels(given: Any) -> Pixel:
    """A number for each of red, green and blue."""
    red, green, blue = map(float, given)
    return red, green, blue
