"""Options for models that compute each prompt in one step: encoders, and embedding models with dense modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.sentence_transformers import max_seq_length
from penstock.config.options import EngineOptions
from penstock.core import Code, PenstockError
from penstock.models import ModelConfig

UNSUPPORTED: Mapping[str, Any] = {
    "role": "mixed",
    "kv_cache_dtype": "auto",
    "speculative_config": "",
    "enable_lora": False,
    "lora_modules": (),
}
"""Options that an encoder does not support: name and the only allowed value, which is the default."""


def whole_prompt_options(options: EngineOptions, config: ModelConfig, folder: Path) -> EngineOptions:
    """Disable chunked prefill and prefix caching, and raise the token budget of a step to the longest prompt.

    Args:
        folder: folder of the checkpoint, whose files may limit the length of an encoder's prompts.

    Raises ``PenstockError`` (``unsupported``) for options that an encoder does not support.
    """
    for name, value in UNSUPPORTED.items() if config.encoder else ():
        if getattr(options, name) != value:
            message = f"{name}: {getattr(options, name)} is not supported for the encoder {config.architecture}"
            raise PenstockError(Code.UNSUPPORTED, f"{message}; remove this option", name)
    max_len = options.max_model_len or config.max_model_len
    if config.encoder and not options.max_model_len:
        max_len = min(max_len, max_seq_length(folder) or max_len)
    return msgspec.structs.replace(
        options,
        max_model_len=max_len,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        long_prefill_token_threshold=0,
        max_num_batched_tokens=max(options.max_num_batched_tokens, max_len),
        swap_space=0.0 if config.encoder else options.swap_space,
        preemption_mode="recompute",
    )


def scratch_blocks(options: EngineOptions, max_concurrent_batches: int) -> int:
    """Maximum number of KV blocks that an encoder uses: the blocks of its steps in flight, which each step frees."""
    blocks = options.max_num_batched_tokens // options.block_size + options.max_num_seqs
    return blocks * (max_concurrent_batches + 1)
