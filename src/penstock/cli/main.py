"""``penstock``: the command line. A command's module is imported when the command is called."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from penstock.config.secrets import mask
from penstock.core import PenstockError
from penstock.core.machine_errors import start_failure
from penstock.core.spelling import did_you_mean

from .parser import Parser
from .screen import open_closed_streams, replace_unprintable

COMMANDS = {
    "serve": "start a server with the APIs of OpenAI and other systems (HTTP and gRPC)",
    "ps": "list the running servers of this user",
    "stop": "stop a running server",
    "chat": "chat with a model in the terminal",
    "top": "show the activity of a server, continuously",
    "generate": "complete a prompt, or answer it with --chat",
    "download": "download a model from a hub, an object store or a web server",
    "list": "list the downloaded models",
    "rm": "delete downloaded models",
    "run-batch": "process a file of requests in OpenAI's batch format",
    "build": "pack a model's weights into a folder that servers load by memory-mapping",
    "convert": "rewrite a checkpoint as safetensors, with another shard size or data type",
    "bench": "measure latency or throughput of a model or a server",
    "pd": "start prefill and decode instances with a router, or show the instances of a router",
    "ranktable": "write rank tables of prefill and decode instances, or merge the tables of several machines",
    "quantize": "write a quantized checkpoint: round to nearest, AWQ, GPTQ, SmoothQuant, FP8",
    "plan": "compute the memory of a model, or the placement of its experts",
    "shims": "create wrapper commands of other systems (trtllm-build, blade_llm_server, ...)",
    "config": "show all options with value and source",
    "doctor": "show hardware and kernels of this machine, and performance advice",
    "completion": "print a completion script for bash, zsh or fish",
}


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from .build_info import version_line

        print(version_line())
        parser.exit()


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 2, with a one-sentence error, for an invalid option or model."""
    open_closed_streams()
    try:
        status = _main(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output (head) has exited; also suppresses the error of the final flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 130


def _main(arguments: list[str] | None) -> int:
    parser = Parser(prog="penstock", description="Serve large language models.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="show version, commit and kernels, and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    arguments = sys.argv[1:] if arguments is None else arguments
    parsers = {}
    for name, about in COMMANDS.items():
        description = f"{about[0].upper()}{about[1:]}."
        parsers[name] = commands.add_parser(name, help=about, description=description, allow_abbrev=False)
    if not arguments:
        parser.print_help()
        return 0
    if not arguments[0].startswith("-") and arguments[0] not in parsers:
        hint = did_you_mean(arguments[0], COMMANDS)
        print(f"penstock: there is no command {arguments[0]}{hint}; penstock --help lists all", file=sys.stderr)
        return 2
    try:
        os.getcwd()
    except FileNotFoundError:  # PyTorch cannot load its libraries from a deleted working directory
        print("penstock: the working directory has been deleted; change to an existing one", file=sys.stderr)
        return 2
    replace_unprintable()
    atexit.register(gc.freeze)  # avoids garbage collections at interpreter exit, which take 0.1 seconds
    try:
        if arguments and arguments[0] in parsers:
            from .flags import add_profile  # slow to import, and not needed for --help
            from .spelling import expand_spellings

            module = _module(arguments[0])
            module.add_arguments(parsers[arguments[0]])
            arguments = getattr(module, "expand_arguments", list)(arguments)
            inner, depth = _innermost(parsers[arguments[0]], arguments)
            if add_profile(inner, arguments):
                arguments = [*arguments[:depth], *expand_spellings(inner, arguments[depth:])]
        return _run(parser, parsers, arguments)
    except PenstockError as error:
        print(f"penstock {arguments[0]}: {mask(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        if (failure := start_failure(error)) is None:
            raise
        print(f"penstock {arguments[0] if arguments else ''}: {failure.message}", file=sys.stderr)
        return 2


def _run(parser: argparse.ArgumentParser, parsers: Mapping[str, argparse.ArgumentParser], arguments: list[str]) -> int:
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0] if unknown[0].startswith("-") else unknown[0]
        hint = did_you_mean(name, _flags(parsers[args.command], arguments))
        print(f"penstock {args.command}: unknown argument {name}{hint}", file=sys.stderr)
        return 2
    try:
        return int(_module(args.command).run(args))
    except PenstockError as error:
        from penstock.config.sources import in_given_terms

        raise in_given_terms(error, getattr(args, "given_names", {})) from error


def _innermost(parser: argparse.ArgumentParser, arguments: list[str], depth: int = 1) -> tuple[Any, int]:
    """Parser of the subcommand in ``arguments``, and the number of arguments that name it."""
    for action in parser._actions:
        choices = action.choices if isinstance(action, argparse._SubParsersAction) else {}
        if len(arguments) > depth and (found := choices.get(arguments[depth])):
            return _innermost(found, arguments, depth + 1)
    return parser, depth


def _flags(parser: argparse.ArgumentParser, arguments: list[str]) -> set[str]:
    """Flags of a command, and of its subcommands in ``arguments``."""
    known = set(parser._option_string_actions)
    for action in parser._actions:
        for name, subparser in (action.choices or {}).items() if isinstance(action, argparse._SubParsersAction) else ():
            known |= _flags(subparser, arguments) if name in arguments else set()
    return known


def _module(command: str) -> Any:
    return import_module(f"penstock.cli.{command.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())
