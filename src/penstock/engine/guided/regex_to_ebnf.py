"""Converts regular expressions and choices to xgrammar's grammars (EBNF).

xgrammar's own conversion silently ignores what it does not support: anchors within the expression, and some character
classes. So expressions are parsed here, and what is not supported is refused by name.
"""

from __future__ import annotations

import re

from .errors import UnsupportedError

DIGIT = "0-9"
WORD = "0-9A-Za-z_"
SPACE = r"\u0020\u0009-\u000d"
ANY_SPACE = SPACE + r"\u001c-\u001f\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
"""What ``\\s`` matches in any dialect; excluded from ``\\S``, and from negated classes with ``\\s``."""
CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
COUNTS = re.compile(r"\{(\d{1,6})(,(\d{1,6})?)?\}")
CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xu]\{([0-9A-Fa-f]{1,6})\}")
GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")


def choice_to_ebnf(texts: tuple[str, ...]) -> str:
    """The grammar of one of several texts."""
    return f"root ::= {' | '.join(map(literal, texts))}\n"


def regex_to_ebnf(pattern: str) -> str:
    r"""The grammar of texts that a regular expression matches from begin to end.

    ``\d``, ``\w`` and ``\s`` match ASCII. Raises ``UnsupportedError`` for unsupported syntax, ``ValueError`` for wrong
    syntax.
    """
    return f"root ::= {_RegexParser(pattern).parse()}\n"


def literal(text: str) -> str:
    return f'"{"".join(map(_escape_character, text))}"'


def _escape_character(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    code = ord(character)
    if 0xD800 <= code < 0xE000:
        raise ValueError(f"U+{code:04X} is no character")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class _RegexParser:
    """A recursive-descent parser that writes EBNF."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self) -> str:
        ebnf = self._alternatives()
        if self._at < len(self._text):
            raise ValueError("there is a ) too many")
        return ebnf

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _consume(self) -> str:
        if not (character := self._peek()):
            raise ValueError("the pattern ends too early")
        self._at += 1
        return character

    def _consume_if(self, character: str) -> bool:
        matches = self._peek() == character
        self._at += matches
        return matches

    def _alternatives(self) -> str:
        alternatives = [self._sequence()]
        while self._consume_if("|"):
            alternatives.append(self._sequence())
        return " | ".join(alternatives)

    def _sequence(self) -> str:
        parts: list[str] = []
        if self._depth == 0:
            self._consume_if("^")  # the expression matches from the beginning anyway
        while self._peek() not in ("", "|", ")"):
            if self._depth == 0 and re.match(r"\$(\||\Z)", self._text[self._at : self._at + 2]):
                self._at += 1  # and to the end
                break
            parts.append(self._quantified(self._atom()))
        return " ".join(parts) or '""'

    def _quantified(self, part: str) -> str:
        if self._peek() in ("*", "+", "?"):
            part = f"({part}){self._consume()}"
        elif self._peek() == "{":
            if not (counts := COUNTS.match(self._text, self._at)):
                raise ValueError(f"{{ at {self._at} begins no count")
            self._at = counts.end()
            maximum = counts[3] or ("" if counts[2] else counts[1])
            if maximum and int(maximum) < int(counts[1]):
                raise ValueError(f"{counts[0]} counts to less than it counts from")
            part = f"({part}){{{int(counts[1])},{maximum and int(maximum)}}}"
        else:
            return part
        self._consume_if("?")  # a lazy quantifier matches the same texts
        if self._peek() in ("*", "+", "?", "{") and self._peek():
            raise UnsupportedError(f"{self._peek()} after a count")
        return part

    def _atom(self) -> str:
        if self._peek() == "(":
            if not (group := GROUP.match(self._text, self._at)):
                raise UnsupportedError(f"{self._text[self._at : self._at + 4]!r} in a pattern")
            self._at = group.end()
            self._depth += 1
            inner = self._alternatives()
            self._depth -= 1
            if not self._consume_if(")"):
                raise ValueError("a ( is not closed")
            return f"({inner})"
        character = self._consume()
        if character == "[":
            return self._class()
        if character == ".":
            return r"[^\u000a]"
        if character == "\\":
            return self._escape()
        if character in "^$":
            raise UnsupportedError(f"{character} within a pattern")
        if character in "*+?{":
            raise ValueError(f"{character} counts nothing")
        return literal(character)

    def _escape(self) -> str:
        kind = self._peek()
        if kind in CLASSES and kind:
            self._at += 1
            return f"[{CLASSES[kind]}]"
        if kind == "S":
            self._at += 1
            return f"[^{ANY_SPACE}]"
        return literal(self._character())

    def _character(self) -> str:
        """The character that an escape sequence stands for."""
        if code := CODE.match(self._text, self._at):
            self._at = code.end()
            number = int(next(filter(None, code.groups())), 16)
            if number > 0x10FFFF:
                raise ValueError(f"{code[0]} is no character")
            return chr(number)
        kind = self._consume()
        if kind in CONTROLS:
            return CONTROLS[kind]
        if kind.isalnum() or not kind.isascii():
            raise UnsupportedError(rf"\{kind} in a pattern")
        return kind

    def _class(self) -> str:
        negated = self._consume_if("^")
        parts: list[str] = []
        while not self._consume_if("]"):
            if not parts and self._peek() == "]":
                raise ValueError("a class is empty")
            if self._text[self._at : self._at + 2] in ("&&", "--", "~~") or self._peek() == "[":
                raise UnsupportedError(f"{self._text[self._at : self._at + 2]} in a class")
            first = self._class_member(negated)
            if len(first) == 1 and self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._class_member(negated)
                if len(last) != 1 or last < first:
                    raise ValueError("a range in a class has no end, or ends before it begins")
                parts.append(f"{_escape_character(first)}-{_escape_character(last)}")
            else:
                parts.append(_escape_character(first) if len(first) == 1 else first)
        if not parts:
            raise ValueError("a class is empty")
        return f"[{'^' * negated}{''.join(parts)}]"

    def _class_member(self, negated: bool) -> str:
        """A character of a class, or the characters of a class escape (``\\d`` …)."""
        character = self._consume()
        if character != "\\":
            return character
        kind = self._peek()
        if kind not in CLASSES or not kind:
            return self._character()
        if negated and kind != "s":
            raise UnsupportedError(rf"\{kind} in a class of what is not in it")
        self._at += 1
        return ANY_SPACE if negated else CLASSES[kind]
