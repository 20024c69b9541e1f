"""Type conversion of JSON values, as in each dialect's original server. The reference is pydantic."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pydantic
import pytest
from msgspec import inspect
from serving import Served

from penstock.core import PenstockError
from penstock.serve.chat.request import ChatRequest
from penstock.serve.dialects.anthropic.schema import MessagesRequest
from penstock.serve.dialects.llama_server.schema import CompletionRequest as LlamaRequest
from penstock.serve.dialects.openai import REQUESTS
from penstock.serve.dialects.paddlenlp.schema import Request as PaddleNLPRequest
from penstock.serve.dialects.responses.schema import ResponsesRequest
from penstock.serve.http.body import RequestBody, convert
from penstock.serve.http.unknown_fields import UnknownFields

MESSAGES = [{"role": "user", "content": "Hi"}]
REQUIRED = {
    "prompt": "a",
    "messages": MESSAGES,
    "input": "a",
    "query": "a",
    "documents": ["a"],
    "tokens": [1],
    "lora_name": "a",
    "lora_path": "/a",
    "model": "a",
    "max_tokens": 5,
}
VALUES = [
    *[4, 4.0, 4.5, -1, 0, 1, 2, 0.0, 1.0, 10**20, True, False],
    *["4", "4.0", "4.", "04", " 4 ", "+4", "-1", "1_000", "1__0", "4.5", "4e0", "1e2", ".5", "0x4", "٤", "4\n"],
    *["true", "True", "TRUE", "yes", "on", "t", "y", "false", "off", "no", "n", "f", "0", "1", " true", "null", ""],
    *["abc", "nan", "inf", "1e400", "9" * 100, [], ["4"], {}, {"a": 1}],
]
SCHEMAS = [*REQUESTS, MessagesRequest, ResponsesRequest, PaddleNLPRequest]


def scalar_fields(schema: type[RequestBody]) -> Iterator[tuple[str, inspect.Type]]:
    """Yield (name, type) of each supported field with a number or boolean as its type, also if it can be null."""
    for field in inspect.type_info(schema).fields:  # type: ignore[attr-defined]
        if field.encode_name in schema.reading.unsupported:
            continue
        kinds = [*field.type.types] if isinstance(field.type, inspect.UnionType) else [field.type]
        kinds = [kind.type if isinstance(kind, inspect.Metadata) else kind for kind in kinds]
        scalars = [kind for kind in kinds if not isinstance(kind, inspect.NoneType)]
        if len(scalars) == 1 and isinstance(scalars[0], inspect.IntType | inspect.FloatType | inspect.BoolType):
            yield field.encode_name, scalars[0]


def by_pydantic(kind: inspect.Type, value: Any) -> Any:
    """Return the value that pydantic converts to, or ``...`` if pydantic or the field's bounds reject it."""
    plain = {inspect.IntType: int, inspect.FloatType: float, inspect.BoolType: bool}[type(kind)]
    try:
        result = pydantic.TypeAdapter(plain).validate_json(json.dumps(value))
    except pydantic.ValidationError:
        return ...
    bounds = {name: getattr(kind, name, None) for name in ("ge", "gt", "le", "lt")}
    outside = (
        (bounds["ge"] is not None and result < bounds["ge"])
        or (bounds["gt"] is not None and result <= bounds["gt"])
        or (bounds["le"] is not None and result > bounds["le"])
        or (bounds["lt"] is not None and result >= bounds["lt"])
    )
    return ... if outside or not math.isfinite(result) else result


def by_penstock(schema: type[RequestBody], name: str, value: Any, lax: Any) -> Any:
    """Return the value that Penstock converts to, or ``...`` if it is rejected by an error that names the field."""
    required = {field.encode_name for field in msgspec.structs.fields(schema) if field.required}
    body = {key: REQUIRED[key] for key in required} | {name: value}
    try:
        return getattr(convert(body, schema, UnknownFields(), lax), name)
    except PenstockError as error:
        assert error.failure.field.partition("[")[0].partition(".")[0] == name, error
        return ...


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_scalars_are_converted_as_by_pydantic(schema: type[RequestBody]) -> None:
    for name, kind in scalar_fields(schema):
        for value in VALUES:
            expected = by_pydantic(kind, value)
            if len(str(value)) > 64:
                expected = ...  # every field rejects values of more than 64 characters
            found = by_penstock(schema, name, value, "pydantic")
            assert (found, type(found)) == (expected, type(expected)), (name, value)


@pytest.mark.parametrize("schema", [*REQUESTS, LlamaRequest], ids=lambda schema: schema.__name__)
def test_strict_dialects_convert_only_between_numbers(schema: type[RequestBody]) -> None:
    """With ``lax=""`` nothing is converted, with ``lax="numbers"`` only integers to floats and back."""
    for name, kind in scalar_fields(schema):
        for value in ("1", "1.0", "true", " 1 "):
            assert by_penstock(schema, name, value, "") is ... and by_penstock(schema, name, value, "numbers") is ...
        if isinstance(kind, inspect.IntType):
            assert by_penstock(schema, name, 1.0, "") is ... and by_penstock(schema, name, 1.0, "numbers") == 1
            assert (
                by_penstock(schema, name, 1.5, "numbers") is ... and by_penstock(schema, name, True, "numbers") is ...
            )


def test_nested_values_are_converted_and_strings_are_kept() -> None:
    body = {
        "messages": [{"role": "user", "content": "4", "name": "true"}],
        "stream_options": {"include_usage": "true"},
        "logit_bias": {"5": "1.5"},
        "stop": ["4", "true"],
        "stop_token_ids": ["7", 8.0],
        "early_stopping": "true",
        "max_tokens": "12",
        "response_format": {"type": "json_schema", "json_schema": {"name": "4", "schema": {"minimum": "4"}}},
        "tools": [{"type": "function", "function": {"name": "a", "parameters": {"maximum": "4", "x": "true"}}}],
    }
    request = convert(body, ChatRequest, UnknownFields(), "pydantic")
    assert request.messages[0].content == "4" and request.messages[0].name == "true"
    assert request.stream_options and request.stream_options.include_usage is True
    assert request.logit_bias == {5: 1.5} and request.stop == ["4", "true"] and request.stop_token_ids == [7, 8]
    assert request.early_stopping is True and request.max_tokens == 12
    assert request.response_format and request.response_format.json_schema
    assert request.response_format.json_schema.schema == {"minimum": "4"}
    assert request.tools and request.tools[0].function.parameters == {"maximum": "4", "x": "true"}


def test_prompt_of_strings_is_not_converted() -> None:
    (schema,) = (schema for schema in REQUESTS if schema.__name__ == "CompletionRequest")
    request: Any = convert({"prompt": ["4", "true"], "max_tokens": "3"}, schema, UnknownFields(), "pydantic")
    assert request.prompt == ["4", "true"] and request.max_tokens == 3


LAX = [
    ("/v1/completions", {"prompt": "Once", "max_tokens": 4.0, "temperature": "0", "stream": "false"}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": "4", "temperature": "0", "logprobs": "1"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": "4", "temperature": "0.0", "stream": "no"}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": "16", "stream": "false"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": "4", "model": "default", "stream": "false"}),
    ("/generate", {"prompt": "Once", "max_tokens": "4", "temperature": "0"}),
    ("/tokenize", {"prompt": "Once", "add_special_tokens": "true"}),
    ("/v1/chat/completions", {"text": "Hi", "max_dec_len": "4", "stream": "false", "topp": "0"}),
    ("/api/generate", {"model": "default", "prompt": "Once", "stream": False, "options": {"num_predict": 4.0}}),
    ("/completion", {"prompt": "Once", "n_predict": 4.0}),
]
STRICT = [
    ("/api/generate", {"model": "default", "prompt": "Once", "stream": "false"}),
    ("/api/generate", {"model": "default", "prompt": "Once", "stream": False, "options": {"num_predict": "4"}}),
    ("/api/generate", {"model": "default", "prompt": "Once", "stream": False, "options": {"top_k": "4"}}),
    ("/completion", {"prompt": "Once", "n_predict": "4"}),
    ("/generate", {"inputs": "Once", "parameters": {"max_new_tokens": "4"}}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": "4.5"}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 4, "stream": "perhaps"}),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--num-gpu-blocks-override", "100", "--max-num-seqs", "8") as served:
        yield served


@pytest.mark.parametrize(("path", "body"), LAX)
def test_request_with_strings_for_numbers_is_answered(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(served.url.removesuffix("/v1") + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize(("path", "body"), STRICT)
def test_request_rejected_by_original_server_is_rejected(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(served.url.removesuffix("/v1") + path, json=body, timeout=60)
    assert 400 <= answer.status_code < 500, answer.text


def test_stream_given_as_string_is_streamed(served: Served) -> None:
    body = {"prompt": "Once", "max_tokens": "2", "stream": "true"}
    answer = httpx.post(f"{served.url}/completions", json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream") and "[DONE]" in answer.text
