"""How prompts have images: what families' processors make of them, and of the text around."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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


class ImageProcessor(Protocol):
    """What makes pixels of a model's images, and says which tokens stand for them."""

    @property
    def placeholder(self) -> int:
        """The token that stands for a feature in prompts."""
        ...

    @property
    def marker(self) -> int:
        """The token that chat templates write for an image."""
        ...

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> ImageProcessor:
        """The processor with ``mm_processor_kwargs``. Raises ``PenstockError`` for unknown names and wrong values."""
        ...

    def __call__(self, image: Image, num_images: int = 1) -> ImageInput | TokenizedImage | Crops:
        """Resize an image.

        Args:
            num_images: of the prompt; some families take fewer pixels of each of several.

        Raises ``PenstockError`` (``invalid``) for an image that is too long for its width, or too large.
        """
        ...


Reader = Callable[
    [Path, Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], Callable[[str], int | None], int], ImageProcessor
]
"""Makes the processor of a checkpoint: of its folder, ``config.json``, the image processor's configuration,
``tokenizer_config.json``, the ids of tokens by name, and the pixels that an image may have. May raise ``KeyError``,
``TypeError`` or ``ValueError``, which name what is wrong, and ``PenstockError`` (``unsupported``)."""


def spread_crops(text: str, marker: str, media: Sequence[Any]) -> str:
    """A prompt's text with that of its images (``Crops``) in place of markers, in order. Raises ``PenstockError``
    (``invalid``) where there are not as many markers."""
    first, *rest = text.split(marker)
    crops = [one for one in media if isinstance(one, Crops)]
    if len(rest) != len(crops):
        raise invalid("images", f"{len(crops)} are given, and the prompt has {len(rest)} placeholders for images")
    return first + "".join(one.text + part for one, part in zip(crops, rest, strict=True))
