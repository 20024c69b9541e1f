"""Prompts of models that fill in the middle (fill-in-the-middle, FIM; https://arxiv.org/abs/2207.14255)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.core import Code, PenstockError

from .tokenizer import Tokenizer

ANCHOR = "☺"
"""Text that merges with none after it."""
REPOSITORY, FILE = "myproject\n", "filename\n"
"""Names that llama.cpp's server gives them."""
SNIPPET = "\n\n--- snippet ---\n\n"
"""Before another file where the model has no token for that."""


class Spelling(NamedTuple):
    """Tokens of one family of models, as its vocabulary spells them."""

    prefix: str
    suffix: str
    middle: str = ""
    """Without one, the suffix comes first, and the answer continues the prefix."""
    ends: tuple[str, ...] = ()
    """Tokens that end the middle, besides the end of a sequence."""
    repository: str = ""
    file: str = ""
    """Tokens before the name of a repository, and of a file."""


SPELLINGS = (
    Spelling(  # Qwen2.5-Coder, Qwen3; CodeGemma and Granite have the first three
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
        "<|repo_name|>",
        "<|file_sep|>",
    ),
    Spelling(  # StarCoder2
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<repo_name>", "<file_sep>", "<|endoftext|>"),
        "<repo_name>",
        "<file_sep>",
    ),
    Spelling("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder: the hole is before the suffix
    Spelling("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # CodeLlama
    Spelling("[PREFIX]", "[SUFFIX]"),  # Codestral
)


class InfillFormat(NamedTuple):
    """How a model's prompts for the middle of a text are composed: a ``Spelling`` as token ids."""

    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]
    repository: int | None
    file: int | None


def find_infill_format(tokenizer: Tokenizer) -> InfillFormat | None:
    """The model's format; None where its vocabulary has none of the tokens."""
    find = tokenizer.token_to_id
    for spelling in SPELLINGS:
        prefix, suffix, middle = (find(token) if token else None for token in spelling[:3])
        if prefix is not None and suffix is not None and (middle is not None or not spelling.middle):
            ends = tuple(token_id for end in spelling.ends if (token_id := find(end)) is not None)
            return InfillFormat(prefix, suffix, middle, ends, find(spelling.repository), find(spelling.file))
    return None


def infill_format(tokenizer: Tokenizer) -> InfillFormat:
    """The model's format. Raises ``PenstockError`` (``unsupported``) where it has none."""
    if found := find_infill_format(tokenizer):
        return found
    words = "this model cannot fill in the middle, as its vocabulary has no tokens for it; leave the suffix out"
    raise PenstockError(Code.UNSUPPORTED, f"suffix: {words}", "suffix")


def infill_prompt(
    tokenizer: Tokenizer,
    prefix: str | Sequence[int],
    suffix: str | Sequence[int],
    files: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """The token ids of a prompt for the text between ``prefix`` and ``suffix``.

    Args:
        files: names and texts of other files of the repository, which come first
            (https://arxiv.org/abs/2409.12186), composed as llama.cpp's server does.

    Raises ``PenstockError``: as ``infill_format``, and for invalid text.
    """
    tokens = infill_format(tokenizer)
    before = tokenizer.encode(prefix, False) if isinstance(prefix, str) else [*prefix]
    after = _encode_suffix(tokenizer, suffix) if isinstance(suffix, str) else [*suffix]
    begin = [*bos(tokenizer), *_context(tokenizer, tokens, files)]
    if tokens.middle is None:
        return [*begin, tokens.suffix, *after, tokens.prefix, *before]
    return [*begin, tokens.prefix, *before, tokens.suffix, *after, tokens.middle]


def _context(tokenizer: Tokenizer, tokens: InfillFormat, files: Sequence[tuple[str, str]]) -> list[int]:
    """Other files, each after its name where the model has a token for that, and the name of the file itself."""
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
    """The token that begins every prompt, where the tokenizer adds one."""
    token = tokenizer.special.get("bos_token")
    first = tokenizer.encode("", True)[:1]
    return tuple(first) if token is not None and first == [tokenizer.token_to_id(token)] else ()


def _encode_suffix(tokenizer: Tokenizer, suffix: str) -> list[int]:
    """Without the space that SentencePiece's vocabularies begin a text with: it continues one, as in CodeLlama."""
    first = tokenizer.encode("a", False)[:1]
    if not first or not tokenizer.vocabulary[first[0]].startswith(b" "):
        return tokenizer.encode(suffix, False)
    anchor, whole = tokenizer.encode(ANCHOR, False), tokenizer.encode(ANCHOR + suffix, False)
    return whole[len(anchor) :] if whole[: len(anchor)] == anchor else tokenizer.encode(suffix, False)
