"""``penstock``: the command line. Each command's module is imported when it is called."""

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
from penstock.config.settings import did_you_mean
from penstock.core import PenstockError
from penstock.core.machine_errors import start_failure

from .parser import Parser
from .screen import replace_unprintable

COMMANDS = {
    "serve": "answer over HTTP and gRPC, in OpenAI's protocol and those of other systems",
    "chat": "talk to a model in the terminal",
    "top": "watch what a server is doing",
    "generate": "continue a prompt, or answer a question with --chat",
    "download": "fetch a model from a hub, an object store or a web server",
    "run-batch": "answer a file of requests in OpenAI's batch format",
    "build": "pack a model's weights once, into a folder that servers map",
    "convert": "rewrite a checkpoint as safetensors, in files of another size or numbers of another type",
    "bench": "measure latency or throughput of a model or a server",
    "pd": "start separate prefill and decode instances with their router, or show those that run",
    "ranktable": "write down who computes what where prefill and decode are apart, and join what machines say",
    "quantize": "write a quantized checkpoint: rounded, AWQ, GPTQ, SmoothQuant, FP8",
    "plan": "tell what a model will take of memory, before it runs",
    "shims": "write commands of other systems, which start this one",
    "config": "show every option, its value and where it comes from",
    "doctor": "tell what this machine has, which kernels run, and what to change to be faster",
    "completion": "write what bash, zsh or fish read to complete commands and flags",
}


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from .build_info import version_line

        print(version_line())
        parser.exit()


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 2, with one sentence, for a wrong option or model."""
    try:
        status = _main(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads the output has gone, as head does: nothing more is written, at the end either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _main(arguments: list[str] | None) -> int:
    parser = Parser(prog="penstock", description="Serve large language models.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="show version, commit and kernels, and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    arguments = sys.argv[1:] if arguments is None else arguments
    parsers = {}
    for name, about in COMMANDS.items():
        description = f"{about[0].upper()}{about[1:]}."
        parsers[name] = commands.add_parser(
            name, help=about, description=description, allow_abbrev=False, conflict_handler="resolve"
        )
    if arguments and not arguments[0].startswith("-") and arguments[0] not in parsers:
        hint = did_you_mean(arguments[0], COMMANDS)
        print(f"penstock: there is no command {arguments[0]}{hint}; penstock --help lists them", file=sys.stderr)
        return 2
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries of PyTorch cannot be loaded then
        print("penstock: the working directory has been deleted; change to another one", file=sys.stderr)
        return 2
    replace_unprintable()
    atexit.register(gc.freeze)  # so that collections as the interpreter ends find nothing: they take 0.1 seconds
    try:
        if arguments and arguments[0] in parsers:
            from .flags import add_profile  # not for --help alone
            from .spelling import expand_spellings

            module = _module(arguments[0])
            module.add_arguments(parsers[arguments[0]])
            arguments = getattr(module, "expand_arguments", list)(arguments)
            if add_profile(parsers[arguments[0]], arguments):
                arguments = [arguments[0], *expand_spellings(parsers[arguments[0]], arguments[1:])]
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
    except KeyboardInterrupt:
        return 130


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


def _flags(parser: argparse.ArgumentParser, arguments: list[str]) -> set[str]:
    """The flags of a command and its subcommands in ``arguments``."""
    known = set(parser._option_string_actions)
    for action in parser._actions:
        for name, subparser in (action.choices or {}).items() if isinstance(action, argparse._SubParsersAction) else ():
            known |= _flags(subparser, arguments) if name in arguments else set()
    return known


def _module(command: str) -> Any:
    return import_module(f"penstock.cli.{command.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())
