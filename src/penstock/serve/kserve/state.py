"""What a server tells of itself, over HTTP and gRPC alike, and what it lets nobody change."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping
from typing import Any

from penstock import __version__
from penstock.core import Code, PenstockError
from penstock.serve.control import ServedModel

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
DEPENDENTS = "unload_dependents"


def server() -> dict[str, Any]:
    """As ``/v2`` tells it."""
    return {"name": "penstock", "version": __version__, "extensions": list(EXTENSIONS)}


def index(registry: Registry, ready: bool = False) -> list[dict[str, str]]:
    """As ``/v2/repository/index`` tells it; ``ready`` leaves out what cannot be asked."""
    states = [
        (name, *_state(registry, model))
        for model in registry.services.models
        for name in model.kserve or model.names[:1]
    ]
    states += [(model.name, "READY", "") for model in registry.others]
    return [
        {"name": name, "version": VERSION, "state": state, "reason": reason}
        for name, state, reason in states
        if state == "READY" or not ready
    ]


def _state(registry: Registry, model: ServedModel) -> tuple[str, str]:
    """And the reason of it."""
    service = next((service for service in registry.services if service.name == model.name), None)
    if model.leaving:
        return "UNLOADING", ""
    if service is None:
        return ("LOADING", "") if model.engine else ("UNAVAILABLE", model.reason)
    try:
        service.gateway.engine.check()
    except PenstockError as error:
        return "UNAVAILABLE", error.failure.message
    return "READY", ""


async def load(registry: Registry, name: str, parameters: Mapping[str, Any] | None) -> None:
    """Load the model that this one is over; nothing is left to do where it is here.

    Raises ``PenstockError`` where there is none, it cannot be loaded, or it is to be loaded in another way.
    """
    if (model := registry.owner(name)) is None:
        known = ", ".join(each for model in registry.services.models for each in model.kserve)
        words = f"failed to load '{name[:100]}', failed to poll from model repository; there is {known}"
        raise PenstockError(Code.INVALID, words, "model_name")
    if parameters:
        words = (
            f"failed to load '{name}': what it runs with is set when the server starts, not by {min(parameters)[:50]}"
        )
        raise PenstockError(Code.UNSUPPORTED, words, "parameters")
    if registry.keeper.explicit or _state(registry, model)[0] != "READY":
        await _done("load", name, registry.keeper.load(model.name))


async def unload(registry: Registry, name: str, parameters: Mapping[str, Any] | None) -> None:
    """Unload the model that this one is over, and with it all that are.

    Raises ``PenstockError`` where there is none, or it is one of several over an engine that are not to go.
    """
    if (model := registry.owner(name)) is None:
        raise PenstockError(Code.INVALID, f"failed to unload '{name[:100]}', model not found", "model_name")
    registry.keeper.check()
    if unknown := sorted((parameters or {}).keys() - {DEPENDENTS}):
        raise PenstockError(Code.INVALID, f"{unknown[0][:100]}: no such parameter; there is {DEPENDENTS}", "parameters")
    own = name in model.names or model.kserve[name] == "tensorrt_llm"
    if not own and not (parameters or {}).get(DEPENDENTS):
        engines = [each for each, kind in model.kserve.items() if kind == "tensorrt_llm"] or [model.name]
        words = f"failed to unload '{name}': it is over the engine of {engines[0]}; unload that"
        raise PenstockError(Code.UNSUPPORTED, f"{words}, or set {DEPENDENTS}", "model_name")
    await _done("unload", name, registry.keeper.unload(model.name))


async def _done(what: str, name: str, work: Awaitable[None]) -> None:
    try:
        await work
    except PenstockError as error:
        failure = error.failure
        raise PenstockError(failure.code, f"failed to {what} '{name}': {failure.message}", "model_name") from error


def log_settings() -> dict[str, Any]:
    """As ``/v2/logging`` tells it."""
    return {
        "log_file": next((h.baseFilename for h in logging.root.handlers if isinstance(h, logging.FileHandler)), ""),
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
