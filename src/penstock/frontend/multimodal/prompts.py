"""How prompts have images: what families' processors make of them, and of the text around."""

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
    """An image whose tokens are not all its placeholder."""

    image: ImageInput
    token_ids: Sequence[int] = ()
    """In place of a placeholder; empty for as many placeholders as the image has features."""
    first: int = 0
    """Index of its first feature among them."""


class Crops(NamedTuple):
    """An image that a prompt has as several, or with text around."""

    images: tuple[ImageInput, ...]
    text: str
    """In place of what the chat template writes for an image; it has a placeholder for each of ``images``."""


@dataclass(frozen=True)
class ImageProcessor(ABC):
    """What makes pixels of a model's images, and says which tokens stand for them."""

    placeholder: int
    """The token that stands for a feature in prompts."""

    @property
    def marker(self) -> int:
        """The token that chat templates write for an image."""
        return self.placeholder

    @abstractmethod
    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ImageProcessor:
        """The processor with ``mm_processor_kwargs``. Raises ``PenstockError`` for unknown names and wrong values."""

    @abstractmethod
    def __call__(self, image: Image, num_images: int = 1) -> ImageInput | TokenizedImage | Crops:
        """Resize an image; its ``offset`` is to be set.

        Args:
            num_images: of the prompt; some families take fewer pixels of each of several.

        Raises ``PenstockError`` (``invalid``) for an image that is too long for its width, or too large.
        """


class ProcessorFiles(NamedTuple):
    """The files of a checkpoint from which its image processor is made."""

    folder: Path
    config: Mapping[str, Any]
    """``config.json``."""
    image_processor: Mapping[str, Any]
    """The image processor's configuration."""
    tokenizer: Mapping[str, Any]
    """``tokenizer_config.json``."""
    token_id: Callable[[str], int | None]
    """The id of a token by its name."""
    limit: int
    """Pixels that an image may have."""


Reader = Callable[[ProcessorFiles], ImageProcessor]
"""Makes the processor of a checkpoint. May raise ``KeyError``, ``TypeError`` or ``ValueError``, which name what is
wrong, and ``PenstockError`` (``unsupported``)."""


def spread_crops(text: str, marker: str, media: Sequence[Any]) -> str:
    """A prompt's text with that of its images (``Crops``) in place of markers, in order. Raises ``PenstockError``
    (``invalid``) where there are not as many markers."""
    first, *rest = text.split(marker)
    crops = [one for one in media if isinstance(one, Crops)]
    if len(rest) != len(crops):
        raise invalid("images", f"{len(crops)} are given, and the prompt has {len(rest)} placeholders for images")
    return first + "".join(one.text + part for one, part in zip(crops, rest, strict=True))
