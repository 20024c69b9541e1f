"""Resolution of options from their sources, in rising precedence: defaults, a profile, the model's folder, a YAML file,
the environment, flags."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.options import Configuration
from penstock.config.profiles import Profile, Settings, flag, translate, translate_variables
from penstock.config.settings import Setting, settings
from penstock.core.errors import PenstockError, invalid
from penstock.core.spelling import did_you_mean

logger = logging.getLogger(__name__)

ALL_ADDRESSES = "0.0.0.0"
"""Default of ``host`` with API keys or under a profile."""
KINDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string"}
BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
SECTIONS = tuple(Configuration.__struct_fields__)
NO_OPTIONS = ("PENSTOCK_ISA", "PENSTOCK_SETS", "PENSTOCK_RAY_PLACEMENT_GROUP")
"""Environment variables that are not options: read by the kernels, their build, and the executor ``ray``."""


@dataclass(frozen=True)
class ResolvedConfiguration:
    """A configuration with the source of each value."""

    configuration: Configuration
    sources: Mapping[str, str]
    """Source of each option: ``default``, the profile, model folder, file, environment variable or flag."""
    ignored: Mapping[str, str]
    """Flags and variables without effect, with the reason."""
    given_names: Mapping[str, str]
    """Options set by another system's flags or variables, with the name of the flag or variable, used in errors."""


def read(
    flags: Mapping[str, Any],
    file: str | Path | None,
    environment: Mapping[str, str] = os.environ,
    profile: Profile | None = None,
    aliases: Mapping[str, str] | None = None,
    model_defaults: Callable[[str], Mapping[str, Any]] = lambda model: {},
) -> ResolvedConfiguration:
    """Resolve the configuration from all sources.

    Args:
        flags: values of Penstock's flags, by option.
        file: a YAML file of options by name, with ``_`` or ``-``, at the top level or under their section. Names at the
            top level may also be the profile's flags, as in vLLM's and FastDeploy's files. A name of both an option
            and a flag is the flag if a profile is selected, otherwise the option.
        environment: environment variables; an option's is ``PENSTOCK_`` and the name in capitals, with values separated
            by commas.
        aliases: values of the profile's flags, as text.
        model_defaults: returns options stored in a model's folder.

    Raises ``PenstockError`` (``invalid``) for an unknown name, with the nearest known one, or an invalid value.
    """
    profile = profile or Profile("", "")
    known = settings()
    ignored: dict[str, str] = {}
    document = _read_file(file)
    in_file = _flags_in_file(document, profile)
    variables, of_variables = translate_variables(profile, environment, ignored)
    together = variables | {flag(name): text for name, text in (in_file | dict(aliases or {})).items()}
    profile.check(together)
    defaults = {**profile.defaults, **profile.defaults_for(together)}
    given = [(name, value, f"the profile {profile.name}") for name, value in defaults.items()]
    of_file = [*translate(profile.flags, in_file, lambda name: f"{name}, in {file}", ignored)]
    of_flags = [*translate(profile.flags, aliases or {}, _flag_as_typed, ignored), *profile.together(together)]
    given += [*_flatten(document, str(file)), *of_file, *of_variables, *_environment_settings(environment), *of_flags]
    given += [(name, value, known[name].flag) for name, value in flags.items()]
    model = next((str(value) for name, value, _ in reversed(given) if name == "model"), "")
    given[len(defaults) : len(defaults)] = [(name, value, model) for name, value in model_defaults(model).items()]
    if profile.name or any(name == "api_key" for name, _, _ in given):
        source = f"the profile {profile.name}" if profile.name else "api_key is given"
        given.insert(0, ("host", ALL_ADDRESSES, source))
    values: dict[str, Any] = {}
    sources = dict.fromkeys(known, "default")
    foreign_sources = {source for _, _, source in (*of_variables, *of_file, *of_flags)}
    for name, value, source in given:
        values[name] = convert_setting(known[name], value, source, source in foreign_sources)
        sources[name] = source
    parts: dict[str, Any] = {section: {} for section in SECTIONS}
    for name, value in values.items():
        parts[known[name].section][name] = value
    hints = {field.name: field.type for field in msgspec.structs.fields(Configuration)}
    result = Configuration(**{section: hints[section](**parts[section]) for section in SECTIONS})
    given_names = {name: source for name, source in sources.items() if source in foreign_sources}
    return ResolvedConfiguration(result, sources, ignored, given_names)


def convert_setting(setting: Setting, value: Any, source: str, foreign: bool = False) -> Any:
    """Convert a value to a setting's type.

    Args:
        foreign: the source is another system's flag or variable; errors name it instead of the setting.

    Raises ``PenstockError`` (``invalid``) for an invalid value.
    """
    name, place = (source, "") if foreign else (setting.name, f", in {source}")
    if setting.kind is tuple:
        given = value if isinstance(value, list | tuple) else [value]
        value = [part.strip() for entry in given for part in str(entry).split(",")]
        if not all(value):
            raise invalid(name, f"has an empty value{place}; remove it, or set a value")
    if setting.kind is str and isinstance(value, dict):
        value = json.dumps(value)  # in a file, an option with JSON text may be an object
    result = convert_value(setting, value, name, place)
    if isinstance(result, float) and not math.isfinite(result):
        shown = "its value" if setting.secret else repr(value)
        raise invalid(name, f"{shown} is wrong: it must be a finite number{place}")
    return result


def convert_value(setting: Setting, value: Any, name: str, place: str = "") -> Any:
    """Convert a value to a setting's type with msgspec. Raises ``PenstockError`` (``invalid``), naming ``name`` and
    ``place``, for an invalid value."""
    try:
        return msgspec.convert(value, setting.annotated, strict=False)
    except msgspec.ValidationError as error:
        shown = "its value" if setting.secret else repr(value)
        raise invalid(name, f"{shown} is wrong: {_reason(str(error), setting)}{place}") from error


def _reason(message: str, setting: Setting) -> str:
    """Translate msgspec's error message."""
    if message.startswith("Invalid enum value"):
        return f"it is not one of {', '.join(setting.choices)}"
    found = re.match(r"Expected `(\w+)`(?: (>=|<=|>|<) ([\d.]+))?", message)
    if not found or found[1] not in KINDS:
        return message
    return f"it must be {BOUNDS[found[2]]} {float(found[3]):.15g}" if found[2] else f"it must be {KINDS[found[1]]}"


def in_given_terms(error: PenstockError, names: Mapping[str, str]) -> PenstockError:
    """Replace options in an error by the names that the user gave.

    Args:
        names: ``ResolvedConfiguration.given_names``.
    """
    failure = error.failure
    message = failure.message
    for name, given in names.items():
        plain = rf"\A{name}(?=: )|(?<![\w-])--{name.replace('_', '-')}(?![\w-])"
        pattern = rf"{plain}|(?<![\w.-]){name}(?![\w-])" if "_" in name else plain
        message = re.sub(pattern, lambda _, given=given: given, message)  # type: ignore[misc]
    field = names.get(failure.field, failure.field)
    return PenstockError.of(msgspec.structs.replace(failure, message=message, field=field))


def _flag_as_typed(name: str) -> str:
    """A profile's flag as typed: with dashes if Penstock has an option of the same name."""
    return settings()[name].flag if name in settings() else flag(name)


def _read_file(file: str | Path | None) -> dict[Any, Any]:
    if file is None:
        return {}
    import yaml

    try:
        document = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise invalid("config", f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict | None):
        raise invalid("config", f"{file} is not a YAML mapping of options")
    return document or {}


def _flags_in_file(document: dict[Any, Any], profile: Profile) -> dict[str, str]:
    """Remove a profile's flags from a file's options, and return their values as text, as on the command line."""
    found = {}
    for key in [*document]:
        name, value = str(key).replace("-", "_"), document[key]
        if name not in profile.flags or (name in settings() and not profile.name):
            continue
        del document[key]
        alias = profile.flags[name]
        if value is None or (alias.switch and value is False):
            continue  # null, or false for a switch: the flag is not set
        if isinstance(value, list) and alias.several:
            found[name] = ",".join(map(str, value))
        elif isinstance(value, str):
            found[name] = value
        else:
            found[name] = json.dumps(value, ensure_ascii=False)
    return found


def _flatten(document: Mapping[Any, Any], file: str) -> Settings:
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if name in SECTIONS and isinstance(value, dict):
            yield from _flatten(value, file)
        elif name not in settings():
            raise invalid(str(key), f"no such option, in {file}{did_you_mean(name, settings())}")
        elif value is not None:
            yield name, value, file


def _environment_settings(environment: Mapping[str, str]) -> Settings:
    names = {setting.variable: setting.name for setting in settings().values()}
    for variable, text in sorted(environment.items()):
        if variable not in names:
            is_ours = variable.startswith("PENSTOCK_") and variable not in NO_OPTIONS
            if is_ours and (hint := did_you_mean(variable, names)):
                logger.warning("the environment variable %s is not an option%s", variable, hint)
            continue
        if text.startswith("tcp://"):  # set by Kubernetes for a service called penstock
            logger.warning("%s=%s was set by Kubernetes and is ignored", variable, text)
            continue
        yield names[variable], text, variable
