"""Constraints on the tool calls that a model decides to make: names of tools, and schemas of arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.core import GuidedDecodingParams, MessageHeader, PenstockError, SamplingParams, ToolCallParams
from penstock.core.errors import invalid
from penstock.core.guided import MAX_TOOL_CHARACTERS, check_schema, clean_schema, disallow_additional_properties
from penstock.core.sampling import EXCLUSIVE
from penstock.text import (
    CallFormat,
    ParserConfig,
    ToolCallFormat,
    answer_or_calls_tag,
    call_format,
    triggered_call_tag,
)
from penstock.text.harmony import ENDS, HEADER_STARTS, MESSAGE
from penstock.text.tool_calls import HARMONY

from .chat_renderer import ResponseFormats

ToolStrictness = Literal["off", "function", "schema"]
"""Values of the option ``tool_strictness``."""
Format = dict[str, Any]
"""A structural tag format."""
MAX_CACHED_TOOLS = 2**20
"""Maximum size of a cached set of functions, bytes of JSON."""
MAX_UNORDERED = 6
"""Maximum number of arguments of a function for which the order is free. A grammar has a rule for each subset."""
MAX_ORDERS = 4096
"""Maximum number of alternatives in all these rules of a request's tools; functions after it have ordered arguments."""


class ToolFunction(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments; None: any arguments."""
    strict: bool | None = None
    """True: the schema must be enforced; False: only the name is; None: the schema is enforced if it can be."""


class ConstrainedCalls(NamedTuple):
    """Sampling parameters with a constraint on tool calls."""

    sampling: SamplingParams
    lowered: dict[str, str] = {}  # noqa: RUF012 - a tuple's default, never written
    """Level of the tools whose calls are less constrained than requested, by name; ``*``: all tools. After the level,
    the field that is the reason may follow."""


class _CallFormats(NamedTuple):
    calls: list[CallFormat]
    lowered: dict[str, str]


def constrain_tool_calls(
    sampling: SamplingParams,
    functions: Sequence[ToolFunction],
    formats: ResponseFormats,
    strictness: ToolStrictness,
    several: bool = True,
) -> ConstrainedCalls:
    """Constrain the tool calls of a chat in which the model may call ``functions``.

    With guided decoding of the answer, the constraint becomes: an answer or tool calls.

    Args:
        formats: formats of the chat template.
        several: allow several calls in an answer.

    Raises ``PenstockError`` for the schema of a function with ``strict`` that cannot be enforced.
    """
    form = HARMONY if ParserConfig(formats.reasoning, tools=formats.tools).in_channels else formats.tools
    is_strict = any(function.strict for function in functions)
    if not functions or form is None or (strictness == "off" and not is_strict):
        return ConstrainedCalls(sampling)
    if not form.constrainable:
        return ConstrainedCalls(sampling, {"*": "off;tool_call_parser"})
    excluded = [name for name in EXCLUSIVE["tool_calls"] if name != "guided_decoding"]
    if conflict := next((name for name in excluded if sampling.has_effect(name)), None):
        return ConstrainedCalls(sampling, {"*": f"off;{conflict}"})
    constraint = sampling.guided_decoding
    if constraint is None:
        encoded = msgspec.json.encode(functions)
        prepare = _tool_call_params if len(encoded) <= MAX_CACHED_TOOLS else _tool_call_params.__wrapped__
        tool_calls, lowered = prepare(encoded, form, reasoning_markers(formats), strictness, several)
        return ConstrainedCalls(sampling.replace(tool_calls=tool_calls), lowered)
    if (answer := _answer_format(constraint)) is None:
        return ConstrainedCalls(sampling, {"*": f"off;{constraint.field}"})
    calls, lowered = _call_formats(form, functions, strictness)
    combined = GuidedDecodingParams(
        structural_tag=answer_or_calls_tag(form, calls, several, answer),
        disable_any_whitespace=constraint.disable_any_whitespace,
        whitespace_pattern=constraint.whitespace_pattern,
        source_field=constraint.field,
        has_tools=True,
    )
    return ConstrainedCalls(sampling.replace(guided_decoding=combined), lowered)


def reasoning_markers(formats: ResponseFormats) -> tuple[str, str] | None:
    """Texts before and after the reasoning; None without reasoning, and for answers in channels."""
    form = formats.reasoning
    return (form.start_marker, form.end_marker) if form and not form.channels else None


@lru_cache(16)
def _tool_call_params(
    encoded: bytes,
    form: ToolCallFormat,
    reasoning: tuple[str, str] | None,
    strictness: ToolStrictness,
    several: bool,
) -> tuple[ToolCallParams, dict[str, str]]:
    """Constraint on the calls of functions, and ``ConstrainedCalls.lowered``. Cached, as agents send the same tools in
    many requests.

    Args:
        encoded: the functions as JSON.
    """
    functions = msgspec.json.decode(encoded, type=list[ToolFunction])
    calls, lowered = _call_formats(form, functions, strictness)
    unmarked = form.unmarked_calls([call.name for call in calls])
    tag = triggered_call_tag(form, calls, several)
    params = ToolCallParams(
        constraint=GuidedDecodingParams(structural_tag=tag, source_field="tools", has_tools=True),
        triggers=form.triggers,
        start_trigger=unmarked.start if unmarked else "",
        escape=unmarked.escape if unmarked else "",
        unknown=unmarked.unknown if unmarked else "",
        reasoning=reasoning,
        header=MessageHeader(ENDS, HEADER_STARTS, MESSAGE) if form is HARMONY else None,
        required=any(function.strict for function in functions),
    )
    return params, lowered


def _call_formats(form: ToolCallFormat, functions: Sequence[ToolFunction], strictness: ToolStrictness) -> _CallFormats:
    """Formats of the calls of functions, and ``ConstrainedCalls.lowered``."""
    lowered: dict[str, str] = {}
    calls, budget = [], MAX_ORDERS
    for i, function in enumerate(functions):
        schema = None
        if function.strict or (strictness == "schema" and function.strict is None):
            try:
                schema = parameters_of(function, f"tools[{i}].function.parameters")
                count = len(schema.get("properties", ()))
                cost = count << count
                any_order = count <= MAX_UNORDERED and cost <= budget
                calls.append(call_format(form, function.name, schema, any_order, exact=bool(function.strict)))
                budget -= cost if any_order else 0
                continue
            except (PenstockError, AttributeError, TypeError, ValueError, RecursionError):
                if function.strict:
                    raise
                lowered[function.name] = "function"
        calls.append(call_format(form, function.name, None))
    if sum(len(json.dumps(call.arguments)) for call in calls) > MAX_TOOL_CHARACTERS // 2:
        return _CallFormats([call_format(form, call.name, None) for call in calls], {"*": "function;tools"})
    return _CallFormats(calls, lowered)


def parameters_of(function: ToolFunction, field: str) -> dict[str, Any]:
    """Return the schema of a function's arguments without annotations.

    Args:
        field: path of the schema in the request.

    Raises ``PenstockError``: ``invalid`` if it is malformed, or no schema of an object, ``unsupported`` if it has
    constraints that ``check_schema`` rejects.
    """
    parameters = {"type": "object"} | clean_schema(field, function.parameters or {})
    if function.strict:
        try:
            parameters = disallow_additional_properties({"properties": {}} | parameters, strict=True)
        except RecursionError as error:
            raise invalid(field, "is nested too deeply: simplify the schema") from error
    if parameters["type"] != "object":
        kind = parameters["type"]
        raise invalid(f"{field}.type", f"must be object for constrained tool calls, is {kind!r:.50}")
    check_schema(field, parameters)
    return parameters


def with_constrained_calls(config: ParserConfig, params: ToolCallParams) -> ParserConfig:
    """Parser configuration for an answer whose tool calls are constrained."""
    tools = config.tools and (replace(config.tools, escape=params.escape) if params.escape else config.tools)
    return replace(config, tools=tools, constrained=True)


def _answer_format(constraint: GuidedDecodingParams) -> Format | None:
    """Structural tag format of a constraint; None if it has no such format."""
    if constraint.json is not None:
        return {"type": "json_schema", "json_schema": json.loads(constraint.json)}
    if constraint.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if constraint.regex is not None:
        return {"type": "regex", "pattern": constraint.regex}
    if constraint.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in constraint.choice]}
    tag = json.loads(constraint.structural_tag) if constraint.structural_tag is not None else {}
    answer = tag.get("format")
    return answer if isinstance(answer, dict) and answer.get("type") != "triggered_tags" else None
