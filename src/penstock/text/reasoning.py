"""A model's thought before its answer, told apart from it however the text is cut into pieces."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from .markers import split


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a kind of model marks its thoughts."""

    parser: str
    """Name of ``--reasoning-parser``."""
    signs: tuple[str, ...]
    """All of them are in the chat templates of such models."""
    opened: str = "<think>"
    closed: str = "</think>"
    wrapped: tuple[str, ...] = ()
    """What is around an answer, and no part of it."""
    always: bool = False
    """Whether the model thinks first even where neither prompt nor answer says so."""


REASONING_FORMATS = (
    ReasoningFormat(
        parser="ernie",
        signs=("</think>", "<response>"),
        wrapped=("<response>", "</response>"),
    ),
    ReasoningFormat(parser="deepseek_r1", signs=("</think>", "<｜Assistant｜>"), always=True),
    ReasoningFormat(parser="qwen3", signs=("</think>",)),
)
"""ERNIE 4.5 and X1, whose answers stand in ``<response>``; DeepSeek R1 and V3.1, which may leave ``<think>`` away; and
Qwen3 with all others that write ``<think>…</think>``."""


def reasoning_format(parser: str, template: str) -> ReasoningFormat | None:
    """The form that a parser of that name reads, or ``auto``: the one that the chat template has, if it has any."""
    if parser == "auto":
        return next((form for form in REASONING_FORMATS if all(sign in template for sign in form.signs)), None)
    return next((form for form in REASONING_FORMATS if form.parser == parser), None)


class Stage(Enum):
    """Where an answer stands."""

    BEFORE = auto()  # it may begin with a thought
    WITHIN = auto()
    AFTER = auto()  # the thought has ended, or there is none


def initial_stage(form: ReasoningFormat, prompt: str, continued: str = "") -> Stage:
    """Where a prompt leaves its answer.

    Args:
        continued: the text of the last message, where the answer goes on with it.
    """
    if continued:
        return Stage.WITHIN if continued.rfind(form.opened) > continued.rfind(form.closed) else Stage.AFTER
    end = prompt.rstrip()
    if end.endswith(form.opened):
        return Stage.WITHIN
    if end.endswith(form.closed):
        return Stage.AFTER
    return Stage.WITHIN if form.always else Stage.BEFORE


class Told(NamedTuple):
    thought: str
    answer: str


class ReasoningParser:
    """Parts a text into thought and answer, without the marks and the line breaks around them.

    Args:
        continued: whether a thought that has begun goes on in the middle.
    """

    def __init__(self, form: ReasoningFormat, stage: Stage, continued: bool = False) -> None:
        self.stage = stage
        self._form = form
        self._held = ""
        self._opening = stage is not Stage.AFTER and not continued
        """Whether the mark of a thought may come."""
        self._fresh = self._opening
        """Whether line breaks after a mark may come."""
        self.thought = stage is Stage.WITHIN
        """Whether there is a thought."""

    def add(self, text: str, last: bool = False) -> Told:
        """Take in a piece; with ``last`` nothing is held back any more."""
        self._held += text
        if self._opening and not self._begin(last):
            return Told("", "")
        if self.stage is Stage.AFTER:
            return Told("", self._answer())
        self._skip_breaks()
        found = split(self._held, [self._form.closed], last, space="\n")
        self._held = found.rest
        if found.mark is None:
            return Told(found.before, "")
        self.stage, self._fresh = Stage.AFTER, True
        return Told(found.before, self._answer())

    def _begin(self, last: bool) -> bool:
        """Look for the mark that begins the thought. False: not known yet."""
        opened, ahead = self._form.opened, self._held.lstrip()
        if not last and opened.startswith(ahead):
            return False
        self._opening = False
        if ahead.startswith(opened):
            self.stage, self._held = Stage.WITHIN, ahead[len(opened) :]
        elif self.stage is Stage.BEFORE:
            self.stage, self._fresh = Stage.AFTER, False
        self.thought = self.stage is Stage.WITHIN
        return True

    def _answer(self) -> str:
        self._skip_breaks()
        said, self._held = self._held, ""
        return said

    def _skip_breaks(self) -> None:
        if self._fresh:
            self._held = self._held.lstrip("\n")
            self._fresh = not self._held
