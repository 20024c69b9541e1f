"""The models that a server has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.core import Code, PenstockError
from penstock.serve.service import Service

from .counts import Counts
from .model import VERSION, Model


class Registry:
    """Models by name, and what was asked of them. One a process."""

    def __init__(self, service: Service, models: Iterable[Model]) -> None:
        self.service = service
        self.counts = Counts()
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def find(self, name: str, version: str = "") -> Model:
        """Raises ``PenstockError`` (``not_found``)."""
        if (model := self._models.get(name)) is None:
            words = f"Request for unknown model: '{name[:100]}' is not found; there is {', '.join(self._models)}"
            raise PenstockError(Code.NOT_FOUND, words, "model")
        if version not in ("", VERSION, "-1"):
            words = f"Request for unknown model: '{name}' version {version[:20]} is not found; there is {VERSION}"
            raise PenstockError(Code.NOT_FOUND, words, "model_version")
        return model
