"""Guide for answers with tool calls: idle in free text, it follows the grammar of the calls from the trigger on."""

from __future__ import annotations

import re

import numpy as np

from penstock.core import Code, Failure, ToolCallParams

from .backend import Grammar, Guide
from .token_texts import TokenTexts
from .tool_call_scanner import ToolCallScanner, Trigger


class ToolCallGuide(Guide):
    """Guides the tool calls of a sequence.

    A guide that is idle allows every token. Steps may be scheduled ahead, and drafts verified without bitmasks: a draft
    ends before the token with the trigger, and tokens in flight after the trigger are discarded.

    Args:
        grammar: grammar from the trigger on.
        rest: guide of the reasoning limit, which applies in addition; None without limits.
    """

    def __init__(
        self, params: ToolCallParams, scanner: ToolCallScanner, grammar: Grammar, texts: TokenTexts, rest: Guide | None
    ) -> None:
        self._params = params
        self._scanner = scanner
        self._grammar = grammar
        self._texts = texts
        self._rest = rest
        self._calls: Guide | None = None
        """Guide of the calls; None before the trigger."""
        self._escapable: bytes | None = None
        """Text since a start trigger, while it may still turn out to be no call."""
        self._replacement: list[int] = []
        self._failure: Failure | None = None

    def copy(self) -> ToolCallGuide:
        rest = self._rest.copy() if self._rest else None
        copy = ToolCallGuide(self._params, self._scanner.copy(), self._grammar, self._texts, rest)
        copy._calls = self._calls.copy() if self._calls else None
        copy._escapable = self._escapable
        return copy

    @property
    def is_idle(self) -> bool:
        return self._calls is None and self._rest is None

    def may_trigger(self, tokens: list[int]) -> bool:
        return not self._scanner.skips(tokens)

    @property
    def is_unconstrained(self) -> bool:
        return self._calls is None and (self._rest is None or self._rest.is_unconstrained)

    def replace_eos(self, eos_token_id: int) -> int:
        return self._rest.replace_eos(eos_token_id) if self._rest and not self._calls else eos_token_id

    def accept_token(self, token: int) -> bool:
        if self._rest and not self._rest.accept_token(token):
            return False
        if self._calls:
            if not self._calls.accept_token(token):
                return False
            return self._escapable is None or self._check_escape(self._escapable + self._texts.all[token])
        if trigger := self._scanner.add(token):
            return self._begin(trigger, self._texts.all[token])
        return True

    def _begin(self, trigger: Trigger, last: bytes) -> bool:
        """Begin the calls with the trigger, which ends in ``last``, the text of the last token. If the grammar does not
        allow the text of the token after the trigger, the token is replaced by tokens without this text.

        Returns False if the text after the trigger is longer than ``last``, and not allowed.
        """
        self._calls = self._grammar.new_guide()
        rest = trigger.rest
        if not self._feed(self._texts.tokenize_marker(trigger.text)):
            message = f"the grammar of the tool calls does not allow their beginning, {trigger.text!r}"
            self._failure = Failure(Code.INTERNAL, message)
            return False
        if rest and not self._feed(self._texts.tokenize(rest)):
            if len(rest) > len(last):
                written = trigger.text + rest.decode(errors="replace")
                self._failure = Failure(Code.UNSUPPORTED, f"the model has begun a malformed tool call: {written:.100}")
                return False
            self._replacement, rest = self._texts.tokenize(last[: len(last) - len(rest)]), b""
        return not trigger.at_start or self._check_escape(trigger.text.encode() + rest)

    def _feed(self, tokens: list[int]) -> bool:
        """Accept all tokens, or none of them."""
        assert self._calls
        valid = self._calls.validate_tokens(tokens) == len(tokens)
        return valid and all([self._calls.accept_token(token) for token in tokens])

    def _check_escape(self, text: bytes) -> bool:
        """Become idle again if ``text``, which began with a start trigger, is certainly no call. Returns False if it
        calls an unknown tool."""
        self._escapable = text
        if re.match(self._params.escape.encode(), text, re.DOTALL):
            self._calls = self._escapable = None
            if trigger := self._scanner.skip_start(text):
                return self._begin(trigger, b"")
        elif re.match(self._params.unknown.encode(), text, re.DOTALL):
            message = f"the model has called an unknown tool: {text.decode(errors='replace'):.100}"
            self._failure = Failure(Code.UNSUPPORTED, message)
            return False
        return True

    def take_replacement(self) -> list[int]:
        tokens, self._replacement = self._replacement, []
        return tokens

    @property
    def failure(self) -> Failure | None:
        failures = [guide.failure for guide in (self._calls, self._rest) if guide]
        return self._failure or next(filter(None, failures), None)

    @property
    def is_terminated(self) -> bool:
        return self._calls is not None and self._calls.is_terminated

    @property
    def token_limit_reached(self) -> bool:
        return self._rest is not None and self._rest.token_limit_reached

    def validate_tokens(self, tokens: list[int]) -> int:
        """Number of leading ``tokens`` that are allowed, up to the token before a trigger: a draft must not contain
        tokens after the trigger, since its bitmasks are those of the state before it."""
        if self._calls and self._escapable is None:
            return self._calls.validate_tokens(tokens)
        if self._calls is None and self._rest is None and self._scanner.skips(tokens):
            return len(tokens)
        count = self._rest.validate_tokens(tokens) if self._rest else len(tokens)
        if self._calls:
            count = self._calls.validate_tokens(tokens[:count])
        state = self.copy()
        for i, token in enumerate(tokens[:count]):
            was_idle = state._calls is None
            state.accept_token(token)
            if was_idle != (state._calls is None):
                return i if was_idle else i + 1
        return count

    def fill_bitmask(self, row: np.ndarray) -> None:
        if guide := self._calls or self._rest:
            guide.fill_bitmask(row)

    def jump_forward_tokens(self) -> list[int]:
        guide = self._calls or self._rest
        return guide.jump_forward_tokens() if guide else []


class ToolCallGrammar(Grammar):
    """Grammar of the tool calls in answers that may also be text.

    Args:
        grammar: grammar from the trigger on; None: calls are not constrained.
    """

    def __init__(self, params: ToolCallParams, grammar: Grammar | None, texts: TokenTexts | None) -> None:
        self._params = params
        self._grammar = grammar
        self._texts = texts
        self.size = grammar.size if grammar else 0
        self.lowered_tools = grammar.lowered_tools if grammar else ("*",)

    def new_guide(self) -> Guide:
        """Create the guide of an output that begins with a trigger."""
        assert self._grammar
        return self._grammar.new_guide()

    def new_idle_guide(self, stage: str, rest: Guide | None) -> Guide | None:
        """Create the guide of an output; arguments as for ``ToolCallGuide`` and ``ToolCallScanner``."""
        if self._grammar is None:
            return rest
        assert self._texts
        scanner = ToolCallScanner(self._params, self._texts.markers(self._params.markers), stage)
        return ToolCallGuide(self._params, scanner, self._grammar, self._texts, rest)
