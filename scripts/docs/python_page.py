"""Reference page of the Python API, from docstrings, which mkdocstrings reads without importing modules."""

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
"""Return types of ``LLM`` and ``AsyncLLM``."""


def python_page() -> str:
    """Markdown page with mkdocstrings directives for the public names of ``penstock``, and for outputs."""
    names = [f"penstock.{name}" for name in penstock.__all__ if not name.startswith("_")]
    names.sort(key=lambda name: (not name.endswith("LLM"), name != "penstock.LLM", name))
    directives = [f"::: {name}" for name in [*names, *(f"penstock.frontend.outputs.{name}" for name in OUTPUTS)]]
    about = "`LLM` runs the engine in the caller's process, `AsyncLLM` in a separate process. Names are vLLM's."
    return "\n\n".join(["# Python API", about, *directives]) + "\n"
