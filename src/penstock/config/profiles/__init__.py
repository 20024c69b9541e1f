"""Profiles: another system's flags, environment variables, defaults and metrics, translated to ours.

A profile is a table in a module of its own, selected with ``--compat`` or by the system's own command. It handles
values as text; the settings that they become check them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from penstock.config.options import EngineOptions
from penstock.config.settings import did_you_mean
from penstock.core.errors import invalid

NAMES = ("ascend-vllm", "bladellm", "fastdeploy", "paddlenlp", "triton", "vllm")
Settings = Iterator[tuple[str, Any, str]]
"""Triples of setting, value, and source (flag, variable or file)."""
KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)\Z|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?\Z")
"""Variables that Kubernetes sets for each service, such as ``VLLM_SERVICE_HOST`` for one called vllm."""
SECURITY = re.compile(
    r"(\A|_)(KEYS?|TOKENS?|SECRETS?|PASSWORDS?|PASSWD|CREDENTIALS?|AUTH|SSL|TLS|CERTS?|ALLOW|ALLOWED|ORIGINS?|CORS|INSECURE"
    r"|TRUST|RESTRICT(ED)?|PLUGINS?)\Z|(\A|_)(API_KEY|AUTH|SSL|TLS|CERT|ALLOW|ALLOWED|CORS|INSECURE|TRUST|RESTRICTED)_"
)
"""Names of variables that are about security."""


class DerivedMetric(NamedTuple):
    """A gauge of another system that is computed from our metrics."""

    help: str
    value: Callable[[Mapping[str, float], EngineOptions], float]
    """Computes it from our counters and gauges, by name without ``penstock:``."""


def share(help: str, part: str, whole: str) -> DerivedMetric:
    """The ratio of two of our metrics; 0 while the second is 0."""
    return DerivedMetric(help, lambda ours, options: ours[part] / max(ours[whole], 1))


def same(help: str, name: str) -> DerivedMetric:
    """One of our metrics, as a gauge."""
    return DerivedMetric(help, lambda ours, options: ours[name])


@dataclass(frozen=True)
class Alias:
    """The translation of one flag or variable."""

    to: str = ""
    """The setting; empty where ``read`` returns several, or there is none."""
    read: Callable[[str], Any] = str
    """Converts the value, or returns a mapping of settings to values. Raises ``ValueError`` where it is wrong."""
    why: str = ""
    """Why it has no effect: it is accepted and ignored, and the log gives this reason."""
    switch: bool = False
    """Whether the flag takes no value."""
    short: str = ""
    """Short flags with their dash, separated by spaces."""
    several: bool = False
    """Whether the flag takes several values, which ``read`` gets joined by commas."""
    secret: bool = False
    """Whether errors must not quote the value."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Values that have no effect, in lower case, with the reason, which the log gives."""

    def settings(self, text: str) -> Mapping[str, Any]:
        """The settings for a value. Raises ``ValueError`` where it is wrong."""
        result = self.read(text)
        return result if isinstance(result, Mapping) else {self.to: result}


def ignored(why: str, switch: bool = False, short: str = "", several: bool = False) -> Alias:
    """A name without effect."""
    return Alias(why=why, switch=switch, short=short, several=several)


def named(names: str, alias: Alias) -> dict[str, Alias]:
    """Part of a table: several names, separated by spaces, with the same alias."""
    return dict.fromkeys(names.split(), alias)


def all_ignored(why: str, names: str, switches: str = "") -> dict[str, Alias]:
    """Part of a table: names without effect, separated by spaces, with a value and without."""
    return named(names, ignored(why)) | named(switches, ignored(why, switch=True))


COMBINED = Alias(read=lambda text: {})
"""A name that ``Profile.together`` evaluates in combination with others."""


def only_value(value: str, why: str, short: str = "") -> Alias:
    """A name that accepts one value, without effect; other values are refused with the reason."""

    def read(text: str) -> Mapping[str, Any]:
        if text.lower() != value and (_number(text) is None or _number(text) != _number(value)):
            raise ValueError(f"{why}; only {value} is possible")
        return {}

    return Alias(read=read, short=short)


def _number(text: str) -> float | None:
    """The number that a text is; None where it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def refused(
    why: str,
    switch: bool = False,
    short: str = "",
    several: bool = False,
    secret: bool = False,
    unless: tuple[str, ...] = (),
) -> Alias:
    """A name that is refused with the reason.

    Args:
        unless: values, in lower case, that ask for nothing, and are accepted; of a switch also ``false``.
    """
    accepted = ("", "false", *unless) if switch else unless

    def read(text: str) -> Mapping[str, Any]:
        if text.lower() not in accepted:
            raise ValueError(why)
        return {}

    return Alias(read=read, switch=switch, short=short, several=several, secret=secret)


def one_of(table: Mapping[str, Any]) -> Callable[[str], Any]:
    """A reader for a table of values, case-insensitive."""

    def read(text: str) -> Any:
        if text.lower() not in table:
            raise ValueError(f"it is not one of {', '.join(table)}")
        return table[text.lower()]

    return read


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ``ValueError`` for other texts."""
    try:
        result = json.loads(text)
    except ValueError as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(result, dict):
        raise ValueError("it is not a JSON object")
    return result


def on(text: str) -> bool:
    """A boolean: a switch on the command line, ``True`` or ``False`` in Python."""
    return one_of({"true": True, "false": False})(text)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Profile:
    """The names and defaults of one system."""

    name: str
    title: str
    """The system's name in texts."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Its defaults, by our settings."""
    flags: Mapping[str, Alias] = field(default_factory=dict)
    """Its flags, by the name without leading dashes and with ``_``."""
    variables: Mapping[str, Alias] = field(default_factory=dict)
    """Its environment variables."""
    prefixes: tuple[str, ...] = ()
    """Prefixes of its environment variables: others that begin so are logged, or refused where their name is about
    security."""
    check: Callable[[Mapping[str, str]], None] = lambda given: None
    """Checks all given names together. Raises ``PenstockError`` (``invalid``) for contradictions."""
    together: Callable[[Mapping[str, str]], Settings] = lambda given: iter(())
    """Settings that depend on several names. Raises ``PenstockError`` (``invalid``)."""
    defaults_for: Callable[[Mapping[str, str]], Mapping[str, Any]] = lambda given: {}
    """Defaults that depend on other options."""
    metrics: Mapping[str, str | DerivedMetric] = field(default_factory=dict)
    """Its metrics: name → ours without ``penstock:``, or how to compute it. ``name.label`` is a sample of ``name`` with
    the label ``label="label"``."""
    ready_message: Callable[[int, EngineOptions], str] = lambda blocks, options: ""
    """The line that it logs when it is ready, given the number of KV blocks."""


def translate(
    table: Mapping[str, Alias], given: Mapping[str, str], source: Callable[[str], str], ignored: dict[str, str]
) -> Settings:
    """Translate given names to settings.

    Args:
        table: the profile's flags or variables.
        source: formats a name for errors and the log.
        ignored: collects names and values without effect, with the reason.
    """
    for name, text in given.items():
        if table[name].why:
            ignored[source(name)] = table[name].why
            continue
        try:
            values = table[name].settings(text)
        except ValueError as error:
            shown = "its value" if table[name].secret else repr(text)
            raise invalid(source(name), f"{shown} is wrong: {error}") from error
        if why := table[name].without_effect.get(text.lower()):
            ignored[f"{source(name)} {text}"] = why
        for setting, value in values.items():
            yield setting, value, source(name)


def flag(name: str) -> str:
    return f"--{name}"


def translate_variables(
    profile: Profile, environment: Mapping[str, str], ignored: dict[str, str]
) -> tuple[dict[str, str], list[tuple[str, Any, str]]]:
    """Translate the environment variables of a system.

    Returns:
        The variables that the profile knows and that are not empty, and their settings.

    Raises ``PenstockError`` (``invalid``) for a wrong value, and for an unknown variable that is about security: it
    cannot be ignored, as the server would be less protected than it was. A number of tokens is not about security.
    """
    known = {name: environment[name] for name in profile.variables if environment.get(name)}
    for name in sorted(environment):
        if not name.startswith(profile.prefixes) or name in profile.variables or not environment[name]:
            continue
        if KUBERNETES.search(name) or (name.endswith("_PORT") and "://" in environment[name]):
            continue
        if SECURITY.search(name) and not (name.endswith("_TOKENS") and _number(environment[name]) is not None):
            raise invalid(
                name, f"is not known of {profile.title}, and its name is about security, so it is not ignored: unset it"
            )
        ignored[name] = f"this variable of {profile.title} has no counterpart"
    return known, list(translate(profile.variables, known, str, ignored))


def load(name: str) -> Profile | None:
    """The profile of a name, None for the empty one. Raises ``PenstockError`` (``invalid``) for an unknown name."""
    if not name:
        return None
    if name not in NAMES:
        raise invalid("compat", f"{name!r} is not one of {', '.join(NAMES)}{did_you_mean(name, NAMES)}")
    result: Profile = import_module(f"{__name__}.{name.replace('-', '_')}").PROFILE
    return result
