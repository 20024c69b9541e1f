"""Conversion of a SentencePiece model (Kudo and Richardson, 2018) to the ``tokenizers`` library.

The file is a protocol buffer, of which the pieces and a few settings are read: fields 1 (piece), 2 (trainer) and
3 (normalizer) of ``ModelProto``. It is parsed here, as no library does it without tying versions: the ``sentencepiece``
package does not return user-defined pieces and the settings, and the generated classes that it has for them are refused
by a protobuf older than its own (of gRPC or OpenTelemetry).
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from penstock.core import Code, PenstockError

from .vocabulary import SPACE

BPE = 2  # of TrainerSpec.ModelType
Field = bytes | int


class Kind(IntEnum):
    """The type of a piece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    kind: Kind


def convert(data: bytes, legacy: bool, names: Mapping[int, str]) -> Tokenizer:
    """The tokenizer of a serialized model.

    Args:
        legacy: a space is put before the text after each special token, not only at the start; where it is not, also
            none before a text that has one.
        names: names of pieces by id that replace those in the model.

    Raises ``PenstockError`` (``unsupported``) for a model that puts spaces behind message.
    """
    model = _message(data)
    pieces = [_piece(_bytes(entry)) for entry in model[1]]
    pieces = [replace(piece, text=names[i]) if i in names else piece for i, piece in enumerate(pieces)]
    user_defined = [piece.text for piece in pieces if piece.kind is Kind.USER_DEFINED]
    trainer, normalizer = _inner(model, 2), _inner(model, 3)
    if _number(trainer, 24, 0):
        message = "tokenizer: SentencePiece models with spaces behind message (treat_whitespace_as_suffix) are not read"
        raise PenstockError(Code.UNSUPPORTED, f"{message}: add its tokenizer.json", "tokenizer")
    bytes_known = any(piece.kind is Kind.BYTE for piece in pieces)
    unknown = next(i for i, piece in enumerate(pieces) if piece.kind is Kind.UNKNOWN)
    algorithm: Any
    if is_bpe := _number(trainer, 3, 1) == BPE:
        algorithm = models.BPE(
            {piece.text: i for i, piece in enumerate(pieces)},
            _merges(pieces),
            unk_token=pieces[unknown].text,
            fuse_unk=True,
            byte_fallback=bytes_known,
            ignore_merges=bool(user_defined),
        )
    else:
        algorithm = models.Unigram([(p.text, p.score) for p in pieces], unk_id=unknown, byte_fallback=bytes_known)
    tokenizer = Tokenizer(algorithm)
    prefixed = bool(_number(normalizer, 3, 1))
    steps: list[Any] = []
    if charsmap := b"".join(map(_bytes, normalizer[2])):
        steps.append(normalizers.Precompiled(charsmap))
    if _number(normalizer, 4, 1):
        # Spaces alone, as SentencePiece has it: a strip would take other white space, too.
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    splits: list[Any] = []
    if legacy:
        steps += [normalizers.Prepend(SPACE)] * prefixed + [normalizers.Replace(" ", SPACE)]
    else:  # as transformers does it: only this step knows where the text starts
        scheme = "first" if prefixed else "never"
        splits.append(pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False))
    if user_defined and is_bpe:  # never parts of other pieces; a unigram model chooses them by their score
        pattern = "|".join(re.escape(text) for text in sorted(user_defined, key=len, reverse=True))
        splits.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    if splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.normalizer = normalizers.Sequence(steps)
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * prefixed)
    special = [piece.text for piece in pieces if piece.kind in (Kind.CONTROL, Kind.UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return tokenizer


def _merges(pieces: list[Piece]) -> list[tuple[str, str]]:
    """The merges of SentencePiece's BPE: any two pieces that form a piece, the best first, of equal ones (runs of
    spaces, which some makers add) that of the lowest id."""
    normal = {piece.text for piece in pieces if piece.kind is Kind.NORMAL}
    result = []
    for i, piece in enumerate(pieces):
        if piece.kind is not Kind.NORMAL:
            continue
        halves = ((piece.text[:cut], piece.text[cut:]) for cut in range(1, len(piece.text)))
        result += [(-piece.score, i, left, right) for left, right in halves if left in normal and right in normal]
    return [(left, right) for *_, left, right in sorted(result)]


# --- Protocol buffers: just what is read above -----------------------------------------------------------------------


Message = defaultdict[int, list[Field]]


def _message(data: bytes) -> Message:
    """The fields of a protobuf message: number → values."""
    fields: Message = defaultdict(list)
    for number, value in _fields(data):
        fields[number].append(value)
    return fields


def _inner(message: Message, number: int) -> Message:
    """The message in a field, empty where it is absent."""
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
                raise ValueError(f"no SentencePiece model: wire type {kind}")
        if at + size > len(data):
            raise ValueError("the SentencePiece model is cut short")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _piece(data: bytes) -> Piece:
    fields = _message(data)
    (score,) = struct.unpack("<f", _bytes(fields[2][0])) if fields[2] else (0.0,)
    return Piece(_bytes(fields[1][0]).decode(), score, Kind(_number(fields, 3, Kind.NORMAL)))


def _number(fields: Message, number: int, default: int) -> int:
    value = fields[number][-1] if fields[number] else default
    assert isinstance(value, int)
    return value


def _bytes(value: Field) -> bytes:
    assert isinstance(value, bytes)
    return value
