"""Forms compiled by xgrammar in a process of its own: ``python -m penstock.engine.guided.compiling``.

It reads what tokens spell and then a form a line on standard input, and writes a reply a line on standard output.
xgrammar compiles for as long as a form takes, which can be for ever. So each is compiled by a child of this process,
which an alarm ends; what was loaded is there for the next one.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from typing import Any

import msgspec
import numpy as np
import xgrammar

from .errors import WHITESPACE, first_line

SECONDS = 10.0
"""Of computing, for one form."""
PATIENCE = 60.0
"""Seconds in which it gets those."""
MEMORY = 4 * 2**30
"""Bytes of data."""
MOST_COMPILED = 2**26
"""Bytes of a reply."""
TOO_MUCH = f"compiling it takes more than {SECONDS:g} seconds, or too much memory"
LOOSE, STRICT = r"::= (([^\"\\\r\n]))", r"::= (([^\0-\x1f\"\\]))"
"""A character of strings whose length is bounded, which xgrammar takes some control characters for; and what it is."""
PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""Where in xgrammar's own sources an error was found."""


class Tokens(msgspec.Struct):
    """The first line."""

    spelled: list[bytes]
    """Nothing for tokens that no text spells."""
    stops: list[int]

    def info(self) -> Any:
        raw = xgrammar.VocabType.RAW
        return xgrammar.TokenizerInfo(
            self.spelled, raw, vocab_size=len(self.spelled), stop_token_ids=self.stops, add_prefix_space=False
        )


class Form(msgspec.Struct):
    """What is asked for: a schema, a grammar, or parts of them put together."""

    schema: str = ""
    grammar: str = ""
    shape: dict[str, Any] = {}
    """In xgrammar's words, but for ``json_schema``, which is text and may have ``separators``."""
    compact: bool = False
    """Whether JSON has nothing between its parts."""


class Reply(msgspec.Struct):
    """The compiled form in xgrammar's own words, or why there is none."""

    compiled: str = ""
    wrong: str = ""
    """The form is none."""
    kept: bool = True
    """Whether it can be kept to."""


def _compile(compiler: Any, form: Form) -> Any:
    if form.schema:
        return compiler.compile_grammar(_json(form.schema, _spaces(form.compact)))
    if form.grammar:
        return compiler.compile_grammar(form.grammar)
    return compiler.compile_structural_tag({"type": "structural_tag", "format": _filled(form.shape, form.compact)})


def _spaces(compact: bool, separators: tuple[str, str] | None = None) -> dict[str, Any]:
    if separators:  # which are pasted between quotes, and read as JSON's texts are
        return {"any_whitespace": False, "separators": tuple(json.dumps(text)[1:-1] for text in separators)}
    if compact:
        return {"any_whitespace": False, "separators": (",", ":")}
    return {"any_whitespace": True, "max_whitespace_cnt": WHITESPACE}


def _filled(shape: Any, compact: bool) -> Any:
    """With grammars in place of schemas: what xgrammar makes of schemas there has other spaces."""
    if isinstance(shape, list):
        return [_filled(part, compact) for part in shape]
    if not isinstance(shape, dict):
        return shape
    if shape.get("type") != "json_schema":
        return {name: _filled(part, compact) for name, part in shape.items()}
    return {"type": "grammar", "grammar": _json(shape["json_schema"], _spaces(compact, shape["separators"]))}


def _json(schema: str, spaces: dict[str, Any]) -> str:
    """The grammar of a schema."""
    written = str(xgrammar.Grammar.from_json_schema(schema, strict_mode=True, **spaces))
    if '"minLength"' not in schema and '"maxLength"' not in schema:
        return written
    mended = written.replace(LOOSE, STRICT)
    if mended == written:
        raise ValueError("strings of bounded length are written otherwise than this version of xgrammar is known to")
    return mended


def _reply(compiler: Any, form: Form, size: int) -> Reply:
    try:
        compiled = _compile(compiler, form)
        row = np.zeros(-(-size // 32), np.int32)
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(row)
        if not row.any():
            return Reply(wrong="nothing is of this form", kept=False)
        text = str(compiled.serialize_json())
    except Exception as error:  # of xgrammar's many kinds
        if "bad_alloc" in str(error):
            return Reply(wrong=TOO_MUCH, kept=False)
        return Reply(wrong=first_line(PLACE.sub("", str(error).strip())))
    if len(text) > MOST_COMPILED:
        return Reply(wrong=f"compiled it has more than {MOST_COMPILED} bytes", kept=False)
    return Reply(text)


def _write(reply: Reply) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the whole group; the parent decides
    tokens = msgspec.json.decode(sys.stdin.buffer.readline(), type=Tokens)
    compiler = xgrammar.GrammarCompiler(tokens.info(), max_threads=1, cache_enabled=False)
    decode = msgspec.json.Decoder(Form).decode
    for line in sys.stdin.buffer:
        if child := os.fork():
            if os.waitpid(child, 0)[1]:
                _write(Reply(wrong=TOO_MUCH, kept=False))
            continue
        failed = 1
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            reply = _reply(compiler, decode(line), len(tokens.spelled))
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _write(reply)
            failed = 0
        finally:
            os._exit(failed)


if __name__ == "__main__":
    main()
