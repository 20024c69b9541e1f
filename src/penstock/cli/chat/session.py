"""A chat session: questions, answers, commands and statistics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from anyio.from_thread import BlockingPortal

from penstock.core import Code, PenstockError
from penstock.core.spelling import did_you_mean

from .backend import Answer, Backend, ContextFull
from .conversation import Conversation, Message
from .images import image_url, pasted_images
from .speed import tokens_per_second
from .stream import Stream
from .terminal import Terminal
from .tools import ToolCall, run_tool

if TYPE_CHECKING:
    from .mcp import McpTools

FULL = "the context is full; /undo removes the last turn, /reset starts a new conversation"
SPINNER_DELAY = 1.0
"""Seconds without a first token after which a spinner is shown."""


@dataclass
class SessionStatistics:
    """Statistics of all answers in the session."""

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Total time from questions to the end of their answers. Inter-token times would be inaccurate for short answers,
    as tokens arrive in groups."""

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def _cancel(calling: Future[str]) -> None:
    calling.cancel()


class Command(NamedTuple):
    """A slash command."""

    takes: str
    """Description of the argument, for the help."""
    about: str
    run: Callable[[Session, str], None]
    words: Sequence[str] = ()
    """First words of the argument, for completion; files are completed if ``takes`` starts with FILE."""


@dataclass
class Session:
    """Sends messages and runs commands until ``/exit`` or the end of input."""

    backend: Backend
    portal: BlockingPortal
    """Portal to the event loop in which the backend runs."""
    conversation: Conversation
    terminal: Terminal
    commands: Mapping[str, Command]
    """Commands by name, without the slash."""
    aliases: Mapping[str, str]
    """Names of commands by alias."""
    tool_command: str = ""
    """Command that executes tool calls, each after a confirmation; empty: the user types the results."""
    mcp: McpTools | None = None
    """Tools of MCP servers, each of which is called after a confirmation."""
    statistics: SessionStatistics = field(default_factory=SessionStatistics)
    used: int | None = None
    """Number of tokens in the context after the last answer; None: unknown."""
    leaving: bool = False
    fold: bool = False
    """Do not print reasoning."""
    reasoning: str = ""
    """Reasoning of the last answer."""
    _unanswered: int = 0
    _trusted: set[str] = field(default_factory=set)
    """MCP tools that are called without a confirmation."""

    def run(self) -> int:
        """Run the session; returns 1 if a message from a pipe was not answered, otherwise 0."""
        self.terminal.note(f"{self.backend.about}; /help lists the commands")
        for line in self.terminal.lines():
            try:
                self._line(line)
            except PenstockError as error:
                self.terminal.print_error(str(error))
                self._unanswered += 1
            except KeyboardInterrupt:
                if not self.terminal.is_interactive:
                    raise
                self.terminal.print_line("")
            if self.leaving:
                break
        return int(self._unanswered > 0 and not self.terminal.is_interactive)

    def ask(self, question: str) -> None:
        """Send a message and print the answer. Raises ``PenstockError`` if the answer fails or is incomplete."""
        self._answer(self.conversation.ask(question))

    def ask_again(self) -> None:
        """Send the last message again and print the answer. Raises ``PenstockError`` like ``ask``."""
        self._answer(self.conversation.ask_again())

    def _line(self, line: str) -> None:
        images: list[str] = []
        if self.terminal.is_interactive and not self._is_command(line):
            line, images = pasted_images(line)
        self.conversation.images += [image_url(path) for path in images]
        for path in images:
            self.terminal.note(f"image: {path}")
        if line.startswith("/") and not images:
            self._command(line)
        elif line.strip():
            self.ask(line)
        else:
            self.terminal.note("type a message to send with the image")

    def _answer(self, messages: list[Message]) -> None:
        """Print the answer; as long as it has tool calls, send their results and print the next answer."""
        while answer := self._generate(messages):
            if not answer.calls:
                return
            for number, call in enumerate(answer.calls):
                result = self._result(call)
                if result is None:
                    question = self.conversation.undo()
                    rest = len(answer.calls) - number
                    message = f"{rest} tool calls have no result; removed the message: {question}"
                    raise PenstockError(Code.CANCELLED, message)
                self.conversation.add_result(call, result)
            messages = self.conversation.messages

    def _generate(self, messages: list[Message]) -> Answer | None:
        """Print the answer while it is generated; returns None if it was interrupted."""
        answer, printed, thought, started = Answer(), 0, 0, time.monotonic()
        first: float | None = None
        stream = Stream(self.portal, self.backend.answer(messages, self.conversation))
        answers = iter(stream)
        try:
            with stream, self.terminal.interruptible(stream.stop):
                while True:
                    with self.terminal.waiting("waiting", SPINNER_DELAY) if first is None else nullcontext():
                        following = next(answers, None)
                    if following is None:
                        break
                    answer = following
                    if first is None and (answer.text or answer.reasoning or answer.calls):
                        first = time.monotonic()
                    if not self.fold:
                        self.terminal.write_dimmed(answer.reasoning[thought:])
                    if answer.reasoning and (printed, thought) == (0, 0) and self.fold:
                        self.terminal.note("thinking (/reasoning shows it)")
                    thought = len(answer.reasoning)
                    if thought and not self.fold and answer.text and not printed:
                        self.terminal.note("")
                    self.terminal.write(answer.text[printed:])
                    printed = len(answer.text)
        except ContextFull as error:
            raise PenstockError(Code.TOO_LARGE, f"{FULL} ({error})") from error
        finally:
            if printed or answer.finish_reason:
                if printed or not answer.calls:
                    self.terminal.print_line("")
                elif thought and not self.fold:
                    self.terminal.note("")
                calls = () if stream.stopped else answer.calls
                self.reasoning = answer.reasoning
                self.conversation.answered(answer.text, calls)
                self._note(answer, started, first or time.monotonic(), time.monotonic())
            elif stream.stopped:
                self.terminal.print_line("")
        return None if stream.stopped else answer

    def _result(self, call: ToolCall) -> str | None:
        """Get the result of a tool call from an MCP server, the command or the user; None if the user gives none."""
        self.terminal.print_line(f"tool call: {call.name}({call.arguments})")
        if self.mcp and self.mcp.has(call):
            return self._mcp_result(self.mcp, call)
        if self.tool_command:
            agreed = self.terminal.ask(f"run {self.tool_command} {call.name}? [y/N] ")
            if agreed is None:
                return None
            if agreed.strip().lower() in ("y", "yes"):
                with self.terminal.interruptible(lambda: None):  # the command handles Ctrl-C
                    result = run_tool(self.tool_command, call)
                self.terminal.note(f"result: {result}")
                return result
        return self.terminal.ask("result: ")

    def _mcp_result(self, mcp: McpTools, call: ToolCall) -> str | None:
        """Call an MCP tool if the user agrees; otherwise the user types the result. Ctrl-C cancels the call."""
        if call.name not in self._trusted:
            agreed = self.terminal.ask(f"call {call.name}? [y/N/a: always] ")
            if agreed is None:
                return None
            answer = agreed.strip().lower()
            if answer in ("a", "always"):
                self._trusted.add(call.name)
            elif answer not in ("y", "yes"):
                return self.terminal.ask("result: ")
        calling = self.portal.start_task_soon(mcp.call, call)
        with self.terminal.interruptible(lambda: _cancel(calling)), self.terminal.waiting(call.name, SPINNER_DELAY):
            try:
                result = calling.result()
            except CancelledError:
                result = "Error: the user cancelled this call"
        self.terminal.note(f"result: {result}")
        return result

    def _note(self, answer: Answer, started: float, first: float, ended: float) -> None:
        tokens = answer.output_tokens
        if tokens is not None:
            self.statistics.answers += 1
            self.statistics.tokens += tokens
            self.statistics.seconds += ended - started
            self.used = (answer.prompt_tokens or 0) + tokens
            speed = tokens_per_second(tokens, started, first, ended)
            shown = "" if speed is None else f"{speed:.1f} tokens/s, "
            self.terminal.note(f"{tokens} tokens, {shown}first token after {first - started:.2f} s")
        maximum = self.conversation.sampling.get("max_tokens", math.inf)
        if answer.finish_reason == "length" and (tokens is None or tokens < maximum):
            self.terminal.print_error(FULL)
        elif answer.finish_reason == "length":
            self.terminal.note(f"stopped at max_tokens ({maximum})")

    def _is_command(self, line: str) -> bool:
        return line.startswith("/") and _name_and_argument(line)[0] in (*self.commands, *self.aliases)

    def _command(self, line: str) -> None:
        name, argument = _name_and_argument(line)
        name = self.aliases.get(name, name)
        if name not in self.commands:
            hint = did_you_mean(name, [*self.commands, *self.aliases])
            message = f"there is no command /{name}{hint} (to send it as a message, put a space before it)"
            raise PenstockError(Code.NOT_FOUND, message)
        self.commands[name].run(self, argument)


def _name_and_argument(command: str) -> tuple[str, str]:
    name, *argument = command.removeprefix("/").split(maxsplit=1) or [""]
    return name, argument[0].rstrip() if argument else ""
