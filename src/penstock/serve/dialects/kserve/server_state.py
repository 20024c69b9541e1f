"""Server metadata, repository index, loading of models, and log and trace settings, for both HTTP and gRPC."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping
from typing import Any

import msgspec

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.numbers import read_decimal
from penstock.core.spelling import did_you_mean
from penstock.serve.models.messages import ModelEntry
from penstock.version import __version__

from .model import MAX_BATCH_SIZE, VERSION
from .repository import ModelRepository
from .settings import change_trace, check_trace
from .settings import trace_settings as current_trace

logger = logging.getLogger(__name__)

EXTENSIONS = (
    "model_repository",
    "model_configuration",
    "parameters",
    "statistics",
    "system_shared_memory",
    "trace",
    "logging",
    "binary_tensor_data",
    "generate",
)
DEPENDENTS = "unload_dependents"
MODEL_CONFIG = frozenset(
    "name platform backend runtime version_policy max_batch_size input output batch_input batch_output optimization "
    "dynamic_batching sequence_batching ensemble_scheduling instance_group default_model_filename cc_model_filenames "
    "metric_tags parameters model_warmup model_operations model_transaction_policy model_repository_agents "
    "response_cache model_metrics".split()
)
"""Fields of Triton's ``ModelConfig``."""
SERVER_NAME = "triton"
"""Server name in the metadata, which Triton's clients check. The HTTP header ``server`` names Penstock."""


def server_metadata() -> dict[str, Any]:
    """The server's metadata, as ``/v2`` returns it."""
    return {"name": SERVER_NAME, "version": __version__, "extensions": list(EXTENSIONS)}


def repository_index(repository: ModelRepository, ready: bool = False) -> list[dict[str, str]]:
    """The list of models that ``/v2/repository/index`` returns; with ``ready``, only ready models."""
    states = [
        (name, *_state(repository, model))
        for model in repository.served_models.models
        for name in model.kserve or model.names[:1]
    ]
    states += [(model.name, "READY", "") for model in repository.others]
    return [
        {"name": name, "version": VERSION, "state": state, "reason": reason}
        for name, state, reason in states
        if state == "READY" or not ready
    ]


def _state(repository: ModelRepository, model: ModelEntry) -> tuple[str, str]:
    """State of a model in the repository index, and the reason if it is unavailable."""
    service = next((service for service in repository.served_models if service.name == model.name), None)
    if model.draining:
        return "UNLOADING", ""
    if service is None:
        return ("LOADING", "") if model.engine else ("UNAVAILABLE", model.reason)
    try:
        service.gateway.engine_pool.require_engine()
    except PenstockError as error:
        return "UNAVAILABLE", error.failure.message
    return "READY", ""


async def load_model(repository: ModelRepository, name: str, parameters: Mapping[str, Any] | None) -> None:
    """Load the served model that provides a KServe model, unless it is loaded already.

    Raises ``PenstockError`` if the model is unknown or cannot be loaded, or the parameters are invalid.
    """
    if (model := repository.owner(name)) is None:
        known = ", ".join(each for model in repository.served_models.models for each in model.kserve)
        message = f"failed to load '{name[:100]}', failed to poll from model repository; available: {known}"
        raise PenstockError(Code.INVALID, message, "model_name")
    try:
        max_batch_size = max_batch_size_override(parameters or {})
    except PenstockError as error:
        failure = error.failure
        raise PenstockError(failure.code, f"failed to load '{name}', {failure.message}", failure.field) from error
    if repository.model_manager.explicit or _state(repository, model)[0] != "READY":
        await _run("load", name, repository.model_manager.load(model.name))
    sizes = repository.shared.read().max_batch_size
    if sizes.get(name) != max_batch_size:
        with repository.shared.update() as state:
            state.max_batch_size.pop(name, None)
            if max_batch_size is not None:
                state.max_batch_size[name] = max_batch_size


async def unload_model(repository: ModelRepository, name: str, parameters: Mapping[str, Any] | None) -> None:
    """Unload the served model that provides a KServe model, with all its KServe models.

    Raises ``PenstockError`` if the model is unknown, or if it uses the engine of another KServe model and
    ``unload_dependents`` is not set.
    """
    if (model := repository.owner(name)) is None:
        raise PenstockError(Code.INVALID, f"failed to unload '{name[:100]}', model not found", "model_name")
    repository.model_manager.check()
    if unknown := sorted((parameters or {}).keys() - {DEPENDENTS}):
        message = f"{unknown[0][:100]}: unknown parameter; the only parameter is {DEPENDENTS}"
        raise PenstockError(Code.INVALID, message, "parameters")
    if not isinstance((parameters or {}).get(DEPENDENTS, False), bool):
        given = str((parameters or {})[DEPENDENTS])[:50]
        raise PenstockError(Code.INVALID, f"{DEPENDENTS}: must be true or false, is {given!r}", "parameters")
    owns_engine = name in model.names or model.kserve[name] == "tensorrt_llm"
    if not owns_engine and not (parameters or {}).get(DEPENDENTS):
        engines = [each for each, kind in model.kserve.items() if kind == "tensorrt_llm"] or [model.name]
        hint = f"it uses the engine of {engines[0]}; unload {engines[0]}, or set {DEPENDENTS}"
        message = f"failed to unload '{name}': {hint}"
        raise PenstockError(Code.UNSUPPORTED, message, "model_name")
    await _run("unload", name, repository.model_manager.unload(model.name))


def max_batch_size_override(parameters: Mapping[str, Any]) -> int | None:
    """The ``max_batch_size`` in the configuration of a load request; all other fields are ignored.

    Raises ``PenstockError`` if the configuration is invalid, or has ``parameters`` (set when the server starts).
    """
    for name in parameters:
        if name.startswith("file:"):
            message = f"{name[:100]}: Invalid file path: model files cannot be uploaded"
            raise PenstockError(Code.UNSUPPORTED, message, name[:100])
        if name != "config":
            raise invalid(name[:100], "unknown parameter; the only parameter is config")
    given = parameters.get("config", "{}")
    try:
        config = msgspec.json.decode(given) if isinstance(given, str) else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("config", f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise invalid("config", f"must be a JSON object as a string, is {str(given)[:50]!r}")
    max_batch_size = None
    for name, value in config.items():
        if name not in MODEL_CONFIG:
            raise invalid("config", f"unknown field: {name[:100]}{did_you_mean(name[:100], MODEL_CONFIG)}")
        if name == "parameters" and value:
            message = "config.parameters: can only be set when the server starts; leave it out"
            raise PenstockError(Code.UNSUPPORTED, message, "config")
        if name == "max_batch_size":
            max_batch_size = _batch_size(value)
        else:
            logger.info("the config field %s of a model load request is ignored", name)
    return max_batch_size


def _batch_size(given: Any) -> int:
    # protobuf's JSON mapping may encode integers as strings
    value = read_decimal(given, MAX_BATCH_SIZE) if isinstance(given, str) else given
    if type(value) is not int or not 0 <= value <= MAX_BATCH_SIZE:
        message = f"must be an integer from 0 to {MAX_BATCH_SIZE}, is {str(given)[:50]!r}"
        raise invalid("max_batch_size", message, MAX_BATCH_SIZE)
    return value


async def _run(operation: str, name: str, work: Awaitable[None]) -> None:
    try:
        await work
    except PenstockError as error:
        failure = error.failure
        message = f"failed to {operation} '{name}': {failure.message}"
        raise PenstockError(failure.code, message, "model_name") from error


def log_settings(repository: ModelRepository, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Change log settings and return all log settings, as ``/v2/logging`` does.

    Raises ``PenstockError``, and changes nothing, if a requested setting is invalid.
    """
    if changes := repository.log.check(requested):
        with repository.shared.update() as state:
            state.log |= changes
        repository.log.apply(repository.shared.read().log)
    return repository.log.current(repository.shared.read().log)


def trace_settings(repository: ModelRepository, requested: Mapping[str, Any], model: str = "") -> dict[str, Any]:
    """Change and return the trace settings of a model, or the global trace settings (the defaults of all models).

    Raises ``PenstockError`` if a setting is invalid, or the model is unknown.
    """
    if model:
        repository.find(model)
    if changes := check_trace(requested):
        with repository.shared.update() as state:
            change_trace(state.trace, model, changes)
    return current_trace(repository.shared.read().trace, model)
