"""Loads models: weights of a checkpoint or an engine folder into the modules of its family."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from penstock.checkpoint.engine_config import read_engine_config
from penstock.checkpoint.model_config import PADDED_TO, ModelConfig
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.expert_placement import Ranks
from penstock.core.quantization import SCHEMES
from penstock.layers import BuildContext, ExpertLoad, PackedWeights, Weights
from penstock.ops import Ops
from penstock.parallel import SINGLE_RANK, Group
from penstock.quant import read_quantization_config

from .heads import build_heads
from .model import Model
from .read_config import read_config
from .registry import family_of
from .weights import (
    Checkpoint,
    DummyWeights,
    EngineOutput,
    EngineWeights,
    FusedExperts,
    GGUFCheckpoint,
    PaddedHeads,
    RenamedWeights,
    WeightCache,
    find_gguf,
    tied_embedding,
)

logger = logging.getLogger(__name__)


def load_model(
    folder: Path,
    ops: Ops,
    *,
    config: ModelConfig | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    max_len: int | None = None,
    load_format: Literal["auto", "safetensors", "dummy"] = "auto",
    seed: int = 0,
    quantization: str = "none",
    weight_cache_dir: Path | None = None,
    weight_cache_size: float = 0.0,
    mtp_heads: bool = False,
    max_loras: int = 0,
    max_lora_rank: int = 0,
    max_step_tokens: int = 0,
    threads: int = 0,
    group: Group = SINGLE_RANK,
    layers: range | None = None,
    expert_parallel: bool = False,
    expert_placement: Mapping[int, Ranks] | None = None,
    num_redundant_experts: int = 0,
    expert_load: ExpertLoad | None = None,
    check_finite: bool = False,
    output: Callable[[Weights], EngineOutput] | None = None,
) -> Model:
    """Build the model of a checkpoint, or of an engine folder.

    Args:
        config: of ``read_config(folder)``, where the caller has it.
        dtype: to compute in; None is as ``compute_dtype`` says, of an engine folder what it was built for.
        max_len: tokens that a sequence may have; None is the model's ``max_model_len``, which it must not exceed.
        seed: of dummy weights.
        quantization: to quantize the weights to, a name of ``SCHEMES``.
        weight_cache_dir: where packed weights are kept for the next start; None keeps none.
        weight_cache_size: GiB that the cache may hold; 0 is a share of the disk.
        mtp_heads: load the checkpoint's heads for multi-token prediction, too.
        max_loras: LoRA adapters that may be loaded at a time.
        max_lora_rank: largest rank of an adapter.
        max_step_tokens: tokens of a step, at most.
        threads: of this rank; 0 is one for each usable core.
        group: the rank whose part of the model is built.
        layers: numbers of the layers of the pipeline stage that is built; None for all.
        expert_parallel: whether ranks have whole experts, not shares of each.
        expert_placement, num_redundant_experts: as of ``BuildContext``.
        expert_load: counts the tokens of experts; None does not.
        check_finite: refuse weights with values that are not finite, where they are not in the cache.
        output: makes what gets all weights of the checkpoint; the model then keeps none of them, and cannot compute.

    Raises ``PenstockError`` with one sentence where the checkpoint is broken or not supported.
    """
    config = config or read_config(folder)
    if max_len and max_len > config.max_model_len:
        message = f"is {max_len}, and this model has a context of {config.max_model_len} tokens"
        raise invalid("max_model_len", message, config.max_model_len)
    if max_loras and config.stored_head_dim:
        message = (
            f"LoRA adapters of a model with head_dim {config.stored_head_dim}; multiples of {PADDED_TO} are supported"
        )
        raise PenstockError(Code.UNSUPPORTED, message, "enable_lora")
    device, built = device or torch.device("cpu"), read_engine_config(folder)
    if dtype is None and built:
        dtype = getattr(torch, built.dtype)
    dtype = compute_dtype(config, dtype, device)
    scheme = SCHEMES[quantization]
    family = family_of(config)
    find_stored = family.find_stored
    weights: Weights
    checkpoint: Checkpoint | GGUFCheckpoint | None = None
    cache: PackedWeights | None = None
    if load_format == "dummy":
        weights = DummyWeights(folder, dtype, seed, device)
    elif built:
        if expert_parallel and config.experts and group.size > 1:
            raise invalid("enable_expert_parallel", "engine folders have a share of each expert for a rank")
        sizes = {"tensor_parallel_size": group.size}
        asked = {"dtype": str(dtype).removeprefix("torch."), "quantization": quantization, **sizes}
        built.check(folder, asked, ops.LAYOUT)
        weights = cache = EngineWeights(folder, built, built.stage_of(layers, config.num_layers), group.rank)
    else:
        checkpoint = _open_checkpoint(folder, config, log=group.rank == 0, whole=layers is None)
        stored = replace(config, head_dim=config.checkpoint_head_dim)
        weights = checkpoint
        if isinstance(checkpoint, Checkpoint):  # a GGUF file's tensors have the names that layers ask for
            if config.tie_word_embeddings and (find := tied_embedding(checkpoint)):
                weights = RenamedWeights(weights, find)
            if find_stored:
                weights = RenamedWeights(weights, partial(find_stored, stored))
            if experts := config.experts:
                weights = FusedExperts(weights, experts.num_experts, experts.projections, experts.fused)
        if config.stored_head_dim:
            weights = PaddedHeads(weights, config.stored_head_dim, config.head_dim)
        if weight_cache_dir and not output:
            packing = f"{ops.LAYOUT} {dtype} {scheme}{' mtp' * mtp_heads} rank {group.rank} of {group.size}"
            if layers:
                packing += f" layers {layers.start} to {layers.stop}"
            if expert_parallel and group.size > 1:
                packing += f" by experts {num_redundant_experts} {expert_placement}"
            cache = WeightCache(weight_cache_dir, folder, packing, checkpoint.state, weight_cache_size)
    context = BuildContext(
        ops,
        weights,
        dtype,
        device,
        max_len or config.max_model_len,
        group=group,
        layers=layers,
        expert_parallel=expert_parallel,
        expert_placement=expert_placement or {},
        num_redundant_experts=num_redundant_experts,
        expert_load=expert_load,
        scheme=scheme,
        weight_cache=cache,
        output=output(weights) if output else None,
        check_finite=check_finite,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_step_tokens=max_step_tokens,
        threads=threads,
    )
    model: Model = family.build(context, config, config.num_mtp_layers if mtp_heads else 0)
    if model.layers.stop == config.num_layers:
        model.heads = build_heads(context, config, family, folder)
    for (given, wanted), size in context.dequantized_bytes.items():
        then = f", and rounded to {wanted}" if wanted.bits else ""
        name = str(dtype).removeprefix("torch.")
        logger.info("weights in %s are dequantized to %s, %.2f GB%s", given, name, size / 1e9, then)
    if isinstance(cache, WeightCache):
        cache.save()
    if isinstance(checkpoint, Checkpoint) and group.rank == 0 and not (cache and cache.mapped_bytes):
        _log_ignored(checkpoint.ignored())
    return model


def _log_ignored(names: list[str]) -> None:
    """Log tensors that the model does not use. Transformers ignores them, too."""
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        message = "%d tensors of the checkpoint are ignored, as config.json does not say that the model has them: %s"
        logger.warning(message, len(names), shown)


def _open_checkpoint(folder: Path, config: ModelConfig, log: bool, whole: bool) -> Checkpoint | GGUFCheckpoint:
    """Open the weights of a checkpoint.

    Args:
        log: say what its format asks for and is not done.
        whole: as of ``Checkpoint``.
    """
    if parts := find_gguf(folder):
        return GGUFCheckpoint(folder, parts, config.checkpoint_head_dim)
    quantized = config.quantization_config
    format = None if quantized is None else read_quantization_config(quantized)
    for note in format.notes if format and log else ():
        logger.info("%s", note)
    return Checkpoint(folder, format, whole=whole)


def compute_dtype(config: ModelConfig, dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype to compute in; None is the checkpoint's, but bfloat16 for a float16 checkpoint on a CPU."""
    if dtype:
        return dtype
    if config.dtype == "float16" and device.type == "cpu":
        logger.info("the checkpoint is in float16, and is computed in bfloat16")
        return torch.bfloat16
    stored: torch.dtype = getattr(torch, config.dtype)
    return stored
