"""The server's metadata, repository index, and log and trace settings, for HTTP and gRPC."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping
from typing import Any

import msgspec

from penstock.config.settings import did_you_mean
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.numbers import read_decimal
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
"""The server's name in its metadata, which Triton's own clients check. The HTTP header ``server`` names Penstock."""


def server_metadata() -> dict[str, Any]:
    """The server's metadata, as ``/v2`` returns it."""
    return {"name": SERVER_NAME, "version": __version__, "extensions": list(EXTENSIONS)}


def repository_index(repository: ModelRepository, ready: bool = False) -> list[dict[str, str]]:
    """The list that ``/v2/repository/index`` returns; ``ready`` leaves out models that are not."""
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
    """A model's state and its reason."""
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
    """Load the served model of a model of the protocol; does nothing where it is loaded.

    Raises ``PenstockError`` where there is none, it cannot be loaded, or the parameters are invalid.
    """
    if (model := repository.owner(name)) is None:
        known = ", ".join(each for model in repository.served_models.models for each in model.kserve)
        message = f"failed to load '{name[:100]}', failed to poll from model repository; there is {known}"
        raise PenstockError(Code.INVALID, message, "model_name")
    try:
        max_batch_size = max_batch_size_override(parameters or {})
    except PenstockError as error:
        failure = error.failure
        raise PenstockError(failure.code, f"failed to load '{name}', {failure.message}", failure.field) from error
    if repository.model_manager.explicit or _state(repository, model)[0] != "READY":
        await _done("load", name, repository.model_manager.load(model.name))
    sizes = repository.shared.read().max_batch_size
    if sizes.get(name) != max_batch_size:
        with repository.shared.update() as state:
            state.max_batch_size.pop(name, None)
            if max_batch_size is not None:
                state.max_batch_size[name] = max_batch_size


async def unload_model(repository: ModelRepository, name: str, parameters: Mapping[str, Any] | None) -> None:
    """Unload the served model of a model of the protocol, and all others over it.

    Raises ``PenstockError`` where there is none, or where other models use its engine and ``unload_dependents`` is not
    given.
    """
    if (model := repository.owner(name)) is None:
        raise PenstockError(Code.INVALID, f"failed to unload '{name[:100]}', model not found", "model_name")
    repository.model_manager.check()
    if unknown := sorted((parameters or {}).keys() - {DEPENDENTS}):
        raise PenstockError(Code.INVALID, f"{unknown[0][:100]}: no such parameter; there is {DEPENDENTS}", "parameters")
    if not isinstance((parameters or {}).get(DEPENDENTS, False), bool):
        raise PenstockError(Code.INVALID, f"{DEPENDENTS}: must be true or false", "parameters")
    owns_engine = name in model.names or model.kserve[name] == "tensorrt_llm"
    if not owns_engine and not (parameters or {}).get(DEPENDENTS):
        engines = [each for each, kind in model.kserve.items() if kind == "tensorrt_llm"] or [model.name]
        message = f"failed to unload '{name}': it is over the engine of {engines[0]}; unload that"
        raise PenstockError(Code.UNSUPPORTED, f"{message}, or set {DEPENDENTS}", "model_name")
    await _done("unload", name, repository.model_manager.unload(model.name))


def max_batch_size_override(parameters: Mapping[str, Any]) -> int | None:
    """The ``max_batch_size`` in the configuration of a load request, its only field with an effect.

    Raises ``PenstockError`` for an invalid configuration, or one with fields that are fixed when the server starts.
    """
    for name in parameters:
        if name.startswith("file:"):
            message = f"{name[:100]}: Invalid file path: files of a model lie where the server finds them"
            raise PenstockError(Code.UNSUPPORTED, message, name[:100])
        if name != "config":
            raise invalid(name[:100], "no such parameter; there is config")
    given = parameters.get("config", "{}")
    try:
        config = msgspec.json.decode(given) if isinstance(given, str) else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid("config", f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise invalid("config", "must be the text of a JSON object")
    max_batch_size = None
    for name, value in config.items():
        if name not in MODEL_CONFIG:
            raise invalid("config", f"no such field: {name[:100]}{did_you_mean(name[:100], MODEL_CONFIG)}")
        if name == "parameters" and value:
            raise PenstockError(Code.UNSUPPORTED, "config.parameters: set when the server starts", "config")
        if name == "max_batch_size":
            max_batch_size = _batch_size(value)
        else:
            logger.info("the field %s of a configuration in a request to load has no meaning here", name)
    return max_batch_size


def _batch_size(value: Any) -> int:
    if isinstance(value, str):  # as protobuf's JSON may have it
        value = read_decimal(value, MAX_BATCH_SIZE)
    if type(value) is not int or not 0 <= value <= MAX_BATCH_SIZE:
        raise invalid("max_batch_size", f"must be a whole number from 0 to {MAX_BATCH_SIZE}", MAX_BATCH_SIZE)
    return value


async def _done(what: str, name: str, work: Awaitable[None]) -> None:
    try:
        await work
    except PenstockError as error:
        failure = error.failure
        raise PenstockError(failure.code, f"failed to {what} '{name}': {failure.message}", "model_name") from error


def log_settings(repository: ModelRepository, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Change log settings and return all of them, as ``/v2/logging`` does.

    Raises ``PenstockError`` where one of them is invalid; then none is changed.
    """
    if changes := repository.log.check(requested):
        with repository.shared.update() as state:
            state.log |= changes
        repository.log.apply(repository.shared.read().log)
    return repository.log.current(repository.shared.read().log)


def trace_settings(repository: ModelRepository, requested: Mapping[str, Any], model: str = "") -> dict[str, Any]:
    """Change and return the trace settings of a model, or the global ones, which apply to models without their own.

    Raises ``PenstockError`` where one of them cannot be so, or there is no such model.
    """
    if model:
        repository.find(model)
    if changes := check_trace(requested):
        with repository.shared.update() as state:
            change_trace(state.trace, model, changes)
    return current_trace(repository.shared.read().trace, model)
