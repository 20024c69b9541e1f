"""Options that a model cannot be run with, refused before any of its weights are read."""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.checkpoint.engine_config import DECIDED, engine_config_of
from penstock.checkpoint.sentence_transformers import read_dense_modules
from penstock.config.options import EngineOptions
from penstock.config.speculative import SpeculativeConfig
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.expert_placement import check_sizes, read_placement
from penstock.models import ModelConfig
from penstock.planning.model_size import size_of
from penstock.planning.pipeline import split_layers

from .speech import speech_options
from .whole_prompts import whole_prompts

logger = logging.getLogger(__name__)


def checked_options(options: EngineOptions, config: ModelConfig, folder: Path) -> EngineOptions:
    """The options as this model is run with them.

    Args:
        folder: of the checkpoint.

    Raises ``PenstockError``, with the option as its field, for options that it is not run with.
    """
    if config.model_impl == "transformers":
        _check_transformers(options, config)
    if config.encoder or read_dense_modules(folder):
        options = whole_prompts(options, config, folder)
    if config.speech:
        options = speech_options(options, config)
    if built := engine_config_of(config.raw, folder):
        built.check(folder, {name: getattr(options, name) for name in DECIDED})
    speculative = SpeculativeConfig.read(options.speculative_config)
    if speculative and speculative.method != "ngram" and options.pipeline_parallel_size > 1:
        message = "pipeline_parallel_size allows the method ngram only, no draft model, MTP layers or heads"
        raise PenstockError(Code.UNSUPPORTED, message, "speculative_config")
    _check_vision(options, config, speculative)
    _check_ranks(options, config)
    return options


def _check_vision(options: EngineOptions, config: ModelConfig, speculative: SpeculativeConfig | None) -> None:
    """Refuse what a model that sees images is not run with. Raises ``PenstockError`` (``unsupported``)."""
    if not config.has_vision:
        return
    wrong = {
        "pipeline_parallel_size": options.pipeline_parallel_size > 1,
        "role": options.role != "mixed",
        "load_format": options.load_format == "dummy",
        "speculative_config": speculative is not None and speculative.method != "ngram",
    }
    for name in [name for name, given in wrong.items() if given]:
        message = f"{name}: models that see images are not run with {getattr(options, name)}, so far"
        raise PenstockError(Code.UNSUPPORTED, message, name)


def _check_ranks(options: EngineOptions, config: ModelConfig) -> None:
    """Refuse ranks that cannot share the model before any is started. Raises ``PenstockError``."""
    if options.nnodes > 1 or options.node_rank:
        from ..executor.rendezvous import check_nodes

        check_nodes(options)
        if options.node_rank:
            raise invalid("node_rank", "is 0 for an engine; on other nodes run penstock serve --node-rank", 0)
    if options.pipeline_parallel_size > 1 or options.pipeline_parallel_layers:
        split_layers(size_of(config), options.pipeline_parallel_size, options.pipeline_parallel_layers)
    ranks, expert_parallel = options.tensor_parallel_size, options.enable_expert_parallel
    if options.expert_parallel_size not in (0, ranks) or (options.expert_parallel_size and not expert_parallel):
        message = f"is {ranks}, the ranks of tensor_parallel_size, with enable_expert_parallel; or 0"
        raise invalid("expert_parallel_size", message, ranks)
    if ranks > 1:
        from penstock.parallel import SingleRank, shard_heads  # which brings PyTorch

        shard_heads(SingleRank(size=ranks), config.num_heads, config.num_kv_heads)
    if config.experts and config.experts.by_modality and options.expert_load:
        message = f"the load of experts is not counted in {config.architecture}, which has others for images"
        raise PenstockError(Code.UNSUPPORTED, message, "expert_load")
    if options.expert_load and config.model_impl != "penstock":
        raise PenstockError(Code.UNSUPPORTED, "transformers' experts are not counted", "expert_load")
    _check_experts(options, config.experts.num_experts if config.experts else 0)


def _check_experts(options: EngineOptions, num_experts: int) -> None:
    """Refuse experts that ranks cannot have. Raises ``PenstockError``."""
    ranks, redundant = options.tensor_parallel_size, options.num_redundant_experts
    if options.enable_expert_parallel and ranks == 1 and options.data_parallel_size > 1 and num_experts:
        message = (
            "engines of data_parallel_size do not share experts: each has all of them, or its ranks of "
            "tensor_parallel_size have; raise the latter, or leave out enable_expert_parallel"
        )
        raise PenstockError(Code.UNSUPPORTED, message, "enable_expert_parallel")
    if ranks > 1 and options.enable_expert_parallel and num_experts:
        check_sizes(num_experts, ranks, redundant)
        if options.expert_placement:
            read_placement(options.expert_placement, num_experts, ranks, redundant)
        return
    for name in ("expert_placement", "num_redundant_experts"):
        if getattr(options, name):
            message = "is for several ranks (tensor_parallel_size) of a model with experts, with enable_expert_parallel"
            raise invalid(name, message)


def _check_transformers(options: EngineOptions, config: ModelConfig) -> None:
    """Refuse options that need an implementation of ours, and log what differs.

    Raises ``PenstockError`` (``unsupported``), with the option as its field.
    """
    for name, asked in {
        "tensor_parallel_size": options.tensor_parallel_size > 1,
        "pipeline_parallel_size": options.pipeline_parallel_size > 1,
        "enable_lora": options.enable_lora,
        "lora_modules": bool(options.lora_modules),
        "role": options.role != "mixed",
        "kv_offloading_size": options.host_tier_bytes > 0,
    }.items():
        if asked:
            message = f"{name} is not supported for {config.architecture}, which is run by transformers"
            raise PenstockError(Code.UNSUPPORTED, message, name)
    logger.warning(
        "%s is run by the modules of transformers (model_impl): slower than an implementation of ours, on one rank, "
        "without LoRA and KV transfer; and not batch-invariant: other requests may change the last bits of a result.",
        config.architecture,
    )
