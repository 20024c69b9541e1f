"""The model repository: the KServe models of all served models."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.core import Code, PenstockError
from penstock.serve.models.manager import ModelManager
from penstock.serve.models.messages import ModelEntry
from penstock.serve.models.served_models import ServedModel, ServedModels

from .model import VERSION, Model
from .settings import LogSettings
from .shared_memory import SharedMemory
from .shared_state import SharedState
from .statistics import Statistics
from .trtllm.metrics import TrtLlmMetrics
from .trtllm.text_models import TextModel
from .trtllm.token_models import Postprocessing, Preprocessing, TokenModel

FOLLOW_INTERVAL = 1.0
"""Seconds between checks for log settings changed through another process."""


class ModelRepository:
    """The model repository of one API process.

    Args:
        others: KServe models of other dialects, which may use any served model.
    """

    def __init__(self, served_models: ServedModels, model_manager: ModelManager, others: Iterable[Model] = ()) -> None:
        self.served_models = served_models
        self.model_manager = model_manager
        self.counts = Statistics()
        self.shared = SharedState(Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]))  # all API processes use this folder
        self.memory = SharedMemory(self.shared, served_models.options, lambda: served_models.max_text_size)
        self.log = LogSettings()
        served_models.metrics.dialect_metrics.append(TrtLlmMetrics(served_models).collect)
        self.others = tuple(others)
        self._models: dict[ServedModel, list[Model]] = {}

    def __iter__(self) -> Iterator[Model]:
        """Iterate over the loaded models."""
        self._models = {service: self._models.get(service) or models_of(service) for service in self.served_models}
        sizes = self.shared.read().max_batch_size
        for models in self._models.values():
            for model in models:
                model.max_batch_size = sizes.get(model.name, type(model).max_batch_size)
                yield model
        yield from self.others

    async def follow(self) -> None:
        """Apply log settings changed through any API process, until cancelled."""
        while True:
            self.log.apply(self.shared.read().log)
            await asyncio.sleep(FOLLOW_INTERVAL)

    def find(self, name: str, version: str = "") -> Model:
        """Find a model by name and version. Raises ``PenstockError`` (``not_found``)."""
        if (model := next((model for model in self if model.name == name), None)) is None:
            # only KServe names are looked up: an OpenAI model name is not found, even while that model is loading
            self.served_models.check_expected(
                entry := next((m for m in self.served_models.models if name in m.kserve), None)
            )
            if entry:
                message = f"Request for unknown model: '{name}' has no available versions: {entry.reason}"
            else:
                known = ", ".join(model.name for model in self) or "none"
                message = f"Request for unknown model: '{name[:100]}' is not found; available: {known}"
            raise PenstockError(Code.NOT_FOUND, message, "model")
        if version not in ("", VERSION, "-1"):
            message = f"Request for unknown model: '{name}' version {version[:20]} is not found; available: {VERSION}"
            raise PenstockError(Code.NOT_FOUND, message, "model_version")
        return model

    def owner(self, name: str) -> ModelEntry | None:
        """Find a served model, loaded or not, by its name or by the name of one of its KServe models."""
        return next((model for model in self.served_models.models if name in model.kserve or name in model.names), None)


def models_of(service: ServedModel) -> list[Model]:
    """The KServe models that one served model provides."""
    models: list[Model] = []
    for name, kind in service.kserve.items():
        match kind:
            case "ensemble":
                models.append(TextModel(service, name))
            case "tensorrt_llm_bls":
                models.append(TextModel(service, name, service.options.accumulate_tokens))
            case "preprocessing":
                models.append(Preprocessing(service))
            case "tensorrt_llm":
                models.append(TokenModel(service))
            case "postprocessing":
                models.append(Postprocessing(service))
        models[-1].name = name
    return models
