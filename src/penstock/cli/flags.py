"""Command-line flags generated from the options."""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from penstock.checkpoint.engine_config import engine_defaults
from penstock.config import logs, secrets
from penstock.config.profiles import Alias, Command, Profile, flag, load, translate
from penstock.config.profiles.vllm import DEFAULT_PROFILE
from penstock.config.settings import Setting, settings, settings_of
from penstock.config.sources import ResolvedConfiguration, convert_value, read
from penstock.core.errors import invalid

from .help_topics import OWN_OPTIONS, add_topic_help
from .parser import PROFILE_PREFIX, Parser

TITLES = {"model": "model options", "engine": "engine options", "server": "server options", "log": "log options"}
FOR_AN_ENGINE = ("model", "engine")

T = TypeVar("T", bound=msgspec.Struct)

logger = logging.getLogger(__name__)


def add_options(
    parser: argparse.ArgumentParser,
    sections: tuple[str, ...] = FOR_AN_ENGINE,
    names: tuple[str, ...] = (),
    profiles: bool = False,
) -> None:
    """Add ``--config`` and a flag for each option (``--max-num-seqs`` or ``--max_num_seqs``) to the parser.

    Args:
        sections: sections whose options are added.
        names: names of additional options of other sections.
        profiles: also accept the flags of other systems, as commands with ``--compat`` do.
    """
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of options, overridden by environment variables and flags"
    )
    add_topic_help(parser)
    added = [setting for setting in settings().values() if setting.section in sections or setting.name in names]
    options = [setting.name for setting in added]
    parser.set_defaults(options=options, profile=None, accepts_profiles=profiles or "compat" in options)
    for section, title in TITLES.items():
        section_settings = [setting for setting in added if setting.section == section]
        if section_settings:
            group = parser.add_argument_group(title)
            for setting in section_settings:
                _add(group, setting)


def add_model(parser: argparse.ArgumentParser, about: str = "the same as --model") -> None:
    """Add the model as a positional argument to a command with ``add_options``."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help=about)


def add_fields(
    parser: argparse.ArgumentParser,
    schema: type[msgspec.Struct],
    without: Collection[str] = (),
    profiles: bool = False,
) -> None:
    """Add a flag for each field of a command's options.

    Args:
        profiles: also accept the flags of this command in other systems (``Profile.commands``).
    """
    if profiles:
        parser.set_defaults(schema=schema, accepts_profiles=True)
    group = parser.add_argument_group(OWN_OPTIONS)
    for setting in settings_of(schema):
        if setting.name not in without:
            _add(group, setting)


def read_fields(args: argparse.Namespace, schema: type[T], **more: Any) -> T:
    """Create options from the flags of ``add_fields``, from ``more``, and from the flags and defaults of a profile.

    Logs flags without effect, and stores names as ``configure`` does. Raises ``PenstockError`` (``invalid``) for values
    out of bounds.
    """
    known = {setting.name: setting for setting in settings_of(schema)}
    command: Command = getattr(args, "profile_command", None) or Command()
    typed, ignored = _typed(args, command.flags), dict[str, str]()
    given = [*translate(command.flags, typed, _flag_as_typed, ignored)]
    given += command.together({flag(name): text for name, text in typed.items()})
    args.given_names = {name: source for name, _, source in given}
    defaults = {name: value for name, value in command.defaults.items() if name in known}
    values = defaults | {name: _converted(known[name], value, source) for name, value, source in given} | more
    for name in known.keys() & vars(args).keys():
        values[name] = convert_value(known[name], getattr(args, name), name)
    for name, why in ignored.items():
        logger.warning("%s is ignored: %s", name, why)
    return schema(**values)


def _converted(setting: Setting, value: Any, source: str) -> Any:
    if setting.kind is tuple and isinstance(value, str):
        value = value.split(",")
    return convert_value(setting, value, source)


def _flag_as_typed(name: str) -> str:
    return flag(name.replace("_", "-"))


def configure(args: argparse.Namespace, process: str = "") -> ResolvedConfiguration:
    """Resolve the configuration from defaults, file, environment and flags. Logs ignored names, and stores the
    configuration's ``given_names`` in ``args.given_names``.

    Args:
        process: name of this process in the log; if not empty, the log is set up.

    Raises ``PenstockError`` (``invalid``) for an unknown name, with the nearest known one, or an invalid value.
    """
    if (model := getattr(args, "model_tag", None)) is not None:
        if getattr(args, "model", model) != model:
            raise invalid("model", f"is given twice, as {model} and --model {args.model}: remove one of them")
        args.model = model
    profile: Profile | None = args.profile
    aliases = _typed(args, profile.flags) if profile else {}
    flags = {name: getattr(args, name) for name in args.options if hasattr(args, name)}
    result = read(flags, args.config, profile=profile, aliases=aliases, model_defaults=engine_defaults)
    secrets.register(result.configuration)
    args.given_names = result.given_names
    if process:
        logs.set_up(result.configuration.log, process)
    for name, why in result.ignored.items():
        logger.warning("%s is ignored: %s", name, why)
    return result


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for ``LLM`` and ``AsyncLLM``, including ``model``."""
    result = configure(args).configuration
    return msgspec.structs.asdict(result.model) | msgspec.structs.asdict(result.engine)


def add_profile(
    parser: argparse.ArgumentParser, arguments: list[str], environment: Mapping[str, str] = os.environ
) -> bool:
    """Add the flags of the selected profile to the parser of a command that accepts them (``add_options``). They
    replace Penstock's flags of the same name. Returns False for other commands.

    Raises ``PenstockError`` (``invalid``) for an unknown profile.
    """
    if not parser.get_default("accepts_profiles"):
        return False
    compat = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    compat.add_argument("--compat", default=environment.get("PENSTOCK_COMPAT", ""))
    known, _ = compat.parse_known_args(arguments)
    profile = load(known.compat) or DEFAULT_PROFILE
    command = profile.commands.get(parser.prog.partition(" ")[2], Command())
    options, schema = parser.get_default("options") or (), parser.get_default("schema")
    flags = {name: alias for name, alias in profile.flags.items() if options and (not alias.to or alias.to in options)}
    own = command.flags if schema else {}  # without a schema, they are read with the engine's options
    flags = {name: alias for name, alias in {**flags, **command.flags}.items() if name not in own}
    parser.set_defaults(profile=replace(profile, flags=flags), profile_command=command)
    group = parser.add_argument_group(f"options of {profile.title}")
    for name, alias in flags.items():
        add_alias(parser, group, name, alias, settings())
    for name, value in command.defaults.items():
        _show_default(parser, f"--{name.replace('_', '-')}", value)
    for name, alias in own.items():
        add_alias(parser, group, name, alias, {setting.name: setting for setting in settings_of(schema)})
    return True


def _show_default(parser: argparse.ArgumentParser, flag: str, value: Any) -> None:
    """Replace the default in the help of a flag."""
    if action := parser._option_string_actions.get(flag):
        shown = "the server's" if value is None else value
        action.help = re.sub(r"default: [^)]*\)\Z", f"default: {shown})", action.help or "")


def _typed(args: argparse.Namespace, table: Mapping[str, Alias]) -> dict[str, str]:
    """Values of another system's flags, as text, by name."""
    destinations = {name: PROFILE_PREFIX + name for name in table}
    typed = {name: getattr(args, dest) for name, dest in destinations.items() if hasattr(args, dest)}
    return {name: ",".join(value) if isinstance(value, list) else value for name, value in typed.items()}


def add_alias(
    parser: argparse.ArgumentParser,
    group: argparse._ArgumentGroup,
    name: str,
    alias: Alias,
    known: Mapping[str, Setting],
) -> None:
    """Add a flag of another system to a parser.

    Args:
        known: settings of the command by name.
    """
    dashed = name.replace("_", "-")
    existing = parser._option_string_actions.get(f"--{dashed}")
    if (
        existing and name in known and existing.nargs != 0 and (alias.to or name) == name
    ):  # the profile's flag has the name of a Penstock option: its value is parsed as the profile does
        existing.dest, existing.type, existing.choices = PROFILE_PREFIX + name, None, None
        if known[name].choices:
            existing.metavar = f"{{{','.join(known[name].choices)}}}"
        for short in alias.short.split():
            existing.option_strings = [short, *existing.option_strings]
            parser._option_string_actions[short] = existing
        return
    names = [*alias.short.split(), f"--{dashed}", *([f"--{name}"] if dashed != name else [])]
    about = f"ignored: {alias.why}" if alias.why else alias.about or "see docs/dialects"
    about = (f"same as {known[alias.to].flag}" if alias.to else about).replace("%", "%%")
    given: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": PROFILE_PREFIX + name, "help": about}
    if alias.several:
        given |= {"action": "extend", "nargs": "+", "metavar": name.rpartition("_")[2].upper()}
    elif alias.to and known[alias.to].kind is tuple:
        given |= {"action": "append", "metavar": name.rpartition("_")[2].upper()}
    elif alias.switch:
        given |= {"action": "store_const", "const": "true"}
    else:
        given["metavar"] = name.rpartition("_")[2].upper()
    group.add_argument(*names, **given)
    if alias.switch:
        group.add_argument(f"--no-{dashed}", **(given | {"const": "false", "help": argparse.SUPPRESS}))


def _add(group: argparse._ArgumentGroup, setting: Setting) -> None:
    names = [setting.flag] + ([f"--{setting.name}"] if "_" in setting.name else [])
    unit = f"{setting.unit}, " if setting.unit else ""
    shown = f"{setting.help} ({unit}default: {_shown(setting)})".replace("%", "%%")
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


def _shown(setting: Setting) -> str:
    """Default of an option, for the help."""
    default = "" if setting.default is None else str(setting.default)
    default = " ".join(setting.default) if isinstance(setting.default, tuple) else default
    return default or in_cache(setting.empty) or "empty"


def in_cache(path: str) -> str:
    """Replace ``~/.cache`` in a path by ``XDG_CACHE_HOME`` if it is set."""
    return path.replace("~/.cache", os.environ.get("XDG_CACHE_HOME") or "~/.cache", 1)
