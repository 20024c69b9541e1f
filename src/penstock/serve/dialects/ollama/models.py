"""The served models in Ollama's format."""

from __future__ import annotations

import hashlib
from collections import Counter
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock import demo
from penstock.checkpoint.checkpoint_digest import weight_files
from penstock.checkpoint.config_json import read_config_json
from penstock.checkpoint.gguf_file import GGUFFile, parts_in
from penstock.core import Code, PenstockError
from penstock.planning.model_size import model_size_of
from penstock.serve.models.served_models import ServedModel, ServedModels
from penstock.text.infill import find_infill_format

LATEST = ":latest"


@lru_cache
def main_type(part: Path) -> str:
    """Name of the type in which most bytes of a GGUF file are stored."""
    sizes: Counter[str] = Counter()
    for tensor in GGUFFile(part).tensors.values():
        sizes[tensor.type.name] += tensor.size
    return max(sizes, key=sizes.__getitem__)


class OllamaModels:
    """The served models under Ollama's names, with their descriptions in Ollama's format."""

    def __init__(self, served_models: ServedModels) -> None:
        self._served_models = served_models

    def find(self, name: str | None) -> ServedModel:
        """Find a model by name, with or without ``:latest``. Raises ``PenstockError``: ``not_found``, or ``invalid``
        without a name."""
        if not name:
            raise PenstockError(Code.INVALID, "model is required; GET /api/tags lists the models", "model")
        return self._served_models.find(self.name_of(name))

    def name_of(self, name: str) -> str:
        """Remove ``:latest`` from a name, unless a model is served under the full name."""
        known = any(service.has(name) for service in self._served_models)
        return name if known else name.removesuffix(LATEST)

    def listed(self) -> list[dict[str, Any]]:
        """The entries of ``/api/tags``: one for each name of a model or adapter."""
        return [self._entry(service, name) for service in self._served_models.listed() for name in service.all_names]

    def running(self) -> list[dict[str, Any]]:
        """The entries of ``/api/ps``: the models that are loaded."""
        return [
            {
                **self._entry(service, name),
                "expires_at": _time(service.keep_alive.expires),
                "size_vram": 0,
                "context_length": self._context(name),
            }
            for service in self._served_models.listed()
            if not service.gateway.engine_pool.is_held
            for name in service.all_names
        ]

    def shown(self, name: str | None) -> dict[str, Any]:
        """The response of ``/api/show``."""
        service = self.find(name)
        config, entry = self._config(service), self._entry(service, service.name)
        family = entry["details"]["family"]
        processor = service.gateway.input_processor
        tools_format, reasoning_format = processor.chats.response_formats()
        capabilities = {
            "completion": True,
            "insert": find_infill_format(processor.tokenizer) is not None,
            "vision": service.sees_images,
            "tools": tools_format is not None,
            "thinking": reasoning_format is not None,
        }
        info = {
            "general.architecture": family,
            "general.parameter_count": self._weights(config),
            f"{family}.context_length": self._context(service.name),
            f"{family}.embedding_length": config.get("hidden_size"),
            f"{family}.block_count": config.get("num_hidden_layers"),
        }
        return {
            "modelfile": f"FROM {service.name}\n",
            "template": processor.tokenizer.template_source or "",
            "details": entry["details"],
            "model_info": {key: value for key, value in info.items() if value is not None},
            "capabilities": [capability for capability, has in capabilities.items() if has],
            "modified_at": entry["modified_at"],
        }

    def _entry(self, service: ServedModel, name: str) -> dict[str, Any]:
        config = self._config(service)
        family = config.get("model_type", "")
        folder = self._folder(service)
        weights = weight_files(folder)
        parts = [] if weights else parts_in(folder)
        return {
            "name": name,
            "model": name,
            "modified_at": _time(self._served_models.created),
            "size": sum(path.stat().st_size for path in parts or weights),
            "digest": hashlib.sha256(f"{service.name} {folder}".encode()).hexdigest(),
            "details": {
                "parent_model": service.name if name not in service.names else "",
                "format": "gguf" if parts else "safetensors",
                "family": family,
                "families": [family],
                "parameter_size": _rounded(self._weights(config)),
                "quantization_level": main_type(parts[0]) if parts else self._quantization(service),
            },
        }

    def _folder(self, service: ServedModel) -> Path:
        model = service.configuration.engine.model
        return Path(model) if model else demo.CHAT

    def _quantization(self, service: ServedModel) -> str:
        engine = service.configuration.engine
        return str(engine.dtype if engine.quantization in ("", "none") else engine.quantization)

    def _config(self, service: ServedModel) -> dict[str, Any]:
        try:
            return read_config_json(self._folder(service))
        except PenstockError:
            return {}

    def _weights(self, config: dict[str, Any]) -> int:
        try:
            size = model_size_of(config)
            return size.layer_weights + size.embedding_weights + size.vision_weights
        except PenstockError:
            return 0

    def _context(self, name: str) -> int | None:
        engine = self._served_models.find(name).gateway.engine_pool.engine
        return engine.max_model_len if engine else None


def _time(seconds: float | None) -> str:
    """A time of the epoch in RFC 3339; None: a time in the distant future."""
    if seconds is None:
        return "9999-12-31T23:59:59Z"
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _rounded(weights: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if weights >= size:
            return f"{weights / size:.1f}{unit}"
    return str(weights)
