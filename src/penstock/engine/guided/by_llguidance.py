"""Forms kept to by llguidance, which refuses by name what it does not know."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import numpy as np
from llguidance import LLMatcher, grammar_from

from penstock.core import Code, Failure, GuidedDecodingParams, PenstockError
from penstock.core.errors import invalid
from penstock.core.guided import STRICT

from .added_tokens import AddedTokens
from .errors import WHITESPACE, UnsupportedError, first_line
from .guide import Backend, Grammar, Guide
from .structure import Chain, Either, Json, Part, Pattern, Repeated, Tagged, Text, read_structure

BOUNDING = frozenset(("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
"""Keywords whose numbers decide which ones may come."""
LEAST = -(2**63) + 513
"""Of the numbers there. llguidance 1.9 takes lower ones for -2**63, and where a range ends there it calls itself until
the stack is used up, which ends the process."""
EMPTY = '""'
"""The empty text in Lark's notation."""


class LLGuide(Guide):
    """The way through a compiled form."""

    free = False

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> LLGuide:
        return LLGuide(self._matcher.deep_copy())

    def replace_eos(self, end: int) -> int:
        return end  # which comes only where the form allows it

    def take(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    @property
    def failure(self) -> Failure | None:
        if not self._matcher.is_error():
            return None
        return Failure(Code.UNSUPPORTED, f"the form cannot be followed: {first_line(self._matcher.get_error())}")

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    def allows(self, tokens: list[int]) -> int:
        return int(self._matcher.validate_tokens(tokens))

    def fill(self, row: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def forced(self) -> list[int]:
        return list(self._matcher.compute_ff_tokens())


class LLGrammar(Grammar):
    """A compiled form."""

    size = 0

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def begin(self) -> Guide:
        return LLGuide(self._matcher.deep_copy())


class LLGuidance(Backend):
    """Compiles what a form needs at once, and the rest as sequences come to it."""

    _tokens: Any

    _own: AddedTokens

    def learn(self, tokens: Any, own: AddedTokens) -> None:
        self._tokens = tokens
        self._own = own

    def compile(self, params: GuidedDecodingParams) -> Grammar:
        try:
            matcher = LLMatcher(self._tokens, _grammar(params, self._own), log_level=0)
        except UnsupportedError as error:
            raise PenstockError(
                Code.UNSUPPORTED, f"{params.field}: cannot be kept to: {error}", params.field
            ) from error
        except (ValueError, TypeError, AttributeError, AssertionError) as error:
            raise invalid(params.field, f"is wrong: {first_line(str(error))}") from error
        if not matcher.is_error():
            matcher.compute_bitmask()  # what it takes is taken here, where nobody waits, and shows whether it works
        if matcher.is_error():
            words = first_line(matcher.get_error()).replace("NoExtensionBias", "nothing is of this form")
            raise PenstockError(Code.UNSUPPORTED, f"{params.field}: cannot be kept to: {words}", params.field)
        return LLGrammar(matcher)


def _grammar(params: GuidedDecodingParams, own: AddedTokens) -> str:
    """In llguidance's own form. Raises ``ValueError`` where it is none.

    Args:
        own: tokens of their own.
    """
    if params.json is not None or params.json_object:
        schema = json.loads(params.json) if params.json is not None else {"type": "object"}
        _check_numbers(schema)
        return str(LLMatcher.grammar_from_json_schema(_with_options(schema, params)))
    if params.regex is not None:
        return str(grammar_from("regex", params.regex))
    if params.choice is not None:
        return str(grammar_from("choice", json.dumps(params.choice)))
    lark = params.grammar if params.grammar is not None else _Lark(params, own).write(read_structure(params))
    for found in re.finditer(r"%json\s*", lark):
        with suppress(json.JSONDecodeError):  # llguidance says what is wrong with it
            _check_numbers(json.JSONDecoder().raw_decode(lark, found.end())[0])
    return str(grammar_from("grammar", lark)) if params.grammar is not None else lark


def _check_numbers(part: Any, bounding: bool = False) -> None:
    """Raises ``UnsupportedError`` for a number that would end the process."""
    if isinstance(part, dict):
        for name, inner in part.items():
            _check_numbers(inner, bounding or name in BOUNDING)
    elif isinstance(part, list):
        for inner in part:
            _check_numbers(inner, bounding)
    elif bounding and isinstance(part, int | float) and part < LEAST:
        raise UnsupportedError(f"numbers below {LEAST}")


def _with_options(
    schema: dict[str, Any], params: GuidedDecodingParams, separators: tuple[str, str] | None = None
) -> dict[str, Any]:
    """A schema with our options in place of its own. One that asks to be taken loosely is not."""
    options: dict[str, Any] = dict(STRICT)
    if separators:
        item, key = map(re.escape, separators)  # which are patterns there
        options |= {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    elif params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or rf"[ \n\r\t]{{1,{WHITESPACE}}}"
    return schema | {"x-guidance": options}


class _Lark:
    """Writes a structure in Lark's notation.

    Texts and patterns beside each other become one terminal: several would each take as much as they can, and leave
    nothing for the next one.
    """

    def __init__(self, params: GuidedDecodingParams, own: AddedTokens) -> None:
        self._params = params
        self._own = own
        self._rules: list[str] = []

    def write(self, structure: Part | Tagged) -> str:
        start = self._tagged(structure) if isinstance(structure, Tagged) else self._part(structure)
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _rule(self, text: str, mark: str = "", name: str = "part") -> str:
        """The name of a rule with this text, or of a terminal where it is in capitals."""
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}{mark}: {text}")
        return name

    def _part(self, part: Part) -> str:
        if (terminal := self._terminal(part)) is not None:
            return self._rule(terminal, name="TEXT") if terminal else ""
        match part:
            case Text(text):
                found = self._own.split(text)
                return " ".join(f"<[{inner}]>" if isinstance(inner, int) else json.dumps(inner) for inner in found)
            case Json(schema, separators):  # in a rule of its own: its references point into itself
                return self._rule(f"%json {json.dumps(_with_options(schema, self._params, separators))}")
            case Chain():
                return self._chain(_flat(part))
            case Either(parts):
                return self._rule(" | ".join(self._part(inner) or EMPTY for inner in parts))
            case Repeated(inner, sign):
                return f"({self._part(inner)}){sign}"
        raise AssertionError("a pattern is a terminal")

    def _chain(self, parts: list[Part]) -> str:
        written: list[str] = []
        run: list[str] = []
        for part in parts:
            terminal = self._terminal(part)
            if terminal is None:
                written += [self._rule(" ".join(run), name="TEXT")] * bool(run)
                written.append(self._part(part))
                run = []
            elif terminal:
                run.append(terminal)
        written += [self._rule(" ".join(run), name="TEXT")] * bool(run)
        return " ".join(written)

    def _terminal(self, part: Part) -> str | None:
        """What is of texts and patterns alone; None for what is not, nothing for the empty text."""
        match part:
            case Text(text):
                found = self._own.split(text)
                return None if any(isinstance(inner, int) for inner in found) else json.dumps(text) if text else ""
            case Pattern(pattern):
                quoted: str = json.loads(grammar_from("regex", pattern))["grammars"][0]["lark_grammar"]
                return quoted.removeprefix("start: ")
            case Json():
                return None
            case Chain(parts):
                inner = [self._terminal(one) for one in parts]
                return None if None in inner else " ".join(one for one in inner if one)
            case Either(parts):
                inner = [self._terminal(one) for one in parts]
                return None if None in inner else f"({' | '.join(one or EMPTY for one in inner)})"
            case Repeated(repeated, sign):
                one = self._terminal(repeated)
                return f"({one}){sign}" if one else one

    def _tagged(self, structure: Tagged) -> str:
        of_tokens = self._own.check(structure.tags)
        tags = []
        for tag in structure.tags:
            trigger = f"ANY {self._part(Text(tag.trigger))}"
            if not of_tokens:
                trigger = self._rule(trigger, "[lazy]")  # ends where it is written for the first time
            tags.append(self._rule(f"{trigger} {self._part(Chain((tag.rest, Text(tag.end))))}"))
        self._rules.append("ANY: /(?s:.*)/")
        return f"({' | '.join(tags)})* {self._rule('ANY')}"


def _flat(part: Part) -> list[Part]:
    """Parts one after the other, of which none is a chain."""
    return [inner for one in part.parts for inner in _flat(one)] if isinstance(part, Chain) else [part]
