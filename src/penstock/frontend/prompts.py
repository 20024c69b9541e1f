"""Types of prompts: as given by callers, and tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import msgspec

from penstock.core import Code, PenstockError
from penstock.core.audio import AudioInput
from penstock.core.errors import invalid
from penstock.core.multimodal import ImageInput
from penstock.core.spelling import did_you_mean
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


class PromptOptions(TypedDict):
    """Keys of every prompt that is a dict."""

    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    """``{"image": …, "video": …}``, one item or a list each."""
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]
    """Options of the image processor."""
    cache_salt: NotRequired[str]
    """Cached prefixes are shared only among requests with the same salt."""


class TextPrompt(PromptOptions):
    """A prompt as text."""

    prompt: str


class TokensPrompt(PromptOptions):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """Text of the prompt, which is only repeated in the output."""


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings, which every call refuses: the name exists for scripts that import it."""

    prompt_embeds: Any


UNSUPPORTED_KEYS = {
    "prompt_embeds": "give prompt or prompt_token_ids",
    "encoder_prompt": "there are no encoder-decoder models for text; give prompt",
    "decoder_prompt": "there are no encoder-decoder models for text; give prompt",
    "multi_modal_uuids": "omit it; images and videos are identified by their content",
    "media_io_kwargs": "give media_io_kwargs to LLM(…)",
    "token_type_ids": "call LLM.score with both texts",
    "prompt_is_token_ids": "give prompt_token_ids only",
}
"""Keys of vLLM's prompts that are refused, with advice."""
KEYS = ("prompt", "prompt_token_ids", "multi_modal_data", "mm_processor_kwargs", "cache_salt", "prompt_token_offsets")
"""Keys of prompts; ``prompt_token_offsets`` is ignored."""


def check_keys(prompt: Mapping[str, Any]) -> None:
    """Raise ``PenstockError`` for a key of a prompt that is unknown or not supported."""
    for key, value in prompt.items():
        if key in UNSUPPORTED_KEYS and value is not None:
            message = f"{key}: is not supported in prompts: {UNSUPPORTED_KEYS[key]}"
            raise PenstockError(Code.UNSUPPORTED, message, key)
        if key not in KEYS and key not in UNSUPPORTED_KEYS:
            raise invalid("prompt", f"has the unknown key {key!r}{did_you_mean(str(key), KEYS)}")


def salt_of(prompt: object) -> str:
    """``cache_salt`` of a prompt; empty if it has none."""
    salt = prompt.get("cache_salt") or "" if isinstance(prompt, Mapping) else ""
    if not isinstance(salt, str):
        raise invalid("cache_salt", f"must be a string, is {type(salt).__name__}")
    return salt


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any] | TokenizedPrompt
"""Prompt of the Python interface: text, token ids, or a mapping with the keys of ``TextPrompt`` or ``TokensPrompt``."""
Messages = Sequence[Mapping[str, Any]]
