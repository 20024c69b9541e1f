"""Operations and schemas of the OpenAPI document, for all dialects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

FAILURES = {
    "400": "the request is invalid, or not supported",
    "401": "an API key is missing or wrong",
    "404": "the model does not exist",
    "408": "the request took too long",
    "413": "the body is too large",
    "429": "too many requests wait; try again soon",
    "503": "the engine is starting or stopping; try again soon",
}
OBJECT: dict[str, Any] = {"type": "object"}
"""Schema of responses that only the other system's documentation describes."""
STRING: dict[str, Any] = {"type": "string"}


def reference(schema: type, prefix: str = "") -> dict[str, Any]:
    """A reference to a schema of ``components``."""
    return {"$ref": f"#/components/schemas/{prefix}{schema.__name__}"}


def operation(
    answer: dict[str, Any] | None,
    failure: dict[str, Any],
    request: dict[str, Any] | None = None,
    streamed: bool = False,
    query: Iterable[str] = (),
) -> dict[str, Any]:
    """An operation of the OpenAPI document.

    Args:
        answer, failure, request: schemas; None for an answer without JSON, and for a request without a body.
        streamed: whether the answer may be a stream of server-sent events.
        query: names of parameters that the URL may have.
    """
    answers: dict[str, Any] = {"200": {"description": "the answer"}}
    if answer:
        answers["200"]["content"] = _json(answer)
        if streamed:
            answers["200"]["content"]["text/event-stream"] = {"schema": STRING}
    failures = {code: {"description": description, "content": _json(failure)} for code, description in FAILURES.items()}
    described: dict[str, Any] = {"responses": answers | failures}
    if request:
        described["requestBody"] = {"required": True, "content": _json(request)}
    if query:
        described["parameters"] = [{"name": name, "in": "query", "schema": STRING} for name in query]
    return described


def components(schemas: Iterable[type], prefix: str = "", strict: bool = False) -> dict[str, Any]:
    """Schemas by name.

    Args:
        prefix: put before the names, which other dialects may use, too.
        strict: whether requests with unknown fields are refused.
    """
    template = f"#/components/schemas/{prefix}{{name}}"
    _, result = msgspec.json.schema_components(list(schemas), ref_template=template)
    for schema in result.values():
        if not strict and schema.get("additionalProperties") is False:
            del schema["additionalProperties"]
    return {f"{prefix}{name}": schema for name, schema in result.items()}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
