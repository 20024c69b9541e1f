"""The process that compiles grammars with xgrammar: ``python -m penstock.engine.guided.xgrammar_process``."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import numpy as np

from ..lean_torch import import_torch
from .compile_process import LIMIT_EXCEEDED, Compile, CompileResult, serve
from .errors import MAX_WHITESPACE, one_line

import_torch()  # which xgrammar imports

import xgrammar  # noqa: E402

MAX_MEMORY = 2**31
"""Bytes to compile one grammar."""
LOOSE_CHARACTER, STRICT_CHARACTER = r"::= (([^\"\\\r\n]))", r"::= (([^\0-\x1f\"\\]))"
"""xgrammar's rule for a character of a string of bounded length, which allows control characters, and the right one."""
SOURCE_LOCATION = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""Time, file and line in xgrammar's error messages."""


class TokenizerTable(msgspec.Struct):
    """The first message: the vocabulary."""

    token_bytes: list[bytes]
    """Empty for special tokens."""
    stop_token_ids: list[int]

    def info(self) -> Any:
        """xgrammar's ``TokenizerInfo``."""
        return xgrammar.TokenizerInfo(
            self.token_bytes,
            xgrammar.VocabType.RAW,
            vocab_size=len(self.token_bytes),
            stop_token_ids=self.stop_token_ids,
            add_prefix_space=False,
        )


class CompileRequest(msgspec.Struct):
    """A grammar to compile; one of the first three fields is given."""

    schema: str = ""
    """JSON Schema, rewritten by ``rewrite_schema``."""
    grammar: str = ""
    """EBNF (GBNF)."""
    format: dict[str, Any] = {}
    """xgrammar's structural tag format, with schemas as text, and their ``separators``."""
    compact: bool = False
    """No whitespace between the parts of JSON."""


def _compile(compiler: Any, request: CompileRequest) -> Any:
    if request.schema:
        return compiler.compile_grammar(_schema_to_ebnf(request.schema, _whitespace(request.compact)))
    if request.grammar:
        return compiler.compile_grammar(request.grammar)
    structure = _replace_schemas(request.format, request.compact)
    return compiler.compile_structural_tag({"type": "structural_tag", "format": structure})


def _whitespace(compact: bool, separators: tuple[str, str] | None = None) -> dict[str, Any]:
    """Keyword arguments of ``Grammar.from_json_schema`` for the whitespace between the parts of JSON."""
    if separators:  # xgrammar puts them between quotes and unescapes them as JSON
        return {"any_whitespace": False, "separators": tuple(json.dumps(text)[1:-1] for text in separators)}
    if compact:
        return {"any_whitespace": False, "separators": (",", ":")}
    return {"any_whitespace": True, "max_whitespace_cnt": MAX_WHITESPACE}


def _replace_schemas(part: Any, compact: bool) -> Any:
    """A format with grammars in place of schemas, for which xgrammar has no whitespace options within a format."""
    if isinstance(part, list):
        return [_replace_schemas(inner, compact) for inner in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") != "json_schema":
        return {name: _replace_schemas(inner, compact) for name, inner in part.items()}
    grammar = _schema_to_ebnf(part["json_schema"], _whitespace(compact, part["separators"]))
    return {"type": "grammar", "grammar": grammar}


def _schema_to_ebnf(schema: str, whitespace: dict[str, Any]) -> str:
    ebnf = str(xgrammar.Grammar.from_json_schema(schema, strict_mode=True, **whitespace))
    if '"minLength"' not in schema and '"maxLength"' not in schema:
        return ebnf
    corrected = ebnf.replace(LOOSE_CHARACTER, STRICT_CHARACTER)
    if corrected == ebnf:
        raise ValueError("strings of bounded length are written otherwise than this version of xgrammar is known to")
    return corrected


def _result(compiler: Any, request: CompileRequest, vocab_size: int) -> CompileResult:
    try:
        compiled = _compile(compiler, request)
        row = np.zeros(-(-vocab_size // 32), np.int32)
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(row)
        if not row.any():
            return CompileResult(error="no output matches it", supported=False)
        text = str(compiled.serialize_json())
    except Exception as error:  # xgrammar raises exceptions of many types
        if "bad_alloc" in str(error):
            return CompileResult(error=LIMIT_EXCEEDED, supported=False)
        return CompileResult(error=one_line(SOURCE_LOCATION.sub("", str(error).strip())))
    return CompileResult(text)


def _prepare(message: bytes) -> Compile:
    table = msgspec.json.decode(message, type=TokenizerTable)
    compiler = xgrammar.GrammarCompiler(table.info(), max_threads=1, cache_enabled=False)
    decode = msgspec.json.Decoder(CompileRequest).decode
    return lambda request: _result(compiler, decode(request), len(table.token_bytes))


if __name__ == "__main__":
    serve(_prepare, MAX_MEMORY)
