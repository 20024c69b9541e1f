"""Calls that must be made: a structural tag for guided decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .formats import ToolCallFormat


def forced_call_tag(form: ToolCallFormat, tools: Mapping[str, Mapping[str, Any]], several: bool) -> dict[str, Any]:
    """A structural tag of nothing but calls, as the model writes them by itself.

    Args:
        tools: names with the schemas of their arguments.
        several: whether more than one call may come.
    """
    before, after = form.begin
    calls = []
    for name, arguments in tools.items():
        told = json.dumps(name, ensure_ascii=False) if '"name"' in before else name
        content = {"type": "json_schema", "json_schema": arguments, "separators": [", ", ": "]}
        calls.append({"type": "tag", "begin": before + told + after, "content": content, "end": form.end})
    elements = [
        {"type": "const_string", "value": form.before},
        {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": form.between,
            "at_least_one": True,
            "stop_after_first": not several,
        },
        {"type": "const_string", "value": form.after},
    ]
    return {"format": {"type": "sequence", "elements": elements}}
