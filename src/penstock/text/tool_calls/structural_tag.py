"""The structural tag that forces tool calls in guided decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .formats import ToolCallFormat


def forced_call_tag(form: ToolCallFormat, tools: Mapping[str, Mapping[str, Any]], several: bool) -> dict[str, Any]:
    """A structural tag that allows tool calls alone, in the model's own format.

    Args:
        tools: name → JSON schema of the arguments.
        several: whether more than one call is allowed.
    """
    prefix, suffix = form.call_start
    calls = []
    for name, arguments in tools.items():
        written = json.dumps(name, ensure_ascii=False) if prefix.endswith('": ') else name  # a value of JSON
        content = {"type": "json_schema", "json_schema": arguments, "separators": [", ", ": "]}
        calls.append({"type": "tag", "begin": prefix + written + suffix, "content": content, "end": form.call_end})
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
