"""Loader of modules of transformers, with weights that Penstock reads."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from penstock.checkpoint.model_config import ModelConfig
from penstock.core.errors import invalid
from penstock.layers import BuildContext
from penstock.layers.context import is_finite

from ..weights import Checkpoint
from .attention import NAME, UnsupportedAttention, register
from .config import GATHERED, LIBRARY_CONFIG, skeleton
from .library import first_line, library_config, model_class
from .sources import WeightSources


def load_module(context: BuildContext, config: ModelConfig) -> tuple[Any, WeightSources | None]:
    """Load a causal language model of transformers with the weights of the context, or with random weights if the
    context has no ``Checkpoint``; with Penstock's attention, or its own if ``GATHERED``. Returns it, and the sources of
    the linear layers that are not loaded.

    Raises ``PenstockError`` (``invalid``) for tensors that are missing or have the wrong shape.
    """
    register()
    found = model_class(config.architecture)
    configuration = library_config(config.architecture, config.raw[LIBRARY_CONFIG])
    attention = "eager" if config.raw[GATHERED] else NAME
    if not isinstance(context.weights, Checkpoint):
        # engine processes import torch without this module (engine/lean_torch.py)
        importlib.import_module("torch._prims.rng_prims")
        torch.manual_seed(int(context.weights.version[:8], 16))
        configuration._attn_implementation = attention
        return found._from_config(configuration, dtype=context.dtype).to(context.device).eval(), None
    sources = WeightSources(context, context.weights, skeleton(config.architecture, deepcopy(configuration))[0])
    options = {"dtype": context.dtype, "attn_implementation": attention, "ignore_mismatched_sizes": True}
    try:
        with _quietly():
            model, info = found.from_pretrained(
                None, config=configuration, state_dict=sources.state, output_loading_info=True, **options
            )
    except Exception as error:  # conversions of tensors raise exceptions of several classes
        raise invalid("model", f"transformers rejects the weights: {first_line(error)}") from error
    if lacking := [*info["missing_keys"], *info["mismatched_keys"]]:
        name = lacking[0] if isinstance(lacking[0], str) else lacking[0][0]
        message = f"the checkpoint lacks {name}, or its shape is not that of config.json: download it again"
        raise invalid("model", message)
    if errors := info.get("error_msgs"):
        raise invalid("model", f"transformers rejects the weights: {str(errors)[:200]}")
    if context.check_finite:
        for name, tensor in model.named_parameters():
            if not is_finite(tensor):
                message = f"tensor {name} has values that are not finite (NaN or infinity); check the weights"
                raise invalid("model", message)
    sources.move(model, context.device)
    return model.eval(), sources


@contextmanager
def _quietly() -> Iterator[None]:
    """Context manager that suppresses progress bars and reports of transformers. The caller raises errors instead."""
    from transformers.utils import logging as library

    shown, level = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if shown:
            library.enable_progress_bar()


def fix_rope(model: nn.Module, max_len: int) -> None:
    """Fix the frequencies of rotary embeddings that depend on the length: they get the values of the maximum length.

    Raises ``UnsupportedAttention`` if this version of transformers updates the frequencies in an unknown way.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        if not any(kind == "longrope" or "dynamic" in str(kind) for kind in by_layer.values()):
            continue
        device = next(model.parameters()).device
        last = torch.tensor([[max_len - 1]], device=device)
        try:
            for layer_type in by_layer:
                more = {} if layer_type is None else {"layer_type": layer_type}
                module(torch.zeros(1, 1, 1, device=device), last, **more)
        except Exception as error:
            message = f"its rotary embedding ({kinds}) depends on the length in an unknown way"
            raise UnsupportedAttention(message) from error
        fixed: Any = dict.fromkeys(by_layer, "fixed") if isinstance(kinds, dict) else "fixed"
        module.rope_type = fixed
