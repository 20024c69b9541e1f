"""``penstock``: the command line. Each command is loaded when it is called."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from penstock import __version__
from penstock.core import PenstockError

COMMANDS = {
    "generate": "continue a prompt, or answer a question with --chat",
    "bench": "measure latency or throughput of a model on this machine",
    "doctor": "tell what this machine has and which kernels run",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status. A wrong option or model is told in one sentence, with status 2."""
    parser = argparse.ArgumentParser(prog="penstock", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    arguments = sys.argv[1:] if arguments is None else arguments
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if arguments[:1] == [name]:
            import_module(f"penstock.cli.{name}").add_arguments(command)
    args = parser.parse_args(arguments)
    try:
        return int(import_module(f"penstock.cli.{args.command}").run(args))
    except PenstockError as error:
        print(f"penstock {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
