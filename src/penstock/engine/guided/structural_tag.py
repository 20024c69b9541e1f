"""Structural tags: combinations of texts, schemas and regular expressions, parsed from requests.

A request contains either ``{"structures", "triggers"}``, free text with tagged parts, or ``{"format": …}``, a tree of
formats, each with a ``type``. Names and fields are those of xgrammar and vLLM.

Structural tags with tool calls also have formats ``fallback``: ``content``, or ``otherwise`` if llguidance cannot
compile ``content``. They are resolved before a structural tag is parsed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.core import GuidedDecodingParams
from penstock.core.json_schema import drop_annotations

from .errors import UnsupportedError

MAX_DEPTH = 32
"""Maximum depth of nested formats."""
MAX_ORDERED = 8
"""Maximum number of elements in any order; a grammar has a rule for each subset of them."""


@dataclass(frozen=True)
class ConstStringFormat:
    """A fixed text. Added tokens in it are generated as tokens."""

    text: str


@dataclass(frozen=True)
class JSONSchemaFormat:
    """A JSON document that follows a schema."""

    schema: dict[str, Any]
    """JSON Schema without annotations (``drop_annotations``)."""
    separators: tuple[str, str] | None = None
    """Text between items, and text between key and value; None: JSON's, with the request's whitespace options."""


@dataclass(frozen=True)
class RegexFormat:
    """A text that matches a regular expression."""

    pattern: str
    """Regular expression in the syntax of Rust's ``regex``."""


@dataclass(frozen=True)
class SequenceFormat:
    """Several formats in a fixed order."""

    parts: tuple[Format, ...]


@dataclass(frozen=True)
class OrFormat:
    """One of several formats."""

    parts: tuple[Format, ...]


@dataclass(frozen=True)
class RepeatFormat:
    """An optional or repeated format."""

    part: Format
    quantifier: str
    """``?``, ``*`` or ``+``, with the meaning of regular expressions."""


@dataclass(frozen=True)
class AnyOrderFormat:
    """Each of several formats at most once, in any order."""

    parts: tuple[Format, ...]
    required: tuple[bool, ...]
    """True for each part that must occur."""
    separator: str


@dataclass(frozen=True)
class TagFormat:
    """A tagged part of free text: begin text, content, end text."""

    trigger: str
    """Prefix of ``begin`` that starts the tag when it occurs in the free text."""
    begin: str
    content: Format
    end: str

    @property
    def after_trigger(self) -> Format:
        """Rest of ``begin`` after the trigger, followed by the content."""
        return SequenceFormat((ConstStringFormat(self.begin[len(self.trigger) :]), self.content))


@dataclass(frozen=True)
class TriggeredTagsFormat:
    """Free text with any number of tags."""

    tags: tuple[TagFormat, ...]


Format = ConstStringFormat | JSONSchemaFormat | RegexFormat | SequenceFormat | OrFormat | RepeatFormat | AnyOrderFormat
"""Formats that may be nested."""


def parse_structural_tag(params: GuidedDecodingParams) -> Format | TriggeredTagsFormat:
    """Parse the structural tag of a request.

    Raises ``ValueError`` for an invalid structural tag, ``UnsupportedError`` for unknown formats and fields.
    """
    document = json.loads(params.structural_tag)
    if document.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"type must be structural_tag, is {document['type']!r:.50}")
    if "format" not in document:
        _check_fields(document, "structures", "triggers")
        return _structures(document)
    _check_fields(document, "format")
    if not isinstance(fields := document["format"], dict):
        raise ValueError(f"format must be an object, is {fields!r:.50}")
    if _depth(fields) > MAX_DEPTH:
        raise UnsupportedError(f"more than {MAX_DEPTH} nested formats")
    return _triggered(fields) if fields.get("type") == "triggered_tags" else _format(fields)


def resolve_fallbacks(tag: dict[str, Any], replaced: Collection[str]) -> dict[str, Any]:
    """Copy a structural tag, with each format ``fallback`` replaced: by its ``otherwise`` if its name is in
    ``replaced``, else by its ``content``."""

    def resolve(part: Any) -> Any:
        if isinstance(part, list):
            return [resolve(inner) for inner in part]
        if not isinstance(part, dict) or "json_schema" in part:
            return part
        if part.get("type") == "fallback":
            return part["otherwise" if part["name"] in replaced else "content"]
        return {name: resolve(inner) for name, inner in part.items()}

    resolved: dict[str, Any] = resolve(tag)
    return resolved


def fallbacks(part: Any) -> Iterator[dict[str, Any]]:
    """Formats ``fallback`` in a structural tag."""
    if isinstance(part, list):
        for inner in part:
            yield from fallbacks(inner)
    elif isinstance(part, dict) and "json_schema" not in part:
        if part.get("type") == "fallback":
            yield part
            return
        for inner in part.values():
            yield from fallbacks(inner)


def allows_free_text(params: GuidedDecodingParams) -> bool:
    """True if a structural tag allows text other than fixed texts and JSON; False for other constraints."""
    return bool(params.structural_tag) and _has_free_text(parse_structural_tag(params))


def json_parts(params: GuidedDecodingParams) -> list[tuple[str, dict[str, Any]]]:
    """Schemas in a structural tag, each with the fixed text before it. Empty for other constraints, and for an invalid
    structural tag."""
    if params.structural_tag is None:
        return []
    try:
        return _schemas(parse_structural_tag(params), "")
    except (ValueError, RecursionError):
        return []


def _schemas(part: Format | TriggeredTagsFormat, before: str) -> list[tuple[str, dict[str, Any]]]:
    """Schemas in a format, each with the last fixed text before it; ``before`` if the format has no such text."""
    match part:
        case JSONSchemaFormat(schema):
            return [(before, schema)]
        case SequenceFormat(parts):
            found = []
            for inner in parts:
                if isinstance(inner, ConstStringFormat):
                    before = inner.text or before
                found += _schemas(inner, before)
            return found
        case OrFormat(parts) | AnyOrderFormat(parts):
            return [one for inner in parts for one in _schemas(inner, before)]
        case RepeatFormat(inner):
            return _schemas(inner, before)
        case TriggeredTagsFormat(tags):
            return [one for tag in tags for one in _schemas(tag.content, tag.begin)]
    return []


def _has_free_text(part: Format | TriggeredTagsFormat) -> bool:
    """True if a format contains a regular expression or triggered tags."""
    match part:
        case SequenceFormat(parts) | OrFormat(parts) | AnyOrderFormat(parts):
            return any(map(_has_free_text, parts))
        case RepeatFormat(inner):
            return _has_free_text(inner)
    return isinstance(part, RegexFormat | TriggeredTagsFormat)


def _structures(document: dict[str, Any]) -> TriggeredTagsFormat:
    """Parse ``{"structures", "triggers"}``."""
    tags = []
    for structure in _objects(document, "structures"):
        _check_fields(structure, "begin", "schema", "end")
        begin, schema, end = structure.get("begin"), structure.get("schema", {}), structure.get("end", "")
        if not isinstance(schema, dict):
            raise ValueError(f"schema must be an object, is {schema!r:.50}")
        tags.append(_tag(document.get("triggers"), begin, JSONSchemaFormat(drop_annotations(schema)), end))
    return TriggeredTagsFormat(tuple(tags))


def _triggered(fields: dict[str, Any]) -> TriggeredTagsFormat:
    """Parse a format ``triggered_tags``."""
    _check_fields(fields, "triggers", "tags")
    tags = []
    for tag in _objects(fields, "tags"):
        begin, content, end = _tag_fields(tag)
        tags.append(_tag(fields.get("triggers"), begin, content, end))
    return TriggeredTagsFormat(tuple(tags))


def _tag(triggers: Any, begin: Any, content: Format, end: Any) -> TagFormat:
    """Tag with the one of ``triggers`` with which ``begin`` starts."""
    if not isinstance(triggers, list) or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError(f"triggers must be a list of non-empty strings, is {triggers!r:.50}")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError(f"begin and end must be strings, are {begin!r:.50} and {end!r:.50}")
    matching = {trigger for trigger in triggers if begin.startswith(trigger)}
    if not matching:
        raise ValueError(f"begin must start with a trigger ({triggers!r:.100}), is {begin!r:.50}")
    if len(matching) > 1:
        raise UnsupportedError(f"begin {begin!r:.50}, which starts with several triggers, {sorted(matching)!r:.100}")
    return TagFormat(matching.pop(), begin, content, end)


def _tag_fields(tag: dict[str, Any]) -> tuple[str, Format, str]:
    """Begin text, content and end text of a tag."""
    _check_fields(tag, "begin", "content", "end")
    if tag.get("type", "tag") != "tag":
        raise ValueError(f"type of a tag must be tag, is {tag['type']!r:.50}")
    begin, end = tag.get("begin"), tag.get("end")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError(f"begin and end must be strings, are {begin!r:.50} and {end!r:.50}")
    if not isinstance(content := tag.get("content"), dict):
        raise ValueError(f"content must be an object, is {content!r:.50}")
    return begin, _format(content), end


def _format(fields: dict[str, Any]) -> Format:
    kind = fields.get("type")
    if kind == "triggered_tags":
        raise UnsupportedError("triggered_tags within another format; use it as the only format")
    if kind not in FORMATS:
        names = ", ".join(name for name in FORMATS if name != "any_order")
        message = f"format {kind!r:.50}; supported are {names}, and triggered_tags as the only format"
        raise UnsupportedError(message)
    return FORMATS[kind](fields)


def _text(fields: dict[str, Any]) -> Format:
    """Parse a format ``const_string``."""
    _check_fields(fields, "value")
    if not isinstance(value := fields.get("value"), str):
        raise ValueError(f"value must be a string, is {value!r:.50}")
    return ConstStringFormat(value)


def _json(fields: dict[str, Any]) -> Format:
    """Parse a format ``json_schema``."""
    _check_fields(fields, "json_schema", "separators")
    schema, separators = fields.get("json_schema"), fields.get("separators")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema must be an object, is {schema!r:.50}")
    schema = drop_annotations(schema)
    if separators is None:
        return JSONSchemaFormat(schema)
    if not isinstance(separators, list) or [type(text) for text in separators] != [str, str]:
        raise ValueError(f"separators must be a list of two strings, is {separators!r:.50}")
    return JSONSchemaFormat(schema, (separators[0], separators[1]))


def _regex(fields: dict[str, Any]) -> Format:
    """Parse a format ``regex``."""
    _check_fields(fields, "pattern")
    if not isinstance(pattern := fields.get("pattern"), str):
        raise ValueError(f"pattern must be a string, is {pattern!r:.50}")
    return RegexFormat(pattern)


def _sequence(fields: dict[str, Any]) -> Format:
    """Parse a format ``sequence``."""
    _check_fields(fields, "elements")
    return SequenceFormat(tuple(map(_format, _objects(fields, "elements"))))


def _or(fields: dict[str, Any]) -> Format:
    """Parse a format ``or``."""
    _check_fields(fields, "elements")
    return OrFormat(tuple(map(_format, _objects(fields, "elements"))))


def _repeated(fields: dict[str, Any]) -> Format:
    """Parse a format ``optional``, ``star`` or ``plus``."""
    _check_fields(fields, "content")
    if not isinstance(content := fields.get("content"), dict):
        raise ValueError(f"content must be an object, is {content!r:.50}")
    return RepeatFormat(_format(content), {"optional": "?", "star": "*", "plus": "+"}[fields["type"]])


def _tag_format(fields: dict[str, Any]) -> Format:
    """Parse a format ``tag``, which has no trigger."""
    begin, content, end = _tag_fields(fields)
    return SequenceFormat((ConstStringFormat(begin), content, ConstStringFormat(end)))


def _tags_with_separator(fields: dict[str, Any]) -> Format:
    """Parse a format ``tags_with_separator``."""
    _check_fields(fields, "tags", "separator", "at_least_one", "stop_after_first")
    separator = fields.get("separator")
    at_least_one, once = fields.get("at_least_one", False), fields.get("stop_after_first", False)
    if not isinstance(separator, str):
        raise ValueError(f"separator must be a string, is {separator!r:.50}")
    if not isinstance(at_least_one, bool) or not isinstance(once, bool):
        raise ValueError(
            f"at_least_one and stop_after_first must be true or false, are {at_least_one!r:.50} and {once!r:.50}"
        )
    one: Format = OrFormat(tuple(map(_tag_format, _objects(fields, "tags"))))
    if not once:
        one = SequenceFormat((one, RepeatFormat(SequenceFormat((ConstStringFormat(separator), one)), "*")))
    return one if at_least_one else RepeatFormat(one, "?")


def _any_order(fields: dict[str, Any]) -> Format:
    """Parse a format ``any_order``, which only tool calls use."""
    _check_fields(fields, "elements", "required", "separator")
    required, separator = fields.get("required"), fields.get("separator")
    parts = tuple(map(_format, _objects(fields, "elements")))
    if not isinstance(required, list) or [type(one) for one in required] != [bool] * len(parts):
        raise ValueError(f"required must be a list of {len(parts)} times true or false, is {required!r:.50}")
    if len(parts) > MAX_ORDERED:
        raise UnsupportedError(f"more than {MAX_ORDERED} elements in any order")
    if not isinstance(separator, str):
        raise ValueError(f"separator must be a string, is {separator!r:.50}")
    return AnyOrderFormat(parts, tuple(required), separator)


FORMATS: dict[str, Callable[[dict[str, Any]], Format]] = {
    "const_string": _text,
    "json_schema": _json,
    "regex": _regex,
    "sequence": _sequence,
    "or": _or,
    "optional": _repeated,
    "star": _repeated,
    "plus": _repeated,
    "tag": _tag_format,
    "tags_with_separator": _tags_with_separator,
    "any_order": _any_order,
}


def _check_fields(fields: dict[str, Any], *names: str) -> None:
    """Raise ``UnsupportedError`` for a field that is not in ``names``."""
    if unknown := next((name for name in fields if name not in (*names, "type")), None):
        raise UnsupportedError(f"field {unknown!s:.50} of {fields.get('type', 'structural_tag')!s:.50}")


def _depth(fields: dict[str, Any]) -> int:
    """Depth of nested formats; 1 without nested formats."""
    depth, level = 0, [fields]
    while level:
        depth += 1
        inner = [part for one in level for name in ("elements", "tags", "content") for part in _as_list(one.get(name))]
        level = [part for part in inner if isinstance(part, dict)]
    return depth


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _objects(fields: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Get a field that has to be a non-empty list of objects."""
    value = fields.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
        raise ValueError(f"{name} must be a non-empty list of objects, is {value!r:.50}")
    return value
