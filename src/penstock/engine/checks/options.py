"""Validation of the engine's options against the model, before its weights are read."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from penstock.checkpoint.engine_config import FIXED_OPTIONS, engine_config_of
from penstock.checkpoint.sentence_transformers import read_dense_modules
from penstock.config.options import EngineOptions
from penstock.config.speculative import SpeculativeConfig
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.expert_placement import check_sizes, read_placement
from penstock.models import ModelConfig
from penstock.planning.kv_size import check_kv_cache_dtype
from penstock.planning.model_size import size_of
from penstock.planning.pipeline import split_layers

from .speech import speech_options
from .whole_prompts import whole_prompt_options

logger = logging.getLogger(__name__)


def checked_options(options: EngineOptions, config: ModelConfig, folder: Path) -> EngineOptions:
    """Check the options against the model. Returns them with the values that encoders and speech models require.

    Args:
        folder: folder of the checkpoint.

    Raises ``PenstockError``, with the option as its field, for options that the model does not support.
    """
    speculative = SpeculativeConfig.read(options.speculative_config)
    if not options.speculation or (options.speculative_config and not speculative):  # the method is none
        options, speculative = msgspec.structs.replace(options, speculation=False, speculative_config=""), None
    if config.model_impl == "transformers":
        _check_transformers(options, config)
    if config.encoder or read_dense_modules(folder):
        options = whole_prompt_options(options, config, folder)
    if config.speech:
        options = speech_options(options, config)
    if built := engine_config_of(config.raw, folder):
        built.check(folder, {name: getattr(options, name) for name in FIXED_OPTIONS})
    if speculative and not speculative.is_lookup and options.pipeline_parallel_size > 1:
        message = (
            "speculative_config: with pipeline_parallel_size > 1, only the methods suffix and ngram are supported, not "
            f"{speculative.method}"
        )
        raise PenstockError(Code.UNSUPPORTED, message, "speculative_config")
    _check_vision(options, config, speculative)
    if config.state or config.compressed:
        _check_states(options, config, speculative)
    check_kv_cache_dtype(options.kv_cache_dtype, config)
    if config.compressed:
        _check_compressed(options, config)
    _check_ranks(options, config)
    return options


def _check_vision(options: EngineOptions, config: ModelConfig, speculative: SpeculativeConfig | None) -> None:
    """Raise ``PenstockError`` (``unsupported``) for options that models with image input do not support."""
    if not config.has_vision:
        return
    unsupported = {
        "pipeline_parallel_size": options.pipeline_parallel_size > 1,
        "role": options.role != "mixed",
        "load_format": options.load_format == "dummy",
        "speculative_config": speculative is not None and not speculative.is_lookup,
    }
    for name in [name for name, is_given in unsupported.items() if is_given]:
        message = f"{name}: {getattr(options, name)} is not supported for models with image input; remove this option"
        raise PenstockError(Code.UNSUPPORTED, message, name)


def _check_states(options: EngineOptions, config: ModelConfig, speculative: SpeculativeConfig | None) -> None:
    """Raise ``PenstockError`` (``unsupported``) for options that models with recurrent state do not support."""
    unsupported = {
        "speculative_config": (
            speculative is not None and speculative.tree is not None,
            "its token tree has several paths, but a sequence has one state; remove speculative_token_tree",
        ),
    }
    for name, (is_given, reason) in unsupported.items():
        if is_given:
            message = f"{name}: {getattr(options, name)} is not supported for {config.architecture}: {reason}"
            raise PenstockError(Code.UNSUPPORTED, message, name)


def _check_compressed(options: EngineOptions, config: ModelConfig) -> None:
    """Raise ``PenstockError`` (``unsupported``) for options that models with compressed attention do not support."""
    assert config.compressed
    groups = config.compressed.groups
    unsupported = {
        "tensor_parallel_size": (
            groups % options.tensor_parallel_size > 0,
            f"it must divide the number of groups of heads (o_groups), {groups}",
        ),
        "load_format": (
            options.load_format == "dummy" and bool(config.experts and config.experts.hash_layers),
            "random weights have no table from token ids to experts",
        ),
        "enable_lora": (options.enable_lora, "remove this option"),
        "lora_modules": (bool(options.lora_modules), "remove this option"),
    }
    for name, (is_given, advice) in unsupported.items():
        if is_given:
            message = f"{name}: {getattr(options, name)} is not supported for {config.architecture}: {advice}"
            raise PenstockError(Code.UNSUPPORTED, message, name)


def _check_ranks(options: EngineOptions, config: ModelConfig) -> None:
    """Raise ``PenstockError`` if the model cannot be divided among the given numbers of nodes and ranks."""
    if options.nnodes > 1 or options.node_rank:
        from ..executor.rendezvous import check_nodes

        check_nodes(options)
        if options.node_rank:
            message = f"is {options.node_rank}, must be 0 for an engine; on other nodes run penstock serve --node-rank"
            raise invalid("node_rank", message, 0)
    if options.pipeline_parallel_size > 1 or options.pipeline_parallel_layers:
        split_layers(size_of(config), options.pipeline_parallel_size, options.pipeline_parallel_layers)
    ranks, expert_parallel = options.tensor_parallel_size, options.enable_expert_parallel
    if options.expert_parallel_size not in (0, ranks) or (options.expert_parallel_size and not expert_parallel):
        message = (
            f"must be tensor_parallel_size ({ranks}) with enable_expert_parallel, or 0; is "
            f"{options.expert_parallel_size}"
        )
        raise invalid("expert_parallel_size", message, ranks)
    if ranks > 1 and config.model_impl == "penstock":  # transformers' modules keep all heads if they do not divide
        from penstock.parallel import SingleRank, shard_heads  # this module imports PyTorch

        for kv_heads in config.kv_head_counts:
            shard_heads(SingleRank(size=ranks), config.num_heads, kv_heads)
    if config.experts and config.experts.by_modality and options.expert_load:
        message = (
            f"expert_load: not supported for {config.architecture}, which has separate experts for images; "
            "remove this option"
        )
        raise PenstockError(Code.UNSUPPORTED, message, "expert_load")
    if options.expert_load and config.model_impl != "penstock":
        message = "expert_load: not supported with model_impl transformers; remove this option"
        raise PenstockError(Code.UNSUPPORTED, message, "expert_load")
    _check_experts(options, config.experts.num_experts if config.experts else 0)


def _check_experts(options: EngineOptions, num_experts: int) -> None:
    """Raise ``PenstockError`` for options of expert parallelism that do not fit the ranks."""
    ranks, redundant = options.tensor_parallel_size, options.num_redundant_experts
    if options.enable_expert_parallel and ranks == 1 and options.data_parallel_size > 1 and num_experts:
        message = (
            "enable_expert_parallel: data-parallel engines do not share experts, only the tensor_parallel_size ranks "
            "of one engine do; raise tensor_parallel_size, or leave out enable_expert_parallel"
        )
        raise PenstockError(Code.UNSUPPORTED, message, "enable_expert_parallel")
    if ranks > 1 and options.enable_expert_parallel and num_experts:
        check_sizes(num_experts, ranks, redundant)
        if options.expert_placement:
            read_placement(options.expert_placement, num_experts, ranks, redundant)
        return
    for name in ("expert_placement", "num_redundant_experts"):
        if getattr(options, name):
            message = (
                f"requires a model with experts (this has {num_experts}), tensor_parallel_size > 1 (is {ranks}) and "
                f"enable_expert_parallel (is {options.enable_expert_parallel})"
            )
            raise invalid(name, message)


def _check_transformers(options: EngineOptions, config: ModelConfig) -> None:
    """Raise ``PenstockError`` (``unsupported``) for options that models run by transformers do not support. Log the
    limitations of these models."""
    for name, is_given in {
        "pipeline_parallel_size": options.pipeline_parallel_size > 1,
        "enable_expert_parallel": options.enable_expert_parallel,
        "enable_lora": options.enable_lora,
        "lora_modules": bool(options.lora_modules),
        "role": options.role != "mixed",
        "kv_offloading_size": options.host_tier_bytes > 0,
    }.items():
        if is_given:
            message = (
                f"{name} is not supported for {config.architecture}, which is run by transformers; remove this option"
            )
            raise PenstockError(Code.UNSUPPORTED, message, name)
    logger.warning(
        "%s is run by the modules of transformers (model_impl): slower than Penstock's own models, and "
        "without LoRA and KV transfer",
        config.architecture,
    )
