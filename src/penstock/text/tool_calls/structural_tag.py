"""The structural tag that forces tool calls in guided decoding."""

from __future__ import annotations

from typing import Any

from .format import Schemas, ToolCallFormat


def forced_call_tag(form: ToolCallFormat, tools: Schemas, several: bool) -> dict[str, Any]:
    """A structural tag that allows tool calls alone, in the model's own format.

    Args:
        tools: the tools that may be called.
        several: whether more than one call is allowed.

    Raises ``PenstockError`` (``unsupported``) where the format cannot follow a schema.
    """
    prefix, suffix = form.call_start
    calls = [
        {
            "type": "tag",
            "begin": prefix + form.written_name(name) + suffix,
            "content": form.arguments_format(schema),
            "end": form.call_end,
        }
        for name, schema in tools.items()
    ]
    elements = [
        {"type": "const_string", "value": form.prefix},
        {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": form.separator,
            "at_least_one": True,
            "stop_after_first": not several,
        },
        {"type": "const_string", "value": form.suffix},
    ]
    return {"format": {"type": "sequence", "elements": elements}}
