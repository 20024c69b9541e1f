"""What models that transformers runs (``model_impl``) do not support."""

from __future__ import annotations

import logging

from penstock.config.options import EngineOptions
from penstock.core import Code, PenstockError
from penstock.models import ModelConfig

logger = logging.getLogger(__name__)


def check_transformers(options: EngineOptions, config: ModelConfig) -> None:
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
            words = f"{name} is not supported for {config.architecture}, which is run by transformers"
            raise PenstockError(Code.UNSUPPORTED, words, name)
    logger.warning(
        "%s is run by the modules of transformers (model_impl): slower than an implementation of ours, on one rank, "
        "without LoRA and KV transfer; and not batch-invariant: other requests may change the last bits of a result.",
        config.architecture,
    )
