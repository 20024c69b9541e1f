"""Which file of a checkpoint holds its tokenizer, and what makes one of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from penstock.core.errors import invalid

from . import from_sentencepiece, from_tiktoken

TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


def load(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """From ``tokenizer.json``, or else from a SentencePiece model or a tiktoken file.

    Args:
        config: what ``tokenizer_config.json`` says.

    Raises ``PenstockError`` (``invalid``) where there is none, or one that cannot be read.
    """
    path = _find(folder)
    try:
        if path.suffix == ".json":
            return Tokenizer.from_file(str(path))
        data = path.read_bytes()
        if TIKTOKEN_LINE.match(data):
            tokenizer, marks_start = from_tiktoken.convert(data), False
        else:
            tokenizer, marks_start = from_sentencepiece.convert(data, bool(config.get("legacy", True))), True
    except Exception as error:  # the library raises nothing more precise
        raise invalid("tokenizer", f"{path} cannot be read: {error}") from error
    _add_tokens(tokenizer, config.get("added_tokens_decoder", {}))
    _add_ends(tokenizer, config, marks_start)
    return tokenizer


def _find(folder: Path) -> Path:
    for path in (folder / "tokenizer.json", folder / "tokenizer.model", *sorted(folder.glob("*tiktoken*"))):
        if path.exists():
            return path
    raise invalid("tokenizer", f"{folder} has no tokenizer.json, tokenizer.model or *.tiktoken")


def _add_tokens(tokenizer: Tokenizer, added: Mapping[str, Mapping[str, Any]]) -> None:
    """Tokens that only the configuration knows, each under its own id."""
    for token_id, token in sorted((int(token_id), token) for token_id, token in added.items()):
        while tokenizer.get_vocab_size() < token_id:
            tokenizer.add_tokens([f"<|unused_{tokenizer.get_vocab_size()}|>"])
        wanted = AddedToken(token["content"], normalized=False, special=bool(token.get("special", False)))
        (tokenizer.add_special_tokens if wanted.special else tokenizer.add_tokens)([wanted])


def _add_ends(tokenizer: Tokenizer, config: Mapping[str, Any], marks_start: bool) -> None:
    """The tokens that encoding puts before and after a text."""
    ends = []
    for name, default in (("bos", marks_start), ("eos", False)):
        token = config.get(f"{name}_token") or ("<s>" if name == "bos" else "</s>")
        token = token if isinstance(token, str) else token["content"]
        wanted = config.get(f"add_{name}_token", default) and tokenizer.token_to_id(token) is not None
        ends.append([token] if wanted else [])
    if any(ends):
        before, after = ends
        known = [(token, tokenizer.token_to_id(token)) for token in before + after]
        tokenizer.post_processor = TemplateProcessing(single=[*before, "$A", *after], special_tokens=known)
