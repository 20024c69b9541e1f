"""Line editor of a chat in a terminal, with history and completion of commands (prompt_toolkit)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter, WordCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.vt100 import Vt100_Output

from penstock.config.user_folders import user_folder

from .session import Command

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
HISTORY = 1000
"""Maximum number of messages in the history file."""


class ChatEditor:
    """Reads messages of one or several lines, and answers to questions, from the terminal.

    A paste is one message. Alt-Enter, a backslash before Enter, and Enter after an opening ``QUOTES`` insert a line
    break; any other Enter ends the message.
    """

    def __init__(self, commands: Mapping[str, Command]) -> None:
        output = Vt100_Output.from_pty(sys.stdout, term=os.environ.get("TERM"))
        output.enable_cpr = False  # a late reply of a slow terminal would be read as keys
        self._messages: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=MORE,
            completer=CommandCompleter(commands),
            complete_while_typing=False,  # it would ignore Tab while it searches
            history=_History(user_folder("XDG_STATE_HOME", ".local/state") / "penstock" / "chat_history"),
            key_bindings=_keys(),
            enable_suspend=True,
            output=output,
        )
        self._answers: PromptSession[str] = PromptSession(enable_suspend=True, output=output)

    def read(self) -> str:
        """Read a message; empty if Ctrl-C cancels it. Raises ``KeyboardInterrupt`` for Ctrl-C, and ``EOFError`` for
        Ctrl-D, on an empty line."""
        try:
            text = self._messages.prompt()
        except KeyboardInterrupt:
            if self._messages.default_buffer.text:
                return ""
            raise
        return text.removeprefix(QUOTES).rstrip().removesuffix(QUOTES) if text.startswith(QUOTES) else text

    def ask(self, question: str) -> str:
        """Read a line after a question; it is not kept. Raises ``KeyboardInterrupt`` and ``EOFError``."""
        return self._answers.prompt(question)


class CommandCompleter(Completer):
    """Completes the names and the arguments of slash commands."""

    def __init__(self, commands: Mapping[str, Command]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        name, space, argument = document.text_before_cursor.partition(" ")
        if not name.startswith("/"):
            return
        if not space:
            for each, entry in self._commands.items():
                if each.startswith(name[1:]):
                    yield Completion(f"/{each}", start_position=-len(name), display_meta=entry.about)
        elif command := self._commands.get(name[1:]):
            completer = self._paths if command.takes.startswith("FILE") else WordCompleter(command.words)
            yield from completer.get_completions(Document(argument), complete_event)


class _History(FileHistory):
    """Messages of this chat and earlier ones, in a file that only the user can read; not kept if that fails."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path
        with suppress(OSError):  # the home folder may be read-only
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)
            path.chmod(0o600)

    def load_history_strings(self) -> Iterable[str]:
        """Return the last ``HISTORY`` messages, newest first, and remove the others from the file."""
        try:
            messages = iter(super().load_history_strings())
        except OSError:
            return []
        kept = list(islice(messages, HISTORY))
        if next(messages, None) is not None:
            with suppress(OSError):
                os.truncate(self._path, 0)
            for message in reversed(kept):
                self.store_string(message)
        return kept

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def _keys() -> KeyBindings:
    """Key bindings that differ from those of prompt_toolkit."""
    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None  # the text already contains the completion
        elif buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        elif _in_quotes(buffer):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def alt_enter(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _in_quotes(buffer: Buffer) -> bool:
    text = buffer.text
    return text.startswith(QUOTES) and not text.removeprefix(QUOTES).rstrip().endswith(QUOTES)
