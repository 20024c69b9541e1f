"""Tool calls in a model's text, found however the text is cut into pieces."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from penstock.text.markers import split

from .brace_scanner import BraceScanner
from .formats import ToolCallFormat

HEAD = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>([^"\\]|\\.){1,256})"\s*,\s*"(arguments|parameters)"\s*:\s*(?=\{)')
"""An object of name and arguments up to the latter, as models write it."""
LONGEST = 512
"""Characters that a name by itself may have, with all that belongs to it."""


@dataclass(slots=True)
class ToolCall:
    """A call, which grows while it is written."""

    id: str = field(compare=False)
    name: str
    arguments: str = ""
    """A JSON object as the model wrote it."""


class ToolCallParser:
    """Takes calls out of a text, with the space around them.

    A call is one from the moment that its name and the opening brace of its arguments have been read: from there on its
    arguments are passed on as they are written, to their closing brace, to the next mark, or to the end of the text, so
    that what streams is what is there in the end. They may turn out to be no JSON, as they may with OpenAI. What comes
    before that moment is held back, and if it turns out to be no call, it is text, as it was written. An object whose
    name does not come first is held back until it is complete.
    """

    def __init__(self, form: ToolCallFormat) -> None:
        self.calls: list[ToolCall] = []
        """Those found so far; the last one may still grow."""
        self._form = form
        self._held = self._said = ""
        self._gap = self._mark = ""
        """The mark at hand, and the space before it."""
        self._braces = BraceScanner(form.stops)
        self._scanned = 0
        """How much of what is held the braces have seen, of an object that is read as a whole."""
        self._in_object = False
        """Whether an object has the arguments in it."""
        self._step = self._lead if form.bare else self._outside

    def add(self, text: str, last: bool = False) -> str:
        """Take in a piece; returns what is said besides. With ``last`` nothing is held back any more."""
        self._held += text
        self._said = ""
        while self._step(last):
            pass
        return self._said

    # Each step works on what is held, and returns whether there is another one to do.

    def _outside(self, last: bool) -> bool:
        found = split(self._held, self._form.marks, last)
        self._said += found.before
        self._held = found.rest
        if found.mark is None:
            return False
        self._gap, self._mark, self._step = found.gap, found.mark, self._lead
        return True

    def _lead(self, last: bool) -> bool:
        """Between a mark and the first brace."""
        form, ahead = self._form, self._held.lstrip(self._form.lead)
        if not ahead and not last:
            return False
        if ahead.startswith("{"):
            self._scanned, self._braces, self._step = 0, BraceScanner(form.stops), self._object
            return True
        at = self._held.find("{")
        if form.named is None:
            return self._give_back()
        if at < 0 and len(self._held) <= LONGEST and not last:
            return False
        told = form.named.fullmatch(self._held, 0, at) if 0 <= at <= LONGEST else None
        if told is None:
            return self._give_back()
        self._begin(next(name for name in told.groupdict().values() if name), in_object=False)
        self._held = self._held[at:]
        return True

    def _object(self, last: bool) -> bool:
        """An object that has name and arguments in it."""
        ahead = self._held.lstrip(self._form.lead)
        if head := HEAD.match(ahead):
            self._begin(_string(head["name"]), in_object=True)
            self._held = ahead[head.end() :]
            return True
        length, ended = self._braces.scan(ahead[self._scanned :], last)
        self._scanned += length
        if not ended:
            if last:  # what is open to the end has no calls in it, as looking for them there again and again takes long
                self._said += self._gap + self._mark + self._held
                self._held, self._step = "", self._outside
            return False
        found = _call(ahead[: self._scanned])
        if found is None:
            return self._give_back()
        self.calls.append(ToolCall(self._form.new_id(), *found))
        self._held, self._step = ahead[self._scanned :], self._after
        return True

    def _arguments(self, last: bool) -> bool:
        length, ended = self._braces.scan(self._held, last)
        self.calls[-1].arguments += self._held[:length]
        self._held = self._held[length:]
        if not ended:
            return False
        self._braces = BraceScanner(self._form.stops, depth=1)
        self._step = self._rest if self._in_object else self._after
        return True

    def _rest(self, last: bool) -> bool:
        """What an object has besides name and arguments says nothing."""
        length, ended = self._braces.scan(self._held, last)
        self._held = self._held[length:]
        if ended:
            self._step = self._after
        return ended

    def _after(self, last: bool) -> bool:
        form = self._form
        self._held = self._held.lstrip()
        for text in (*form.closers, *form.separators):
            if self._held.startswith(text):
                self._held = self._held[len(text) :]
                if text in form.separators:
                    self._gap, self._mark, self._step = "", text, self._lead
                return True
            if not last and text.startswith(self._held):
                return False
        if form.bare and self._held.startswith("{"):
            self._gap, self._mark, self._step = "", "", self._lead
        else:
            self._step = self._outside
        return True

    def _begin(self, name: str, in_object: bool) -> None:
        self.calls.append(ToolCall(self._form.new_id(), name))
        self._in_object, self._braces, self._step = in_object, BraceScanner(self._form.stops), self._arguments

    def _give_back(self) -> bool:
        """The mark at hand was none."""
        self._said += self._gap + self._mark
        self._step = self._outside
        return True


def _string(written: str) -> str:
    """A name as JSON writes it, or as it stands where that is wrong."""
    try:
        name = str(json.loads(f'"{written}"', strict=False))
        return name if _is_text(name) else written
    except ValueError:
        return written


def _is_text(text: str) -> bool:
    """Whether it can be sent: half a surrogate pair, which JSON can write, cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _call(written: str) -> tuple[str, str] | None:
    """Name and arguments."""
    try:
        found = json.loads(written)
        name, arguments = found["name"], found.get("arguments", found.get("parameters")) or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str) and not _is_text(text):
            text = json.dumps(arguments)
        good = isinstance(name, str) and isinstance(json.loads(text), dict)  # text is JSON within JSON
        good = good and _is_text(name + text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (name, text) if good else None
