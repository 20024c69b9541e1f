"""What a server tells of itself, over HTTP and gRPC alike, and what it lets nobody change."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock import __version__
from penstock.core import Code, PenstockError

from .model import VERSION
from .registry import Registry

logger = logging.getLogger(__name__)

EXTENSIONS = (
    "model_repository",
    "model_configuration",
    "parameters",
    "statistics",
    "trace",
    "logging",
    "binary_tensor_data",
    "generate",
)


def server() -> dict[str, Any]:
    """As ``/v2`` tells it."""
    return {"name": "penstock", "version": __version__, "extensions": list(EXTENSIONS)}


def index(registry: Registry) -> list[dict[str, str]]:
    """As ``/v2/repository/index`` tells it."""
    engine = registry.service.gateway.engine
    try:
        engine.check()
        ready, reason = "READY", ""
    except PenstockError as error:
        ready, reason = "UNAVAILABLE", error.failure.message
    return [{"name": model.name, "version": VERSION, "state": ready, "reason": reason} for model in registry]


def load(registry: Registry, name: str, parameters: Mapping[str, Any] | None) -> None:
    """Nothing is left to do for a model that is here.

    Raises ``PenstockError`` for others, and where it is to be loaded in another way.
    """
    if name not in [model.name for model in registry]:
        known = ", ".join(model.name for model in registry)
        words = f"failed to load '{name[:100]}', failed to poll from model repository; there is {known}"
        raise PenstockError(Code.INVALID, words, "model_name")
    if parameters:
        words = (
            f"failed to load '{name}': what it runs with is set when the server starts, not by {min(parameters)[:50]}"
        )
        raise PenstockError(Code.UNSUPPORTED, words, "parameters")


def unload(registry: Registry, name: str) -> None:
    """Raises ``PenstockError``: the models are one, and stay as long as the server does."""
    registry.find(name)
    words = f"failed to unload '{name}': its models are one engine, which ends with the server"
    raise PenstockError(Code.UNSUPPORTED, words, "model_name")


def log_settings() -> dict[str, Any]:
    """As ``/v2/logging`` tells it."""
    return {
        "log_file": "",
        "log_info": logger.isEnabledFor(logging.INFO),
        "log_warning": logger.isEnabledFor(logging.WARNING),
        "log_error": logger.isEnabledFor(logging.ERROR),
        "log_verbose_level": int(logger.isEnabledFor(logging.DEBUG)),
        "log_format": "default",
    }


def trace_settings() -> dict[str, Any]:
    """As ``/v2/trace/setting`` tells it."""
    return {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "triton",
    }


def unchanged(current: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as they are.

    Raises ``PenstockError`` where they are to be others: they are set when the server starts.
    """
    for name, value in wanted.items():
        if name not in current:
            raise PenstockError(Code.INVALID, f"{name[:100]}: no such setting", name[:100])
        if value is not None and value != current[name]:
            words = f"{name}: is {current[name]!r} for as long as the server runs; set it when the server starts"
            raise PenstockError(Code.UNSUPPORTED, words, name)
    return current
