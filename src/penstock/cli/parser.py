"""Argument parser of all commands, and error reporting of commands of other systems."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NoReturn

from penstock.config.secrets import mask
from penstock.core import PenstockError


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that reports errors in one sentence, without usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def exit_status(parser: argparse.ArgumentParser, work: Callable[[], int | None]) -> int:
    """Run a command's ``work``; returns the exit status: 2, with a one-sentence error, for a ``PenstockError``."""
    try:
        return work() or 0
    except PenstockError as error:
        print(f"{parser.prog}: {mask(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def add_kinds(parser: argparse.ArgumentParser, package: str, kinds: Mapping[str, tuple[str, str]]) -> None:
    """Add subcommands to a command: ``kinds`` has module (in ``package``) and description by name."""
    subparsers = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, (module, about) in kinds.items():
        kind = subparsers.add_parser(
            name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False
        )
        import_module(f"{package}.{module}").add_arguments(kind)
