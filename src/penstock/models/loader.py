"""Loader of models: builds the modules of a family with the weights of a checkpoint or an engine folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch

from penstock.checkpoint.engine_config import EngineConfig, read_engine_config
from penstock.checkpoint.model_config import PADDED_TO, ModelConfig
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.quantization import SCHEMES
from penstock.layers import BuildContext, BuildOptions, PackedWeights, Weights
from penstock.ops import Ops
from penstock.quant import read_quantization_config

from .adapted import adapt, adapt_gguf
from .heads import build_heads
from .model import Model
from .read_config import read_config
from .registry import family_of
from .weights import (
    Checkpoint,
    DummyWeights,
    EngineOutput,
    EngineWeights,
    GGUFCheckpoint,
    WeightCache,
    find_gguf,
)

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(BuildOptions):
    """Options for loading a model, or one rank's part of it."""

    dtype: torch.dtype | None = None
    """Dtype of the computation; None: ``compute_dtype``, or the dtype that an engine folder was built for."""
    device: torch.device = CPU
    max_len: int | None = None
    """Maximum sequence length in tokens, at most the model's ``max_model_len``; None: ``max_model_len``."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    seed: int = 0
    """Seed of dummy weights."""
    quantization: str = "none"
    """Quantization of the weights at load, a key of ``SCHEMES``."""
    weight_cache_dir: Path | None = None
    """Folder of the weight cache, which stores packed weights for the next start; None: no cache."""
    weight_cache_size: float = 0.0
    """Maximum size of the weight cache in GiB; 0: a share of the disk (``weights.cache``)."""
    mtp_heads: bool = False
    """Load the checkpoint's heads for multi-token prediction."""


def load_model(
    folder: Path,
    ops: Ops,
    options: LoadOptions | None = None,
    config: ModelConfig | None = None,
    output: Callable[[Weights], EngineOutput] | None = None,
) -> Model:
    """Load the model of a checkpoint or an engine folder.

    Args:
        config: result of ``read_config(folder)``; None: read it.
        output: creates the receiver of all weights. The model then stores no weights, and cannot compute.

    Raises ``PenstockError`` if the checkpoint is broken or not supported.
    """
    config, options = config or read_config(folder), options or LoadOptions()
    _check_options(options, config)
    built, dtype = read_engine_config(folder), options.dtype
    if dtype is None and built:
        dtype = getattr(torch, built.dtype)
    dtype = compute_dtype(config, dtype, options.device)
    weights: Weights
    checkpoint: Checkpoint | GGUFCheckpoint | None = None
    cache: PackedWeights | None = None
    if options.load_format == "dummy":
        weights = DummyWeights(folder, dtype, options.seed, options.device)
    elif built:
        weights = cache = _engine_weights(folder, built, options, config, dtype, ops)
    else:
        checkpoint = _open_checkpoint(folder, config, log=options.group.rank == 0, whole=options.layers is None)
        if isinstance(checkpoint, GGUFCheckpoint):
            weights = adapt_gguf(checkpoint, config)
        else:
            weights = adapt(checkpoint, checkpoint, config)
        if options.weight_cache_dir and not output:
            packing = _packing(options, dtype, ops)
            cache = WeightCache(options.weight_cache_dir, folder, packing, checkpoint.state, options.weight_cache_size)
    context = BuildContext(
        ops,
        weights,
        dtype,
        options.device,
        options.max_len or config.max_model_len,
        scheme=SCHEMES[options.quantization],
        weight_cache=cache,
        output=output(weights) if output else None,
        **{each.name: getattr(options, each.name) for each in fields(BuildOptions)},
    )
    family = family_of(config)
    model: Model = family.build(context, config, config.num_mtp_layers if options.mtp_heads else 0)
    if model.layers.stop == config.num_layers:
        model.heads = build_heads(context, config, family, folder)
    for (stored, wanted), size in context.dequantized_bytes.items():
        then = f", and quantized to {wanted}" if wanted.bits else ""
        name = str(dtype).removeprefix("torch.")
        logger.info("dequantized weights in %s to %s, %.2f GB%s", stored, name, size / 1e9, then)
    if isinstance(cache, WeightCache):
        cache.save()
    if isinstance(checkpoint, Checkpoint) and options.group.rank == 0 and not (cache and cache.mapped_bytes):
        _log_ignored(checkpoint.ignored())
    return model


def _check_options(options: LoadOptions, config: ModelConfig) -> None:
    if options.max_len and options.max_len > config.max_model_len:
        message = f"is {options.max_len}; this model has a context of {config.max_model_len} tokens"
        raise invalid("max_model_len", message, config.max_model_len)
    if options.max_loras and config.stored_head_dim:
        message = f"LoRA adapters are not supported for a model with head_dim {config.stored_head_dim}"
        raise PenstockError(Code.UNSUPPORTED, f"{message}; it must be a multiple of {PADDED_TO}", "enable_lora")


def _engine_weights(
    folder: Path, built: EngineConfig, options: LoadOptions, config: ModelConfig, dtype: torch.dtype, ops: Ops
) -> EngineWeights:
    """Open an engine folder's weights. Raises ``PenstockError`` (``invalid``) if it was built for other options."""
    group = options.group
    if options.expert_parallel and config.experts and group.size > 1:
        message = "is not supported for engine folders, which split each expert: serve the checkpoint instead"
        raise invalid("enable_expert_parallel", message)
    requested = {"dtype": str(dtype).removeprefix("torch."), "quantization": options.quantization}
    built.check(folder, {**requested, "tensor_parallel_size": group.size}, ops.LAYOUT)
    return EngineWeights(folder, built, built.stage_of(options.layers, config.num_layers), group.rank)


def _packing(options: LoadOptions, dtype: torch.dtype, ops: Ops) -> str:
    """Key of the weight cache: everything that packed weights depend on, except the checkpoint."""
    group, layers = options.group, options.layers
    packing = f"{ops.LAYOUT} {dtype} {SCHEMES[options.quantization]}{' mtp' * options.mtp_heads}"
    packing += f" rank {group.rank} of {group.size}"
    if layers:
        packing += f" layers {layers.start} to {layers.stop}"
    if options.expert_parallel and group.size > 1:
        packing += f" by experts {options.num_redundant_experts} {options.expert_placement or None}"
    return packing


def _log_ignored(names: list[str]) -> None:
    """Log tensors that the model does not use. transformers also ignores them."""
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        message = "%d tensors of the checkpoint are ignored, because config.json does not describe them: %s"
        logger.warning(message, len(names), shown)


def _open_checkpoint(folder: Path, config: ModelConfig, log: bool, whole: bool) -> Checkpoint | GGUFCheckpoint:
    """Open the weights of a checkpoint.

    Args:
        log: log the notes of the quantization format.
        whole: True if all layers are loaded (see ``Checkpoint``).
    """
    if parts := find_gguf(folder):
        return GGUFCheckpoint(folder, parts, config.checkpoint_head_dim)
    quantized = config.quantization_config
    format = None if quantized is None else read_quantization_config(quantized)
    for note in format.notes if format and log else ():
        logger.info("%s", note)
    return Checkpoint(folder, format, whole=whole)


def compute_dtype(config: ModelConfig, dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of the computation: ``dtype``; if None, the checkpoint's, with bfloat16 instead of float16 on CPUs."""
    if dtype:
        return dtype
    if config.dtype == "float16" and device.type == "cpu":
        logger.info("computing in bfloat16: the checkpoint's dtype, float16, is not used on CPUs")
        return torch.bfloat16
    stored: torch.dtype = getattr(torch, config.dtype)
    return stored
