"""Profiles: translation of another system's flags, environment variables, defaults and metrics to Penstock's.

A profile is a table in a separate module, selected with ``--compat`` or by the system's command. It translates values
as text; the resulting settings validate them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from penstock.config.options import EngineOptions
from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean

NAMES = ("ascend-vllm", "bladellm", "fastdeploy", "paddlenlp", "triton", "vllm")
Settings = Iterator[tuple[str, Any, str]]
"""Triples of setting, value, and source (flag, variable or file)."""
KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)\Z|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?\Z")
"""Variables that Kubernetes sets for each service, such as ``VLLM_SERVICE_HOST`` for a service called vllm."""
SECURITY = re.compile(
    r"(\A|_)(KEYS?|TOKENS?|SECRETS?|PASSWORDS?|PASSWD|CREDENTIALS?|AUTH|SSL|TLS|CERTS?|ALLOW|ALLOWED|ORIGINS?|CORS|INSECURE"
    r"|TRUST|RESTRICT(ED)?|PLUGINS?)\Z|(\A|_)(API_KEY|AUTH|SSL|TLS|CERT|ALLOW|ALLOWED|CORS|INSECURE|TRUST|RESTRICTED)_"
)
"""Names of security-related variables."""


class DerivedMetric(NamedTuple):
    """A gauge of another system, computed from Penstock's metrics."""

    help: str
    value: Callable[[Mapping[str, float], EngineOptions], float]
    """Computes the gauge from Penstock's counters and gauges, by name without ``penstock:``, and the options."""


def share(help: str, part: str, whole: str) -> DerivedMetric:
    """Gauge ``part / whole`` of two of Penstock's metrics; 0 while ``whole`` is 0."""
    return DerivedMetric(help, lambda metrics, options: metrics[part] / max(metrics[whole], 1))


def same(help: str, name: str) -> DerivedMetric:
    """Gauge with the value of Penstock's metric ``name``."""
    return DerivedMetric(help, lambda metrics, options: metrics[name])


@dataclass(frozen=True)
class Alias:
    """Translation of a flag or variable."""

    to: str = ""
    """Name of the setting; empty if ``read`` returns a mapping."""
    read: Callable[[str], Any] = str
    """Converts the value, or returns a mapping of settings to values. Raises ``ValueError`` for an invalid value."""
    why: str = ""
    """Reason why the name is accepted but has no effect, for the log; empty: it has an effect."""
    switch: bool = False
    """The flag takes no value."""
    short: str = ""
    """Short flags with their dash, separated by spaces."""
    several: bool = False
    """The flag takes several values, which are passed to ``read`` joined by commas."""
    secret: bool = False
    """Errors must not quote the value."""
    about: str = ""
    """Description for the help; empty: the name of the option, or the reason."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Values without effect, in lower case, with the reason for the log."""

    def settings(self, text: str) -> Mapping[str, Any]:
        """Translate a value to settings. Raises ``ValueError`` for an invalid value."""
        result = self.read(text)
        return result if isinstance(result, Mapping) else {self.to: result}


def ignored(why: str, switch: bool = False, short: str = "", several: bool = False) -> Alias:
    """Alias that has no effect, for the given reason."""
    return Alias(why=why, switch=switch, short=short, several=several)


def named(names: str, alias: Alias) -> dict[str, Alias]:
    """Table with the same alias for several names, separated by spaces."""
    return dict.fromkeys(names.split(), alias)


def all_ignored(why: str, names: str, switches: str = "") -> dict[str, Alias]:
    """Table of ignored ``names`` (flags with a value) and ``switches`` (without), separated by spaces."""
    return named(names, ignored(why)) | named(switches, ignored(why, switch=True))


COMBINED = Alias(read=lambda text: {})
"""Alias that ``Profile.together`` evaluates together with other names."""


def only_value(value: str, why: str, short: str = "") -> Alias:
    """Alias that accepts one value, without effect; other values are rejected for the given reason."""

    def read(text: str) -> Mapping[str, Any]:
        if text.lower() != value and (_number(text) is None or _number(text) != _number(value)):
            raise ValueError(f"{why}; only {value} is possible")
        return {}

    return Alias(read=read, short=short, about=f"only {value}: {why}")


def _number(text: str) -> float | None:
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
    """Alias that is rejected for the given reason.

    Args:
        unless: values without effect, in lower case, which are accepted. A switch also accepts ``false``.
    """
    accepted = ("", "false", *unless) if switch else unless

    def read(text: str) -> Mapping[str, Any]:
        if text.lower() not in accepted:
            raise ValueError(why)
        return {}

    about = f"not supported: {why}"
    return Alias(read=read, switch=switch, short=short, several=several, secret=secret, about=about)


def one_of(table: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a reader that maps values by a table, case-insensitively."""

    def read(text: str) -> Any:
        if text.lower() not in table:
            raise ValueError(f"it is not one of {', '.join(table)}")
        return table[text.lower()]

    return read


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ``ValueError`` for other texts."""
    try:
        result = json.loads(text)
    except ValueError as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(result, dict):
        raise ValueError("it is not a JSON object")
    return result


def on(text: str) -> bool:
    """Parse ``true`` or ``false``, in any case. Raises ``ValueError`` for other texts."""
    return one_of({"true": True, "false": False})(text)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Command:
    """Flags of another command than the server's, which set the options of Penstock's command of the same name."""

    flags: Mapping[str, Alias] = field(default_factory=dict)
    """Flags by name without leading dashes and with ``_``. Flags with Penstock's name and meaning are not listed."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The system's defaults, by Penstock's options."""
    together: Callable[[Mapping[str, str]], Settings] = lambda given: iter(())
    """Yields settings that depend on several flags. Raises ``PenstockError`` (``invalid``)."""


@dataclass(frozen=True)
class Profile:
    """Flags, environment variables, defaults and metrics of another system."""

    name: str
    title: str
    """The system's name in messages."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The system's defaults, by Penstock's settings."""
    flags: Mapping[str, Alias] = field(default_factory=dict)
    """The system's flags, by name without leading dashes and with ``_``."""
    variables: Mapping[str, Alias] = field(default_factory=dict)
    """The system's environment variables, by name."""
    prefixes: tuple[str, ...] = ()
    """Prefixes of the system's environment variables. Unknown variables with such a prefix are logged, or rejected if
    their names are security-related."""
    check: Callable[[Mapping[str, str]], None] = lambda given: None
    """Checks the combination of all given names. Raises ``PenstockError`` (``invalid``) for contradictions."""
    together: Callable[[Mapping[str, str]], Settings] = lambda given: iter(())
    """Yields settings that depend on several names. Raises ``PenstockError`` (``invalid``)."""
    defaults_for: Callable[[Mapping[str, str]], Mapping[str, Any]] = lambda given: {}
    """Returns defaults, by Penstock's settings, that depend on the given names."""
    metrics: Mapping[str, str | DerivedMetric] = field(default_factory=dict)
    """The system's metrics, with Penstock's name (without ``penstock:``) or a derived metric. A key ``name.label`` is a
    sample of ``name`` with the label ``label="label"``."""
    commands: Mapping[str, Command] = field(default_factory=dict)
    """Other commands by name, such as ``bench serve``. Their flags replace those of the server."""
    ready_message: Callable[[int, EngineOptions], str] = lambda blocks, options: ""
    """Returns the line that the system logs when it is ready, given the number of KV blocks."""


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
        The non-empty variables that the profile has, and their settings.

    Raises ``PenstockError`` (``invalid``) for an invalid value, and for an unknown security-related variable: ignoring
    it could leave the server unprotected. A variable ``…_TOKENS`` with a number is not security-related.
    """
    known = {name: environment[name] for name in profile.variables if environment.get(name)}
    for name in sorted(environment):
        if not name.startswith(profile.prefixes) or name in profile.variables or not environment[name]:
            continue
        if KUBERNETES.search(name) or (name.endswith("_PORT") and "://" in environment[name]):
            continue
        if SECURITY.search(name) and not (name.endswith("_TOKENS") and _number(environment[name]) is not None):
            message = f"is not a known variable of {profile.title}, and may be security-related, so it is not ignored"
            raise invalid(name, f"{message}: unset it")
        ignored[name] = f"this variable of {profile.title} has no equivalent"
    return known, list(translate(profile.variables, known, str, ignored))


def load(name: str) -> Profile | None:
    """Load a profile by name; None for an empty name. Raises ``PenstockError`` (``invalid``) for an unknown name."""
    if not name:
        return None
    if name not in NAMES:
        raise invalid("compat", f"{name!r} is not one of {', '.join(NAMES)}{did_you_mean(name, NAMES)}")
    result: Profile = import_module(f"{__name__}.{name.replace('-', '_')}").PROFILE
    return result
