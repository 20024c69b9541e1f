"""Penstock, an LLM serving system.

>>> from penstock import LLM, SamplingParams

Public names are imported on first use, so ``import penstock`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.core import GuidedDecodingParams, LoRARequest, PenstockError, PoolingParams
    from penstock.frontend.async_llm import AsyncLLM
    from penstock.frontend.async_llm import AsyncLLM as AsyncLLMEngine
    from penstock.frontend.beam_outputs import BeamSearchOutput, BeamSearchSequence
    from penstock.frontend.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
    from penstock.frontend.engine_metrics import Counter, Gauge, Histogram, Metric, Vector
    from penstock.frontend.llm import LLM
    from penstock.frontend.llm_engine import LLMEngine
    from penstock.frontend.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from penstock.frontend.prompts import EmbedsPrompt, Prompt, TextPrompt, TokensPrompt
    from penstock.frontend.prompts import Prompt as PromptType
    from penstock.frontend.sampling_params import (
        BeamSearchParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

_FRONTEND = {
    "async_llm": "AsyncLLM",
    "beam_outputs": "BeamSearchOutput BeamSearchSequence",
    "engine_args": "AsyncEngineArgs EngineArgs FlexibleArgumentParser",
    "engine_metrics": "Counter Gauge Histogram Metric Vector",
    "llm": "LLM",
    "llm_engine": "LLMEngine",
    "outputs": (
        "ClassificationOutput ClassificationRequestOutput CompletionOutput "
        "EmbeddingOutput EmbeddingRequestOutput PoolingOutput PoolingRequestOutput RequestOutput ScoringOutput "
        "ScoringRequestOutput"
    ),
    "prompts": "EmbedsPrompt Prompt TextPrompt TokensPrompt",
    "sampling_params": "BeamSearchParams RequestOutputKind SamplingParams StructuredOutputsParams",
}
"""Names by module of ``penstock.frontend``."""
_MODULES = dict.fromkeys(("GuidedDecodingParams", "LoRARequest", "PenstockError", "PoolingParams"), "penstock.core")
_MODULES |= {name: f"penstock.frontend.{module}" for module, names in _FRONTEND.items() for name in names.split()}
_OTHER_NAMES = {"AsyncLLMEngine": "AsyncLLM", "PromptType": "Prompt"}
"""vLLM's second names."""

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "FlexibleArgumentParser",
    "Gauge",
    "GuidedDecodingParams",
    "Histogram",
    "LLMEngine",
    "LoRARequest",
    "Metric",
    "PenstockError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "Prompt",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
    "__version__",
]


def __getattr__(name: str) -> Any:
    own = _OTHER_NAMES.get(name, name)
    if own not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[own]), own)


def __dir__() -> list[str]:
    return __all__
