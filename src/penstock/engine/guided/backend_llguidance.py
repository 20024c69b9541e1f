"""The llguidance backend. llguidance reports unsupported JSON Schema keywords by name."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, grammar_from

from penstock.core import Code, Failure, GuidedDecodingParams, Vocabulary
from penstock.core.guided import LLGUIDANCE_OPTIONS

from .added_tokens import AddedTokens
from .backend import Grammar, Guide
from .bounded_guide import TokenClasses
from .compile_process import CompileProcess
from .errors import UnsupportedError, one_line
from .llguidance_process import VocabularyMessage, compile_grammar
from .structural_tag import (
    AnyOrderFormat,
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
from .token_texts import TokenTexts
from .vocabulary import load_tokenizer, read_added_tokens, sampled_vocabulary

NUMBER_KEYWORDS = frozenset(("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
"""JSON Schema keywords whose numbers bound a value."""
MIN_NUMBER = -(2**63) + 513
"""Smallest number allowed in ``NUMBER_KEYWORDS``. llguidance 1.9 rounds smaller numbers to -2**63. With a range that
ends at -2**63, its recursion does not end, overflows the stack and kills the process."""
MAX_WHITESPACE = 32
"""Default limit for consecutive whitespace characters in JSON. Without a limit, a model may generate whitespace until
``max_tokens``."""
MAX_TOKEN_TIME = 0.25
"""Maximum seconds of processor time for one token of one sequence."""
TIME_PER_TOKEN = 0.01
"""Seconds of processor time that each token adds to the sequence's budget."""
MAX_TIME_BUDGET = 1.0
"""Initial and maximum budget of processor time of a sequence, seconds."""
EMPTY = '""'
"""The empty string in Lark's notation."""


class TimeBudget:
    """Limits the processor time of one sequence's grammar, since that time delays all sequences of the batch::

        with budget: ...

    A grammar that takes too long usually takes longer with every token.
    """

    __slots__ = ("_left", "_started", "is_exceeded")

    def __init__(self) -> None:
        self._left = MAX_TIME_BUDGET
        self._started = 0.0
        self.is_exceeded = False
        """True once a token took more than ``MAX_TOKEN_TIME``, or the budget was used up."""

    def copy(self) -> TimeBudget:
        copy = TimeBudget()
        copy._left, copy.is_exceeded = self._left, self.is_exceeded
        return copy

    def add_token(self) -> None:
        """Extend the budget for one more token."""
        self._left = min(self._left + TIME_PER_TOKEN, MAX_TIME_BUDGET)

    def __enter__(self) -> None:
        self._started = time.thread_time()

    def __exit__(self, *error: object) -> None:
        spent = time.thread_time() - self._started
        self._left -= spent
        if spent > MAX_TOKEN_TIME or self._left < 0:
            self.is_exceeded = True


class LLGuide(Guide):
    """Guide over llguidance's matcher."""

    is_unconstrained = False

    def __init__(self, matcher: Any, budget: TimeBudget | None = None) -> None:
        self._matcher = matcher
        self._budget = budget or TimeBudget()

    def copy(self) -> LLGuide:
        return LLGuide(self._matcher.deep_copy(), self._budget.copy())

    def replace_eos(self, eos_token_id: int) -> int:
        return eos_token_id  # the bitmask allows EOS only if the grammar is complete

    def accept_token(self, token: int) -> bool:
        self._budget.add_token()
        with self._budget:
            accepted = bool(self._matcher.consume_token(token))
        return accepted and not self._budget.is_exceeded

    @property
    def failure(self) -> Failure | None:
        if self._matcher.is_error():
            error = one_line(self._matcher.get_error())
        elif self._budget.is_exceeded:
            error = f"a token took more than {MAX_TOKEN_TIME:g} seconds, or many tokens took long; simplify it"
        else:
            return None
        return Failure(Code.UNSUPPORTED, f"the grammar cannot be followed: {error}")

    @property
    def is_terminated(self) -> bool:
        return bool(self._matcher.is_stopped())

    def validate_tokens(self, tokens: list[int]) -> int:
        with self._budget:
            return int(self._matcher.validate_tokens(tokens))

    def fill_bitmask(self, row: np.ndarray) -> None:
        with self._budget:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def jump_forward_tokens(self) -> list[int]:
        with self._budget:
            return list(self._matcher.compute_ff_tokens())


class LLGrammar(Grammar):
    """Grammar compiled by llguidance."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self.size = size

    def new_guide(self) -> Guide:
        return LLGuide(self._matcher.deep_copy())


class LLGuidance:
    """Compiles grammars with llguidance. A separate process first compiles each grammar completely
    (``llguidance_process.py``), under limits of time and memory. In this process, llguidance then compiles it lazily,
    as sequences reach new states.

    Args:
        vocab_size: number of tokens of the model, padding included.

    Raises ``PenstockError`` (``unsupported``) for a tokenizer that llguidance cannot load.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        vocabulary = sampled_vocabulary(vocabulary, vocab_size)
        self.added_tokens = read_added_tokens(vocabulary)
        self._tokenizer = load_tokenizer(vocabulary, vocab_size)
        self.process = CompileProcess(msgspec.json.encode(VocabularyMessage(vocabulary, vocab_size)))
        self.texts = TokenTexts(self._tokenizer, self.added_tokens)
        self.token_classes = TokenClasses(self.texts.all)

    def request(self, params: GuidedDecodingParams) -> bytes:
        """Translate a constraint to a request for the compile process. Raises ``UnsupportedError`` if llguidance does
        not support the constraint, ``ValueError`` or ``RecursionError`` if it is invalid."""
        return msgspec.json.encode(_grammar(params, self.added_tokens))

    def grammar(self, request: bytes, size: int) -> Grammar:
        """Grammar of a ``request`` that the compile process has compiled before.

        Args:
            size: bytes of memory that the grammar takes.
        """
        matcher = compile_grammar(self._tokenizer, json.loads(request))
        if matcher.is_error():
            raise RuntimeError(f"the grammar could not be compiled again: {one_line(matcher.get_error())}")
        return LLGrammar(matcher, size)


def _grammar(params: GuidedDecodingParams, added_tokens: AddedTokens) -> str:
    """Translate a constraint to llguidance's grammar. Raises ``UnsupportedError`` if llguidance does not support it,
    ``ValueError`` if it is invalid."""
    if params.json is not None or params.json_object:
        schema = json.loads(params.json) if params.json is not None else {"type": "object"}
        _check_numbers(schema)
        return str(LLMatcher.grammar_from_json_schema(_with_options(schema, params)))
    if params.regex is not None:
        return str(grammar_from("regex", params.regex))
    if params.choice is not None:
        # One terminal, since llguidance's parser limits a rule to 2,000 alternatives.
        return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, params.choice))}\n"
    if params.grammar is not None:
        lark = params.grammar
    else:
        lark = _LarkWriter(params, added_tokens).write(parse_structural_tag(params))
    for schema_start in re.finditer(r"%json\s*", lark):
        with suppress(json.JSONDecodeError):  # llguidance reports the error
            _check_numbers(json.JSONDecoder().raw_decode(lark, schema_start.end())[0])
    return str(grammar_from("grammar", lark)) if params.grammar is not None else lark


def _check_numbers(part: Any, is_bound: bool = False) -> None:
    """Raise ``UnsupportedError`` for a number below ``MIN_NUMBER``."""
    if isinstance(part, dict):
        for name, inner in part.items():
            _check_numbers(inner, is_bound or name in NUMBER_KEYWORDS)
    elif isinstance(part, list):
        for inner in part:
            _check_numbers(inner, is_bound)
    elif is_bound and isinstance(part, int | float) and part < MIN_NUMBER:
        raise UnsupportedError(f"numbers below {MIN_NUMBER}")


def _with_options(
    schema: dict[str, Any], params: GuidedDecodingParams, separators: tuple[str, str] | None = None
) -> dict[str, Any]:
    """Copy a schema, with llguidance's options (``x-guidance``) replaced by those of this module and the request.

    Args:
        separators: texts between items and after keys; None: those of JSON, with whitespace as ``params`` allow.
    """
    options: dict[str, Any] = dict(LLGUIDANCE_OPTIONS)
    if separators:
        item, key = map(re.escape, separators)  # llguidance expects regular expressions
        options |= {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    elif params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}"
    return schema | {"x-guidance": options}


class _LarkWriter:
    """Translates a structural tag to a Lark grammar.

    Adjacent texts and regular expressions form one terminal: as separate terminals, the first one would match greedily,
    and leave no text for the second.
    """

    def __init__(self, params: GuidedDecodingParams, added_tokens: AddedTokens) -> None:
        self._params = params
        self._added_tokens = added_tokens
        self._rules: list[str] = []
        self._names: dict[str, str] = {}
        """Name of each rule by the rest of its text, so that equal rules are written once."""

    def write(self, structure: Format | TriggeredTagsFormat) -> str:
        """Lark grammar of a structural tag."""
        if isinstance(structure, TriggeredTagsFormat):
            start = self._triggered_tags(structure)
        else:
            start = self._format(structure)
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _rule(self, text: str, attributes: str = "", name: str = "part") -> str:
        """Add a rule (a terminal if ``name`` is in upper case). Returns the rule's unique name."""
        key = f"{name}{attributes}: {text}"
        if key not in self._names:
            self._names[key] = f"{name}_{len(self._rules)}"
            self._rules.append(f"{self._names[key]}{attributes}: {text}")
        return self._names[key]

    def _format(self, part: Format) -> str:
        """Expression for a format, to use in a rule; adds rules as needed."""
        if (terminal := self._terminal(part)) is not None:
            return self._rule(terminal, name="TEXT") if terminal else ""
        match part:
            case ConstStringFormat():
                return self._sequence([part])
            case JSONSchemaFormat(schema, separators):  # a separate rule, so that references resolve within it
                return self._rule(f"%json {json.dumps(_with_options(schema, self._params, separators))}")
            case SequenceFormat():
                return self._sequence(_flatten(part))
            case OrFormat(parts):
                return self._rule(" | ".join(self._format(inner) or EMPTY for inner in parts))
            case RepeatFormat(inner, quantifier):
                return f"({self._format(inner)}){quantifier}"
            case AnyOrderFormat():
                return self._any_order(part)
        raise AssertionError("a regular expression is a terminal")

    def _any_order(self, part: AnyOrderFormat) -> str:
        """Expression for parts in any order, with one rule for each set of parts that may follow."""
        first = list(map(self._format, part.parts))
        following = first
        if part.separator:
            separator = ConstStringFormat(part.separator)
            following = [self._format(SequenceFormat((separator, one))) for one in part.parts]
        rules: dict[frozenset[int], str] = {}

        def rest(left: frozenset[int], elements: list[str]) -> str:
            ends = [] if any(part.required[i] for i in left) else [EMPTY]
            return self._rule(" | ".join([f"{elements[i]} {after(left - {i})}" for i in sorted(left)] + ends))

        def after(left: frozenset[int]) -> str:
            if left not in rules:
                rules[left] = rest(left, following) if left else EMPTY
            return rules[left]

        return rest(frozenset(range(len(first))), first)

    def _sequence(self, parts: list[Format]) -> str:
        """Expression for consecutive formats, with adjacent terminals merged."""
        rules: list[str] = []
        run: list[str] = []

        def end_run() -> None:
            rules.extend([self._rule(" ".join(run), name="TEXT")] * bool(run))
            run.clear()

        for part in parts:
            terminal = self._terminal(part)
            if terminal is not None:
                run.extend([terminal] * bool(terminal))
            elif isinstance(part, ConstStringFormat):  # the text around added tokens belongs to the adjacent terminals
                for piece in self._added_tokens.split(part.text):
                    if isinstance(piece, int):
                        end_run()
                        rules.append(f"<[{piece}]>")
                    else:
                        run.append(json.dumps(piece))
            else:
                end_run()
                rules.append(self._format(part))
        end_run()
        return " ".join(rules)

    def _terminal(self, part: Format) -> str | None:
        """Terminal for a format of texts and regular expressions only, "" for the empty text; else None."""
        match part:
            case ConstStringFormat(text):
                has_added = any(isinstance(each, int) for each in self._added_tokens.split(text))
                return None if has_added else json.dumps(text) if text else ""
            case RegexFormat(pattern):
                quoted: str = json.loads(grammar_from("regex", pattern))["grammars"][0]["lark_grammar"]
                return quoted.removeprefix("start: ")
            case JSONSchemaFormat() | AnyOrderFormat():
                return None
            case SequenceFormat(parts):
                inner = [self._terminal(one) for one in parts]
                return None if None in inner else " ".join(one for one in inner if one)
            case OrFormat(parts):
                inner = [self._terminal(one) for one in parts]
                return None if None in inner else f"({' | '.join(one or EMPTY for one in inner)})"
            case RepeatFormat(repeated, quantifier):
                one = self._terminal(repeated)
                return f"({one}){quantifier}" if one else one

    def _triggered_tags(self, structure: TriggeredTagsFormat) -> str:
        """Expression for free text with tags, each of which starts at its trigger."""
        by_token = self._added_tokens.are_triggers(structure.tags)
        tags = []
        for tag in structure.tags:
            trigger = f"ANY {self._format(ConstStringFormat(tag.trigger))}"
            if not by_token:
                trigger = self._rule(trigger, "[lazy]")  # the text before a tag ends at the first trigger
            rest = SequenceFormat((tag.after_trigger, ConstStringFormat(tag.end)))
            tags.append(self._rule(f"{trigger} {self._format(rest)}"))
        self._rules.append("ANY: /(?s:.*)/")
        return f"({' | '.join(tags)})* {self._rule('ANY')}"


def _flatten(part: Format) -> list[Format]:
    """Parts of nested sequences as one list."""
    return [inner for one in part.parts for inner in _flatten(one)] if isinstance(part, SequenceFormat) else [part]
