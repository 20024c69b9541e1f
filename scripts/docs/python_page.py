"""The page of the Python API, from its docstrings, which mkdocstrings reads without importing anything."""

from __future__ import annotations

import penstock

OUTPUTS = (
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "Loglikelihood",
    "EmbeddingRequestOutput",
    "ClassificationRequestOutput",
    "ScoringRequestOutput",
    "PoolingRequestOutput",
)
"""What ``LLM`` and ``AsyncLLM`` return."""


def python_page() -> str:
    """Markdown with mkdocstrings' directives: what ``import penstock`` offers, and outputs."""
    names = [f"penstock.{name}" for name in penstock.__all__ if not name.startswith("_")]
    names.sort(key=lambda name: (not name.endswith("LLM"), name != "penstock.LLM", name))
    directives = [f"::: {name}" for name in [*names, *(f"penstock.frontend.outputs.{name}" for name in OUTPUTS)]]
    about = "`LLM` runs an engine in the caller's process, `AsyncLLM` in one of its own. Names are vLLM's."
    return "\n\n".join(["# Python API", about, *directives]) + "\n"
