"""Decoding of untrusted image files with Pillow."""

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
    """Raise ``PenstockError`` (``unsupported``) if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        message = "image: decoding needs Pillow, which is not installed: pip install 'penstock-llm[multimodal]'"
        raise PenstockError(Code.UNSUPPORTED, message, "image") from error


def decode_image(data: bytes, max_pixels: int, field: str) -> Image:
    """Decode an image file, or the first frame of an animation, and apply its EXIF orientation.

    Args:
        max_pixels: limit of pixels, checked against the file's header before memory is allocated.
        field: field of the request, for error messages.

    Raises ``PenstockError`` (``invalid``) for an unsupported format, a damaged file or too many pixels.
    """
    from PIL import Image as pillow
    from PIL import ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about large images and damaged metadata
            image = pillow.open(io.BytesIO(data), formats=FORMATS)
            check_pixels(image, max_pixels, field)
            image.load()
            return ImageOps.exif_transpose(image)
    except PenstockError:
        raise
    except UnidentifiedImageError as error:
        raise invalid(field, f"is not an image in a supported format ({', '.join(FORMATS)})") from error
    except pillow.DecompressionBombError as error:
        raise invalid(field, f"has more pixels than max_image_pixels ({max_pixels})", max_pixels) from error
    except Exception as error:  # a decoder can raise anything for a damaged file
        raise invalid(field, f"is a damaged image: {error!r:.100}") from error


def to_rgb(image: Image) -> Image:
    """Convert an image to RGB, with a white background if it is transparent, as in transformers and vLLM."""
    from PIL import Image as pillow

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
    return pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def as_image(value: Any, max_pixels: int, field: str) -> Image:
    """Convert an image given in Python: a Pillow image, or a uint8 array ``[height, width, 3]`` or ``[height, width]``.

    Raises ``PenstockError`` (``invalid``) for a value of another type, or too many pixels.
    """
    import numpy as np
    from PIL import Image as pillow

    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim not in (2, 3) or value.shape[2:] not in ((), (3,)) or not value.size:
            given = f"{value.dtype} {list(value.shape)}"
            raise invalid(field, f"an array must be uint8 of shape [height, width, 3] or [height, width], is {given}")
        value = pillow.fromarray(np.ascontiguousarray(value))
    if not isinstance(value, pillow.Image):
        message = f"must be a Pillow image, or a uint8 array [height, width, 3], is a {type(value).__name__}"
        raise invalid(field, message)
    check_pixels(value, max_pixels, field)
    return value


def check_pixels(image: Image, max_pixels: int, field: str) -> None:
    """Raise ``PenstockError`` (``invalid``) for an image with more than ``max_pixels``."""
    width, height = image.size
    if width * height > max_pixels:
        message = f"has {width} x {height} pixels, more than max_image_pixels ({max_pixels})"
        raise invalid(field, message, max_pixels)
