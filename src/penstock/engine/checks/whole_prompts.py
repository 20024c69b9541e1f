"""Models whose prompts are computed in one step each: encoders, which attend in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.sentence_transformers import max_seq_length
from penstock.config.options import EngineOptions
from penstock.core import Code, PenstockError
from penstock.models import ModelConfig

REFUSED: Mapping[str, Any] = {
    "role": "mixed",
    "kv_cache_dtype": "auto",
    "speculative_config": "",
    "enable_lora": False,
    "lora_modules": (),
}
"""Options that an encoder has no use for, and their values without effect."""


def whole_prompts(options: EngineOptions, config: ModelConfig, folder: Path) -> EngineOptions:
    """The options with steps that hold the longest prompt, which is neither cut into chunks nor cached.

    Args:
        folder: of the checkpoint, whose files may name a length for encoders.

    Raises ``PenstockError`` (``unsupported``) for options that an encoder cannot have.
    """
    for name, value in REFUSED.items() if config.encoder else ():
        if getattr(options, name) != value:
            raise PenstockError(Code.UNSUPPORTED, f"{config.architecture} keeps no KV cache, and has no {name}", name)
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
    """KV blocks that an encoder's steps use at most: those of their tokens, as blocks are freed with the step."""
    blocks = options.max_num_batched_tokens // options.block_size + options.max_num_seqs
    return blocks * (max_concurrent_batches + 1)
