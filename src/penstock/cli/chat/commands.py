"""Slash commands of ``penstock chat``."""

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
    rows = [(f"/{name} {command.takes}", command.about) for name, command in COMMANDS.items()]
    width = max(len(usage) for usage, _ in rows) + 2
    for usage, about in rows:
        session.terminal.print_line(f"{usage:<{width}}{about}")
    session.terminal.print_line('Alt-Enter, or \\ before Enter, inserts a line break; """ encloses several lines.')


def _image(session: Session, rest: str) -> None:
    if not rest:
        raise invalid("image", "needs an image: /image FILE or /image URL")
    session.conversation.images.append(image_url(rest.strip("\"'")))
    session.terminal.note("the image will be sent with the next message")


def _tools(session: Session, rest: str) -> None:
    if rest:
        tools = load_tools(_path("tools", rest)) if rest != "none" else []
        session.conversation.tools = [*tools, *(session.mcp.definitions if session.mcp else ())]
    for tool in session.conversation.tools:
        function = tool["function"]
        session.terminal.print_line(f"{function['name']:<22}{function.get('description', '')}")


def _reasoning(session: Session, rest: str) -> None:
    if rest not in ("", "fold", "show"):
        raise invalid("reasoning", f"must be show, fold or empty, is {rest!r}")
    if rest:
        session.fold = rest == "fold"
    else:
        session.terminal.print_line(session.reasoning or "the last answer has no reasoning")


def _system(session: Session, rest: str) -> None:
    session.conversation.system = rest


def _undo(session: Session, rest: str) -> None:
    session.terminal.note(f"removed: {session.conversation.undo()}")


def _set(session: Session, rest: str) -> None:
    name, _, text = rest.partition(" ")
    if name:
        session.conversation.set(name, _value(text.strip()) if text.strip() else None)
        return
    for field in FIELDS:
        value = session.conversation.sampling.get(field)
        session.terminal.print_line(
            f"{field:<28}{'default' if value is None else json.dumps(value, ensure_ascii=False)}"
        )


def _save(session: Session, rest: str) -> None:
    session.conversation.save(_path("save", rest))


def _load(session: Session, rest: str) -> None:
    session.conversation.load(_path("load", rest))


def _info(session: Session, rest: str) -> None:
    statistics, limit = session.statistics, f" of {session.backend.context}" if session.backend.context else ""
    used = "unknown" if session.used is None else f"{session.used}{limit} tokens after the last answer"
    session.terminal.print_line(f"{'model':<10}{session.backend.about}")
    session.terminal.print_line(f"{'context':<10}{used}")
    session.terminal.print_line(
        f"{'answers':<10}{statistics.answers}, {statistics.tokens} tokens, {statistics.speed:.1f} tokens/s"
    )


def _exit(session: Session, rest: str) -> None:
    session.leaving = True


COMMANDS = {
    "help": Command("", "show this help", _help),
    "reset": Command("", "start a new conversation (also /clear)", lambda session, _: session.conversation.clear()),
    "system": Command("TEXT", "set the system prompt; without TEXT, remove it", _system),
    "image": Command("FILE or URL", "send an image with the next message; pasting a path also works", _image),
    "tools": Command("FILE", "load tools from a JSON file (none: remove them); without FILE, list all tools", _tools),
    "reasoning": Command(
        "show or fold",
        "show or hide reasoning; without argument, print the last answer's reasoning",
        _reasoning,
        ("show", "fold"),
    ),
    "undo": Command("", "remove the last message and its answer", _undo),
    "regenerate": Command("", "answer the last message again (also /retry)", lambda session, _: session.ask_again()),
    "set": Command(
        "NAME VALUE", "set a sampling parameter; without VALUE, reset it; without NAME, list all", _set, FIELDS
    ),
    "save": Command("FILE", "save the messages as JSON", _save),
    "load": Command("FILE", "continue with saved messages", _load),
    "info": Command("", "show model, tokens and speed", _info),
    "exit": Command("", "exit (also Ctrl-D)", _exit),
}

ALIASES = {"clear": "reset", "retry": "regenerate", "quit": "exit", "bye": "exit"}
"""Commands by their names in other chat programs."""


def _value(text: str) -> Any:
    """Parse JSON; other text is returned unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _path(command: str, rest: str) -> Path:
    if not rest:
        raise invalid(command, f"needs a file: /{command} FILE")
    return Path(rest).expanduser()
