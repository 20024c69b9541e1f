"""Options by name, as callers of ``LLM`` and ``AsyncLLM`` give them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.errors import invalid
from penstock.core.options import EngineOptions
from penstock.core.profiles import flag, load, meant
from penstock.core.settings import nearest, settings

logger = logging.getLogger(__name__)


def engine_options(given: Mapping[str, Any]) -> EngineOptions:
    """Raises ``PenstockError`` (``invalid``) for an unknown name, with the nearest known one, or a wrong value."""
    known = [field.name for field in msgspec.structs.fields(EngineOptions)]
    for name in given:
        if name not in known:
            raise invalid(name, f"no such option{nearest(name, known)}")
    plain = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in given.items()}
    try:
        return msgspec.convert(plain, EngineOptions)
    except msgspec.ValidationError as error:
        raise invalid("options", str(error)) from error


def translated(compat: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options here for those of another system, with its defaults; None is what is not given.

    What has no meaning here, or in no server, is said in the log. Raises ``PenstockError`` (``invalid``) for an unknown
    system, and for values that are wrong or not possible here.
    """
    profile = load(compat)
    if profile is None:
        return dict(given)
    theirs, ours = {}, {}
    for name, value in given.items():
        if value is None:
            continue
        if name in profile.flags:
            theirs[name] = value if isinstance(value, str) else json.dumps(value)
        else:
            ours[name] = value
    together = {flag(name): text for name, text in theirs.items()}
    profile.check(together)
    ignored: dict[str, str] = {}
    found = [(name, value, "") for name, value in {**profile.defaults, **profile.defaults_for(together)}.items()]
    found += [*meant(profile.flags, theirs, str, ignored), *profile.together(together)]
    found += [(name, value, name) for name, value in ours.items()]
    options = {}
    for name, value, source in found:
        if name in settings() and settings()[name].section == "server":
            if source:
                ignored[source] = "it is for servers"
        else:
            options[name] = _converted(name, value) if isinstance(value, str) and source in theirs else value
    for name, why in ignored.items():
        logger.warning("%s has no meaning here and is ignored: %s", name, why)
    return options


def _converted(name: str, text: str) -> Any:
    """A value as text in the option's own type."""
    try:
        return msgspec.convert(text, settings()[name].annotated, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(name, str(error)) from error
