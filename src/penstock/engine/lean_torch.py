"""A faster ``import torch`` for processes that only run models."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

DEFERRED = "torch._meta_registrations"
"""Module with the operators' implementations for meta tensors. Importing it, with the decompositions of all operators,
takes a third of the time of ``import torch``, and only PyTorch's compiler needs it."""


def import_torch() -> None:
    """Import ``torch`` without ``DEFERRED``, which is imported later, before the first further module of PyTorch."""
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
    """Import hook that imports ``DEFERRED`` before the first further module of PyTorch, which it may import itself."""

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
