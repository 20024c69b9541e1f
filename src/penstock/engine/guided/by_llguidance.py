"""Forms kept to by llguidance, which refuses by name what it does not know."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from llguidance import LLMatcher, StructTag, grammar_from

from penstock.core import Code, Failure, GuidedDecodingParams, PenstockError
from penstock.core.errors import invalid
from penstock.core.guided import STRICT

from .guide import WHITESPACE, Backend, Grammar, Guide, first_line
from .tags import read_tags


class LLGuide(Guide):
    """The way through a compiled form."""

    free = False

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> LLGuide:
        return LLGuide(self._matcher.deep_copy())

    def for_end(self, end: int) -> int:
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

    def learn(self, tokens: Any) -> None:
        self._tokens = tokens

    def compile(self, params: GuidedDecodingParams) -> Grammar:
        try:
            matcher = LLMatcher(self._tokens, _grammar(params), log_level=0)
        except (ValueError, TypeError, AttributeError, AssertionError) as error:
            raise invalid(params.field, f"is wrong: {first_line(str(error))}") from error
        if not matcher.is_error():
            matcher.compute_bitmask()  # what it takes is taken here, where nobody waits, and shows whether it works
        if matcher.is_error():
            words = first_line(matcher.get_error()).replace("NoExtensionBias", "nothing is of this form")
            raise PenstockError(Code.UNSUPPORTED, f"{params.field}: cannot be kept to: {words}", params.field)
        return LLGrammar(matcher)


def _grammar(params: GuidedDecodingParams) -> str:
    """In llguidance's own form. Raises ``ValueError`` where it is none."""
    if params.json is not None or params.json_object:
        schema = json.loads(params.json) if params.json is not None else {"type": "object"}
        return str(LLMatcher.grammar_from_json_schema(_with_options(schema, params)))
    if params.regex is not None:
        return str(grammar_from("regex", params.regex))
    if params.choice is not None:
        return str(grammar_from("choice", json.dumps(params.choice)))
    if params.grammar is not None:
        return str(grammar_from("grammar", params.grammar))
    tags = [
        StructTag(trigger=tag.trigger, begin=tag.begin, grammar=_with_options(tag.schema, params), end=tag.end)
        for tag in read_tags(params)
    ]
    return str(StructTag.to_grammar(tags, assume_special=False))


def _with_options(schema: dict[str, Any], params: GuidedDecodingParams) -> dict[str, Any]:
    """A schema with our options in place of its own. One that asks to be taken loosely is not."""
    options: dict[str, Any] = dict(STRICT)
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or rf"[ \n\r\t]{{1,{WHITESPACE}}}"
    return schema | {"x-guidance": options}
