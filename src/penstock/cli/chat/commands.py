"""Slash commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.core.errors import invalid

from .conversation import FIELDS
from .images import image_url
from .session import Command, Session
from .tools import load_tools


def _help(session: Session, rest: str) -> None:
    for name, command in COMMANDS.items():
        session.terminal.tell(f"{f'/{name} {command.takes}':<22}{command.about}")
    session.terminal.tell('A line that ends with \\ goes on in the next; """ begins and ends several.')


def _image(session: Session, rest: str) -> None:
    if not rest:
        raise invalid("image", "which image? /image FILE or /image URL")
    session.conversation.images.append(image_url(rest.strip("\"'")))
    session.terminal.note("it goes with the next question")


def _tools(session: Session, rest: str) -> None:
    if rest:
        session.conversation.tools = load_tools(_path("tools", rest)) if rest != "none" else []
    for tool in session.conversation.tools:
        function = tool["function"]
        session.terminal.tell(f"{function['name']:<22}{function.get('description', '')}")


def _reasoning(session: Session, rest: str) -> None:
    if rest not in ("", "fold", "show"):
        raise invalid("reasoning", "takes show, fold or nothing")
    if rest:
        session.fold = rest == "fold"
    else:
        session.terminal.tell(session.reasoning or "the last answer has no reasoning")


def _system(session: Session, rest: str) -> None:
    session.conversation.system = rest


def _undo(session: Session, rest: str) -> None:
    session.terminal.note(f"taken back: {session.conversation.undo()}")


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
    "reset": Command("", "begin a new conversation (also /clear)", lambda session, _: session.conversation.clear()),
    "system": Command("TEXT", "set the system prompt, or without TEXT none", _system),
    "image": Command("FILE or URL", "send an image with the next question; a pasted path does so, too", _image),
    "tools": Command("FILE", "let the model call the tools of a JSON file, or of none; without FILE a list", _tools),
    "reasoning": Command(
        "show or fold", "show reasoning as it comes, or not; alone: that of the last answer", _reasoning
    ),
    "undo": Command("", "drop the last question and its answer", _undo),
    "regenerate": Command("", "ask the last question again (also /retry)", lambda session, _: session.ask_again()),
    "set": Command("NAME VALUE", "draw answers differently; without VALUE the model's own, without NAME a list", _set),
    "save": Command("FILE", "write the messages as JSON", _save),
    "load": Command("FILE", "go on with messages that were saved", _load),
    "info": Command("", "the model, tokens and speed", _info),
    "exit": Command("", "leave, as Ctrl-D does", _exit),
}

ALIASES = {"clear": "reset", "retry": "regenerate", "quit": "exit", "bye": "exit"}
"""Other names of commands, which other chats have."""


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
