"""Profiles: what another system's names of settings mean here, and the values it has where none are given.

A profile is a table, a module of its own for each system, and is chosen with ``--compat`` or by the command that the
system's users type. Values are text to it, as they are typed; which are right is told by the setting they are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from penstock.config.options import EngineOptions
from penstock.config.settings import did_you_mean
from penstock.core.errors import invalid

NAMES = ("ascend-vllm", "bladellm", "fastdeploy", "paddlenlp", "triton", "vllm")
Settings = Iterator[tuple[str, Any, str]]
"""Settings here and their values, with where each was found."""


class DerivedMetric(NamedTuple):
    """A gauge of another system that is made of ours."""

    help: str
    value: Callable[[Mapping[str, float], EngineOptions], float]
    """From our counters and gauges, by name without ``penstock:``."""


def share(help: str, part: str, whole: str) -> DerivedMetric:
    """What one of our metrics is of another; 0 where there is nothing yet."""
    return DerivedMetric(help, lambda ours, options: ours[part] / max(ours[whole], 1))


def same(help: str, name: str) -> DerivedMetric:
    """One of our metrics, as a gauge."""
    return DerivedMetric(help, lambda ours, options: ours[name])


@dataclass(frozen=True)
class Alias:
    """What one name means."""

    to: str = ""
    """The setting here; nothing where ``read`` tells several, or there is none."""
    read: Callable[[str], Any] = str
    """Its value here, or a mapping of settings to values. Raises ``ValueError`` where it is wrong."""
    why: str = ""
    """Why it has no meaning here: it is taken, ignored, and said so in the log."""
    switch: bool = False
    """Whether its flag stands without a value."""
    short: str = ""
    """Another flag for it, with its dash."""

    def settings(self, text: str) -> Mapping[str, Any]:
        """The settings that a value stands for. Raises ``ValueError`` where it is wrong."""
        found = self.read(text)
        return found if isinstance(found, Mapping) else {self.to: found}


def ignored(why: str, switch: bool = False, short: str = "") -> Alias:
    """A name that has no meaning here."""
    return Alias(why=why, switch=switch, short=short)


COMBINED = Alias(read=lambda text: {})
"""A name that means something only together with others."""


def only_value(value: str, why: str, short: str = "") -> Alias:
    """A name that can have one value, which changes nothing; others are refused by name for a reason."""

    def read(text: str) -> Mapping[str, Any]:
        if text.lower() != value:
            raise ValueError(f"{why}; only {value} is possible")
        return {}

    return Alias(read=read, short=short)


def refused(why: str, switch: bool = False) -> Alias:
    """A name that cannot be given, for a reason."""

    def read(text: str) -> Mapping[str, Any]:
        raise ValueError(why)

    return Alias(read=read, switch=switch)


def one_of(table: Mapping[str, Any]) -> Callable[[str], Any]:
    """How a value among few is read, in capitals or not."""

    def read(text: str) -> Any:
        if text.lower() not in table:
            raise ValueError(f"it is none of {', '.join(table)}")
        return table[text.lower()]

    return read


def on(text: str) -> bool:
    """A switch; in Python it may also be given as off."""
    return one_of({"true": True, "false": False})(text)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Profile:
    """The names of one system."""

    name: str
    title: str
    """What people call the system."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of settings here, where nothing is given."""
    flags: Mapping[str, Alias] = field(default_factory=dict)
    """By the name without dashes in front, with ``_`` within."""
    variables: Mapping[str, Alias] = field(default_factory=dict)
    """By the name in the environment."""
    check: Callable[[Mapping[str, str]], None] = lambda given: None
    """Looks at all that was given, by name, together. Raises ``PenstockError`` (``invalid``) for what contradicts."""
    together: Callable[[Mapping[str, str]], Settings] = lambda given: iter(())
    """Settings that several names tell together, from all that was given. Raises ``PenstockError`` (``invalid``)."""
    defaults_for: Callable[[Mapping[str, str]], Mapping[str, Any]] = lambda given: {}
    """Values of settings where they are not given, which depend on what is."""
    metrics: Mapping[str, str | DerivedMetric] = field(default_factory=dict)
    """By its names: those of ours, without ``penstock:``, or how to make them of ours. ``name.label`` is a sample of
    ``name`` that has the label ``label="label"``."""
    ready_message: Callable[[int, EngineOptions], str] = lambda blocks, options: ""
    """What it says in the log once it is ready, with so many KV blocks."""


def translate(
    table: Mapping[str, Alias], given: Mapping[str, str], source: Callable[[str], str], ignored: dict[str, str]
) -> Settings:
    """The settings that another system's names mean; what means nothing here is noted."""
    for name, text in given.items():
        if table[name].why:
            ignored[source(name)] = table[name].why
            continue
        try:
            found = table[name].settings(text)
        except ValueError as error:
            raise invalid(source(name), f"{text!r} is wrong: {error}") from error
        for setting, value in found.items():
            yield setting, value, source(name)


def flag(name: str) -> str:
    return f"--{name}"


def load(name: str) -> Profile | None:
    """The profile of a system, none for none. Raises ``PenstockError`` (``invalid``) for an unknown one."""
    if not name:
        return None
    if name not in NAMES:
        raise invalid("compat", f"{name!r} is none of {', '.join(NAMES)}{did_you_mean(name, NAMES)}")
    found: Profile = import_module(f"{__name__}.{name.replace('-', '_')}").PROFILE
    return found
