"""Conversion of request fields to sampling parameters and guided decoding constraints."""

from __future__ import annotations

import json
from typing import Any

from penstock.core import GuidedDecodingParams, SamplingParams
from penstock.core.errors import invalid
from penstock.core.guided import disallow_additional_properties, schema_to_json
from penstock.frontend.chat_renderer import ResponseFormats
from penstock.frontend.tool_calls import (
    ConstrainedCalls,
    ToolFunction,
    ToolStrictness,
    constrain_tool_calls,
    parameters_of,
)
from penstock.text import ToolCallFormat, forced_call_tag

from .request import ChatRequest, GenerationRequest, JsonSchema, NamedTool, ResponseFormat

SHARED_FIELDS = (
    "n best_of use_beam_search length_penalty early_stopping temperature top_p top_k min_p presence_penalty "
    "frequency_penalty repetition_penalty seed logit_bias allowed_token_ids bad_words min_tokens stop "
    "stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens prompt_logprobs "
    "temp_scaled_logprobs top_p_normalized_logprobs"
).split()
"""Fields with the same name in ``SamplingParams``."""
GUIDED_FIELDS = ("json", "regex", "choice", "grammar", "whitespace_pattern")
OTHER_NAMES = {"json_schema": "json", "regex": "regex", "grammar": "grammar", "ebnf": "grammar"}
"""Constraint by field of llama-server or SGLang."""
RESPONSE_FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "json_object": ("json", ("schema", "value")),
    "json_schema": ("json", ("json_schema", "schema")),
    "json": ("json", ("value", "schema")),
    "regex": ("regex", ("value", "pattern")),
    "grammar": ("grammar", ("grammar",)),
    "structural_tag": ("structural_tag", ("structures", "triggers", "format")),
    "text": ("", ()),
}
"""Constraint and allowed fields by type of a response format."""


def sampling_of(request: GenerationRequest, defaults: SamplingParams, **overrides: Any) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        defaults: values of absent fields.
        overrides: values of fields that chats and completions name differently.
    """
    given = {name: value for name in SHARED_FIELDS if (value := getattr(request, name)) is not None}
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        if name in given:
            given[name] = (given[name],) if isinstance(given[name], str) else tuple(given[name])
    if request.bad_words_token_ids is not None:
        bad_words = request.bad_words_token_ids
        given["bad_word_ids"] = tuple((word,) if isinstance(word, int) else tuple(word) for word in bad_words)
    if (constraint := guided_decoding_of(request)) is not None:
        given["guided_decoding"] = constraint
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "requires stream: set it to true")
    if given.get("top_p") == 0:
        given |= {"top_p": 1.0, "top_k": 1}
    if request.use_beam_search:  # ignore the checkpoint's defaults for sampling
        defaults = defaults.replace(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    return defaults.replace(**given, **overrides)


def chat_sampling(request: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a chat. Raises ``PenstockError`` (``invalid``) for conflicting fields."""
    max_tokens = {value for value in (request.max_tokens, request.max_completion_tokens) if value is not None}
    if len(max_tokens) > 1:
        raise invalid("max_completion_tokens", "differs from max_tokens; set only one of them")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "requires logprobs: set it to true")
    budgets = {value for value in (request.reasoning_max_tokens, request.thinking_token_budget) if value is not None}
    if len(budgets) > 1:
        raise invalid("thinking_token_budget", "differs from reasoning_max_tokens; set only one of them")
    budget = budgets.pop() if budgets else -1
    overrides = {
        "max_tokens": max_tokens.pop() if max_tokens else None,
        "reasoning_max_tokens": budget if budget >= 0 else None,
        "response_max_tokens": request.response_max_tokens,
    }
    return sampling_of(
        request, defaults, **overrides, logprobs=(request.top_logprobs or 0) if request.logprobs else None
    )


def guided_decoding_of(request: GenerationRequest) -> GuidedDecodingParams | None:
    """Return the guided decoding parameters of a request; None: the request has no constraint.

    Raises ``PenstockError`` (``invalid``) for several constraints, and for a malformed response format.
    """
    given = {name: value for name in GUIDED_FIELDS if (value := getattr(request, f"guided_{name}")) is not None}
    if request.structural_tag is not None:
        given["structural_tag"] = request.structural_tag
    if request.guided_decoding_disable_any_whitespace:
        given["disable_any_whitespace"] = True
    sources = {
        "guided_decoding": given,
        "structured_outputs": _from_structured_outputs(request),
        "response_format": _from_response_format(request.response_format),
        **{name: {kind: value} for name, kind in OTHER_NAMES.items() if (value := getattr(request, name))},
    }
    constraints = [
        name for name, source in sources.items() if source.keys() - {"disable_any_whitespace", "whitespace_pattern"}
    ]
    if len(constraints) > 1:
        raise invalid(constraints[1], f"cannot be combined with {constraints[0]}: only one constraint is allowed")
    params = {name: value for source in sources.values() for name, value in source.items()}
    if not constraints:
        if params:
            raise invalid("guided_whitespace_pattern", "requires a JSON constraint: set guided_json")
        return None
    source_field = constraints[0] if constraints[0] != "guided_decoding" else ""
    return GuidedDecodingParams(**params, source_field=source_field)


def forced_tool_call(request: ChatRequest, tool_format: ToolCallFormat | None) -> GuidedDecodingParams | None:
    """Return the guided decoding parameters of a forced tool call (``tool_choice``); None: no call is forced.

    Args:
        tool_format: the model's tool call format.

    Raises ``PenstockError`` (``invalid``) if the named tool is not defined, or a tool's schema is invalid.
    """
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    known = {}
    for i, tool in enumerate(request.tools or ()):
        function = tool.function
        parameters = parameters_of(
            ToolFunction(function.name, function.parameters, function.strict), f"tools[{i}].function.parameters"
        )
        if tool.function.name in known:
            raise invalid(f"tools[{i}].function.name", f"{tool.function.name!r} is defined twice: use unique names")
        known[tool.function.name] = parameters
    if not known:
        raise invalid("tool_choice", "requires tools")
    forced = choice.function.name if isinstance(choice, NamedTool) else ""
    if forced and forced not in known:
        raise invalid("tool_choice", f"{forced!r} is not one of the tools: {', '.join(known)}")
    parallel = not forced and request.parallel_tool_calls is not False
    tools = {forced: known[forced]} if forced else known
    assert tool_format, "otherwise the tools would have been rejected"
    tag = forced_call_tag(tool_format, tools, parallel)
    return GuidedDecodingParams(structural_tag=tag, source_field="tools", has_tools=True)


def constrain_calls(
    request: ChatRequest, sampling: SamplingParams, formats: ResponseFormats, strictness: ToolStrictness
) -> ConstrainedCalls:
    """Constrain the tool calls that the model may make on its own (``tool_choice`` ``auto``).

    Args:
        formats: formats of the chat template.
    """
    if not request.tools or request.tool_choice not in (None, "auto") or request.disable_chat_template:
        return ConstrainedCalls(sampling)
    functions = [ToolFunction(one.function.name, one.function.parameters, one.function.strict) for one in request.tools]
    return constrain_tool_calls(sampling, functions, formats, strictness, request.parallel_tool_calls is not False)


def _from_structured_outputs(request: GenerationRequest) -> dict[str, Any]:
    outputs = request.structured_outputs
    if outputs is None:
        return {}
    given = {name: value for name in outputs.__struct_fields__ if (value := getattr(outputs, name)) is not None}
    if given.pop("disable_additional_properties", False) and outputs.json is not None:
        field = "structured_outputs.json"
        given["json"] = _restrict(field, json.loads(schema_to_json(field, outputs.json)), strict=False)
    return given


def _from_response_format(form: ResponseFormat | None) -> dict[str, Any]:
    """Return the constraint of a response format. Raises ``PenstockError`` (``invalid``) for a missing field, or a
    field that is not allowed with the type."""
    if form is None:
        return {}
    constraint, fields = RESPONSE_FORMATS[form.type]
    given = {
        name: value for name in form.__struct_fields__ if name != "type" and (value := getattr(form, name)) is not None
    }
    if other := next((name for name in given if name not in fields), None):
        raise invalid(f"response_format.{other}", f"is not allowed with type {form.type}")
    if form.type == "text":
        return {}
    if form.type == "structural_tag":
        return {"structural_tag": given}
    if len(given) > 1:
        raise invalid("response_format", f"has both {' and '.join(given)}: set only one")
    if not given:
        if form.type == "json_object":
            return {"json_object": True}
        raise invalid(f"response_format.{fields[0]}", f"is missing; type {form.type} requires it")
    ((name, value),) = given.items()
    if isinstance(value, JsonSchema):
        if value.schema is None:
            return {"json_object": True}
        field = "response_format.json_schema.schema"
        return {"json": _restrict(field, value.schema) if value.strict else value.schema}
    if constraint == "regex" and not isinstance(value, str):
        raise invalid(f"response_format.{name}", f"must be a string with type regex, is {type(value).__name__}")
    return {constraint: value}


def _restrict(field: str, schema: Any, strict: bool = True) -> Any:
    """Disallow unlisted properties in all objects of a schema; with ``strict``, also require all listed properties, as
    in OpenAI's strict mode. Raises ``PenstockError`` (``invalid``) if the schema is nested too deeply."""
    try:
        return disallow_additional_properties(schema, strict)
    except RecursionError as error:
        raise invalid(field, "is nested too deeply: simplify the schema") from error
