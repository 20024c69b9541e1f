"""Penstock, an LLM serving system.

>>> from penstock import LLM, SamplingParams

Public names are imported on first use, so ``import penstock`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.core import GuidedDecodingParams, LoRARequest, PenstockError, PoolingParams, SamplingParams
    from penstock.frontend.async_llm import AsyncLLM
    from penstock.frontend.llm import LLM

_MODULES = {
    "AsyncLLM": "penstock.frontend.async_llm",
    "GuidedDecodingParams": "penstock.core",
    "LLM": "penstock.frontend.llm",
    "LoRARequest": "penstock.core",
    "PenstockError": "penstock.core",
    "PoolingParams": "penstock.core",
    "SamplingParams": "penstock.core",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "GuidedDecodingParams",
    "LoRARequest",
    "PenstockError",
    "PoolingParams",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
