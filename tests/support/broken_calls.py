"""Random tool calls that are broken: wrong names and arguments, early ends, nested markers, in every format."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.text import ToolCallFormat
from penstock.text.markers import partial_match_length
from penstock.text.tool_calls.gemma_calls import GemmaFormat
from penstock.text.tool_calls.nested_calls import NestedFormat
from penstock.text.tool_calls.pythonic_calls import PythonicFormat
from penstock.text.tool_calls.values import type_name
from penstock.text.tool_calls.xml_calls import XMLFormat

Schema = dict[str, Any]
WORDS = [
    "Paris",
    "x",
    "",
    "日本",
    "e\u0301",
    'say "hi"',
    "a\\b",
    "line\nbreak",
    "5",
    "null",
    "{",
    "}",
    "</",
    "😀",
    "a, b)",
]
VALUES: list[Any] = [*WORDS, 5, -1, 3.5, True, None, [1, "a"], {"city": 5}, [], {}]


def tool(name: str, schema: Schema | None, **fields: Any) -> dict[str, Any]:
    """Entry of a request's ``tools``."""
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


def schema(properties: Schema, required: Sequence[str] = (), **fields: Any) -> Schema:
    """Schema of arguments without additional properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **fields,
    }


TEXT, SHORT, NUMBER = {"type": "string"}, {"type": "string", "maxLength": 8}, {"type": "integer"}
SCHEMAS: list[Schema] = [
    schema({"city": TEXT, "days": NUMBER}, ["city"]),
    schema({"city": SHORT, "unit": {"enum": ["C", "F"]}}, ["city", "unit"]),
    schema({}),
    schema({"flag": {"type": "boolean"}, "ratio": {"type": "number", "minimum": 0}, "note": TEXT}, ["flag"]),
    schema({"items": {"type": "array", "items": NUMBER, "maxItems": 3}, "x": {"type": ["string", "null"]}}, ["items"]),
    schema(
        {"place": {"$ref": "#/$defs/place"}, "when": {"anyOf": [NUMBER, {"const": "now"}]}},
        ["place"],
        **{"$defs": {"place": schema({"lat": {"type": "number"}, "lon": {"type": "number"}}, ["lat", "lon"])}},
    ),
    schema({"kind": {"const": "a"}, "deep": schema({"deeper": schema({"x": SHORT}, ["x"])}, ["deeper"])}, ["deep"]),
]
"""Schemas that every format enforces."""
NAMES = ["get_weather", "get", "getTime", "search_web", "ns.do_it", "set-alarm", "f", "f2"]


def write_call(form: ToolCallFormat, head: str, name: str, arguments: Mapping[str, Any], rng: random.Random) -> str:
    """Text of a call, from its head on, without suffix."""
    before = rng.choice(_texts(form.before_arguments()))
    return head + form.written_name(name) + before + write_arguments(form, arguments) + form.call_end


def _texts(part: dict[str, Any]) -> list[str]:
    return [part["value"]] if "value" in part else [each["value"] for each in part["elements"]]


def write_arguments(form: ToolCallFormat, arguments: Mapping[str, Any]) -> str:
    """Text of a call's arguments, as a model of the format writes them."""
    if isinstance(form, XMLFormat):
        (begin, key_end), around = form.parameter, "\n" if form.trim_newlines else ""
        before = f"{form.line}{form.value_start}" if form.value_start else ""
        kinds = dict(form.kinds)
        return "".join(
            f"{begin}{key}{key_end}{kinds.get(type_name(value), '')}{before}{around}{_plain(value)}{around}"
            f"{form.value_end}{form.line}"
            for key, value in arguments.items()
        )
    if isinstance(form, GemmaFormat):
        texts = {key: f"{form.quote}{value}{form.quote}" for key, value in arguments.items() if isinstance(value, str)}
        return ",".join(f"{key}:{texts.get(key) or _plain(value)}" for key, value in arguments.items())
    if isinstance(form, NestedFormat):
        mark = form.mark
        return "".join(f"{mark}<{key}>{_plain(value)}{mark}</{key}>" for key, value in arguments.items())
    if isinstance(form, PythonicFormat):
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return json.dumps(arguments, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def broken_answer(form: ToolCallFormat, tools: Mapping[str, Schema], rng: random.Random) -> str:
    """An answer with tool calls, most of which are broken in one or several ways."""
    heads = form.heads()
    if unmarked := form.unmarked_calls(list(tools)):
        heads.append({"{": '{"name": ', "[": "["}[unmarked.start])
        heads.append({"{": '{"type": "function", "name":', "[": "[ "}[unmarked.start])
    head = rng.choice(heads)
    if form.single:  # Harmony: the head of a message precedes the recipient
        head = rng.choice(["<|channel|>commentary ", "<|start|>assistant ", " ", ""]) + head
    elif head in form.heads() and rng.random() < 0.5:
        head = rng.choice(["Let me see. ", "I'll call <b>it</b>:\n", "<tool", "{}", "  \n"]) + head
    texts = []
    for i in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice(list(tools))
        properties = list(tools[name].get("properties", {}))
        arguments = {key: rng.choice(VALUES) for key in properties if rng.random() < 0.7}
        if rng.random() < 0.3:
            arguments[rng.choice(["town", "x y", "", "city", '"'])] = rng.choice(VALUES)
        if rng.random() < 0.3:
            name = rng.choice(["get_wether", name + "x", name[:-1], name.upper(), "", "日本", f"functions.{name}"])
        start = head if not i else form.separator + form.call_start[0]
        texts.append(write_call(form, start, name, arguments, rng))
    text = "".join(texts) + rng.choice([form.suffix, "", " and so on", "\n\n"])
    for _ in range(rng.choice([0, 0, 1, 2])):
        text = _mutated(text, form, rng)
    return text


def _mutated(text: str, form: ToolCallFormat, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    match rng.choice(["cut", "drop", "insert", "marker", "space"]):
        case "cut":
            return text[:at]
        case "drop":
            return text[:at] + text[at + rng.randint(1, 4) :]
        case "marker":
            if any(partial_match_length(text[:at], marker) for marker in form.start_markers):
                return text  # a special token within a marker: the marker is text for the parser
            markers = (*form.start_markers, *form.end_markers, *form.marker_tokens)
            if form.allow_unmarked:  # a marker in JSON is text, and removed from the content
                markers = ()
            markers = (*markers, form.call_end, "<|im_end|>")
            return text[:at] + rng.choice(markers) + text[at:]
        case "space":
            return text.replace(" ", rng.choice(["", "  ", "\n"]), 3)
    return text[:at] + rng.choice([*WORDS, '"', "'", ",", "]", ")", ">"]) + text[at:]


def encode_in_pieces(encode: Any, text: str, rng: random.Random) -> list[int]:
    """Token ids of a text, cut at random places so that tokens begin at unusual places."""
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.choice([0, 0, 2, 8])))
    return [token for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for token in encode(text[a:b])]
