"""Constraints on tool calls that the model decides to make (``tool_choice`` ``auto``)."""

from __future__ import annotations

import json
from typing import Any, Literal

from penstock.core import GuidedDecodingParams, PenstockError, SamplingParams, ToolCallParams
from penstock.core.guided import MAX_TOOL_CHARACTERS, check_schema
from penstock.core.sampling import EXCLUSIVE
from penstock.frontend.chat_renderer import ResponseFormats
from penstock.serve.models.served_models import ServedModel
from penstock.text import (
    CallFormat,
    ParserConfig,
    ToolCallFormat,
    answer_or_calls_tag,
    call_format,
    triggered_call_tag,
)
from penstock.text.harmony import ENDS, MESSAGE
from penstock.text.tool_calls import HARMONY

from .request import ChatRequest, Function
from .sampling import parameters_of

Level = Literal["off", "function", "schema"]
Format = dict[str, Any]
"""A structural tag format."""


def constrain_tool_calls(
    service: ServedModel,
    request: ChatRequest,
    formats: ResponseFormats,
    sampling: SamplingParams,
    lowered: dict[str, str],
) -> SamplingParams:
    """Return the sampling parameters of a chat, with a constraint on the tool calls that the model may make.

    Args:
        lowered: gets the level of the tools whose calls are less constrained than requested
            (``RequestRecord.tool_levels``).

    Raises ``PenstockError`` for the schema of a tool with ``strict`` that cannot be enforced.
    """
    form = HARMONY if ParserConfig(formats.reasoning, tools=formats.tools).in_channels else formats.tools
    if not request.tools or request.tool_choice not in (None, "auto") or form is None or request.disable_chat_template:
        return sampling
    level = service.gateway.input_processor.tool_strictness
    functions = [tool.function for tool in request.tools]
    if level == "off" and not any(function.strict for function in functions):
        return sampling
    excluded = [name for name in EXCLUSIVE["tool_calls"] if name != "guided_decoding"]
    if conflict := next((name for name in excluded if sampling.has_effect(name)), None):
        lowered["*"] = f"off;{conflict}"
        return sampling
    calls = [
        _call(form, function, f"tools[{i}].function.parameters", level, lowered) for i, function in enumerate(functions)
    ]
    if sum(len(json.dumps(call.arguments)) for call in calls) > MAX_TOOL_CHARACTERS // 2:
        calls = [call_format(form, function.name, None) for function in functions]
        lowered["*"] = "function;tools"
    several = request.parallel_tool_calls is not False
    if sampling.guided_decoding:
        if (answer := _answer_format(sampling.guided_decoding)) is None:
            lowered["*"] = f"off;{sampling.guided_decoding.field}"
            return sampling
        return sampling.replace(
            guided_decoding=_answer_or_calls(form, calls, several, answer, sampling.guided_decoding)
        )
    tag = triggered_call_tag(form, calls, several)
    reasoning, unmarked = formats.reasoning, form.unmarked_calls([call.name for call in calls])
    return sampling.replace(
        tool_calls=ToolCallParams(
            constraint=GuidedDecodingParams(structural_tag=tag, source_field="tools", has_tools=True),
            triggers=form.triggers,
            start_trigger=unmarked.start if unmarked else "",
            escape=unmarked.escape if unmarked else "",
            unknown=unmarked.unknown if unmarked else "",
            reasoning=(reasoning.start_marker, reasoning.end_marker) if reasoning and form is not HARMONY else None,
            header=(ENDS, MESSAGE) if form is HARMONY else None,
            required=any(function.strict for function in functions),
        )
    )


def _call(form: ToolCallFormat, function: Function, field: str, level: Level, lowered: dict[str, str]) -> CallFormat:
    """Format of a tool's calls. Adds the tool to ``lowered`` if its schema cannot be enforced."""
    if not function.strict and (level != "schema" or function.strict is False):
        return call_format(form, function.name, None)
    try:
        parameters = parameters_of(function, field)
        check_schema(field, parameters)
        return call_format(form, function.name, parameters, exact=bool(function.strict))
    except (PenstockError, AttributeError, TypeError, ValueError, RecursionError):
        if function.strict:
            raise
        lowered[function.name] = "function"
        return call_format(form, function.name, None)


def _answer_or_calls(
    form: ToolCallFormat, calls: list[CallFormat], several: bool, answer: Format, constraint: GuidedDecodingParams
) -> GuidedDecodingParams:
    """Constraint of an answer in the format ``answer``, or tool calls."""
    return GuidedDecodingParams(
        structural_tag=answer_or_calls_tag(form, calls, several, answer),
        disable_any_whitespace=constraint.disable_any_whitespace,
        whitespace_pattern=constraint.whitespace_pattern,
        source_field=constraint.field,
        has_tools=True,
    )


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
