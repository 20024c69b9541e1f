"""Patterns and texts in the notation of xgrammar's grammars (EBNF).

xgrammar reads patterns itself, but passes over what it does not know: anchors within a pattern, classes of names. So
they are read here, and what is not known is refused by name.
"""

from __future__ import annotations

import re

from .errors import UnsupportedError

DIGIT = "0-9"
WORD = "0-9A-Za-z_"
SPACE = r"\u0020\u0009-\u000d"
ANY_SPACE = SPACE + r"\u001c-\u001f\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
"""What any dialect takes for a space; without it a complement has no space in any."""
CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
COUNTS = re.compile(r"\{(\d{1,6})(,(\d{1,6})?)?\}")
CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xu]\{([0-9A-Fa-f]{1,6})\}")
GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_]\w*>|(?!\?))")


def grammar_of_texts(texts: tuple[str, ...]) -> str:
    """A grammar of these texts."""
    return f"root ::= {' | '.join(map(literal, texts))}\n"


def grammar_of_pattern(pattern: str) -> str:
    r"""A grammar of what a pattern matches as a whole.

    ``\d``, ``\w`` and ``\s`` are those of ASCII. Raises ``UnsupportedError`` for what is not known, ``ValueError``
    where the pattern is none.
    """
    return f"root ::= {_Pattern(pattern).read()}\n"


def literal(text: str) -> str:
    return f'"{"".join(map(_spelled, text))}"'


def _spelled(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    code = ord(character)
    if 0xD800 <= code < 0xE000:
        raise ValueError(f"U+{code:04X} is no character")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class _Pattern:
    """Reads a pattern from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> str:
        found = self._alternatives()
        if self._at < len(self._text):
            raise ValueError("there is a ) too many")
        return found

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        if not (character := self._next()):
            raise ValueError("the pattern ends too early")
        self._at += 1
        return character

    def _skip(self, character: str) -> bool:
        found = self._next() == character
        self._at += found
        return found

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while self._skip("|"):
            found.append(self._sequence())
        return " | ".join(found)

    def _sequence(self) -> str:
        parts: list[str] = []
        if self._depth == 0:
            self._skip("^")  # where the output begins
        while self._next() not in ("", "|", ")"):
            if self._depth == 0 and re.match(r"\$(\||\Z)", self._text[self._at : self._at + 2]):
                self._at += 1  # where it ends
                break
            parts.append(self._counted(self._one()))
        return " ".join(parts) or '""'

    def _counted(self, part: str) -> str:
        if self._next() in ("*", "+", "?"):
            part = f"({part}){self._take()}"
        elif self._next() == "{":
            if not (counts := COUNTS.match(self._text, self._at)):
                raise ValueError(f"{{ at {self._at} begins no count")
            self._at = counts.end()
            most = counts[3] or ("" if counts[2] else counts[1])
            if most and int(most) < int(counts[1]):
                raise ValueError(f"{counts[0]} counts to less than it counts from")
            part = f"({part}){{{int(counts[1])},{most and int(most)}}}"
        else:
            return part
        self._skip("?")  # the shortest way first: the same texts
        if self._next() in ("*", "+", "?", "{") and self._next():
            raise UnsupportedError(f"{self._next()} after a count")
        return part

    def _one(self) -> str:
        if self._next() == "(":
            if not (group := GROUP.match(self._text, self._at)):
                raise UnsupportedError(f"{self._text[self._at : self._at + 4]!r} in a pattern")
            self._at = group.end()
            self._depth += 1
            found = self._alternatives()
            self._depth -= 1
            if not self._skip(")"):
                raise ValueError("a ( is not closed")
            return f"({found})"
        character = self._take()
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
        kind = self._next()
        if kind in CLASSES and kind:
            self._at += 1
            return f"[{CLASSES[kind]}]"
        if kind == "S":
            self._at += 1
            return f"[^{ANY_SPACE}]"
        return literal(self._character())

    def _character(self) -> str:
        """What is escaped, where it is one character."""
        if code := CODE.match(self._text, self._at):
            self._at = code.end()
            number = int(next(filter(None, code.groups())), 16)
            if number > 0x10FFFF:
                raise ValueError(f"{code[0]} is no character")
            return chr(number)
        kind = self._take()
        if kind in CONTROLS:
            return CONTROLS[kind]
        if kind.isalnum() or not kind.isascii():
            raise UnsupportedError(rf"\{kind} in a pattern")
        return kind

    def _class(self) -> str:
        negated = self._skip("^")
        parts: list[str] = []
        while not self._skip("]"):
            if not parts and self._next() == "]":
                raise ValueError("a class is empty")
            if self._text[self._at : self._at + 2] in ("&&", "--", "~~") or self._next() == "[":
                raise UnsupportedError(f"{self._text[self._at : self._at + 2]} in a class")
            first = self._member(negated)
            if len(first) == 1 and self._next() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member(negated)
                if len(last) != 1 or last < first:
                    raise ValueError("a range in a class has no end, or ends before it begins")
                parts.append(f"{_spelled(first)}-{_spelled(last)}")
            else:
                parts.append(_spelled(first) if len(first) == 1 else first)
        if not parts:
            raise ValueError("a class is empty")
        return f"[{'^' * negated}{''.join(parts)}]"

    def _member(self, negated: bool) -> str:
        """A character, or what stands for several."""
        character = self._take()
        if character != "\\":
            return character
        kind = self._next()
        if kind not in CLASSES or not kind:
            return self._character()
        if negated and kind != "s":
            raise UnsupportedError(rf"\{kind} in a class of what is not in it")
        self._at += 1
        return ANY_SPACE if negated else CLASSES[kind]
