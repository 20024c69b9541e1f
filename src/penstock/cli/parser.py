"""Argument parser of all commands, and error reporting of commands of other systems."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NoReturn

from penstock.config.secrets import mask
from penstock.core import PenstockError

MAX_USAGE_FLAGS = 12
"""Maximum number of flags in the usage line; for more flags, the line has only ``[options]``."""


PROFILE_PREFIX = "profile:"
"""Prefix of the argparse destinations of a profile's flags, whose names may also be names of Penstock's options."""


class HelpFormatter(argparse.HelpFormatter):
    """Lists ``--max-num-seqs``, but not its second spelling ``--max_num_seqs``, which some profiles' systems use."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.dest.startswith(PROFILE_PREFIX):
            return super()._format_action_invocation(action)
        names = action.option_strings
        action.option_strings = [name for name in names if "_" not in name or name.replace("_", "-") not in names]
        text = super()._format_action_invocation(action)
        action.option_strings = names
        return text


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` with a short usage line that reports errors in one sentence, without usage. A flag that is
    added again replaces the earlier one."""

    def __init__(self, formatter_class: type[argparse.HelpFormatter] = HelpFormatter, **kwargs: Any) -> None:
        super().__init__(formatter_class=formatter_class, conflict_handler="resolve", **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def format_help(self) -> str:
        self.shorten_usage()
        return super().format_help()

    def shorten_usage(self) -> None:
        """Replace the flags of the usage line by ``[options]`` if there are many."""
        if self.usage is None and sum(bool(action.option_strings) for action in self._actions) > MAX_USAGE_FLAGS:
            positionals = [action for action in self._actions if not action.option_strings]
            names = [str(action.metavar or action.dest.upper()) for action in positionals]
            optional = [action.nargs in (argparse.OPTIONAL, argparse.ZERO_OR_MORE) for action in positionals]
            shown = [f"[{name}]" if each else name for name, each in zip(names, optional, strict=True)]
            self.usage = " ".join(["%(prog)s", *shown, "[options]"])


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
        description = f"{about[0].upper()}{about[1:]}."
        kind = subparsers.add_parser(name, help=about, description=description, allow_abbrev=False)
        import_module(f"{package}.{module}").add_arguments(kind)
