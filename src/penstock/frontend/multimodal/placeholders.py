"""Placeholders of images among a prompt's tokens: one from the template, as many as the image has features."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.core.errors import invalid
from penstock.core.multimodal import ImageInput


def check_placeholders(token_ids: Sequence[int], num_images: int, placeholder: int) -> None:
    """Raise ``PenstockError`` (``invalid``) where there are not as many placeholders as images."""
    if (count := sum(token == placeholder for token in token_ids)) != num_images:
        words = f"{num_images} are given, and the prompt has {count} placeholders for images"
        raise invalid("images", words, count)


def place_images(
    token_ids: Sequence[int], images: Sequence[ImageInput], placeholder: int
) -> tuple[list[int], tuple[ImageInput, ...]]:
    """Expand each placeholder to its image's features, in order. Returns the prompt, and the images with their places.

    Raises ``PenstockError`` (``invalid``) where there are not as many placeholders as images.
    """
    check_placeholders(token_ids, len(images), placeholder)
    tokens: list[int] = []
    placed: list[ImageInput] = []
    left = iter(images)
    for token in token_ids:
        if token != placeholder:
            tokens.append(token)
            continue
        image = next(left)
        placed.append(msgspec.structs.replace(image, offset=len(tokens)))
        tokens += [placeholder] * image.length
    return tokens, tuple(placed)
