"""BladeLLM: the flags of ``blade_llm_server``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import invalid

from . import COMBINED, Alias, Profile, Settings, cuda_graphs, ignored, on, one_of

ALGORITHMS = {"sps": "draft_model", "look_ahead": "ngram", "normal": ""}
"""``--decode_algo`` → the drafter: a draft model, or n-grams."""
DTYPES = {"half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "float32": "float32"}
PROMPT_CACHE_SWAP = 4.0
"""Host memory of ``--prompt_cache_enable_swap``, GiB."""
COLLECTIVES = "ranks gather outputs in shared memory, and over TCP between machines"


def _speculative(given: Mapping[str, str]) -> Settings:
    algorithm = given.get("--decode_algo", "normal")
    if algorithm.lower() not in ALGORITHMS:
        raise invalid("--decode_algo", f"{algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    method = ALGORITHMS[algorithm.lower()]
    for name in ("--gamma", "--draft.model"):
        if name in given and (not method or (name == "--draft.model" and method == "ngram")):
            raise invalid(name, f"cannot be combined with --decode_algo {algorithm}")
    if not method:
        return
    result: dict[str, Any] = {"method": method}
    if model := given.get("--draft.model"):
        result["model"] = model
    if gamma := given.get("--gamma"):
        if not gamma.isdecimal():
            raise invalid("--gamma", f"{gamma!r} is not a number of tokens")
        result["num_speculative_tokens"] = int(gamma)
    yield "speculative_config", json.dumps(result), "--decode_algo"


def _prompt_cache_swap(text: str) -> Mapping[str, Any]:
    return {"kv_offloading_size": PROMPT_CACHE_SWAP} if on(text) else {}


PROFILE = Profile(
    name="bladellm",
    title="BladeLLM",
    defaults={"port": 8081, "kv_cache_free_memory_fraction": 0.85},
    flags={
        "tokenizer_dir": Alias("tokenizer"),
        "tensor_parallel_size": Alias("tensor_parallel_size"),
        "pipeline_parallel_size": Alias("pipeline_parallel_size"),
        "max_gpu_memory_utilization": Alias("kv_cache_free_memory_fraction"),
        "preempt_strategy": Alias(
            "preemption_mode", one_of({"auto": "recompute", "recompute": "recompute", "swap": "swap"})
        ),
        "ragged_flash_max_batch_tokens": Alias("max_num_batched_tokens"),
        "decode_algo": COMBINED,
        "gamma": COMBINED,
        "draft.model": COMBINED,
        "disable_prompt_cache": Alias("enable_prefix_caching", lambda text: not on(text), switch=True),
        "prompt_cache_enable_swap": Alias(read=_prompt_cache_swap, switch=True),
        "dtype": Alias("dtype", one_of(DTYPES)),
        "kv_cache_quant": Alias("kv_cache_dtype", one_of({"no_quant": "auto", "int8": "int8"})),
        "log_level": Alias("log_level", str.lower),
        "disable_cuda_graph": Alias("enforce_eager", on, switch=True),
        "cuda_graph_max_batch_size": Alias("cudagraph_capture_sizes", cuda_graphs.up_to),
        "cuda_graph_batch_sizes": Alias("cudagraph_capture_sizes", cuda_graphs.sizes),
        "enable_custom_allreduce": ignored(COLLECTIVES, switch=True),
    },
    together=_speculative,
)
