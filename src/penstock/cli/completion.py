"""``penstock completion``: what a shell reads to complete commands and flags, written by shtab as a whole, so that
completing starts no Python."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import Any

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        choices=SHELLS,
        help='bash and zsh: eval "$(penstock completion bash)"; fish: penstock completion fish | source',
    )


def run(args: argparse.Namespace) -> int:
    import shtab

    from .main import COMMANDS
    from .parser import Parser

    parser = Parser(prog="penstock", allow_abbrev=False)
    commands = parser.add_subparsers()
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, allow_abbrev=False, conflict_handler="resolve")
        import_module(f"penstock.cli.{name.replace('-', '_')}").add_arguments(command)
        _complete_files(command, shtab.FILE)
    if args.shell == "zsh":
        print("autoload -U +X compinit && compinit")
    print(shtab.complete(parser, args.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: Mapping[str, Any]) -> None:
    """Complete names of files for values without choices."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _complete_files(subparser, files)
        elif action.nargs != 0 and not action.choices:
            action.complete = files  # type: ignore[attr-defined]
