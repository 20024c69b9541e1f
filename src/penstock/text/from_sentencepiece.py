"""Conversion of a SentencePiece model (Kudo and Richardson, 2018) to the ``tokenizers`` library.

The file is a protocol buffer (``ModelProto``). Fields 1 (pieces), 2 (trainer) and 3 (normalizer) are read. They are
parsed here to avoid a version conflict: the ``sentencepiece`` API does not expose user-defined pieces and settings, and
its generated classes fail with an older protobuf, as required by gRPC or OpenTelemetry.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .vocabulary import SPACE

BPE = 2  # value of TrainerSpec.ModelType for BPE models
MAX_PIECE = 2**9
"""Maximum length of a normal piece in a BPE model, in characters. SentencePiece's trainer defaults to 16."""
MAX_CHARACTERS = 2**23
"""Maximum total length of the normal pieces of a BPE model, in characters. Gemma 3 (262,144 pieces) has 1.7 million."""
Field = bytes | int


class Kind(IntEnum):
    """Type of a piece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_KINDS = {int(kind): kind for kind in Kind}
_FLOAT = struct.Struct("<f")


class Piece(NamedTuple):
    """An entry of the vocabulary."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True)
class Settings:
    """Settings of a SentencePiece model."""

    is_bpe: bool
    """BPE model; otherwise a unigram model."""
    add_space_prefix: bool = True
    """Prepend a space to the text."""
    remove_extra_spaces: bool = True
    """Strip spaces at both ends, and collapse runs of spaces."""
    charsmap: bytes = b""
    """Compiled normalization table (``precompiled_charsmap``)."""
    legacy: bool = True
    """True: prepend a space at the start and after each special token. False: only at the start, and only if the text
    does not begin with a space."""
    user_defined_first: bool = False
    """Match user-defined pieces without spaces before normalization (llama.cpp); False: after it."""


def convert(data: bytes, legacy: bool, names: Mapping[int, str]) -> Tokenizer:
    """Convert a serialized model.

    Args:
        legacy: prepend a space after each special token (``Settings.legacy``).
        names: piece id → text that replaces the text in the model.

    Raises ``PenstockError``: ``unsupported`` for a model with spaces after words; ``invalid`` for a model that exceeds
    a limit (``tokenizer_json``).
    """
    model = _message(data)
    pieces = [_piece(_bytes(entry)) for entry in model[1]]
    for i, name in names.items():
        if 0 <= i < len(pieces):
            pieces[i] = pieces[i]._replace(text=name)
    trainer, normalizer = _inner(model, 2), _inner(model, 3)
    if _number(trainer, 24, 0):
        message = "tokenizer: SentencePiece models with treat_whitespace_as_suffix are not supported"
        raise PenstockError(Code.UNSUPPORTED, f"{message}: add its tokenizer.json", "tokenizer")
    settings = Settings(
        is_bpe=_number(trainer, 3, 1) == BPE,
        add_space_prefix=bool(_number(normalizer, 3, 1)),
        remove_extra_spaces=bool(_number(normalizer, 4, 1)),
        charsmap=b"".join(map(_bytes, normalizer[2])),
        legacy=legacy,
    )
    return Tokenizer.from_str(json.dumps(tokenizer_json(pieces, settings), ensure_ascii=False))


def tokenizer_json(pieces: Sequence[Piece], settings: Settings) -> dict[str, Any]:
    """Return the content of ``tokenizer.json``.

    Raises ``PenstockError`` (``invalid``) for a BPE model that exceeds ``MAX_PIECE`` or ``MAX_CHARACTERS``.
    """
    ids = {piece.text: i for i, piece in enumerate(pieces)}
    found_first = [
        piece.text
        for piece in pieces
        if settings.user_defined_first and piece.kind is Kind.USER_DEFINED and not {" ", SPACE} & set(piece.text)
    ]
    special = [piece.text for piece in pieces if piece.kind in (Kind.CONTROL, Kind.UNKNOWN)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = {text: False for text in found_first if text} | {text: True for text in special if text}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": ids[text], "content": text, "special": is_special, **flags}
            for text, is_special in sorted(added.items(), key=lambda item: ids[item[0]])
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(settings)},
        "pre_tokenizer": _pre_tokenizer(pieces, settings, frozenset(found_first)),
        "post_processor": None,
        "decoder": _decoder(settings),
        "model": _bpe_model(pieces, ids) if settings.is_bpe else _unigram_model(pieces),
    }


def _normalizers(settings: Settings) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if settings.charsmap:
        table = base64.b64encode(settings.charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if settings.remove_extra_spaces:  # not Strip: it would also remove line breaks and tabs
        steps += [_replace({"Regex": r"\A +| +\z"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if settings.legacy:
        steps += [{"type": "Prepend", "prepend": SPACE}] * settings.add_space_prefix
        steps.append(_replace({"String": " "}, SPACE))
    return steps


def _pre_tokenizer(pieces: Sequence[Piece], settings: Settings, found_first: Collection[str]) -> dict[str, Any] | None:
    splits: list[dict[str, Any]] = []
    if not settings.legacy:  # as in transformers: normalizers cannot know where the text starts
        scheme = "first" if settings.add_space_prefix else "never"
        splits.append({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False})
    user_defined = {piece.text for piece in pieces if piece.kind is Kind.USER_DEFINED}.difference(found_first)
    if user_defined and settings.is_bpe:  # BPE must not merge them with other text; unigram models use their scores
        pattern = "|".join(re.escape(text) for text in sorted(sorted(user_defined), key=len, reverse=True))
        splits.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    return {"type": "Sequence", "pretokenizers": splits} if splits else None


def _decoder(settings: Settings) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    steps += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * settings.add_space_prefix
    return {"type": "Sequence", "decoders": steps}


def _replace(pattern: Mapping[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _bpe_model(pieces: Sequence[Piece], ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "unk_token": next(piece.text for piece in pieces if piece.kind is Kind.UNKNOWN),
        "fuse_unk": True,
        "byte_fallback": any(piece.kind is Kind.BYTE for piece in pieces),
        "ignore_merges": any(piece.kind is Kind.USER_DEFINED for piece in pieces),
        "vocab": ids,
        "merges": _merges(pieces),
    }


def _unigram_model(pieces: Sequence[Piece]) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": next(i for i, piece in enumerate(pieces) if piece.kind is Kind.UNKNOWN),
        "vocab": [(piece.text, piece.score) for piece in pieces],
        "byte_fallback": any(piece.kind is Kind.BYTE for piece in pieces),
    }


def _merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """The merges of SentencePiece's BPE: all pairs of pieces that form a piece, ordered by descending score of the
    formed piece, then by ascending id (runs of spaces have equal scores in some models)."""
    normal = {piece.text: piece.text for piece in pieces if piece.kind is Kind.NORMAL}
    ranked = sorted((piece for piece in pieces if piece.kind is Kind.NORMAL), key=lambda piece: -piece.score)
    if (total := sum(len(piece.text) for piece in ranked)) > MAX_CHARACTERS:
        message = f"the SentencePiece model has pieces of {total} characters in total; the limit is {MAX_CHARACTERS}"
        raise invalid("tokenizer", message, MAX_CHARACTERS)
    result: list[tuple[str, str]] = []
    for piece in ranked:
        text = piece.text
        if len(text) > MAX_PIECE:
            message = f"the SentencePiece model has a piece of {len(text)} characters; the limit is {MAX_PIECE}"
            raise invalid("tokenizer", message, MAX_PIECE)
        for cut in range(1, len(text)):
            if (left := normal.get(text[:cut])) and (right := normal.get(text[cut:])):
                result.append((left, right))
    return result


# --- Protocol buffers ---------------------------------------------------------------------------------------------


Message = defaultdict[int, list[Field]]


def _message(data: bytes) -> Message:
    """The fields of a protobuf message: field number → values."""
    fields: Message = defaultdict(list)
    for number, value in _fields(data):
        fields[number].append(value)
    return fields


def _inner(message: Message, number: int) -> Message:
    """The protobuf message nested in a field; empty if the field is absent."""
    return _message(_bytes(message[number][-1]) if message[number] else b"")


def _fields(data: bytes) -> Iterator[tuple[int, Field]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, at = _varint(data, at)
            case 5:
                size = 4
            case kind:
                raise ValueError(f"not a SentencePiece model: protobuf wire type {kind}")
        if at + size > len(data):
            raise ValueError(f"the SentencePiece model is truncated at {len(data)} bytes")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    if data[at] < 0x80:
        return data[at], at + 1
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _piece(data: bytes) -> Piece:
    text, score, kind = b"", 0.0, int(Kind.NORMAL)
    for number, value in _fields(data):
        if isinstance(value, int):
            kind = value if number == 3 else kind
        elif number == 1:
            text = value
        elif number == 2:
            (score,) = _FLOAT.unpack(value)
    return Piece(text.decode(), score, _KINDS.get(kind) or Kind(kind))


def _number(fields: Message, number: int, default: int) -> int:
    value = fields[number][-1] if fields[number] else default
    assert isinstance(value, int)
    return value


def _bytes(value: Field) -> bytes:
    assert isinstance(value, bytes)
    return value
