"""Loading a checkpoint's tokenizer from whichever file holds it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from penstock.core.errors import PenstockError, invalid

from . import from_sentencepiece, from_tiktoken, from_wordpiece
from .vocabulary import MAX_TOKENS

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
WORDPIECE = "vocab.txt"
MAX_BYTES = 128 * 2**20
"""Maximum size of a tokenizer file; the largest known have 33 MB."""
MAX_SIDE_BYTES = 16 * 2**20
"""Maximum size of its configuration and chat template."""
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


def load(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Load ``tokenizer.json``, or else a SentencePiece model, a tiktoken file, or BERT's ``vocab.txt``.

    Args:
        config: the contents of ``tokenizer_config.json``.

    Raises ``PenstockError`` (``invalid``) where there is none, or one that cannot be read.
    """
    path = _find(folder)
    try:
        if path.suffix == ".json":
            return Tokenizer.from_buffer(read(path))
        data = read(path)
        if path.name == WORDPIECE:
            return from_wordpiece.convert(data, config)
        if TIKTOKEN_LINE.match(data):
            tokenizer, add_bos = from_tiktoken.convert(data), False
        else:
            tokenizer, add_bos = from_sentencepiece.convert(data, bool(config.get("legacy", True))), True
    except (PenstockError, MemoryError):
        raise
    except Exception as error:  # the library raises nothing more precise
        raise invalid("tokenizer", f"{path} cannot be read: {error}") from error
    _add_tokens(tokenizer, config.get("added_tokens_decoder", {}))
    _add_special_tokens(tokenizer, config, add_bos)
    return tokenizer


def paths(folder: Path) -> list[Path]:
    """The files of a tokenizer. Raises ``PenstockError`` (``invalid``) where there is none."""
    return [_find(folder), *(path for path in (folder / CONFIG, folder / TEMPLATE) if path.exists())]


def read(path: Path) -> bytes:
    """Read a file. Raises ``PenstockError`` (``invalid``) where it cannot be read, or exceeds its maximum size."""
    limit = MAX_SIDE_BYTES if path.name in (CONFIG, TEMPLATE) else MAX_BYTES
    try:
        if (size := path.stat().st_size) > limit:
            raise invalid("tokenizer", f"{path} has {size / 2**20:.0f} MiB; {limit // 2**20} MiB are allowed", limit)
        return path.read_bytes()
    except OSError as error:
        raise invalid("tokenizer", f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error


def _find(folder: Path) -> Path:
    named = [folder / name for name in ("tokenizer.json", "tokenizer.model")]
    for path in (*named, *sorted(folder.glob("*tiktoken*")), folder / WORDPIECE):
        if path.exists():
            return path
    raise invalid("tokenizer", f"{folder} has no tokenizer.json, tokenizer.model, *.tiktoken or {WORDPIECE}")


def _add_tokens(tokenizer: Tokenizer, added: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the tokens of ``tokenizer_config.json`` that the file lacks, under their ids."""
    for token_id, token in sorted((int(token_id), token) for token_id, token in added.items()):
        if token_id >= MAX_TOKENS:
            raise invalid("tokenizer", f"{CONFIG} has a token of id {token_id}; {MAX_TOKENS} are allowed", MAX_TOKENS)
        while tokenizer.get_vocab_size() < token_id:
            tokenizer.add_tokens([f"<|unused_{tokenizer.get_vocab_size()}|>"])
        token_to_add = AddedToken(token["content"], normalized=False, special=bool(token.get("special", False)))
        (tokenizer.add_special_tokens if token_to_add.special else tokenizer.add_tokens)([token_to_add])


def _add_special_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], add_bos: bool) -> None:
    """The special tokens that encoding puts before and after a text."""
    bos_and_eos = []
    for name, default in (("bos", add_bos), ("eos", False)):
        token = config.get(f"{name}_token") or ("<s>" if name == "bos" else "</s>")
        token = token if isinstance(token, str) else token["content"]
        added = config.get(f"add_{name}_token", default) and tokenizer.token_to_id(token) is not None
        bos_and_eos.append([token] if added else [])
    if any(bos_and_eos):
        before, after = bos_and_eos
        known = [(token, tokenizer.token_to_id(token)) for token in before + after]
        tokenizer.post_processor = TemplateProcessing(single=[*before, "$A", *after], special_tokens=known)
