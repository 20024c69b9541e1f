"""A quicker ``import torch`` for processes that do nothing but run models."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

DEFERRED = "torch._meta_registrations"
"""What operators return for tensors without data. Registering that, with the decompositions of all operators that it
imports, is a third of the time of importing PyTorch, and only its compiler needs it."""


def import_torch() -> None:
    """Import ``torch`` without ``DEFERRED``, which is imported before any further module of PyTorch is."""
    if "torch" in sys.modules:
        return
    sys.modules[DEFERRED] = ModuleType(DEFERRED)
    try:
        import torch
    finally:
        del sys.modules[DEFERRED]
    vars(torch).pop("_meta_registrations", None)
    sys.meta_path.insert(0, _Before())


class _Before:
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.startswith("torch."):
            sys.meta_path.remove(self)
            importlib.import_module(DEFERRED)
        return None
