"""The options as a list of ``Setting``, from which flags, environment variables and files are derived."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from .options import Configuration
from .secrets import is_secret


@dataclass(frozen=True)
class Setting:
    """One option of the configuration."""

    section: str
    name: str
    annotated: Any
    """The type with its bounds, as ``msgspec.convert`` takes it."""
    kind: type
    """The plain type: ``str``, ``int``, ``float``, ``bool`` or ``tuple``."""
    choices: tuple[str, ...]
    default: Any
    unit: str
    help: str
    empty: str
    """Meaning of an empty value, for the help."""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return f"PENSTOCK_{self.name.upper()}"

    @property
    def secret(self) -> bool:
        return is_secret(self.name)


@cache
def settings() -> dict[str, Setting]:
    """Every option by its name; names are unique over all sections."""
    result: dict[str, Setting] = {}
    for section, schema in typing.get_type_hints(Configuration).items():
        hints = typing.get_type_hints(schema, include_extras=True)
        for field in msgspec.structs.fields(schema):
            assert field.name not in result, f"two options are called {field.name}"
            result[field.name] = _setting(section, field.name, hints[field.name], field.default)
    return result


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint "; did you mean …?" with the only known name that begins with this one, or else the most similar one;
    empty where none is."""
    names = list(known)
    longer = [one for one in names if name and one.startswith(name)]
    near = longer if len(longer) == 1 else difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _setting(section: str, name: str, hint: Any, default: Any) -> Setting:
    plain, meta = typing.get_args(hint)
    choices = typing.get_args(plain) if typing.get_origin(plain) is typing.Literal else ()
    kind = str if choices else typing.get_origin(plain) or plain
    assert not isinstance(kind, types.UnionType)
    extra = meta.extra or {}
    return Setting(section, name, hint, kind, choices, default, extra["unit"], meta.description or "", extra["empty"])
