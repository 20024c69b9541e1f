"""Command-line flags from the configuration's schema: names, types, defaults, units and help are written once."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from penstock.core.settings import Setting, settings

from .configuration import Configured, read

TITLES = {
    "model": "model options",
    "engine": "engine options",
    "server": "server options",
    "log": "log options",
}
FOR_AN_ENGINE = ("model", "engine")


def add_options(
    parser: argparse.ArgumentParser, sections: tuple[str, ...] = FOR_AN_ENGINE, names: tuple[str, ...] = ()
) -> None:
    """Give the parser ``--config`` and a flag for each option, ``--max-num-seqs`` or ``--max_num_seqs``.

    Args:
        sections: whose options are all taken.
        names: of single options of other sections.
    """
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of options, which the environment and flags override"
    )
    taken = [setting for setting in settings().values() if setting.section in sections or setting.name in names]
    parser.set_defaults(options=[setting.name for setting in taken])
    for section, title in TITLES.items():
        own = [setting for setting in taken if setting.section == section]
        if own:
            group = parser.add_argument_group(title)
            for setting in own:
                _add(group, setting)


def configure(args: argparse.Namespace) -> Configured:
    """The whole configuration: defaults, file, environment, and the flags that were given.

    Raises ``PenstockError`` (``invalid``) for an unknown name, with the nearest known one, or a wrong value.
    """
    return read({name: getattr(args, name) for name in args.options if hasattr(args, name)}, args.config)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """What ``LLM`` and ``AsyncLLM`` take, ``model`` included."""
    found = configure(args).configuration
    return msgspec.structs.asdict(found.model) | msgspec.structs.asdict(found.engine)


def _add(group: argparse._ArgumentGroup, setting: Setting) -> None:
    names = [setting.flag] + ([f"--{setting.name}"] if "_" in setting.name else [])
    unit = f"{setting.unit}, " if setting.unit else ""
    shown = f"{setting.help} ({unit}default: {_shown(setting.default)})".replace("%", "%%")
    given: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": setting.name, "help": shown}
    if setting.kind is bool:
        given["action"] = argparse.BooleanOptionalAction
        names = names[:1]
    elif setting.choices:
        given["choices"] = setting.choices
    elif setting.secret and setting.kind is tuple:
        given |= {"action": "append", "metavar": "KEY[,KEY]"}
    elif setting.kind is tuple:
        given |= {"nargs": "+", "action": "extend", "metavar": setting.name.rpartition("_")[2].upper()}
    else:
        given |= {"type": setting.kind, "metavar": (setting.unit or setting.kind.__name__).upper()}
    group.add_argument(*names, **given)


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(default) or "none"
    return "none" if default == "" else str(default)
