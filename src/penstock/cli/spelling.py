"""Alternative spellings of flags: ``_`` for ``-``, switches with a value, single keys of JSON values."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.core.errors import invalid

ON = {"true": True, "false": False, "1": True, "0": False}


def expand_spellings(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """Rewrite arguments to the spellings of the parser.

    ``--enable_chunked_prefill=False`` becomes ``--no-enable-chunked-prefill``, and
    ``--speculative-config.method ngram`` becomes ``--speculative-config {"method": "ngram"}``.

    Raises ``PenstockError`` (``invalid``) if single keys are added to a value that is not a JSON object.
    """
    known = parser._option_string_actions
    result: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    pending: list[str] = []

    def following() -> str | None:
        return pending.pop() if pending else next(rest, None)

    while (argument := following()) is not None:
        if argument == "--":
            return [*_merged(result, objects, known), *_as_json(objects), argument, *rest]
        name, equals, value = argument.partition("=")
        name = _known_name(name, known)
        base, dot, key = name.partition(".")
        if name in known and known[name].nargs == 0 and not name.startswith("--no-"):
            given: str | None = value if equals else following()
            if given is not None and given.lower() in ON:
                off = f"--no-{_long(known[name]).removeprefix('--')}"
                result.append(name if ON[given.lower()] else off)
                continue
            if given is not None and not equals:
                pending.append(given)
        elif dot and name not in known and (base := _known_name(base, known)) in known and argument.startswith("-"):
            given = value if equals else following()
            _set(objects.setdefault(_long(known[base]), {}), key.split("."), given or "")
            continue
        result.append(f"{name}{equals}{value}")
    return [*_merged(result, objects, known), *_as_json(objects)]


def _known_name(name: str, known: Iterable[str]) -> str:
    dashed = name.replace("_", "-")
    return dashed if name not in known and name.startswith("--") and dashed in known else name


def _long(action: argparse.Action) -> str:
    return next(name for name in (*action.option_strings, "") if name.startswith("--") or not name)


def _set(target: dict[str, Any], keys: list[str], text: str) -> None:
    *outer, last = keys
    for key in outer:
        target = target.setdefault(key, {})
    try:
        target[last] = json.loads(text)
    except ValueError:
        target[last] = text


def _merged(
    arguments: list[str], objects: dict[str, dict[str, Any]], known: Mapping[str, argparse.Action]
) -> list[str]:
    """Remove the JSON values of flags that also have single keys, and merge them into ``objects``."""
    result: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        name = _long(known[name]) if name in known else name
        if name not in objects:
            result.append(argument)
            continue
        text = value if equals else next(rest, "")
        try:
            objects[name] = {**json.loads(text), **objects[name]}
        except (ValueError, TypeError) as error:
            raise invalid(name, f"{text!r} is not a JSON object, so single keys cannot be added to it") from error
    return result


def _as_json(objects: dict[str, dict[str, Any]]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in objects.items()]
