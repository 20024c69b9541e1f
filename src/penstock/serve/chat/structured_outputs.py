"""Constraints of guided decoding, from the request's fields: ``response_format``, ``guided_…``, ``tool_choice`` …"""

from __future__ import annotations

import json
from typing import Any

from penstock.core import GuidedDecodingParams
from penstock.core.errors import invalid
from penstock.core.guided import as_json, check_schema, closed
from penstock.text import ToolCallFormat, forced_call_tag

from .request import ChatRequest, GenerationRequest, NamedTool, ResponseFormat

GUIDED = ("json", "regex", "choice", "grammar", "whitespace_pattern")


def form_of(request: GenerationRequest) -> GuidedDecodingParams | None:
    """The constraint of a request; None for none. Raises ``PenstockError`` (``invalid``) for several."""
    given = {name: value for name in GUIDED if (value := getattr(request, f"guided_{name}")) is not None}
    if request.structural_tag is not None:
        given["structural_tag"] = request.structural_tag
    if request.guided_decoding_disable_any_whitespace:
        given["disable_any_whitespace"] = True
    sources = {
        "guided_decoding": given,
        "structured_outputs": _structured(request),
        "response_format": _format(request),
    }
    named = [name for name, form in sources.items() if form.keys() - {"disable_any_whitespace", "whitespace_pattern"}]
    if len(named) > 1:
        raise invalid(named[1], f"does not go with {named[0]}: an answer has one form")
    wanted = {name: value for form in sources.values() for name, value in form.items()}
    if not named:
        if wanted:
            raise invalid("guided_whitespace_pattern", "goes with a form only")
        return None
    asked_as = named[0] if named[0] != "guided_decoding" else ""
    return GuidedDecodingParams(**wanted, asked_as=asked_as)


def calls_of(request: ChatRequest, form: ToolCallFormat | None) -> GuidedDecodingParams | None:
    """The constraint of a forced tool call (``tool_choice``), in the model's own format; None where none is forced.

    Raises ``PenstockError`` (``invalid``) where there is no such tool.
    """
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    known = {}
    for i, tool in enumerate(request.tools or ()):
        parameters = {"type": "object"} | (tool.function.parameters or {})
        if tool.function.strict:
            parameters = _closed(f"tools[{i}].function.parameters", {"properties": {}} | parameters)
        if parameters["type"] != "object":
            raise invalid(f"tools[{i}].function.parameters.type", "must be object where a call is forced")
        if tool.function.name in known:
            raise invalid(f"tools[{i}].function.name", f"{tool.function.name!r} comes twice")
        check_schema(f"tools[{i}].function.parameters", parameters)
        known[tool.function.name] = parameters
    if not known:
        raise invalid("tool_choice", "goes with tools only")
    one = choice.function.name if isinstance(choice, NamedTool) else ""
    if one and one not in known:
        raise invalid("tool_choice", f"{one!r} is none of the tools: {', '.join(known)}")
    several = not one and request.parallel_tool_calls is not False
    wanted = {one: known[one]} if one else known
    assert form, "or tools would have been refused"
    return GuidedDecodingParams(structural_tag=forced_call_tag(form, wanted, several), asked_as="tools")


def _structured(request: GenerationRequest) -> dict[str, Any]:
    form = request.structured_outputs
    if form is None:
        return {}
    given = {name: value for name in form.__struct_fields__ if (value := getattr(form, name)) is not None}
    if given.pop("disable_additional_properties", False) and form.json is not None:
        field = "structured_outputs.json"
        given["json"] = _closed(field, json.loads(as_json(field, form.json)), strict=False)
    return given


def _format(request: GenerationRequest) -> dict[str, Any]:
    form: ResponseFormat | None = request.response_format
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"json_object": True}
    if form.type == "structural_tag":
        given = {name: getattr(form, name) for name in ("structures", "triggers", "format")}
        return {"structural_tag": {name: value for name, value in given.items() if value is not None}}
    if form.json_schema is None:
        raise invalid("response_format.json_schema", "is missing")
    if form.json_schema.schema is None:
        return {"json_object": True}
    schema = form.json_schema.schema
    return {"json": _closed("response_format.json_schema.schema", schema) if form.json_schema.strict else schema}


def _closed(field: str, schema: Any, strict: bool = True) -> Any:
    """A schema whose objects have no other properties than those that it lists, and with ``strict`` all of them, as in
    OpenAI's strict mode. Raises ``PenstockError`` (``invalid``) where it is nested too deeply."""
    try:
        return closed(schema, strict)
    except RecursionError as error:
        raise invalid(field, "is nested too deeply") from error
