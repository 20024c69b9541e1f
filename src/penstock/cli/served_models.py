"""Models of a server, from ``--model`` and ``--models``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock import demo
from penstock.checkpoint.engine_config import engine_defaults
from penstock.config.options import Configuration
from penstock.config.secrets import public_url
from penstock.config.settings import settings
from penstock.config.sources import convert_setting
from penstock.core.errors import invalid
from penstock.core.lora import parse_lora_modules
from penstock.core.spelling import did_you_mean
from penstock.serve.models.messages import DEFAULT_NAME, ModelEntry

KSERVE = ("ensemble", "tensorrt_llm_bls", "preprocessing", "tensorrt_llm", "postprocessing")
"""Names of the Triton models (TensorRT-LLM backend) under which the first model is also served. Each name is also the
model's kind in ``ModelEntry.kserve``."""
CHECKPOINT_OPTIONS = frozenset(
    "model pooling_type pooling_task pooling_activation classifier_tokens "
    "tokenizer chat_template tool_call_parser reasoning_parser revision lora_modules "
    "speculative_config".split()
)
"""Options of a checkpoint, which other models do not inherit."""


def served_models(configuration: Configuration) -> tuple[ModelEntry, ...]:
    """Models of a server; the first one handles requests without a model name.

    Raises ``PenstockError`` (``invalid``) for invalid options and duplicate names.
    """
    options, result = configuration.server, []
    if configuration.engine.model or not options.models:
        names = options.served_model_name or (public_url(configuration.engine.model) or demo.NAME,)
        result.append(ModelEntry(names=names, configuration=configuration, kserve={}))
    result += [_additional_model(configuration, name, given) for name, given in _parse_models(options.models).items()]
    kserve_models = [
        {name: "ensemble" for name in model.names if "/" not in name} if result[1:] else {} for model in result
    ]
    kserve_models[0] |= dict(zip(KSERVE, KSERVE, strict=True))
    result = [
        model if model.kserve else msgspec.structs.replace(model, kserve=kserve)
        for model, kserve in zip(result, kserve_models, strict=True)
    ]
    _check_names(result)
    required = _required(configuration, result)
    return tuple(msgspec.structs.replace(model, required=model.name in required) for model in result)


def _additional_model(configuration: Configuration, name: str, given: Mapping[str, Any]) -> ModelEntry:
    """Create a model of ``--models``, which inherits options from the first model."""
    known = {key: setting for key, setting in settings().items() if setting.section in ("model", "engine")}
    kserve = given.get("kserve", {})
    changes: dict[str, dict[str, Any]] = {"model": {}, "engine": {}}
    first = configuration.engine
    built = {key for key, value in engine_defaults(first.model).items() if getattr(first, key) == value}
    for key in CHECKPOINT_OPTIONS | built:  # options stored in the first model's engine folder are not inherited
        changes[known[key].section][key] = known[key].default
    folder = given.get("model", "")
    for key, value in {**engine_defaults(folder if isinstance(folder, str) else ""), **given}.items():
        option = key.replace("-", "_")
        if option == "kserve":
            continue
        if option not in known:
            raise invalid("models", f"{name}: no such option {key!r}{did_you_mean(option, known)}")
        changes[known[option].section][option] = convert_setting(known[option], value, f"models: {name}")
    if not changes["engine"]["model"]:
        raise invalid("models", f'{name}: "model" is missing: set it to the folder or name of a checkpoint')
    parts = {
        section: msgspec.structs.replace(getattr(configuration, section), **new) for section, new in changes.items()
    }
    return ModelEntry(names=(name,), configuration=msgspec.structs.replace(configuration, **parts), kserve=kserve)


def _parse_models(text: str) -> dict[str, dict[str, Any]]:
    """Parse the option ``models`` to options by model name."""
    if not text:
        return {}
    try:
        result = json.loads(text)
    except ValueError as error:
        raise invalid("models", f"is not JSON: {error}") from error
    if not isinstance(result, dict) or not all(isinstance(given, str | dict) for given in result.values()):
        raise invalid("models", 'must be a JSON object of folders or options by name, such as {"NAME": "FOLDER"}')
    return {name: {"model": given} if isinstance(given, str) else given for name, given in result.items()}


def _required(configuration: Configuration, models: list[ModelEntry]) -> list[str]:
    """Names of the models to load at the start."""
    options, names = configuration.server, [model.name for model in models]
    if options.model_control_mode == "none":
        if options.load_model:
            raise invalid("load_model", "requires --model-control-mode explicit; otherwise all models are loaded")
        return names
    owners = {name: model.name for model in models for name in (*model.kserve, *model.names)}
    for name in options.load_model:
        if name not in (*owners, "*"):
            raise invalid("load_model", f"there is no model {name!r}{did_you_mean(name, owners)}")
    return names if "*" in options.load_model else [owners[name] for name in options.load_model]


def _check_names(models: list[ModelEntry]) -> None:
    seen: set[str] = set()
    for model in models:
        for name in model.names:
            if name in seen:
                raise invalid("models", f"{name!r} is the name of two models: rename one of them")
            if not name:
                raise invalid("models", "a model has an empty name: name each model")
            if name == DEFAULT_NAME and models[1:]:
                raise invalid("models", f"{name!r} is reserved for the first model: rename the additional model")
            seen.add(name)
    for model in models:
        adapters = parse_lora_modules(model.configuration.engine.lora_modules).keys()
        if both := adapters & seen:
            raise invalid("lora_modules", f"{min(both)!r} is the name of a model, or of another adapter: rename it")
        seen |= adapters
    kserve = [name for model in models for name in model.kserve]
    if twice := {name for name in kserve if kserve.count(name) > 1}:
        raise invalid("models", f"{min(twice)!r} is the name of two KServe models: rename one of them")
