"""Constraints for guided decoding."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from .errors import Code, PenstockError, invalid

MAX_CHARACTERS = 65_536
"""Characters of a schema, pattern or grammar."""
MAX_CHOICES = 4096
STRICT = {"lenient": False, "json_allowed_escapes": '"\\bfnrt'}
"""Options of llguidance: refuse what it does not support, and write no ``\\u`` in strings, which could hide a
property's name."""
OF_JSON = ("json", "json_object", "structural_tag")
FORMS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class GuidedDecodingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One constraint on the whole output.

    Raises ``PenstockError`` (``invalid``) unless exactly one is given, of the right type. Unsupported schemas are found
    when the engine compiles the constraint.
    """

    json: Any = None
    """A JSON Schema (draft 2020-12): text, an object, or a pydantic model."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression for the whole output, in the syntax of Rust's ``regex``, without lookaround."""
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar in Lark's or GBNF's notation."""
    structural_tag: Any = None
    """Free text with tagged parts that follow schemas, ``{"structures": [{"begin", "schema", "end"}], "triggers"}``, or
    a combination, ``{"format": {"type", …}}``, as in vLLM and xgrammar; text or an object."""
    disable_any_whitespace: bool = False
    """JSON without whitespace between its parts."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between the parts of JSON."""
    asked_as: str = ""
    """The request's field, for errors, where it is not ``guided_…``."""

    def __post_init__(self) -> None:
        for name, field in (("json", "guided_json"), ("structural_tag", "structural_tag")):
            if (value := getattr(self, name)) is not None:
                msgspec.structs.force_setattr(self, name, as_json(self.asked_as or field, value))
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise invalid("guided_decoding", f"give one of {', '.join(FORMS)}; there is {names}")
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        if self.choice is not None and (not self.choice or not all(isinstance(c, str) and c for c in self.choice)):
            raise invalid("guided_choice", "must hold at least one text, and none that is empty")
        if len(self.choice or ()) > MAX_CHOICES:
            raise invalid("guided_choice", f"must hold at most {MAX_CHOICES} texts", MAX_CHOICES)
        for name in ("regex", "grammar", "whitespace_pattern"):
            if (value := getattr(self, name)) is not None and not isinstance(value, str):
                raise invalid(f"guided_{name}", f"must be text, is {type(value).__name__}")
        try:
            msgspec.json.encode([self.regex, self.grammar, self.whitespace_pattern, self.choice])
        except UnicodeEncodeError as error:
            raise invalid(self.field, f"is not valid text: {error}") from error
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise invalid("guided_whitespace_pattern", "does not go with disable_any_whitespace")
        if (self.disable_any_whitespace or self.whitespace_pattern is not None) and given[0] not in OF_JSON:
            raise invalid("guided_whitespace_pattern", f"goes with JSON only, not with {given[0]}")
        if self.characters > MAX_CHARACTERS:
            raise invalid(self.field, f"must have at most {MAX_CHARACTERS} characters", MAX_CHARACTERS)

    @property
    def field(self) -> str:
        """The request's field that holds the constraint."""
        if self.asked_as:
            return self.asked_as
        form = next(name for name in FORMS if getattr(self, name) not in (None, False))
        return form if form == "structural_tag" else f"guided_{form}"

    @property
    def of_json(self) -> bool:
        """Whether the constraint is about JSON."""
        return any(getattr(self, name) not in (None, False) for name in OF_JSON)

    @property
    def characters(self) -> int:
        texts = (
            self.json,
            self.regex,
            self.grammar,
            self.structural_tag,
            self.whitespace_pattern,
            *(self.choice or ()),
        )
        return sum(len(text) for text in texts if text)


def closed(schema: Any, strict: bool = False) -> Any:
    """A schema with ``additionalProperties: false`` for objects that do not give it.

    Parts of ``allOf`` are left open, as each lists some of one object's properties.

    Args:
        strict: also require all listed properties, as OpenAI's strict schemas do.
    """
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name, part in schema.items():
        if name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(part, dict):
            found[name] = {key: closed(inner, strict) for key, inner in part.items()}
        elif name in ("anyOf", "oneOf", "prefixItems") and isinstance(part, list):
            found[name] = [closed(inner, strict) for inner in part]
        elif name in ("items", "additionalProperties"):
            found[name] = closed(part, strict)
    listed, required = schema.get("properties"), schema.get("required") or []
    alone = not schema.keys() & {"allOf", "$ref", "unevaluatedProperties"}
    if alone and isinstance(listed, dict) and (strict or (listed and listed.keys() >= set(required))):
        found.setdefault("additionalProperties", False)
        if strict:
            found["required"] = [*listed, *(name for name in required if name not in listed)]
    return found


def as_json(field: str, given: Any) -> str:
    """A schema as JSON text, in which integral numbers are written as integers.

    Raises ``PenstockError`` (``invalid``) for anything but a JSON object, its text, or a pydantic model.
    """
    if isinstance(given, type) and hasattr(given, "model_json_schema"):
        given = given.model_json_schema()
    try:
        found = json.loads(given if isinstance(given, str) else json.dumps(given), parse_float=_number)
        if isinstance(found, bool):
            found = {} if found else {"not": {}}
        text = json.dumps(found)
        check_schema(field, found)
    except (ValueError, TypeError, RecursionError) as error:
        raise invalid(field, f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise invalid(field, "must be a JSON object")
    return text


def check_schema(field: str, part: Any) -> None:
    """Raises ``PenstockError`` (``unsupported``) for keywords that llguidance would relax silently.

    ``minProperties``: where names are open, a name may be written twice and is counted twice; so it cannot exceed the
    number of required properties. Control characters: only ``\\u`` can write them.
    """
    if isinstance(part, dict):
        least, required = part.get("minProperties"), part.get("required")
        if isinstance(least, int) and least > (len(required) if isinstance(required, list) else 0):
            words = "minProperties beyond the properties that are required by name"
            raise PenstockError(Code.UNSUPPORTED, f"{field}: cannot be kept to: {words}", field)
    if isinstance(part, str) and any(c < " " and c not in "\b\f\n\r\t" for c in part):
        raise PenstockError(Code.UNSUPPORTED, f"{field}: cannot be kept to: control characters in strings", field)
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        check_schema(field, inner)


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number
