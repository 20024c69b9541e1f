"""A faster ``import torch`` for processes that only run models."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

DEFERRED = "torch._meta_registrations"
"""PyTorch's module of operators for meta tensors, which only its compiler needs. With the decompositions of all
operators, which it imports, it takes a third of the time of ``import torch``."""


def import_torch() -> None:
    """Import ``torch`` without ``DEFERRED``. That module is imported before the next import of a ``torch.…`` module."""
    if "torch" in sys.modules:
        return
    sys.modules[DEFERRED] = ModuleType(DEFERRED)
    try:
        import torch
    finally:
        del sys.modules[DEFERRED]
    vars(torch).pop("_meta_registrations", None)
    sys.meta_path.insert(0, _DeferredImport())


class _DeferredImport(Loader):
    """Import hook that imports ``DEFERRED`` before the next module of PyTorch, and then removes itself."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("torch."):
            return None
        sys.meta_path.remove(self)
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        importlib.import_module(DEFERRED)
        module = importlib.import_module(spec.name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
