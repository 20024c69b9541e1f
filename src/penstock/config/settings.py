"""Metadata of all options (``Setting``), from which flags, environment variables and files are derived."""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from .option import option
from .options import Configuration
from .secrets import is_secret


@dataclass(frozen=True)
class Setting:
    """Metadata of one option of the configuration."""

    section: str
    schema: type
    """Class of the section, such as ``EngineOptions``."""
    name: str
    annotated: Any
    """Annotated type with bounds, for ``msgspec.convert``."""
    kind: type
    """Plain type: ``str``, ``int``, ``float``, ``bool`` or ``tuple``."""
    choices: tuple[str, ...]
    default: Any
    unit: str
    empty: str
    """Meaning of an empty value, for the help."""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def help(self) -> str:
        """Help text: the option's docstring."""
        return _docstrings(self.schema)[self.name]

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return f"PENSTOCK_{self.name.upper()}"

    @property
    def secret(self) -> bool:
        return is_secret(self.name)


@cache
def settings() -> dict[str, Setting]:
    """All options by name. Names are unique across sections."""
    result: dict[str, Setting] = {}
    for section in msgspec.structs.fields(Configuration):
        for setting in settings_of(section.type, section.name):
            assert setting.name not in result, f"two options are called {setting.name}"
            result[setting.name] = setting
    return result


def settings_of(schema: type[msgspec.Struct], section: str = "") -> Iterator[Setting]:
    """Options of a configuration class, in the order of its fields."""
    for field in msgspec.structs.fields(schema):
        hint = field.type
        plain, meta = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint, option())
        if typing.get_origin(plain) in (types.UnionType, typing.Union):
            (plain,) = (part for part in typing.get_args(plain) if part is not types.NoneType)
        choices = typing.get_args(plain) if typing.get_origin(plain) is typing.Literal else ()
        kind = str if choices else typing.get_origin(plain) or plain
        unit, empty = meta.extra["unit"], meta.extra["empty"]
        yield Setting(section, schema, field.name, hint, kind, choices, field.default, unit, empty)


@cache
def _docstrings(schema: type) -> dict[str, str]:
    """Attribute docstrings of a class and its bases, each on one line."""
    result: dict[str, str] = {}
    for each in reversed(schema.__mro__[: schema.__mro__.index(msgspec.Struct)]):
        classes = (part for part in _module(each.__module__).body if isinstance(part, ast.ClassDef))
        for field, text in pairwise(next(part.body for part in classes if part.name == each.__name__)):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                result[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split()).replace("``", "")
    return result


@cache
def _module(name: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[name]))
