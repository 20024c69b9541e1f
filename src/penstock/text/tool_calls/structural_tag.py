"""Structural tags that force tool calls in guided decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class CallFormat(NamedTuple):
    """A tool that may be called."""

    name: str
    arguments: dict[str, Any]
    """Structural tag format of the arguments."""


def call_format(
    form: ToolCallFormat, name: str, schema: Mapping[str, Any] | None, any_order: bool = False, exact: bool = False
) -> CallFormat:
    """Return the format of a tool's calls.

    Args:
        schema: JSON Schema of the arguments; None: any arguments.
        any_order: allow any order of the arguments, if the format does.
        exact: without it, a schema that cannot be enforced is replaced by any arguments.

    Raises ``PenstockError`` (``unsupported``) if the tool call format cannot enforce the schema.
    """
    otherwise = form.any_arguments_format()
    if schema is None:
        return CallFormat(name, otherwise)
    content = form.unordered_arguments_format(schema) if any_order else form.arguments_format(schema)
    if exact:
        return CallFormat(name, content)
    return CallFormat(name, {"type": "fallback", "name": name, "content": content, "otherwise": otherwise})


def triggered_call_tag(form: ToolCallFormat, calls: Sequence[CallFormat], several: bool) -> dict[str, Any]:
    """Return a structural tag for the text from a trigger of the format to the end of the answer: tool calls, or, after
    the beginning of an unmarked call that is none or that names an unknown tool, any text.

    Args:
        calls: tools that may be called.
        several: True: one or more calls; False: exactly one call.
    """
    marked = _calls(form, form.heads(), calls, several)
    unmarked = form.unmarked_calls([call.name for call in calls])
    if not unmarked:
        return {"format": marked}
    first = [
        {"type": "sequence", "elements": [_regex(unmarked.heads[call.name]), call.arguments, _text(form.call_end)]}
        for call in calls
    ]
    elements: list[dict[str, Any]] = [{"type": "or", "elements": first}]
    if several:
        following = [_text(form.separator + form.call_start[0]), {"type": "or", "elements": _tags(form, calls)}]
        elements.append({"type": "star", "content": {"type": "sequence", "elements": following}})
    elements.append(_text(form.suffix))
    texts = [_regex(f"{beginning}(?s:.*)") for beginning in (unmarked.escape, unmarked.unknown)]
    return {"format": {"type": "or", "elements": [marked, {"type": "sequence", "elements": elements}, *texts]}}


def answer_or_calls_tag(
    form: ToolCallFormat, calls: Sequence[CallFormat], several: bool, answer: dict[str, Any]
) -> dict[str, Any]:
    """Return a structural tag for an answer in the format ``answer``, or tool calls; arguments as for
    ``triggered_call_tag``."""
    heads = [form.prefix + form.call_start[0]]
    if form.answer_start:
        start = {"type": "const_string", "value": form.answer_start}
        answer = {"type": "sequence", "elements": [start, answer]}
    return {"format": {"type": "or", "elements": [answer, _calls(form, heads, calls, several)]}}


def _calls(form: ToolCallFormat, heads: list[str], calls: Sequence[CallFormat], several: bool) -> dict[str, Any]:
    """Format of one or more calls. ``heads``: alternative texts before the first name."""
    elements = [
        {"type": "or", "elements": list(map(_text, dict.fromkeys(heads)))},
        {
            "type": "tags_with_separator",
            "tags": _tags(form, calls),
            "separator": form.separator + form.call_start[0],
            "at_least_one": True,
            "stop_after_first": form.single or not several,
        },
        _text(form.suffix),
    ]
    return {"type": "sequence", "elements": elements}


def _tags(form: ToolCallFormat, calls: Sequence[CallFormat]) -> list[dict[str, Any]]:
    """Formats of the calls from the name on."""
    before, tags = form.before_arguments(), []
    for call in calls:
        begin, content = form.written_name(call.name), call.arguments
        if before["type"] == "const_string":  # one text, which errors of the schema quote
            begin += before["value"]
        else:
            content = {"type": "sequence", "elements": [before, content]}
        tags.append({"type": "tag", "begin": begin, "content": content, "end": form.call_end})
    return tags


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}
