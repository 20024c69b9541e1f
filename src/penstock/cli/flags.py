"""Command-line flags from the configuration's schema: names, types, defaults, units and help are written once."""

from __future__ import annotations

import argparse
import types
import typing
from typing import Any

import msgspec

from penstock.core.options import EngineOptions


def add_options(parser: argparse.ArgumentParser, schema: type[msgspec.Struct] = EngineOptions) -> None:
    """Give the parser a flag for each option, ``--max-num-seqs`` or ``--max_num_seqs``."""
    group = parser.add_argument_group("engine options")
    hints = typing.get_type_hints(schema, include_extras=True)
    for field in msgspec.structs.fields(schema):
        kind, meta = _unwrap(hints[field.name])
        names = [f"--{field.name.replace('_', '-')}"] + ([f"--{field.name}"] if "_" in field.name else [])
        shown = f"{meta.description} " if meta.description else ""
        unit = (meta.extra or {}).get("unit")
        given: dict[str, Any] = {"default": field.default, "dest": field.name}
        given["help"] = f"{shown}({f'{unit}, ' if unit else ''}default: {_shown(field.default)})".replace("%", "%%")
        if kind is bool:
            given["action"] = argparse.BooleanOptionalAction
            names = names[:1]
        elif typing.get_origin(kind) is typing.Literal:
            given["choices"] = typing.get_args(kind)
        else:
            given |= {"type": kind, "metavar": (unit or kind.__name__).upper()}
        group.add_argument(*names, **given)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options among parsed arguments."""
    return {field.name: getattr(args, field.name) for field in msgspec.structs.fields(EngineOptions)}


def _unwrap(hint: Any) -> tuple[Any, msgspec.Meta]:
    """The type and what is known besides it of ``Annotated[type, Meta]``."""
    kind, *notes = typing.get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    metas = [note for note in [*getattr(hint, "__metadata__", ()), *notes] if isinstance(note, msgspec.Meta)]
    return kind, metas[0] if metas else msgspec.Meta()


def _shown(default: Any) -> str:
    return "none" if default == "" else str(default)
