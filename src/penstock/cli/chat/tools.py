"""Tools of a chat: their definitions in a file, and the command that runs them."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.json_files import read_json_file


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for."""

    id: str
    name: str
    arguments: str
    """A JSON object, as the model wrote it."""

    def as_dict(self) -> dict[str, Any]:
        """An entry of an assistant message's ``tool_calls``."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Function(msgspec.Struct, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    function: Function
    type: str = "function"


def load_tools(path: Path) -> list[dict[str, Any]]:
    """The tools of a JSON file: a list of OpenAI's tools, or of their functions alone, or one of these.

    Raises ``PenstockError`` (``invalid``) where it has none.
    """
    given = read_json_file(path, "tools")
    entries = given if isinstance(given, list) else [given]
    wrapped = [{"function": one} if isinstance(one, dict) and "function" not in one else one for one in entries]
    try:
        tools: list[dict[str, Any]] = msgspec.to_builtins(msgspec.convert(wrapped, list[Tool]))
    except msgspec.ValidationError as error:
        raise invalid("tools", f"{path} has no tools in OpenAI's form: {error}") from error
    return tools


def run_tool(command: str, call: ToolCall) -> str:
    """Run ``COMMAND NAME`` with the call's arguments on standard input; returns what it printed, for the model, with
    its exit status and what it complained of where it failed.

    Raises ``PenstockError`` (``not_found``) where it cannot be started.
    """
    try:
        done = subprocess.run(
            [*shlex.split(command), call.name], input=call.arguments.encode(), capture_output=True, check=False
        )
    except (OSError, ValueError) as error:
        raise PenstockError(Code.NOT_FOUND, f"{command} cannot be run: {error}") from error
    output = done.stdout.decode(errors="replace").strip()
    if done.returncode == 0:
        return output
    return f"exit status {done.returncode}\n{output}\n{done.stderr.decode(errors='replace').strip()}".strip()
