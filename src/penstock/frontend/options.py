"""Keyword arguments of ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, ValidationError, convert
from msgspec.structs import fields, replace

from penstock.checkpoint.engine_config import engine_defaults
from penstock.config.options import EngineOptions, ModelOptions
from penstock.config.profiles import flag, load, translate
from penstock.config.profiles.vllm import DEFAULT_PROFILE
from penstock.config.settings import settings
from penstock.config.sources import convert_setting
from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean

from .hub import resolve_draft, resolve_source

T = TypeVar("T", bound=Struct)

logger = logging.getLogger(__name__)


def read_options(model: str | Path, compat: str, given: Mapping[str, Any]) -> tuple[ModelOptions, EngineOptions]:
    """Convert keyword arguments to options; the model is downloaded if it is not cached.

    Args:
        compat: system that defines the option names and defaults; empty: vLLM.
        given: options by name; None: the option is absent.

    Raises ``PenstockError`` (``invalid``) for a wrong value, and for an unknown name; the message then has the
    nearest known name.
    """
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    present = {name: value for name, value in plain.items() if value is not None}
    result = translate_options(compat, present, engine_defaults(str(model)))
    model_fields, engine_fields = ([field.name for field in fields(kind)] for kind in (ModelOptions, EngineOptions))
    for name in result:
        if name not in (*model_fields, *engine_fields):
            raise invalid(name, f"no such option{did_you_mean(name, (*model_fields, *engine_fields))}")
    model_options = _struct({name: result.pop(name) for name in model_fields if name in result}, ModelOptions)
    folder = resolve_source(model, model_options)
    engine = _struct(result | {"model": str(folder)}, EngineOptions)
    return model_options, replace(engine, speculative_config=resolve_draft(engine.speculative_config))


def _struct(given: Mapping[str, Any], schema: type[T]) -> T:
    plain = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in given.items()}
    try:
        return convert(plain, schema)
    except ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise invalid(path.rstrip("`") or "options", message) from error


def translate_options(
    compat: str, given: Mapping[str, Any], model_defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Translate another system's options to Penstock's, and add that system's defaults.

    Options that do not apply are ignored, with a warning.

    Args:
        compat: the system; empty: vLLM.
        model_defaults: defaults of the model, which override the system's defaults.

    Raises ``PenstockError`` (``invalid``) for an unknown system, and for invalid or unsupported values.
    """
    profile = load(compat) or DEFAULT_PROFILE
    foreign, native = {}, {}  # options by the system's names, and by Penstock's
    for name, value in given.items():
        if name in profile.flags:
            if value is None:  # vLLM and FastDeploy write None for an absent option
                continue
            foreign[name] = value if isinstance(value, str) else json.dumps(value)
        else:
            native[name] = value
    by_flag = {flag(name): text for name, text in foreign.items()}
    profile.check(by_flag)
    ignored: dict[str, str] = {}
    with_sources = [(name, value, "") for name, value in {**profile.defaults, **profile.defaults_for(by_flag)}.items()]
    with_sources += [(name, value, "") for name, value in (model_defaults or {}).items()]
    with_sources += [*translate(profile.flags, foreign, str, ignored), *profile.together(by_flag)]
    with_sources += [(name, value, name) for name, value in native.items()]
    options = {}
    for name, value, source in with_sources:
        if name in settings() and settings()[name].section not in ("model", "engine"):
            if source:
                ignored[source] = "it applies to servers only"
        else:
            converted = convert_setting(settings()[name], value, source, foreign=True) if source in foreign else value
            options[name] = converted
    for name, why in ignored.items():
        logger.warning("option %s is ignored: %s", name, why)
    return options
