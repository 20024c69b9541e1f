"""A chat session: questions, answers, commands and statistics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.config.settings import did_you_mean
from penstock.core import Code, PenstockError

from .backend import Answer, Backend, ContextFull
from .conversation import Conversation
from .loop_thread import LoopThread
from .terminal import Terminal

FULL = "the context is full; /undo drops the last turn, /clear begins anew"


@dataclass
class SessionStatistics:
    """Statistics of the session."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Command(NamedTuple):
    """The command of a line that begins with a slash."""

    takes: str
    """Its argument, for the help."""
    about: str
    run: Callable[[Session, str], None]


class Session:
    """Asks questions and runs commands until ``/exit`` or the end of input.

    Args:
        commands: by name, without the slash.
    """

    def __init__(
        self,
        backend: Backend,
        loop_thread: LoopThread,
        conversation: Conversation,
        terminal: Terminal,
        commands: Mapping[str, Command],
    ) -> None:
        self.backend = backend
        self.conversation = conversation
        self.terminal = terminal
        self.statistics = SessionStatistics()
        self.used: int | None = None
        """Tokens of the context after the last answer; None where unknown."""
        self.leaving = False
        self._loop_thread = loop_thread
        self._commands = commands
        self._unanswered = 0

    def run(self) -> int:
        """Returns 1 where a pipe's question was not answered, else 0."""
        self.terminal.note(f"{self.backend.about}; /help tells what can be done here")
        for line in self.terminal.lines():
            try:
                if line.startswith("/"):
                    self._command(line)
                else:
                    self.ask(line.strip())
            except PenstockError as error:
                self.terminal.complain(str(error))
                self._unanswered += 1
            if self.leaving:
                break
        return int(self._unanswered > 0 and not self.terminal.with_person)

    def ask(self, question: str) -> None:
        """Ask and print the answer as it comes; raises ``PenstockError`` where there is none, or not all of it."""
        messages = self.conversation.ask(question)
        answer, num_printed, started = Answer(), 0, time.monotonic()
        stream = self._loop_thread.stream(self.backend.answer(messages, self.conversation.sampling))
        try:
            with stream, self.terminal.interruptible(stream.stop):
                for answer in stream:
                    self.terminal.say(answer.text[num_printed:])
                    num_printed = len(answer.text)
        except ContextFull as error:
            raise PenstockError(Code.TOO_LARGE, f"{FULL} ({error})") from error
        finally:
            if num_printed or answer.finish_reason:
                self.terminal.tell("")
                self.conversation.answered(answer.text)
                self._note(answer, time.monotonic() - started)
            elif stream.stopped:
                self.terminal.tell("")

    def _note(self, answer: Answer, seconds: float) -> None:
        tokens = answer.output_tokens
        if tokens is not None:
            self.statistics.answers += 1
            self.statistics.tokens += tokens
            self.statistics.seconds += seconds
            self.used = (answer.prompt_tokens or 0) + tokens
            self.terminal.note(f"{tokens} tokens, {tokens / seconds:.1f} tokens/s")
        maximum = self.conversation.sampling.get("max_tokens", math.inf)
        if answer.finish_reason == "length" and (tokens is None or tokens < maximum):
            self.terminal.complain(FULL)
        elif answer.finish_reason == "length":
            self.terminal.note(f"cut at max_tokens {maximum}")

    def _command(self, line: str) -> None:
        name, _, rest = line.removeprefix("/").partition(" ")
        if name not in self._commands:
            message = f"there is no /{name}{did_you_mean(name, self._commands)} (to say it, put a space before it)"
            raise PenstockError(Code.NOT_FOUND, message)
        self._commands[name].run(self, rest.strip())
