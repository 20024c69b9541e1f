"""Interface of the families' image processors: pixels of images, and their tokens in prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core.errors import invalid
from penstock.core.multimodal import ImageInput

if TYPE_CHECKING:
    from PIL.Image import Image


class TokenizedImage(NamedTuple):
    """Image with additional tokens, such as row separators."""

    image: ImageInput
    token_ids: Sequence[int] = ()
    """Tokens that replace the placeholder; empty: one placeholder per feature."""
    first: int = 0
    """Index of the first feature in ``token_ids``."""


class Crops(NamedTuple):
    """Image that is split into several images, or surrounded with text."""

    images: tuple[ImageInput, ...]
    text: str
    """Text that replaces the chat template's text for the image, with one placeholder per item of ``images``."""


@dataclass(frozen=True)
class ImageProcessor(ABC):
    """Preprocesses a model's images and defines their tokens."""

    placeholder: int
    """Id of the token that stands for one image feature in a prompt."""

    @property
    def marker(self) -> int:
        """Id of the token that chat templates write for an image."""
        return self.placeholder

    @abstractmethod
    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ImageProcessor:
        """Apply ``mm_processor_kwargs``. Raises ``PenstockError`` for unknown names and invalid values."""

    @abstractmethod
    def __call__(self, image: Image, num_images: int = 1) -> ImageInput | TokenizedImage | Crops:
        """Resize an image. The caller sets its ``offset``.

        Args:
            num_images: number of images in the prompt; some families use fewer pixels per image if there are several.

        Raises ``PenstockError`` (``invalid``) for an image with an extreme aspect ratio, or too many pixels.
        """


class ProcessorFiles(NamedTuple):
    """Configuration of a checkpoint's image processor."""

    folder: Path
    config: Mapping[str, Any]
    """Content of ``config.json``."""
    image_processor: Mapping[str, Any]
    """Configuration of the image processor."""
    tokenizer: Mapping[str, Any]
    """Content of ``tokenizer_config.json``."""
    token_id: Callable[[str], int | None]
    """Returns the id of a token, given its text; None: no such token."""
    limit: int
    """Maximum number of pixels of an image."""


Reader = Callable[[ProcessorFiles], ImageProcessor]
"""Creates the processor of a checkpoint. May raise ``KeyError``, ``TypeError`` or ``ValueError`` for malformed files,
and ``PenstockError`` (``unsupported``)."""


def expand_crops(text: str, marker: str, media: Sequence[Any]) -> str:
    """Replace the image markers in a prompt's text with the texts of its images (``Crops``), in order. Raises
    ``PenstockError`` (``invalid``) if the numbers of markers and images differ."""
    first, *rest = text.split(marker)
    crops = [one for one in media if isinstance(one, Crops)]
    if len(rest) != len(crops):
        message = f"the prompt has {len(rest)} placeholders for {len(crops)} images: write one for each"
        raise invalid("images", message)
    return first + "".join(one.text + part for one, part in zip(crops, rest, strict=True))
