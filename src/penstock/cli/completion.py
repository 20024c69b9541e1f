"""``penstock completion``: what a shell reads to complete commands and flags. It is written whole, so that completing
starts no Python."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

SHELLS = ("bash", "zsh", "fish")


class Flag(NamedTuple):
    """A flag, the values that it may have where these are known, and its help."""

    name: str
    choices: tuple[str, ...]
    about: str


Flags = Mapping[str, list[Flag]]
"""By command, and by command and subcommand (``bench serve``)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell",
        choices=SHELLS,
        help='bash and zsh: eval "$(penstock completion bash)"; fish: penstock completion fish | source',
    )


def run(args: argparse.Namespace) -> int:
    flags = collect_flags()
    print(fish_script(flags) if args.shell == "fish" else bash_script(flags, args.shell == "zsh"))
    return 0


def collect_flags() -> Flags:
    """The flags of all commands and subcommands."""
    from .main import COMMANDS
    from .parser import Parser

    found: dict[str, list[Flag]] = {}
    for command in COMMANDS:
        parser = Parser(prog=command, allow_abbrev=False, conflict_handler="resolve")
        import_module(f"penstock.cli.{command.replace('-', '_')}").add_arguments(parser)
        _collect(parser, command, found)
    return found


def _collect(parser: argparse.ArgumentParser, path: str, found: dict[str, list[Flag]]) -> None:
    flags = found[path] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                _collect(subparser, f"{path} {name}", found)
        elif action.help != argparse.SUPPRESS:
            choices = tuple(str(choice) for choice in action.choices or ())
            about = " ".join((action.help or "").replace("%%", "%").split())
            flags += [Flag(name, choices, about) for name in action.option_strings if name.startswith("--")]


def subcommands(flags: Flags, command: str) -> list[str]:
    return [path.removeprefix(f"{command} ") for path in flags if path.startswith(f"{command} ")]


def bash_script(flags: Flags, for_zsh: bool = False) -> str:
    """Completes commands, flags and their values; else names of files."""
    commands = [path for path in flags if " " not in path]
    lines = ["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit"] if for_zsh else []
    lines += [
        "_penstock() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""',
        '    local command="${COMP_WORDS[1]}" path="${COMP_WORDS[1]}"',
        '    case "$command ${COMP_WORDS[2]}" in',
    ]
    nested = "|".join(shlex.quote(path) for path in flags if " " in path)
    lines += [f'        {nested}) [ "$COMP_CWORD" -gt 2 ] && path="$command ${{COMP_WORDS[2]}}" ;;']
    lines += ["    esac", '    if [ "$COMP_CWORD" -eq 1 ]; then', f"        words={shlex.quote(' '.join(commands))}"]
    lines += ["    else", '        case "$path $before" in']
    for path, those in flags.items():
        for flag in those:
            if flag.choices:
                lines.append(
                    f"            {shlex.quote(f'{path} {flag.name}')}) words={shlex.quote(' '.join(flag.choices))} ;;"
                )
    lines += ['            *) case "$path" in']
    for path, those in flags.items():
        names = " ".join([*subcommands(flags, path), *(flag.name for flag in those)])
        lines.append(f"                {shlex.quote(path)}) words={shlex.quote(names)} ;;")
    lines += [
        "            esac ;;",
        "        esac",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
    ]
    return "\n".join([*lines, "complete -o default -F _penstock penstock"])


def fish_script(flags: Flags) -> str:
    """Completes commands, flags with their help, and their values."""
    from .main import COMMANDS

    lines = [
        f"complete -c penstock -n __fish_use_subcommand -f -a {command} -d {_fish(COMMANDS[command])}"
        for command in flags
        if " " not in command
    ]
    for path, those in flags.items():
        given = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in path.split())
        lines += [f"complete -c penstock -n {_fish(given)} -f -a {name}" for name in subcommands(flags, path)]
        for flag in those:
            values = f" -x -a {_fish(' '.join(flag.choices))}" if flag.choices else ""
            lines.append(f"complete -c penstock -n {_fish(given)} -l {flag.name[2:]} -d {_fish(flag.about)}{values}")
    return "\n".join(lines)


def _fish(text: str) -> str:
    """Quoted as fish reads it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
