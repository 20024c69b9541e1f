"""Structural tags that force tool calls in guided decoding."""

from __future__ import annotations

from typing import Any

from .format import Schemas, ToolCallFormat


def forced_call_tag(form: ToolCallFormat, tools: Schemas, several: bool) -> dict[str, Any]:
    """Return a structural tag that allows only tool calls, in the model's format.

    Args:
        tools: argument schemas of the tools that may be called.
        several: True: one or more calls; False: exactly one call.

    Raises ``PenstockError`` (``unsupported``) if the format cannot enforce a schema.
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
