"""Prompts: as callers give them, and tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.core.audio import AudioInput
from penstock.core.multimodal import ImageInput
from penstock.text import ParserConfig


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A prompt in token ids, with its media."""

    token_ids: list[int]
    text: str | None = None
    """Text of the prompt; None where it was given in token ids."""
    images: tuple[ImageInput, ...] = ()
    """Images and frames of videos, in the order of their placeholders."""
    audio: AudioInput | None = None
    second_text: int = 0
    """Index of the second text's first token, for a pair of texts with token types; 0 for a single text."""
    parser_config: ParserConfig | None = None
    """How to parse the answer to a chat; None for completions."""


Prompt = str | Sequence[int] | Mapping[str, Any] | TokenizedPrompt
"""A prompt of the Python interface: text, token ids, or either in a mapping: ``{"prompt": …}``,
``{"prompt_token_ids": …}``. A mapping has images and videos as ``multi_modal_data``: ``{"image": …, "video": …}``, one
or a list each, and optionally ``mm_processor_kwargs``."""
Messages = Sequence[Mapping[str, Any]]
