"""Decoding of image files, which are not trusted, with Pillow."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def require_pillow() -> None:
    """Raise ``PenstockError`` (``unsupported``) where Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        words = "image: reading one takes Pillow, which is not installed: pip install 'penstock-llm[multimodal]'"
        raise PenstockError(Code.UNSUPPORTED, words, "image") from error


def decode_image(data: bytes, max_pixels: int, field: str) -> Image:
    """Decode an image file; of an animation the first picture. It is turned as its EXIF data say.

    Args:
        max_pixels: of the image. Its size is in the file's header, so that no memory is taken for a larger one.
        field: what errors name.

    Raises ``PenstockError`` (``invalid``) for another format, a damaged file and too many pixels.
    """
    from PIL import Image as pillow
    from PIL import ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large images and damaged metadata
            image = pillow.open(io.BytesIO(data), formats=FORMATS)
            check_pixels(image, max_pixels, field)
            image.load()
            return ImageOps.exif_transpose(image)
    except PenstockError:
        raise
    except UnidentifiedImageError as error:
        raise invalid(field, f"is no image in a format that is read here ({', '.join(FORMATS)})") from error
    except pillow.DecompressionBombError as error:
        raise invalid(field, f"has more pixels than max_image_pixels ({max_pixels})", max_pixels) from error
    except Exception as error:  # a decoder can raise anything for a damaged file
        raise invalid(field, f"is a damaged image: {error!r:.100}") from error


def to_rgb(image: Image) -> Image:
    """The image in RGB; a transparent one on white, as processors of transformers and vLLM show it to models."""
    from PIL import Image as pillow

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
    return pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def as_image(value: Any, max_pixels: int, field: str) -> Image:
    """An image of Python code: Pillow's, or an array ``[height, width, 3]`` or ``[height, width]`` of uint8.

    Raises ``PenstockError`` (``invalid``) for anything else, and too many pixels.
    """
    import numpy as np
    from PIL import Image as pillow

    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim not in (2, 3) or value.shape[2:] not in ((), (3,)) or not value.size:
            raise invalid(field, "an array must be [height, width, 3] of uint8")
        value = pillow.fromarray(np.ascontiguousarray(value))
    if not isinstance(value, pillow.Image):
        raise invalid(field, "must be an image of Pillow, or an array [height, width, 3] of uint8")
    check_pixels(value, max_pixels, field)
    return value


def check_pixels(image: Image, max_pixels: int, field: str) -> None:
    """Raise ``PenstockError`` (``invalid``) for an image of more pixels."""
    width, height = image.size
    if width * height > max_pixels:
        words = f"has {width} x {height} pixels, more than max_image_pixels ({max_pixels})"
        raise invalid(field, words, max_pixels)
