"""The default of speculative decoding: suffix decoding, where drafts cannot change results."""

from __future__ import annotations

import importlib.util

from penstock.config.options import EngineOptions
from penstock.models import ModelConfig

from ..step import ModelInfo


def why_off(options: EngineOptions, config: ModelConfig | None = None, info: ModelInfo | None = None) -> str:
    """Why nothing is drafted without ``speculative_config``; empty if suffix decoding is the default.

    Args:
        config, info: the model; None: any model for which drafts are on.
    """
    if not options.speculation:
        return "the option speculation is off"
    if importlib.util.find_spec("penstock.ops._kernels") is None:
        return "Penstock was built without a C++ compiler"
    if options.pipeline_parallel_size > 1:
        return "it is not the default with pipeline stages"
    if config and (config.encoder or config.speech):
        return "the model does not generate text token by token"
    if config and (config.state or config.compressed):
        return f"it is not the default for {config.architecture}: each sequence needs memory for the states of drafts"
    if info and not info.batch_invariant:
        return "the model is not batch-invariant, so that drafts can change results"
    if info and info.asynchronous:
        return "it is not the default on GPUs, where its speed is not measured"
    return ""
