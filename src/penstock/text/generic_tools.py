"""Tools for models whose chat template has none: described in the system message, with calls and results as text.

The calls are those of ``tool_calls.json_formats.GENERIC``: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

NO_TOOLS = (
    "tools: this model's chat template does not support tools; with --tool-call-parser generic the server describes "
    "them in the system message"
)
"""Error message for tools that the chat template does not support."""
INTRODUCTION = (
    "You can call functions. Each line is a function: its name, its purpose and the JSON schema of its arguments.\n"
)
CALLS = (
    "\nTo call a function, write a JSON object with its name and its arguments:\n<tool_call>\n"
    '{"name": "name of the function", "arguments": {"name of an argument": "value"}}\n</tool_call>\n'
    "Write one such block for each call. The results follow in <tool_response> blocks. Call functions only if needed; "
    "otherwise answer without these blocks."
)


def tool_instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """Describe tools, given in OpenAI's format, and the form of their calls."""
    fields = ("name", "description", "parameters")
    functions = [{name: tool["function"][name] for name in fields if name in tool["function"]} for tool in tools]
    lines = [json.dumps(function, ensure_ascii=False) for function in functions]
    return INTRODUCTION + "\n".join(lines) + "\n" + CALLS


def generic_messages(messages: Messages, instructions: str = "", in_system: bool = True) -> list[dict[str, Any]]:
    """Convert a chat with tools to one that any chat template can render.

    Calls are appended to the content of their message. Results become messages of the user, joined with the user's next
    message, as many templates require that roles alternate.

    Args:
        instructions: text about the tools; "": none.
        in_system: True: add the instructions to the system message; False: to the first message of the user.
    """
    converted: list[dict[str, Any]] = []
    has_results = False
    """True if the last message is one of results."""
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            content = _joined(_joined("<tool_response>", content), "</tool_response>")
        if has_results and role in ("tool", "user"):
            converted[-1]["content"] = _joined(converted[-1]["content"], content)
        elif calls := message.get("tool_calls"):
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            converted.append(rest | {"content": _joined(content, "\n".join(map(_call, calls)))})
        else:
            converted.append({"role": "user", "content": content} if role == "tool" else dict(message))
        has_results = role == "tool"
    if instructions:
        _add_instructions(converted, instructions, in_system)
    return converted


def _add_instructions(messages: list[dict[str, Any]], instructions: str, in_system: bool) -> None:
    first = next((message for message in messages if message["role"] == "user"), None)
    if in_system or first is None:
        if messages and messages[0]["role"] in ("system", "developer"):
            messages[0]["content"] = _joined(messages[0].get("content") or "", instructions, "\n\n")
        else:
            messages.insert(0, {"role": "system", "content": instructions})
    else:
        first["content"] = _joined(instructions, first.get("content") or "", "\n\n")


def _call(call: Mapping[str, Any]) -> str:
    """Text of an entry of ``tool_calls``."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {written}}}\n</tool_call>'


def _joined(first: Any, second: Any, separator: str = "\n") -> Any:
    """Join two contents, each a text or a list of parts."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{separator}{second}"
    before, after = ([{"type": "text", "text": part}] if isinstance(part, str) else [*part] for part in (first, second))
    return [*before, {"type": "text", "text": separator}, *after]
