"""Structural tags: texts, schemas and patterns put together, as requests write it and as backends read it.

There are two ways to write one. ``{"structures", "triggers"}`` is free text with tagged parts. ``{"format": …}`` puts
parts together by their ``type``, as xgrammar and vLLM know it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.core import GuidedDecodingParams

from .errors import UnsupportedError

DEEPEST = 32
"""Formats within each other."""


@dataclass(frozen=True)
class Text:
    """This, and nothing else. What is a token of its own comes as that token alone."""

    text: str


@dataclass(frozen=True)
class Json:
    """A document that keeps to a schema, whose references point into itself."""

    schema: dict[str, Any]
    separators: tuple[str, str] | None = None
    """Between items, and after keys, where nothing else may stand there."""


@dataclass(frozen=True)
class Pattern:
    pattern: str


@dataclass(frozen=True)
class Chain:
    """One after the other."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Either:
    """One of them."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Repeated:
    part: Part
    sign: str
    """``?``, ``*`` or ``+``, as in patterns."""


@dataclass(frozen=True)
class Tag:
    trigger: str
    """Where it is written, the tag has begun."""
    begin: str
    """All that it begins with, the trigger first."""
    content: Part
    end: str

    @property
    def rest(self) -> Part:
        """What follows the trigger, up to the tag's end."""
        return Chain((Text(self.begin[len(self.trigger) :]), self.content))


@dataclass(frozen=True)
class Tagged:
    """Free text, in which parts follow where their triggers are written."""

    tags: tuple[Tag, ...]


Part = Text | Json | Pattern | Chain | Either | Repeated


def read_structure(params: GuidedDecodingParams) -> Part | Tagged:
    """What a structural tag asks for.

    Raises ``ValueError`` where it is none, ``UnsupportedError`` where it asks for what is not known here.
    """
    found = json.loads(params.structural_tag)
    if found.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"type must be structural_tag, is {found['type']!r:.50}")
    if "format" not in found:
        _known(found, "structures", "triggers")
        return _structures(found)
    _known(found, "format")
    if not isinstance(shape := found["format"], dict):
        raise ValueError(f"format must be an object, is {shape!r:.50}")
    if _depth(shape) > DEEPEST:
        raise UnsupportedError(f"more than {DEEPEST} formats within each other")
    return _triggered(shape) if shape.get("type") == "triggered_tags" else _part(shape)


def _structures(found: dict[str, Any]) -> Tagged:
    tags = []
    for structure in _several(found, "structures"):
        _known(structure, "begin", "schema", "end")
        begin, schema, end = structure.get("begin"), structure.get("schema", {}), structure.get("end", "")
        if not isinstance(schema, dict):
            raise ValueError(f"schema must be an object, is {schema!r}")
        tags.append(_tag(found.get("triggers"), begin, Json(schema), end))
    return Tagged(tuple(tags))


def _triggered(shape: dict[str, Any]) -> Tagged:
    _known(shape, "triggers", "tags")
    tags = []
    for tag in _several(shape, "tags"):
        begin, content, end = _fields_of_tag(tag)
        tags.append(_tag(shape.get("triggers"), begin, content, end))
    return Tagged(tuple(tags))


def _tag(triggers: Any, begin: Any, content: Part, end: Any) -> Tag:
    if not isinstance(triggers, list) or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError(f"triggers must be a list of texts, is {triggers!r:.50}")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError(f"begin and end must be text, are {begin!r:.50} and {end!r:.50}")
    found = {trigger for trigger in triggers if begin.startswith(trigger)}
    if not found:
        raise ValueError(f"begin must be text that starts with a trigger, is {begin!r:.50}")
    if len(found) > 1:
        raise UnsupportedError(f"{begin!r:.50}, which begins with several triggers")
    return Tag(found.pop(), begin, content, end)


def _fields_of_tag(tag: dict[str, Any]) -> tuple[str, Part, str]:
    """How a tag begins, what is in it, and how it ends."""
    _known(tag, "begin", "content", "end")
    if tag.get("type", "tag") != "tag":
        raise ValueError(f"type of a tag must be tag, is {tag['type']!r:.50}")
    begin, end = tag.get("begin"), tag.get("end")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError(f"begin and end must be text, are {begin!r:.50} and {end!r:.50}")
    if not isinstance(content := tag.get("content"), dict):
        raise ValueError(f"content must be an object, is {content!r:.50}")
    return begin, _part(content), end


def _part(shape: dict[str, Any]) -> Part:
    kind = shape.get("type")
    if kind == "triggered_tags":
        raise UnsupportedError("triggered_tags within another format")
    if kind not in FORMATS:
        raise UnsupportedError(f"format {kind!r:.50}; there are {', '.join(FORMATS)} and, alone, triggered_tags")
    return FORMATS[kind](shape)


def _text(shape: dict[str, Any]) -> Part:
    _known(shape, "value")
    if not isinstance(value := shape.get("value"), str):
        raise ValueError(f"value must be text, is {value!r:.50}")
    return Text(value)


def _json(shape: dict[str, Any]) -> Part:
    _known(shape, "json_schema", "separators")
    schema, separators = shape.get("json_schema"), shape.get("separators")
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema must be an object, is {schema!r:.50}")
    if separators is None:
        return Json(schema)
    if not isinstance(separators, list) or [type(text) for text in separators] != [str, str]:
        raise ValueError(f"separators must be two texts, are {separators!r:.50}")
    return Json(schema, (separators[0], separators[1]))


def _regex(shape: dict[str, Any]) -> Part:
    _known(shape, "pattern")
    if not isinstance(pattern := shape.get("pattern"), str):
        raise ValueError(f"pattern must be text, is {pattern!r:.50}")
    return Pattern(pattern)


def _sequence(shape: dict[str, Any]) -> Part:
    _known(shape, "elements")
    return Chain(tuple(map(_part, _several(shape, "elements"))))


def _or(shape: dict[str, Any]) -> Part:
    _known(shape, "elements")
    return Either(tuple(map(_part, _several(shape, "elements"))))


def _repeated(shape: dict[str, Any]) -> Part:
    _known(shape, "content")
    if not isinstance(content := shape.get("content"), dict):
        raise ValueError(f"content must be an object, is {content!r:.50}")
    return Repeated(_part(content), {"optional": "?", "star": "*", "plus": "+"}[shape["type"]])


def _in_tag(shape: dict[str, Any]) -> Part:
    begin, content, end = _fields_of_tag(shape)
    return Chain((Text(begin), content, Text(end)))


def _separated(shape: dict[str, Any]) -> Part:
    _known(shape, "tags", "separator", "at_least_one", "stop_after_first")
    separator = shape.get("separator")
    least, once = shape.get("at_least_one", False), shape.get("stop_after_first", False)
    if not isinstance(separator, str):
        raise ValueError(f"separator must be text, is {separator!r:.50}")
    if not isinstance(least, bool) or not isinstance(once, bool):
        raise ValueError(f"at_least_one and stop_after_first must be true or false, are {least!r:.50} and {once!r:.50}")
    one: Part = Either(tuple(map(_in_tag, _several(shape, "tags"))))
    if not once:
        one = Chain((one, Repeated(Chain((Text(separator), one)), "*")))
    return one if least else Repeated(one, "?")


FORMATS: dict[str, Callable[[dict[str, Any]], Part]] = {
    "const_string": _text,
    "json_schema": _json,
    "regex": _regex,
    "sequence": _sequence,
    "or": _or,
    "optional": _repeated,
    "star": _repeated,
    "plus": _repeated,
    "tag": _in_tag,
    "tags_with_separator": _separated,
}


def _known(shape: dict[str, Any], *names: str) -> None:
    if other := next((name for name in shape if name not in (*names, "type")), None):
        raise UnsupportedError(f"{other!s:.50} of {shape.get('type', 'structural_tag')!s:.50}")


def _depth(shape: dict[str, Any]) -> int:
    """How many formats are within each other."""
    depth, level = 0, [shape]
    while level:
        depth += 1
        inner = [part for one in level for name in ("elements", "tags", "content") for part in _list(one.get(name))]
        level = [part for part in inner if isinstance(part, dict)]
    return depth


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _several(shape: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = shape.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(part, dict) for part in found):
        raise ValueError(f"{name} must be a list of objects, with at least one, is {found!r:.50}")
    return found
