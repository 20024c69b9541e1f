"""Fill-in-the-middle (FIM) prompts (https://arxiv.org/abs/2207.14255)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.core import Code, PenstockError

from .tokenizer import Tokenizer

ANCHOR = "☺"
"""Text that no tokenizer merges with the text after it."""
REPOSITORY, FILE = "myproject\n", "filename\n"
"""Repository and file name used by llama.cpp's server."""
SNIPPET = "\n\n--- snippet ---\n\n"
"""Separator before another file if the model has no file token."""


class FIMTokens(NamedTuple):
    """FIM tokens of one model family, as text."""

    prefix: str
    suffix: str
    middle: str = ""
    """If empty, the suffix precedes the prefix, and the answer continues the prefix."""
    ends: tuple[str, ...] = ()
    """Tokens that end the answer, in addition to EOS."""
    repository: str = ""
    """Token before a repository's name."""
    file: str = ""
    """Token before a file's name."""


FIM_TOKENS = (
    FIMTokens(  # Qwen2.5-Coder, Qwen3; CodeGemma and Granite have prefix, suffix and middle of these
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
        "<|repo_name|>",
        "<|file_sep|>",
    ),
    FIMTokens(  # StarCoder2
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<repo_name>", "<file_sep>", "<|endoftext|>"),
        "<repo_name>",
        "<file_sep>",
    ),
    FIMTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder: the hole precedes the suffix
    FIMTokens("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # CodeLlama
    FIMTokens("[PREFIX]", "[SUFFIX]"),  # Codestral
)


class InfillFormat(NamedTuple):
    """FIM tokens of a model, as ids; see ``FIMTokens``."""

    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]
    repository: int | None
    file: int | None


def find_infill_format(tokenizer: Tokenizer) -> InfillFormat | None:
    """The model's FIM format, or None if its vocabulary has no FIM tokens."""
    find = tokenizer.token_to_id
    for tokens in FIM_TOKENS:
        prefix, suffix, middle = (find(token) if token else None for token in tokens[:3])
        if prefix is not None and suffix is not None and (middle is not None or not tokens.middle):
            ends = tuple(token_id for end in tokens.ends if (token_id := find(end)) is not None)
            return InfillFormat(prefix, suffix, middle, ends, find(tokens.repository), find(tokens.file))
    return None


def infill_format(tokenizer: Tokenizer) -> InfillFormat:
    """The model's FIM format. Raises ``PenstockError`` (``unsupported``) if its vocabulary has no FIM tokens."""
    if found := find_infill_format(tokenizer):
        return found
    message = "suffix: this model's vocabulary has no fill-in-the-middle tokens; omit the suffix"
    raise PenstockError(Code.UNSUPPORTED, message, "suffix")


def infill_prompt(
    tokenizer: Tokenizer,
    prefix: str | Sequence[int],
    suffix: str | Sequence[int],
    files: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """Return the token ids of a prompt for the text between ``prefix`` and ``suffix``.

    Args:
        files: names and texts of other files of the repository, put before the prefix as by llama.cpp's server
            (https://arxiv.org/abs/2409.12186).

    Raises ``PenstockError``: ``unsupported`` for a model without FIM tokens, ``invalid`` for invalid text.
    """
    tokens = infill_format(tokenizer)
    before = tokenizer.encode(prefix, False) if isinstance(prefix, str) else [*prefix]
    after = _encode_suffix(tokenizer, suffix) if isinstance(suffix, str) else [*suffix]
    begin = [*bos(tokenizer), *_context(tokenizer, tokens, files)]
    if tokens.middle is None:
        return [*begin, tokens.suffix, *after, tokens.prefix, *before]
    return [*begin, tokens.prefix, *before, tokens.suffix, *after, tokens.middle]


def _context(tokenizer: Tokenizer, tokens: InfillFormat, files: Sequence[tuple[str, str]]) -> list[int]:
    """Token ids of the other files and of the edited file's name. Names are only used if the model has a file token."""
    if not files:
        return []
    result: list[int] = []
    if tokens.repository is not None:
        result += [tokens.repository, *tokenizer.encode(REPOSITORY, False)]
    for name, text in files:
        named = SNIPPET if tokens.file is None else f"{name}\n"
        result += [*([] if tokens.file is None else [tokens.file]), *tokenizer.encode(named, False)]
        result += tokenizer.encode(text, False)
    return result if tokens.file is None else [*result, tokens.file, *tokenizer.encode(FILE, False)]


def bos(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The BOS token, if the tokenizer adds it to prompts."""
    token = tokenizer.special.get("bos_token")
    first = tokenizer.encode("", True)[:1]
    return tuple(first) if token is not None and first == [tokenizer.token_to_id(token)] else ()


def _encode_suffix(tokenizer: Tokenizer, suffix: str) -> list[int]:
    """Encode without the leading space that SentencePiece prepends (as in CodeLlama): the suffix continues a text."""
    first = tokenizer.encode("a", False)[:1]
    if not first or not tokenizer.vocabulary[first[0]].startswith(b" "):
        return tokenizer.encode(suffix, False)
    anchor, whole = tokenizer.encode(ANCHOR, False), tokenizer.encode(ANCHOR + suffix, False)
    return whole[len(anchor) :] if whole[: len(anchor)] == anchor else tokenizer.encode(suffix, False)
