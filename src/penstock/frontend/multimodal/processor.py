"""Resizing of images as a model's processor does, for Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.config_json import CONFIG, read_config_json
from penstock.checkpoint.vision_config import ERNIE_VL, QWEN3_VL, QWEN_VL
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.multimodal import ImageInput

from .decoding import to_rgb
from .gemma3 import read_gemma3
from .internvl import read_internvl
from .llava import read_llava, read_onevision
from .pixtral import read_pixtral
from .prompts import ImageProcessor, Reader

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSORS = tuple(
    f"{name}{suffix}"
    for name in ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Ernie4_5_VLMoeImageProcessor")
    for suffix in ("", "Fast", "Pil")
)
FILES = ("processor_config.json", "preprocessor_config.json")
TOKENIZER_CONFIG = "tokenizer_config.json"
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MAX_ASPECT_RATIO = 200
MAX_VALUE = 2**31
KWARGS = ("min_pixels", "max_pixels", "size")
"""Fields of ``mm_processor_kwargs``."""


@dataclass(frozen=True)
class QwenVLProcessor:
    """An ``ImageProcessor``: images are resized to multiples of a feature's edge, with about the same aspect ratio, and
    a number of pixels within limits (``smart_resize`` of Qwen2-VL)."""

    placeholder: int
    """The token that stands for a feature in prompts."""
    edge: int
    """Pixels of a feature's edge."""
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    resample: int = 3
    """Pillow's filter: 3 is bicubic."""
    limit: int = 2**26
    """Pixels of an image, before and after it is resized, at most."""

    @property
    def marker(self) -> int:
        """As ``ImageProcessor.marker``."""
        return self.placeholder

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> QwenVLProcessor:
        """The processor with ``mm_processor_kwargs``. Raises ``PenstockError`` for unknown names and wrong values."""
        if unknown := sorted(kwargs.keys() - set(KWARGS)):
            words = f"{unknown[0]!r:.50} is not supported, only {', '.join(KWARGS)} are"
            raise PenstockError(Code.UNSUPPORTED, f"mm_processor_kwargs: {words}", "mm_processor_kwargs")
        smallest, largest = read_pixel_limits(kwargs, self.min_pixels, self.max_pixels)
        if not all(isinstance(value, int) and 1 <= value <= MAX_VALUE for value in (smallest, largest)):
            raise invalid("mm_processor_kwargs", "numbers of pixels must be whole numbers from 1 on", 1)
        return replace(self, min_pixels=smallest, max_pixels=largest)

    def __call__(self, image: Image, num_images: int = 1) -> ImageInput:
        """Resize an image; its ``offset`` is to be set. Raises ``PenstockError`` (``invalid``) for an image that is too
        long for its width, or too large."""
        height, width = self._size(image.height, image.width)
        pixels = to_rgb(image).resize((width, height), self.resample).tobytes()
        rows, columns = height // self.edge, width // self.edge
        digest = hashlib.blake2b(repr((rows, columns, height, width, self.mean, self.std)).encode(), digest_size=32)
        digest.update(pixels)
        return ImageInput(digest.digest(), 0, rows, columns, height, width, pixels, self.mean, self.std)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        new = smart_resize(height, width, self.edge, self.min_pixels, self.max_pixels)
        if new[0] * new[1] > self.limit:
            words = f"would be resized to {new[1]} x {new[0]} pixels, more than max_image_pixels ({self.limit})"
            raise invalid("image", words, self.limit)
        return new


def smart_resize(
    height: int, width: int, edge: int, min_pixels: int, max_pixels: int, frames: int = 1, rounded: int = 1
) -> tuple[int, int]:
    """Height and width as multiples of ``edge``, with about the same aspect ratio, and pixels within limits.

    Args:
        frames: number of frames whose pixels are limited together.
        rounded: ``frames``, rounded to those that share features.

    Raises ``PenstockError`` (``invalid``) for what is too long for its width.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        words = f"an image of {width} x {height} pixels is too narrow, at most 1 to {MAX_ASPECT_RATIO} is possible"
        raise invalid("image", words, MAX_ASPECT_RATIO)
    new = round(height / edge) * edge, round(width / edge) * edge
    if rounded * new[0] * new[1] > max_pixels:
        factor = math.sqrt(frames * height * width / max_pixels)
        new = (
            max(edge, math.floor(height / factor / edge) * edge),
            max(edge, math.floor(width / factor / edge) * edge),
        )
    elif rounded * new[0] * new[1] < min_pixels:
        factor = math.sqrt(min_pixels / (frames * height * width))
        new = math.ceil(height * factor / edge) * edge, math.ceil(width * factor / edge) * edge
    return new


READERS: dict[str, Reader] = {
    "Gemma3ForConditionalGeneration": read_gemma3,
    "InternVLForConditionalGeneration": read_internvl,
    "LlavaForConditionalGeneration": read_llava,
    "LlavaOnevisionForConditionalGeneration": read_onevision,
    "Mistral3ForConditionalGeneration": read_pixtral,
}
"""By architecture; Qwen's are read here."""


def read_image_processor(
    folder: Path, kwargs: Mapping[str, Any], limit: int, token_id: Callable[[str], int | None]
) -> ImageProcessor | None:
    """The processor of a checkpoint; None of a model that sees no images.

    Args:
        kwargs: ``mm_processor_kwargs``.
        token_id: the id of a token by its name.
        limit: pixels of an image, at most.

    Raises ``PenstockError``: ``invalid`` where a file is broken, ``unsupported`` for another kind of processor.
    """
    if not (folder / CONFIG).is_file():
        return None
    config = read_config_json(folder, weights=False)
    architecture = next(iter(config.get("architectures") or [""]))
    if reader := READERS.get(architecture):
        return _read_processor(reader, folder, config, limit, token_id).with_kwargs(kwargs)
    if architecture not in (*QWEN_VL, ERNIE_VL):
        return None
    given = _read(folder)
    if (kind := given.get("image_processor_type", PROCESSORS[0])) not in PROCESSORS:
        raise PenstockError(Code.UNSUPPORTED, f"{folder} has the image processor {kind!r:.50}", "model")
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if given.get(name) is False:
            raise PenstockError(Code.UNSUPPORTED, f"{folder} has an image processor with {name} false", "model")
    try:
        vision = config["vision_config"]
        patch = int(given.get("patch_size") or vision.get("patch_size", 16 if architecture in QWEN3_VL else 14))
        merge = int(given.get("merge_size") or vision.get("spatial_merge_size", 2))
        smallest, largest = read_pixel_limits(given, 56 * 56, 28 * 28 * (6177 if architecture == ERNIE_VL else 1280))
        processor = QwenVLProcessor(
            placeholder=int(config.get("image_token_id", 100295 if architecture == ERNIE_VL else 151655)),
            edge=patch * merge,
            min_pixels=int(smallest),
            max_pixels=int(largest),
            mean=channels(given.get("image_mean", CLIP_MEAN)),
            std=channels(given.get("image_std", CLIP_STD)),
            resample=int(given.get("resample", 3)),
            limit=limit,
        )
        if processor.edge < 1 or not 0 <= processor.resample <= 5 or 0.0 in processor.std:
            raise ValueError("patch_size, merge_size, resample or image_std is out of range")
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise invalid("model", f"{folder} has a broken {CONFIG} or image processor: {error}") from error
    return processor.with_kwargs(kwargs)


def _read_processor(
    reader: Reader, folder: Path, config: Mapping[str, Any], limit: int, token_id: Callable[[str], int | None]
) -> ImageProcessor:
    path = folder / TOKENIZER_CONFIG
    try:
        names = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return reader(folder, config, _read(folder), names, token_id, limit)
    except (KeyError, AttributeError, TypeError, ValueError, RecursionError, OSError) as error:
        raise invalid("model", f"{folder} has a broken {CONFIG} or image processor: {error}") from error


def _read(folder: Path) -> dict[str, Any]:
    """The image processor's configuration: ``image_processor`` in the file of all processors, or else its separate
    file; empty without both."""
    result: dict[str, Any] = {}
    for name in FILES:
        if not (folder / name).is_file():
            continue
        try:
            given = json.loads((folder / name).read_text(encoding="utf-8"))
            if "image_processor" in given:
                return dict(given["image_processor"])
            result = dict(given)
        except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
            raise invalid("model", f"{folder / name} is broken: {error}") from error
    return result


def read_pixel_limits(given: Mapping[str, Any], smallest: Any, largest: Any) -> tuple[Any, Any]:
    """Limits of the number of pixels, by their older names or those of ``size``."""
    size = given.get("size") or {}
    if not isinstance(size, Mapping):
        raise invalid("mm_processor_kwargs", "size must have shortest_edge and longest_edge")
    smallest = size.get("shortest_edge", size.get("min_pixels", smallest))
    largest = size.get("longest_edge", size.get("max_pixels", largest))
    by_name = given.get("min_pixels"), given.get("max_pixels")
    return smallest if by_name[0] is None else by_name[0], largest if by_name[1] is None else by_name[1]


def channels(given: Any) -> tuple[float, float, float]:
    """A number for each of red, green and blue."""
    red, green, blue = map(float, given)
    return red, green, blue
