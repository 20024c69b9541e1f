"""Profile of BladeLLM: flags of ``blade_llm_server``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import invalid

from . import COMBINED, Alias, Profile, Settings, cuda_graphs, ignored, named, on, one_of, only_value, refused

ALGORITHMS = {"sps": "draft_model", "look_ahead": "ngram", "normal": ""}
"""Speculative method by ``--decode_algo``."""
DTYPES = {"half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "float32": "float32"}
PROMPT_CACHE_SWAP = {"kv_offloading_size": 4.0}
"""Settings for ``--prompt_cache_enable_swap`` (GiB)."""
CACHES = {"no_quant": "auto", "int8": "int8", "fp8_e4m3": "fp8_e4m3"}
COLLECTIVES = "ranks gather outputs in shared memory, and over TCP between machines"
DRAFT = "a draft model uses the options and the tokenizer of its model"
DRAFT_FLAGS = (
    "tokenizer_dir chat_template dtype kv_cache_quant kv_cache_quant_sub_heads tokenizer_special_tokens "
    "enable_triton_mla disable_cuda_graph cuda_graph_max_batch_size cuda_graph_batch_sizes with_visual "
    "use_sps use_lookahead look_ahead_window_size look_ahead_gram_size guess_set_size"
).split()
DRAFT_SWITCHES = ("enable_triton_mla", "disable_cuda_graph")
IN_REQUESTS = "set it in requests, or its default with --override-generation-config"
LOOK_AHEAD = "drafts are n-grams looked up in the text"
LLUMNIX = "Llumnix is not supported; use --role router in front of several instances"


def _speculative(given: Mapping[str, str]) -> Settings:
    algorithm = given.get("--decode_algo", "normal")
    for name, meant in (("--use_sps", "sps"), ("--use_lookahead", "look_ahead")):
        if given.get(name, "").lower() in ("true", "1"):
            if "--decode_algo" in given and algorithm.lower() != meant:
                raise invalid(name, f"contradicts --decode_algo {algorithm}: set only one of them")
            algorithm = meant
    if algorithm.lower() not in ALGORITHMS:
        raise invalid("--decode_algo", f"{algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    method = ALGORITHMS[algorithm.lower()]
    for name in ("--gamma", "--draft.model"):
        if name in given and (not method or (name == "--draft.model" and method == "ngram")):
            raise invalid(name, f"cannot be combined with --decode_algo {algorithm}")
    if not method:
        if "--decode_algo" in given:
            yield "speculative_config", '{"method": "none"}', "--decode_algo"
        return
    result: dict[str, Any] = {"method": method}
    if model := given.get("--draft.model"):
        result["model"] = model
    if gamma := given.get("--gamma"):
        if not gamma.isdecimal():
            raise invalid("--gamma", f"{gamma!r} is not a number of tokens")
        result["num_speculative_tokens"] = int(gamma)
    yield "speculative_config", json.dumps(result), "--decode_algo"


PROFILE = Profile(
    name="bladellm",
    title="BladeLLM",
    defaults={"port": 8081, "kv_cache_free_memory_fraction": 0.85},
    flags={
        "tokenizer_dir": Alias("tokenizer"),
        "tensor_parallel_size": Alias("tensor_parallel_size", short="-tp"),
        "pipeline_parallel_size": Alias("pipeline_parallel_size", short="-pp"),
        "max_gpu_memory_utilization": Alias("kv_cache_free_memory_fraction"),
        "preempt_strategy": Alias(
            "preemption_mode", one_of({"auto": "recompute", "recompute": "recompute", "swap": "swap"})
        ),
        "ragged_flash_max_batch_tokens": Alias("max_num_batched_tokens"),
        "decode_algo": COMBINED,
        "gamma": COMBINED,
        "draft.model": COMBINED,
        "disable_prompt_cache": Alias("enable_prefix_caching", lambda text: not on(text), switch=True),
        "prompt_cache_enable_swap": Alias(read=lambda text: PROMPT_CACHE_SWAP if on(text) else {}, switch=True),
        "dtype": Alias("dtype", one_of(DTYPES)),
        "kv_cache_quant": Alias("kv_cache_dtype", one_of(CACHES)),
        "log_level": Alias("log_level", str.lower),
        "disable_cuda_graph": Alias("enforce_eager", on, switch=True),
        "cuda_graph_max_batch_size": Alias("cudagraph_capture_sizes", cuda_graphs.up_to),
        "cuda_graph_batch_sizes": Alias("cudagraph_capture_sizes", cuda_graphs.sizes),
        "enable_custom_allreduce": ignored(COLLECTIVES, switch=True),
        "use_sps": COMBINED,
        "use_lookahead": COMBINED,
        **named("look_ahead_window_size look_ahead_gram_size guess_set_size", ignored(LOOK_AHEAD)),
        "pipeline_micro_batch": ignored("--max-concurrent-batches sets the number of steps in flight"),
        "attention_dp_size": only_value("1", "--tensor_parallel_size splits attention, too"),
        "worker_socket_path": ignored("the engine and its workers communicate through shared memory"),
        "decoding_parallelism": ignored("all sequences are sampled in one step"),
        "metric_exporters": ignored("/metrics is always served", several=True),
        "enable_json_warmup": ignored("grammars are compiled when a request needs them", switch=True),
        "enable_llumnix": refused(LLUMNIX, switch=True),
        "llumnix_config": refused(LLUMNIX),
        "kv_cache_quant_sub_heads": ignored("each head of a token has a separate scale"),
        "tokenizer_special_tokens": refused("the checkpoint's tokenizer defines the special tokens"),
        "enable_triton_mla": ignored("--ops selects the kernels", switch=True),
        "with_visual": ignored("detected from the model's config.json"),
        "enable_quant": refused("set --quantization to quantize at load, or run blade_llm_quantize first"),
        **named(
            "temperature top_p top_k repetition_penalty presence_penalty max_new_tokens stop_sequences stop_tokens "
            "ignore_eos skip_special_tokens cat_prompt",
            refused(IN_REQUESTS),
        ),
        **{f"draft.{name}": ignored(DRAFT, switch=name in DRAFT_SWITCHES) for name in DRAFT_FLAGS},
    },
    prefixes=("BLADE_", "BLADELLM_"),
    together=_speculative,
)
