"""Operations and schemas of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

FAILURES = {
    "400": "the request is invalid or not supported",
    "401": "an API key is missing or wrong",
    "404": "the model does not exist",
    "408": "the request took too long",
    "413": "the body is too large",
    "429": "too many requests are waiting; try again later",
    "503": "the engine is starting or stopping; try again later",
}
OBJECT: dict[str, Any] = {"type": "object"}
"""Schema of responses that only the dialect's original server documents."""
STRING: dict[str, Any] = {"type": "string"}


def reference(schema: type, prefix: str = "") -> dict[str, Any]:
    """Return a reference to a schema in ``components``."""
    return {"$ref": f"#/components/schemas/{prefix}{schema.__name__}"}


def operation(
    answer: dict[str, Any] | None,
    failure: dict[str, Any],
    request: dict[str, Any] | None = None,
    streamed: bool = False,
    query: Iterable[str] = (),
) -> dict[str, Any]:
    """Return an operation of the OpenAPI document.

    Args:
        answer: schema of the answer; None if it is not JSON.
        failure: schema of errors.
        request: schema of the body; None for a request without a body.
        streamed: the answer may be a stream of server-sent events.
        query: names of query parameters.
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
    """Return JSON schemas by name.

    Args:
        prefix: prefix of the names, as other dialects may have schemas with the same name.
        strict: requests with unknown fields are rejected.
    """
    template = f"#/components/schemas/{prefix}{{name}}"
    _, result = msgspec.json.schema_components(list(schemas), ref_template=template)
    for schema in result.values():
        if not strict and schema.get("additionalProperties") is False:
            del schema["additionalProperties"]
    return {f"{prefix}{name}": schema for name, schema in result.items()}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
