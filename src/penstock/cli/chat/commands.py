"""Slash commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.core.errors import invalid

from .conversation import FIELDS
from .session import Command, Session


def _help(session: Session, rest: str) -> None:
    for name, command in COMMANDS.items():
        session.terminal.tell(f"{f'/{name} {command.takes}':<22}{command.about}")
    session.terminal.tell('A line that ends with \\ goes on in the next; """ begins and ends several.')


def _clear(session: Session, rest: str) -> None:
    session.conversation.clear()


def _system(session: Session, rest: str) -> None:
    session.conversation.system = rest


def _undo(session: Session, rest: str) -> None:
    session.terminal.note(f"taken back: {session.conversation.undo()}")


def _retry(session: Session, rest: str) -> None:
    session.ask(session.conversation.last_question())


def _set(session: Session, rest: str) -> None:
    name, _, text = rest.partition(" ")
    if name:
        session.conversation.set(name, _value(text.strip()) if text.strip() else None)
        return
    for field in FIELDS:
        value = session.conversation.sampling.get(field)
        session.terminal.tell(f"{field:<28}{'default' if value is None else json.dumps(value, ensure_ascii=False)}")


def _save(session: Session, rest: str) -> None:
    session.conversation.save(_path("save", rest))


def _load(session: Session, rest: str) -> None:
    session.conversation.load(_path("load", rest))


def _info(session: Session, rest: str) -> None:
    statistics, of = session.statistics, f" of {session.backend.context}" if session.backend.context else ""
    used = "unknown" if session.used is None else f"{session.used}{of} tokens after the last answer"
    session.terminal.tell(f"{'model':<10}{session.backend.about}")
    session.terminal.tell(f"{'context':<10}{used}")
    session.terminal.tell(
        f"{'answers':<10}{statistics.answers}, {statistics.tokens} tokens, {statistics.speed:.1f} tokens/s"
    )


def _exit(session: Session, rest: str) -> None:
    session.leaving = True


COMMANDS = {
    "help": Command("", "show this", _help),
    "clear": Command("", "begin a new conversation", _clear),
    "system": Command("TEXT", "set the system prompt, or without TEXT none", _system),
    "undo": Command("", "drop the last question and its answer", _undo),
    "retry": Command("", "ask the last question again", _retry),
    "set": Command("NAME VALUE", "draw answers differently; without VALUE the model's own, without NAME a list", _set),
    "save": Command("FILE", "write the messages as JSON", _save),
    "load": Command("FILE", "go on with messages that were saved", _load),
    "info": Command("", "the model, tokens and speed", _info),
    "exit": Command("", "leave, as Ctrl-D does", _exit),
}


def _value(text: str) -> Any:
    """The value of JSON text, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _path(command: str, rest: str) -> Path:
    if not rest:
        raise invalid(command, f"which file? /{command} FILE")
    return Path(rest).expanduser()
