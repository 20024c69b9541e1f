"""Conversion of requests of Text Generation Inference to those of OpenAI."""

from __future__ import annotations

from typing import Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .requests import GenerateRequest, Grammar, Parameters

MAX_NEW_TOKENS = 100
"""Its default."""
NAMES = {
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "truncate": "truncate_prompt_tokens",
    "adapter_id": "model",
}
SAMPLING = ("temperature", "top_k", "top_p")


def completion_fields(request: GenerateRequest, streamed: bool) -> dict[str, Any]:
    """A request as OpenAI's completion. Raises ``PenstockError`` for what is not supported, and contradictions."""
    given = request.parameters
    if given.watermark:
        raise PenstockError(Code.UNSUPPORTED, "watermark: is not supported", "watermark")
    if given.typical_p not in (None, 1):
        raise PenstockError(Code.UNSUPPORTED, "typical_p: is not supported; use top_p or top_k", "typical_p")
    if streamed:
        whole_only = {"best_of": (given.best_of or 1) > 1, "decoder_input_details": given.decoder_input_details}
        for name, asked in whole_only.items():
            if asked:
                raise invalid(name, "is for answers that are not streamed")
    fields = {to: value for name, to in NAMES.items() if (value := getattr(given, name)) not in (None, [])}
    fields |= _sampling(given)
    fields["max_tokens"] = given.max_new_tokens or MAX_NEW_TOKENS
    fields["logprobs"] = given.top_n_tokens or 0
    fields["include_stop_str_in_output"] = True
    if given.decoder_input_details:
        fields["prompt_logprobs"] = 0
    if given.grammar:
        fields |= _constraint(given.grammar)
    return fields | {"prompt": request.inputs}


def _sampling(given: Parameters) -> dict[str, Any]:
    """Defaults are the dialect's own, not the model's."""
    values = {name: getattr(given, name) for name in SAMPLING if getattr(given, name) is not None}
    if not given.do_sample and "top_k" not in values and all(value == 1 for value in values.values()):
        values["temperature"] = 0.0
    result: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    if given.repetition_penalty is not None:
        del result["repetition_penalty"]
    if (given.best_of or 1) > 1:
        if values.get("temperature") == 0:
            raise invalid("best_of", "requires sampling (do_sample)")
        result["best_of"] = given.best_of
    return result | values


def _constraint(grammar: Grammar) -> dict[str, Any]:
    if grammar.type == "regex":
        if not isinstance(grammar.value, str):
            raise invalid("grammar.value", "is no regular expression")
        return {"guided_regex": grammar.value}
    schema = grammar.value
    if grammar.type == "json_schema":
        if not isinstance(schema, dict) or "schema" not in schema:
            raise invalid("grammar.value", "needs an object with schema")
        schema = schema["schema"]
    return {"guided_json": schema}
