"""Parameters of guided decoding, and checks of their schemas."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from .errors import Code, PenstockError, invalid
from .json_schema import drop_annotations
from .named_parameters import NamedParameters

MAX_CHARACTERS = 65_536
"""Maximum characters of a schema, regular expression or grammar."""
WHITESPACE_FACTOR = 4
"""Maximum ratio of a schema's characters with and without insignificant whitespace; a longer text is not parsed."""
MAX_TOOL_CHARACTERS = 2**22
"""Maximum characters of the schemas of all tools of a request."""
MAX_CHOICES = 4096
"""Maximum number of entries of ``choice``."""
LLGUIDANCE_OPTIONS = {"lenient": False, "json_allowed_escapes": '"\\bfnrt'}
"""Options of llguidance: reject unsupported keywords, and do not generate ``\\u`` escapes, which could disguise a
property name."""
GuidedBackend = Literal["auto", "llguidance", "guidance", "xgrammar", "outlines", "lm-format-enforcer", "off"]
"""Guided decoding backends of vLLM and FastDeploy. All values except ``off`` select llguidance."""
JSON_CONSTRAINTS = ("json", "json_object", "structural_tag")
"""Constraints for which the output contains JSON."""
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Fields of ``GuidedDecodingParams`` that are mutually exclusive."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokenizer's data from which guided decoding builds token masks."""

    tokenizer: str
    """Content of a ``tokenizer.json``."""
    eos: list[int]
    """End-of-sequence token ids, at least one."""


class GuidedDecodingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=NamedParameters):
    """A constraint on the whole output.

    Raises ``PenstockError`` (``invalid``) unless exactly one constraint is given, of the right type. Most unsupported
    schemas are only rejected later, when the engine compiles the constraint.
    """

    json: Any = None
    """A JSON Schema (draft 2020-12): text, an object, or a pydantic model."""
    json_object: bool = False
    """Allow any JSON object."""
    regex: str | None = None
    """A regular expression for the whole output, in the syntax of Rust's ``regex``, without lookaround."""
    choice: tuple[str, ...] | None = None
    """Allowed outputs."""
    grammar: str | None = None
    """A context-free grammar in Lark or GBNF syntax."""
    structural_tag: Any = None
    """Structural tags of vLLM and xgrammar, as JSON text or an object: free text with tagged parts that follow schemas
    (``{"structures": [{"begin", "schema", "end"}], "triggers"}``), or ``{"format": {"type", …}}``."""
    disable_any_whitespace: bool = False
    """Generate JSON without whitespace between tokens."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between JSON tokens."""
    source_field: str = ""
    """Name of the request's field in error messages; empty: ``guided_…``."""
    has_tools: bool = False
    """The structural tag contains tool calls."""

    def __post_init__(self) -> None:
        limit = MAX_TOOL_CHARACTERS if self.has_tools else MAX_CHARACTERS
        for name, field in (("json", "guided_json"), ("structural_tag", "structural_tag")):
            value = getattr(self, name)
            if value is not None and not (self.has_tools and isinstance(value, str)):  # decoded: checked already
                text = schema_to_json(self.source_field or field, value, name == "json", limit)
                msgspec.structs.force_setattr(self, name, text)
        given = self._given
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise invalid(
                self.source_field or "guided_decoding", f"set exactly one of {', '.join(CONSTRAINTS)}; given: {names}"
            )
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        if isinstance(self.choice, str):
            raise invalid(self._name("choice"), f"must be a list of strings, is the string {self.choice!r:.50}")
        if self.choice is not None and (not self.choice or not all(isinstance(c, str) and c for c in self.choice)):
            raise invalid(self._name("choice"), f"must be one or more non-empty strings, is {list(self.choice)!r:.100}")
        if (count := len(self.choice or ())) > MAX_CHOICES:
            raise invalid(self._name("choice"), f"must have at most {MAX_CHOICES} entries, has {count}", MAX_CHOICES)
        for name in ("regex", "grammar", "whitespace_pattern"):
            if (value := getattr(self, name)) is not None and not isinstance(value, str):
                raise invalid(self._name(name), f"must be a string, is {type(value).__name__}")
        try:
            msgspec.json.encode([self.regex, self.grammar, self.whitespace_pattern, self.choice])
        except UnicodeEncodeError as error:
            raise invalid(self.field, f"is not valid text: {error}") from error
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise invalid(self._name("whitespace_pattern"), "cannot be combined with disable_any_whitespace")
        if (self.disable_any_whitespace or self.whitespace_pattern is not None) and given[0] not in JSON_CONSTRAINTS:
            raise invalid(self._name("whitespace_pattern"), f"requires a JSON constraint, not {given[0]}")
        if (length := self.characters) > limit:
            raise invalid(self.field, f"must have at most {limit} characters, has {length}", limit)

    def _name(self, option: str) -> str:
        """Name of an option in error messages."""
        return f"{self.source_field}.{option}" if self.source_field else f"guided_{option}"

    @property
    def field(self) -> str:
        """Name of the request's field that holds the constraint."""
        if self.source_field:
            return self.source_field
        (constraint,) = self._given
        return constraint if constraint == "structural_tag" else f"guided_{constraint}"

    @property
    def is_json(self) -> bool:
        """True if the output contains JSON, to which the whitespace options apply."""
        return self._given[0] in JSON_CONSTRAINTS

    @property
    def _given(self) -> list[str]:
        """Names of the constraints that are set: exactly one after ``__post_init__``."""
        return [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]

    @property
    def characters(self) -> int:
        """Number of characters of the constraint and its whitespace pattern."""
        texts = (self.json, self.regex, self.grammar, self.structural_tag, self.whitespace_pattern)
        return sum(len(text) for text in (*texts, *(self.choice or ())) if text)


def disallow_additional_properties(schema: Any, strict: bool = False) -> Any:
    """Copy a schema, with ``additionalProperties: false`` in objects that do not set it.

    Subschemas of ``allOf`` are left unchanged: each lists only some of an object's properties.

    Args:
        strict: also require all listed properties, as OpenAI's strict schemas do.
    """
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name, part in schema.items():
        if name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(part, dict):
            result[name] = {key: disallow_additional_properties(inner, strict) for key, inner in part.items()}
        elif name in ("anyOf", "oneOf", "prefixItems") and isinstance(part, list):
            result[name] = [disallow_additional_properties(inner, strict) for inner in part]
        elif name in ("items", "additionalProperties"):
            result[name] = disallow_additional_properties(part, strict)
    properties, required = schema.get("properties"), schema.get("required") or []
    combined = bool(schema.keys() & {"allOf", "$ref", "unevaluatedProperties"})
    lists_all = isinstance(properties, dict) and (strict or (properties and properties.keys() >= set(required)))
    if lists_all and not combined:
        assert isinstance(properties, dict)
        result.setdefault("additionalProperties", False)
        if strict:
            result["required"] = [*properties, *(name for name in required if name not in properties)]
    return result


def schema_to_json(field: str, schema: Any, is_schema: bool = True, limit: int = MAX_CHARACTERS) -> str:
    """Encode a schema as JSON text, with integral numbers as integers.

    Args:
        field: name of the request's field, for errors.
        schema: a JSON object, its text, or a pydantic model.
        is_schema: remove annotations (``drop_annotations``); False for a structural tag, which contains schemas.
        limit: maximum number of characters without insignificant whitespace.

    Raises ``PenstockError``: ``invalid`` for any other value, ``unsupported`` for a schema that ``check_schema``
    rejects.
    """
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    try:
        given = schema if isinstance(schema, str) else json.dumps(schema)
        if len(given) > WHITESPACE_FACTOR * limit:
            raise invalid(field, f"must have at most {limit} characters, has {len(given)}", limit)
        parsed = json.loads(given, parse_float=_integer_or_float)
    except (ValueError, TypeError, RecursionError) as error:
        raise invalid(field, f"is not JSON: {error}") from error
    if isinstance(parsed, bool):
        parsed = {} if parsed else {"not": {}}
    if not isinstance(parsed, dict):
        raise invalid(field, f"must be a JSON object, is {parsed!r:.50}")
    if is_schema:
        parsed = clean_schema(field, parsed)
    try:
        check_schema(field, parsed)
        return json.dumps(parsed)
    except RecursionError as error:
        raise invalid(field, "is nested too deeply; reduce its nesting") from error


def clean_schema(field: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Copy a schema without annotations (``drop_annotations``). Raises ``PenstockError`` (``invalid``) if it is
    malformed."""
    try:
        return drop_annotations(schema)
    except RecursionError as error:
        raise invalid(field, "is nested too deeply; reduce its nesting") from error
    except ValueError as error:
        raise invalid(field, f"is not a valid JSON Schema: {error}") from error


def check_schema(field: str, part: Any) -> None:
    """Raise ``PenstockError`` (``unsupported``) for constraints that llguidance would not enforce.

    These are ``minProperties`` above the number of required properties (an additional name may be generated twice, and
    would count twice), and control characters, which need ``\\u`` escapes (see ``LLGUIDANCE_OPTIONS``).
    """
    if isinstance(part, dict):
        minimum, required = part.get("minProperties"), part.get("required")
        if isinstance(minimum, int) and minimum > (len(required) if isinstance(required, list) else 0):
            message = f"not supported: minProperties {minimum} above the number of required properties"
            raise PenstockError(Code.UNSUPPORTED, f"{field}: {message}", field)
    if isinstance(part, str) and any(c < " " and c not in "\b\f\n\r\t" for c in part):
        message = f"{field}: not supported: control characters in strings, such as {part!r:.50}"
        raise PenstockError(Code.UNSUPPORTED, message, field)
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        check_schema(field, inner)


def _integer_or_float(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number
