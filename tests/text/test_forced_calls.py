"""Forced tool calls: the parser of a format reads back every call that the format's structural tag allows."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock import PenstockError
from penstock.serve.chat.request import TOOL_NAME
from penstock.text import (
    ParserConfig,
    ReasoningStage,
    ResponseParser,
    ToolCallFormat,
    forced_call_tag,
    reasoning_format,
)
from penstock.text.tool_calls.formats import HARMONY, TOOL_CALL_FORMATS

NAMES = st.from_regex(TOOL_NAME.removeprefix("^").removesuffix("$"), fullmatch=True)
KEYS = st.one_of(NAMES, st.text(st.characters(codec="utf-8"), min_size=1, max_size=12))
VALUES = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    st.sampled_from(["", "</parameter>", "</arg_value>", "\n", " x ", "5", "null", "{", '"', "a, b)"]),
)


def only_text(part: dict[str, Any]) -> str:
    """The only text allowed by a structural tag with constant values."""
    match part["type"]:
        case "const_string":
            return str(part["value"])
        case "sequence":
            return "".join(map(only_text, part["elements"]))
        case "or":
            (element,) = part["elements"]
            return only_text(element)
        case "tag":
            return part["begin"] + only_text(part["content"]) + part["end"]
        case "tags_with_separator":
            return str(part["separator"]).join(map(only_text, part["tags"]))
        case "json_schema":
            return json.dumps(constant(part["json_schema"]), ensure_ascii=False)
    raise AssertionError(part["type"])


def constant(schema: dict[str, Any]) -> Any:
    if "properties" in schema:
        return {name: constant(inner) for name, inner in schema["properties"].items()}
    return schema["const"]


def schema_of(arguments: dict[str, str]) -> dict[str, Any]:
    properties = {name: {"type": "string", "const": value} for name, value in arguments.items()}
    return {"type": "object", "properties": properties, "required": list(arguments)}


@pytest.mark.parametrize("call_format", TOOL_CALL_FORMATS, ids=lambda call_format: str(call_format.parsers[0]))
@given(calls=st.dictionaries(NAMES, st.dictionaries(KEYS, VALUES, max_size=3), min_size=1, max_size=3), data=st.data())
@example(calls={"user-profile/update": {"a": "b"}, "a:1": {}, "ns:do/it": {"user-id": "7"}, "2fa.send": {}}, data=None)
@settings(max_examples=60, deadline=None)
def test_forced_call_is_read_back_by_parser(
    call_format: ToolCallFormat, calls: dict[str, dict[str, str]], data: st.DataObject | None
) -> None:
    schemas = {name: schema_of(arguments) for name, arguments in calls.items()}
    try:
        tag = forced_call_tag(call_format, schemas, several=True)
    except PenstockError as error:
        assert "tools" in error.failure.message
        return
    text = only_text(tag["format"])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8))) if data else []
    reasoning = (
        reasoning_format("openai_gptoss", "") if call_format is HARMONY else None
    )  # this parser also parses Harmony's calls
    parser = ResponseParser(ParserConfig(reasoning, ReasoningStage.BEFORE, tools=call_format, schemas=schemas))
    for start, end in itertools.pairwise([0, *cuts, len(text)]):
        parser.add(text[start:end], last=False)
    parser.add("", last=True)
    assert parser.message.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in parser.message.tool_calls] == list(calls.items())


@pytest.mark.parametrize("call_format", TOOL_CALL_FORMATS, ids=lambda call_format: str(call_format.parsers[0]))
def test_every_allowed_tool_name_can_be_forced(call_format: ToolCallFormat) -> None:
    for name in ("user-profile/update", "a:1", "2fa", "a.b", "_", "x" * 128):
        forced_call_tag(call_format, {name: schema_of({"city": "Paris"})}, several=False)
