"""``penstock config``: show all options with value and source."""

from __future__ import annotations

import argparse
import json
from typing import Any

from penstock.config.secrets import MASK, masked
from penstock.config.settings import Setting, settings
from penstock.config.sources import ResolvedConfiguration

from .compat.model_repository import expand_arguments
from .flags import TITLES, add_options, configure, in_cache
from .screen import print_json

__all__ = ["add_arguments", "expand_arguments", "run", "value_of"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON with value, source, unit and help of each option")
    form.add_argument("--yaml", action="store_true", help="print a file for --config with all options")
    add_options(parser, tuple(TITLES))


def run(args: argparse.Namespace) -> int:
    configured = configure(args)
    if args.json:
        print_json(_as_json(configured))
    elif args.yaml:
        _print_yaml(configured)
    else:
        _print_table(configured)
    return 0


def value_of(configured: ResolvedConfiguration, setting: Setting) -> Any:
    """Value of an option, with secrets masked; for an empty value, its meaning (``Setting.empty``)."""
    value = masked(getattr(getattr(configured.configuration, setting.section), setting.name), setting.name)
    return value or in_cache(setting.empty) or value


def _print_table(configured: ResolvedConfiguration) -> None:
    rows = [(s, f"{value_of(configured, s)!s}") for s in settings().values()]
    width = max(len(value) for _, value in rows)
    section = ""
    for setting, value in rows:
        if setting.section != section:
            section = setting.section
            print(f"\n{TITLES[section]}" if section != "model" else TITLES[section])
        print(f"  {setting.name:<28} {value:<{width}}  {configured.sources[setting.name]}")
    if configured.ignored:
        print("\nignored")
        for name, why in configured.ignored.items():
            print(f"  {name:<28} {why}")


def _as_json(configured: ResolvedConfiguration) -> dict[str, Any]:
    return {
        setting.name: {
            "value": value_of(configured, setting),
            "source": configured.sources[setting.name],
            "unit": setting.unit,
            "help": setting.help,
        }
        for setting in settings().values()
    }


def _print_yaml(configured: ResolvedConfiguration) -> None:
    section = ""
    for setting in settings().values():
        if setting.section != section:
            section = setting.section
            print(f"{section}:")
        unit = f" ({setting.unit})" if setting.unit else ""
        print(f"  # {setting.help}{unit}")
        value = value_of(configured, setting)
        if value == in_cache(setting.empty):
            value = () if setting.kind is tuple else ""
        if MASK in str(value):
            print(f"  # {setting.name}: set by {configured.sources[setting.name]}")
        else:
            print(f"  {setting.name}: {json.dumps(value)}")
