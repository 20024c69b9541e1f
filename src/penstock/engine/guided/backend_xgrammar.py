"""The xgrammar backend. It refuses grammars whose keywords xgrammar is not known to enforce (``json_schema.py``,
``regex_to_ebnf.py``)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from xgrammar import CompiledGrammar, GrammarMatcher

from penstock.core import Code, Failure, GuidedDecodingParams, Vocabulary

from .added_tokens import AddedTokens
from .backend import Backend, Grammar, Guide
from .compile_process import CompileProcess, CompileResult
from .errors import TOO_LONG, UnsupportedError
from .json_schema import rewrite_schema
from .regex_to_ebnf import choice_to_ebnf, regex_to_ebnf
from .structural_tag import (
    ConstStringFormat,
    Format,
    JSONSchemaFormat,
    OrFormat,
    RegexFormat,
    RepeatFormat,
    SequenceFormat,
    TriggeredTagsFormat,
    parse_structural_tag,
)
from .token_time import TokenTime
from .xgrammar_process import CompileRequest, TokenizerTable

DEAD_END = "it allows no next token"


class XGrammarGuide(Guide):
    """A guide over xgrammar's matcher.

    Args:
        eos_mask: bitmask of the EOS tokens, ``[ceil(vocabulary / 32)]`` int32.
        excluded: bitmask of tokens that are never allowed, whatever the matcher says; likewise.
    """

    is_unconstrained = False

    def __init__(self, matcher: Any, eos_mask: np.ndarray, excluded: np.ndarray) -> None:
        self._matcher = matcher
        self._eos_mask = eos_mask
        self._excluded = excluded
        self._bitmask: np.ndarray | None = None
        """Bitmask of the next token; None until it is computed."""
        self._error = ""
        """Why the sequence cannot continue; empty while it can."""
        self._time = TokenTime()

    def copy(self) -> XGrammarGuide:
        copy = XGrammarGuide(self._matcher.fork(), self._eos_mask, self._excluded)
        copy._bitmask, copy._error, copy._time = self._bitmask, self._error, self._time.copy()
        return copy

    def replace_eos(self, eos_token_id: int) -> int:
        if not self._next_bitmask().any():  # the token was sampled from an empty bitmask
            self._error = DEAD_END
        return eos_token_id

    def accept_token(self, token: int) -> bool:
        self._bitmask = None
        self._time.add_token()
        with self._time:
            accepted = self._matcher.accept_token(token)
        if not accepted:
            self._error = DEAD_END
        self._check_time()
        return not self._error

    @property
    def failure(self) -> Failure | None:
        error = self._error or (DEAD_END if self._bitmask is not None and not self._bitmask.any() else "")
        return Failure(Code.UNSUPPORTED, f"the grammar cannot be followed: {error}") if error else None

    @property
    def is_terminated(self) -> bool:
        return bool(self._matcher.is_completed()) and not (self._next_bitmask() & ~self._eos_mask).any()

    def validate_tokens(self, tokens: list[int]) -> int:
        count = 0
        with self._time:
            while (
                count < len(tokens)
                and not self._is_excluded(tokens[count])
                and self._matcher.accept_token(tokens[count])
            ):
                count += 1
            if count:
                self._matcher.rollback(count)
        self._check_time()
        return count

    def _is_excluded(self, token: int) -> bool:
        return bool(self._excluded[token // 32] >> (token % 32) & 1)

    def fill_bitmask(self, row: np.ndarray) -> None:
        row[:] = self._next_bitmask()

    def jump_forward_tokens(self) -> list[int]:
        bitmask = self._next_bitmask()
        if np.bitwise_count(bitmask.view(np.uint32)).sum() != 1 or (bitmask & self._eos_mask).any():
            return []
        return [int(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))[0])]

    def _next_bitmask(self) -> np.ndarray:
        if self._bitmask is None:
            bitmask = np.zeros_like(self._eos_mask)
            with self._time:
                self._matcher.fill_next_token_bitmask(bitmask)
            self._bitmask = bitmask & ~self._excluded
            self._check_time()
        return self._bitmask

    def _check_time(self) -> None:
        if self._time.is_exceeded:
            self._error = TOO_LONG


class XGrammarGrammar(Grammar):
    """A grammar that xgrammar has compiled; arguments as for ``XGrammarGuide``."""

    def __init__(self, compiled: Any, eos_mask: np.ndarray, excluded: np.ndarray) -> None:
        self.size = int(compiled.memory_size_bytes)
        self._compiled = compiled
        self._eos_mask = eos_mask
        self._excluded = excluded

    def new_guide(self) -> Guide:
        return XGrammarGuide(GrammarMatcher(self._compiled), self._eos_mask, self._excluded)


class XGrammar(Backend):
    """Compiles the whole grammar at once, in another process (``xgrammar_process.py``)."""

    _added_tokens: AddedTokens
    _info: Any
    """xgrammar's ``TokenizerInfo``."""
    _eos_mask: np.ndarray
    _padding_mask: np.ndarray
    """Bits beyond the vocabulary."""
    _added_mask: np.ndarray
    """Added tokens but EOS."""

    def __init__(self) -> None:
        self._process = CompileProcess("xgrammar_process")  # which loads xgrammar for seconds

    def set_vocabulary(self, vocabulary: Vocabulary, tokenizer: Any, added_tokens: AddedTokens) -> CompileProcess:
        self._added_tokens = added_tokens
        size = tokenizer.vocab_size
        token_bytes = [b"" if tokenizer.is_special_token(i) else tokenizer.decode_bytes([i]) for i in range(size)]
        for token in added_tokens.tokens.values():  # 0xFF is in no text; xgrammar needs some bytes
            token_bytes[token] = b"\xff" + token_bytes[token]
        table = TokenizerTable(token_bytes, tokenizer.eos_tokens)
        self._process.set_vocabulary(msgspec.json.encode(table))
        self._info = table.info()
        self._eos_mask = _bitmask(tokenizer.eos_tokens, size)
        self._padding_mask = _bitmask(range(size, -(-size // 32) * 32), size)
        self._added_mask = _bitmask(set(added_tokens.tokens.values()) - added_tokens.eos_token_ids, size)
        return self._process

    def request(self, params: GuidedDecodingParams) -> bytes:
        return msgspec.json.encode(_compile_request(params, self._added_tokens))

    def grammar(self, request: bytes, result: CompileResult) -> Grammar:
        excluded = self._padding_mask
        if msgspec.json.decode(request, type=CompileRequest).format.get("type") == "triggered_tags":
            excluded = excluded | self._added_mask  # between tags xgrammar allows any bytes
        return XGrammarGrammar(CompiledGrammar.deserialize_json(result.compiled, self._info), self._eos_mask, excluded)


def _bitmask(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """The bitmask of a set of tokens, ``[ceil(vocabulary / 32)]`` int32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _compile_request(params: GuidedDecodingParams, added_tokens: AddedTokens) -> CompileRequest:
    """Translate a constraint for xgrammar. Raises ``UnsupportedError`` where xgrammar does not support it,
    ``ValueError`` where it is wrong."""
    if params.whitespace_pattern is not None:
        raise UnsupportedError("whitespace_pattern")
    compact = params.disable_any_whitespace
    if params.json is not None or params.json_object:
        schema = json.loads(params.json) if params.json is not None else {"type": "object"}
        return CompileRequest(schema=_schema_text(schema), compact=compact)
    if params.regex is not None:
        return CompileRequest(grammar=regex_to_ebnf(params.regex))
    if params.choice is not None:
        return CompileRequest(grammar=choice_to_ebnf(params.choice))
    if params.grammar is not None:
        if "::=" not in params.grammar:
            raise UnsupportedError("Lark's notation; GBNF's is")
        return CompileRequest(grammar=params.grammar)
    structure = parse_structural_tag(params)
    if isinstance(structure, TriggeredTagsFormat):
        return CompileRequest(format=_triggered_tags(structure, added_tokens), compact=compact)
    return CompileRequest(format=_format(structure, added_tokens), compact=compact)


def _schema_text(schema: dict[str, Any]) -> str:
    text = json.dumps(rewrite_schema(schema), ensure_ascii=False)
    text.encode()  # raises for unpaired surrogates
    return text


def _format(part: Format, added_tokens: AddedTokens) -> dict[str, Any]:
    """A format in xgrammar's notation, but for schemas, which ``xgrammar_process`` replaces."""
    match part:
        case ConstStringFormat(text):
            return _sequence(_const_string(text, added_tokens))
        case JSONSchemaFormat(schema, separators):
            return {"type": "json_schema", "json_schema": _schema_text(schema), "separators": separators}
        case RegexFormat(pattern):
            return {"type": "grammar", "grammar": regex_to_ebnf(pattern)}
        case SequenceFormat(parts):
            return _sequence([_format(inner, added_tokens) for inner in parts])
        case OrFormat(parts):
            return {"type": "or", "elements": [_format(inner, added_tokens) for inner in parts]}
        case RepeatFormat(inner, quantifier):
            kind = {"?": "optional", "*": "star", "+": "plus"}[quantifier]
            return {"type": kind, "content": _format(inner, added_tokens)}


def _const_string(text: str, added_tokens: AddedTokens) -> list[dict[str, Any]]:
    return [
        {"type": "token", "token": part} if isinstance(part, int) else {"type": "const_string", "value": part}
        for part in added_tokens.split(text)
    ]


def _sequence(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements or [{"type": "const_string", "value": ""}]}


def _triggered_tags(structure: TriggeredTagsFormat, added_tokens: AddedTokens) -> dict[str, Any]:
    by_token = added_tokens.are_triggers(structure.tags)
    triggers = list(dict.fromkeys(tag.trigger for tag in structure.tags))
    tags = []
    for tag in structure.tags:
        *before, end = _const_string(tag.end, added_tokens) or [{"value": ""}]
        tags.append(
            {
                "type": "tag",
                "begin": {"type": "token", "token": added_tokens.tokens[tag.trigger]} if by_token else tag.trigger,
                "content": _sequence([_format(tag.after_trigger, added_tokens), *before]),
                "end": end if "token" in end else end["value"],
            }
        )
    if not by_token:
        if _has_token(tags):
            raise UnsupportedError("added tokens in tags that begin with none")
        return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    trigger_tokens = [added_tokens.tokens[trigger] for trigger in triggers]
    excluded = sorted(set(added_tokens.tokens.values()) - set(trigger_tokens) - added_tokens.eos_token_ids)
    return {
        "type": "token_triggered_tags",
        "trigger_tokens": trigger_tokens,
        "tags": tags,
        "exclude_tokens": excluded,
    }


def _has_token(part: Any) -> bool:
    """Whether a format contains a token."""
    if isinstance(part, dict):
        return part.get("type") == "token" or any(map(_has_token, part.values()))
    return isinstance(part, list) and any(map(_has_token, part))
