"""BladeLLM: the flags of ``blade_llm_server``."""

from __future__ import annotations

from . import Alias, Profile

PROFILE = Profile(
    name="bladellm",
    title="BladeLLM",
    flags={
        "model": Alias("model"),
        "tokenizer_dir": Alias("tokenizer"),
        "ragged_flash_max_batch_tokens": Alias("max_num_batched_tokens"),
    },
)
