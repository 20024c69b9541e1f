"""Forms kept to by xgrammar: what it is known to keep to, and nothing else (``schemas.py``, ``patterns.py``)."""

from __future__ import annotations

import json
import sys
import time
import weakref
from collections.abc import Iterable
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import msgspec
import numpy as np
from xgrammar import CompiledGrammar, GrammarMatcher

from penstock.core import Code, Failure, GuidedDecodingParams, PenstockError
from penstock.core.errors import invalid

from .added_tokens import AddedTokens
from .compiling import Form, Reply, Tokens
from .errors import UnsupportedError
from .guide import Backend, Grammar, Guide
from .patterns import grammar_of_pattern, grammar_of_texts
from .schemas import rewritten
from .structure import Chain, Either, Json, Part, Pattern, Repeated, Tagged, Text, read_structure

SECONDS = 0.25
"""Of computing, for a token. What takes so long at one token takes longer at the next, and others wait for it."""
DEAD = "nothing can come next"


class XGuide(Guide):
    """The way through a compiled form.

    Args:
        ends: bits of the tokens that end sequences, ``[vocabulary / 32]`` int32.
        never: bits of tokens that may not come, whatever xgrammar tells; likewise.
    """

    free = False

    def __init__(self, matcher: Any, ends: np.ndarray, never: np.ndarray) -> None:
        self._matcher = matcher
        self._ends = ends
        self._never = never
        self._mask: np.ndarray | None = None
        """Of the tokens that may come next, where it has been asked for since the last one."""
        self._lost = ""
        """Why it cannot go on."""

    def copy(self) -> XGuide:
        twin = XGuide(self._matcher.fork(), self._ends, self._never)
        twin._mask, twin._lost = self._mask, self._lost
        return twin

    def replace_eos(self, end: int) -> int:
        if not self._next().any():  # then what was chosen means nothing
            self._lost = DEAD
        return end

    def take(self, token: int) -> bool:
        self._mask = None
        begun = time.thread_time()
        if not self._matcher.accept_token(token):
            self._lost = DEAD
        self._watch(begun)
        return not self._lost

    @property
    def failure(self) -> Failure | None:
        lost = self._lost or (DEAD if self._mask is not None and not self._mask.any() else "")
        return Failure(Code.UNSUPPORTED, f"the form cannot be followed: {lost}") if lost else None

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_completed()) and not (self._next() & ~self._ends).any()

    def allows(self, tokens: list[int]) -> int:
        taken, begun = 0, time.thread_time()
        while taken < len(tokens) and not self._forbids(tokens[taken]) and self._matcher.accept_token(tokens[taken]):
            taken += 1
        if taken:
            self._matcher.rollback(taken)
        self._watch(begun)
        return taken

    def _forbids(self, token: int) -> bool:
        return bool(self._never[token // 32] >> (token % 32) & 1)

    def fill(self, row: np.ndarray) -> None:
        row[:] = self._next()

    def forced(self) -> list[int]:
        mask = self._next()
        if np.bitwise_count(mask.view(np.uint32)).sum() != 1 or (mask & self._ends).any():
            return []
        return [int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])]

    def _next(self) -> np.ndarray:
        if self._mask is None:
            mask, begun = np.zeros_like(self._ends), time.thread_time()
            self._matcher.fill_next_token_bitmask(mask)
            self._mask = mask & ~self._never
            self._watch(begun)
        return self._mask

    def _watch(self, begun: float) -> None:
        if time.thread_time() - begun > SECONDS:
            self._lost = "it takes too long"


class XGrammarForm(Grammar):
    """A compiled form."""

    def __init__(self, compiled: Any, ends: np.ndarray, never: np.ndarray) -> None:
        self.size = int(compiled.memory_size_bytes)
        self._compiled = compiled
        self._ends = ends
        self._never = never

    def begin(self) -> Guide:
        return XGuide(GrammarMatcher(self._compiled), self._ends, self._never)


class XGrammar(Backend):
    """Compiles all of a form before its first token, in a process of its own (``compiling.py``)."""

    _own: AddedTokens
    _tokens: Tokens
    _info: Any
    _ends: np.ndarray
    _beyond: np.ndarray
    """Bits that stand for no token."""
    _others: np.ndarray
    """Tokens of their own that end nothing."""

    def __init__(self) -> None:
        self._compiler = _Compiler()

    def learn(self, tokens: Any, own: AddedTokens) -> None:
        self._own = own
        size = tokens.vocab_size
        spelled = [b"" if tokens.is_special_token(i) else tokens.decode_bytes([i]) for i in range(size)]
        for token in own.tokens.values():  # nothing else spells this, and what spells nothing is never taken
            spelled[token] = b"\xff" + spelled[token]
        self._tokens = Tokens(spelled, tokens.eos_tokens)
        self._info = self._tokens.info()
        self._ends = _bits(tokens.eos_tokens, size)
        self._beyond = _bits(range(size, -(-size // 32) * 32), size)
        self._others = _bits(set(own.tokens.values()) - own.ends, size)

    def compile(self, params: GuidedDecodingParams) -> Grammar:
        field = params.field
        try:
            form = _form(params, self._own)
            reply = self._compiler.ask(self._tokens, form)
        except UnsupportedError as error:
            raise PenstockError(Code.UNSUPPORTED, f"{field}: cannot be kept to by xgrammar: {error}", field) from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise invalid(field, f"is wrong: {error}") from error
        if not reply.kept:
            raise PenstockError(Code.UNSUPPORTED, f"{field}: cannot be kept to by xgrammar: {reply.wrong}", field)
        if reply.wrong:
            raise invalid(field, f"is wrong: {reply.wrong}")
        never = self._beyond
        if form.shape.get("type") == "triggered_tags":
            never = never | self._others  # outside of tags it takes any bytes at all
        return XGrammarForm(CompiledGrammar.deserialize_json(reply.compiled, self._info), self._ends, never)


def _bits(tokens: Iterable[int], size: int) -> np.ndarray:
    found = np.zeros(-(-size // 32) * 32, np.uint8)
    found[list(tokens)] = 1
    return np.packbits(found, bitorder="little").view(np.int32)


class _Compiler:
    """The process that compiles, started with the engine, and again where it has died."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "penstock.engine.guided.compiling"]
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        self._taught = False
        self._end = weakref.finalize(self, _end, self._process)

    def ask(self, tokens: Tokens, form: Form) -> Reply:
        """Raises ``PenstockError`` (``internal``) where no process lives for long enough."""
        line = msgspec.json.encode(form) + b"\n"
        for _ in range(2):  # it may have died since the last form
            if self._process.poll() is not None:
                self._end()
                self._start()
            if reply := self._told(tokens, line):
                return msgspec.json.decode(reply, type=Reply)
            self._process.kill()
            self._process.wait()
        raise PenstockError(Code.INTERNAL, "the process in which xgrammar compiles has died twice")

    def _told(self, tokens: Tokens, line: bytes) -> bytes:
        """Nothing where the process ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        try:
            if not self._taught:
                stdin.write(msgspec.json.encode(tokens) + b"\n")
                self._taught = True
            stdin.write(line)
            stdin.flush()
            return stdout.readline()
        except BrokenPipeError:
            return b""


def _end(process: Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


def _form(params: GuidedDecodingParams, own: AddedTokens) -> Form:
    """Raises ``UnsupportedError`` with the name of what cannot be kept to, ``ValueError`` where the form is none."""
    if params.whitespace_pattern is not None:
        raise UnsupportedError("whitespace_pattern")
    compact = params.disable_any_whitespace
    if params.json is not None or params.json_object:
        schema = json.loads(params.json) if params.json is not None else {"type": "object"}
        return Form(schema=_text(schema), compact=compact)
    if params.regex is not None:
        return Form(grammar=grammar_of_pattern(params.regex))
    if params.choice is not None:
        return Form(grammar=grammar_of_texts(params.choice))
    if params.grammar is not None:
        if "::=" not in params.grammar:
            raise UnsupportedError("Lark's notation; GBNF's is")
        return Form(grammar=params.grammar)
    structure = read_structure(params)
    shape = _tagged(structure, own) if isinstance(structure, Tagged) else _shape(structure, own)
    return Form(shape=shape, compact=compact)


def _text(schema: dict[str, Any]) -> str:
    text = json.dumps(rewritten(schema), ensure_ascii=False)
    text.encode()  # which lone surrogates are not
    return text


def _shape(part: Part, own: AddedTokens) -> dict[str, Any]:
    """A part in xgrammar's words, but for schemas, which the process that compiles puts in."""
    match part:
        case Text(text):
            return _sequence(_written(text, own))
        case Json(schema, separators):
            return {"type": "json_schema", "json_schema": _text(schema), "separators": separators}
        case Pattern(pattern):
            return {"type": "grammar", "grammar": grammar_of_pattern(pattern)}
        case Chain(parts):
            return _sequence([_shape(inner, own) for inner in parts])
        case Either(parts):
            return {"type": "or", "elements": [_shape(inner, own) for inner in parts]}
        case Repeated(inner, sign):
            return {"type": {"?": "optional", "*": "star", "+": "plus"}[sign], "content": _shape(inner, own)}


def _written(text: str, own: AddedTokens) -> list[dict[str, Any]]:
    return [
        {"type": "token", "token": part} if isinstance(part, int) else {"type": "const_string", "value": part}
        for part in own.split(text)
    ]


def _sequence(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements or [{"type": "const_string", "value": ""}]}


def _tagged(structure: Tagged, own: AddedTokens) -> dict[str, Any]:
    of_tokens = own.check(structure.tags)
    triggers = list(dict.fromkeys(tag.trigger for tag in structure.tags))
    tags = []
    for tag in structure.tags:
        *before, end = _written(tag.end, own) or [{"value": ""}]
        tags.append(
            {
                "type": "tag",
                "begin": {"type": "token", "token": own.tokens[tag.trigger]} if of_tokens else tag.trigger,
                "content": _sequence([_shape(tag.rest, own), *before]),
                "end": end if "token" in end else end["value"],
            }
        )
    if not of_tokens:
        if _has_token(tags):
            raise UnsupportedError("tokens of their own in tags that begin with none")
        return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    begun = [own.tokens[trigger] for trigger in triggers]
    others = sorted(set(own.tokens.values()) - set(begun) - own.ends)
    return {"type": "token_triggered_tags", "trigger_tokens": begun, "tags": tags, "exclude_tokens": others}


def _has_token(shape: Any) -> bool:
    if isinstance(shape, dict):
        return shape.get("type") == "token" or any(map(_has_token, shape.values()))
    return isinstance(shape, list) and any(map(_has_token, shape))
