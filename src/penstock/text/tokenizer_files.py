"""Loader of a checkpoint's tokenizer, for all kinds of vocabulary files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from penstock.core.errors import PenstockError, invalid

from . import from_bpe_files, from_sentencepiece, from_tekken, from_tiktoken, from_wordpiece
from .side_files import SideFiles, read, side_paths
from .tiktoken_formats import tiktoken_format

FULL = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
TEKKEN = "tekken.json"
BPE_VOCABULARY, BPE_MERGES = "vocab.json", "merges.txt"
WORDPIECE = "vocab.txt"
NAMES = (FULL, SENTENCEPIECE, TEKKEN, BPE_VOCABULARY, BPE_MERGES, WORDPIECE)
PLACEHOLDER = "<|unused_{}|>"
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


class Loaded(NamedTuple):
    """A tokenizer and its special tokens by role."""

    tokenizer: Tokenizer
    special: dict[str, str]


def load(folder: Path, side_files: SideFiles) -> Loaded:
    """Load the first file found of ``tokenizer.json``, a SentencePiece model, a tiktoken file, ``tekken.json``,
    ``vocab.json`` with ``merges.txt``, and BERT's ``vocab.txt``.

    Raises ``PenstockError``: ``invalid`` if all these files are absent, or the file cannot be read; ``unsupported`` if
    the pre-tokenizer is unknown.
    """
    path, *others = _vocabulary_files(folder)
    try:
        return _load(path, others, side_files)
    except (PenstockError, MemoryError):
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise invalid("tokenizer", f"{path} cannot be read: {error}") from error


def paths(folder: Path) -> list[Path]:
    """All files of a tokenizer. Raises ``PenstockError`` (``invalid``) if the vocabulary file is missing."""
    return [*_vocabulary_files(folder), *side_paths(folder)]


def _load(path: Path, others: list[Path], side_files: SideFiles) -> Loaded:
    data, config, special = read(path), side_files.config, side_files.special
    added, placeholder = side_files.added, PLACEHOLDER
    bos: tuple[str, ...] = ()
    if path.name == FULL:
        tokenizer = Tokenizer.from_buffer(data)
        _add_tokens(tokenizer, added, placeholder, special.values())
        _add_special(tokenizer, side_files.special_tokens, special.values())
        return Loaded(tokenizer, special)
    if path.name == WORDPIECE:
        tokenizer, special = from_wordpiece.convert(data, config, special)
    elif path.name == BPE_VOCABULARY:
        tokenizer, special = from_bpe_files.convert(data, read(others[0]), side_files)
    elif path.name == TEKKEN:
        tokenizer, special = from_tekken.convert(data, special)
        bos = (special["bos_token"],)
    elif TIKTOKEN_LINE.match(data):
        form = tiktoken_format(config, side_files.model_type, path.name)
        tokenizer, bos, placeholder = from_tiktoken.convert(data, form), form.prefix, form.placeholder
        if not added:
            first = tokenizer.get_vocab_size()
            added = {first + i: AddedToken(token, special=True) for i, token in enumerate(form.special)}
    else:
        names = {token_id: token.content for token_id, token in added.items()}
        tokenizer = from_sentencepiece.convert(data, config.get("legacy") is not False, names)
        added = {token_id: _without_normalization(token) for token_id, token in added.items()}
        special = {"bos_token": "<s>", "eos_token": "</s>"} | special
        bos = (special["bos_token"],)
    _add_tokens(tokenizer, added, placeholder, special.values())
    _add_special(tokenizer, side_files.special_tokens, special.values())
    _add_bounds(tokenizer, config, special, bos)
    return Loaded(tokenizer, special)


def _without_normalization(token: AddedToken) -> AddedToken:
    """Copy of a token with ``normalized=False``: it is matched before spaces are replaced."""
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "special")}
    return AddedToken(token.content, normalized=False, **flags)


def _vocabulary_files(folder: Path) -> list[Path]:
    """The vocabulary file; ``vocab.json`` is followed by ``merges.txt``."""
    tiktoken = sorted((*folder.glob("*.tiktoken"), *folder.glob("tiktoken.model")))
    for path in (folder / FULL, folder / SENTENCEPIECE, *tiktoken, folder / TEKKEN):
        if path.is_file():
            return [path]
    for names in ((BPE_VOCABULARY, BPE_MERGES), (WORDPIECE,)):
        found = [folder / name for name in names]
        if all(path.is_file() for path in found):
            return found
    raise invalid(
        "tokenizer",
        f"{folder} has no {FULL}, {SENTENCEPIECE}, *.tiktoken, {TEKKEN}, {BPE_VOCABULARY} with {BPE_MERGES}, or "
        f"{WORDPIECE}: add the tokenizer's files",
    )


def _add_tokens(
    tokenizer: Tokenizer, added: Mapping[int, AddedToken], placeholder: str, special: Collection[str]
) -> None:
    """Add tokens with their ids. A token whose id already belongs to another token is ignored.

    Args:
        placeholder: token for each unused id before a token; ``{}`` is replaced by the id.
        special: tokens that are special whatever their flag says, because they have a role.
    """
    known = tokenizer.get_added_tokens_decoder()
    for token_id, token in added.items():
        if token_id in known and known[token_id].__getstate__() == token.__getstate__():
            continue
        if (size := tokenizer.get_vocab_size()) > token_id and tokenizer.id_to_token(token_id) != token.content:
            continue
        tokenizer.add_tokens([placeholder.format(i) for i in range(size, token_id)])
        is_special = token.special or token.content in special
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([token])


def _add_special(tokenizer: Tokenizer, named: Iterable[AddedToken], defaults: Iterable[str]) -> None:
    """Make tokens special: they are matched as a whole in prompts and skipped in answers.

    Args:
        named: tokens named by the files. Tokens that the vocabulary lacks get the next ids, as in transformers; the
            engine rejects a prompt with an id that the model has no embedding for.
        defaults: tokens that are ignored if the vocabulary lacks them.
    """
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    usual = (AddedToken(token, special=True) for token in defaults if tokenizer.token_to_id(token) is not None)
    new: dict[str, AddedToken] = {}
    for token in (*named, *usual):
        if token.content not in known:
            new.setdefault(token.content, token)
    tokenizer.add_special_tokens(list(new.values()))


def _add_bounds(
    tokenizer: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str], bos: tuple[str, ...]
) -> None:
    """Add the post-processor that puts special tokens before and after a text.

    Args:
        bos: tokens before a text if ``add_bos_token`` is absent.
    """
    before: Sequence[str] = bos
    if "add_bos_token" in config:
        before = [special.get("bos_token", "")] if config["add_bos_token"] else []
    after = [special.get("eos_token", "")] if config.get("add_eos_token") else []
    known = {token: tokenizer.token_to_id(token) for token in (*before, *after)}
    before, after = ([token for token in part if known[token] is not None] for part in (before, after))
    if before or after:
        tokens = [(token, token_id) for token, token_id in known.items() if token_id is not None]
        tokenizer.post_processor = TemplateProcessing(single=[*before, "$A", *after], special_tokens=tokens)
