"""Types of prompts: as given by callers, and tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.core.audio import AudioInput
from penstock.core.multimodal import ImageInput
from penstock.text import ParserConfig


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """Token ids of a prompt, with its media."""

    token_ids: list[int]
    text: str | None = None
    """Text of the prompt; None if it was given as token ids."""
    images: tuple[ImageInput, ...] = ()
    """Images and video frames, in the order of their placeholders."""
    audio: AudioInput | None = None
    num_truncated: int = 0
    """Number of tokens that were removed, as the request or the dialect truncates prompts."""
    second_text: int = 0
    """Index of the second text's first token, for a text pair with token types; 0 for a single text."""
    parser_config: ParserConfig | None = None
    """Parser of chat answers; None for completions."""


Prompt = str | Sequence[int] | Mapping[str, Any] | TokenizedPrompt
"""Prompt of the Python interface: text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``, optionally
with ``multi_modal_data`` (``{"image": …, "video": …}``, one item or a list each) and ``mm_processor_kwargs``."""
Messages = Sequence[Mapping[str, Any]]
