"""Translation of parameters in TensorRT-LLM's ``config.pbtxt`` files to flags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config.profiles import Alias, ignored, one_of, refused
from penstock.config.profiles.triton import switched

POLICIES = {name: name for name in ("max_utilization", "guaranteed_no_evict")}
BATCHING = {"inflight_fused_batching": "inflight", "inflight_batching": "inflight", "v1": "static"}
DECODING = ("auto", "top_k", "top_p", "top_k_top_p", "beam_search")
DRAFTERS = {"lookahead": "ngram", "medusa": "medusa", "eagle": "eagle"}
"""Method of ``speculative_config`` by ``decoding_mode``. Lookahead is replaced by n-gram
drafting (prompt lookup), which also needs no draft model."""
CHOICES = {"medusa_choices": "medusa", "eagle_choices": "eagle"}
"""Method of ``speculative_config`` by parameter with a tree of draft tokens."""
BRANCH = r"\{\s*\d+(?:\s*,\s*\d+)*\s*\}"
GIB = 2**30
BLOCK = 64
"""Number of tokens in a KV block."""

Flags = Mapping[str, Any]


def must_be(first: str, *more: str, why: str) -> Alias:
    """Alias that accepts the given values, without effect; other values are rejected for the reason ``why``."""
    allowed = (first, *more)

    def read(text: str) -> Flags:
        if text.strip().lower() not in allowed:
            raise ValueError(f"{why}; it must be {' or '.join(allowed)}")
        return {}

    return Alias(read=read)


def omitted(why: str) -> Alias:
    """Alias of a parameter that must be omitted for the reason ``why``."""
    return refused(f"{why}; omit it")


def _blocks(text: str) -> int:
    return max(int(text) // BLOCK, 1)


def device_groups(text: str) -> list[list[int]]:
    """Parse ``gpu_device_ids``: the devices of each instance, such as ``0,1;2,3``. Raises ``ValueError``."""
    groups = [[int(number) for number in group.split(",")] for group in text.split(";")]
    devices = [device for group in groups for device in group]
    if devices[0] < 0 or devices != list(range(devices[0], devices[0] + len(devices))):
        raise ValueError("devices must have consecutive numbers; use CUDA_VISIBLE_DEVICES to renumber them")
    if any(len(group) != len(groups[0]) for group in groups):
        raise ValueError("all instances must have the same number of devices")
    return groups


def _instances(text: str) -> Flags:
    """Number of instances, and the GPU of the first one. Without GPUs, the device numbers are ignored."""
    groups = device_groups(text)
    result: dict[str, Any] = {"data_parallel_size": len(groups)} if len(groups) > 1 else {}
    return result | ({"device": f"cuda:{first}"} if (first := groups[0][0]) and has_gpus() else {})


def has_gpus() -> bool:
    """True if this machine has an NVIDIA GPU. Does not import PyTorch."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def attention_windows(text: str) -> list[int]:
    """Parse ``max_attention_window_size``: window sizes in tokens, repeated over the layers. Raises ``ValueError``."""
    windows = [int(number) for number in text.strip("{} ").split(",")]
    if min(windows) < 1:
        raise ValueError("a window must have at least one token")
    return windows


def _check_windows(text: str) -> Flags:
    attention_windows(text)  # model_repository compares the windows with the model's
    return {}


def _decoding(text: str) -> Flags:
    if method := DRAFTERS.get(text.lower()):
        return {"speculative_config": json.dumps({"method": method})}
    return must_be(*DECODING, why="requests select the decoding mode").settings(text)


def _tree(text: str) -> list[list[int]]:
    """Parse the branches of a tree of draft tokens."""
    if not re.fullmatch(rf"\s*{BRANCH}(?:\s*,\s*{BRANCH})*\s*", text):
        raise ValueError("it is not a tree of choices such as {0, 0, 0}, {0, 1}")
    return [[int(number) for number in re.findall(r"\d+", branch)] for branch in re.findall(BRANCH, text)]


IMAGES = "use OpenAI's API to send images to a checkpoint of a vision model"
TOKENIZER = {
    "tokenizer_dir": Alias("tokenizer"),
    "tokenizer_type": ignored("the type is detected from the tokenizer's files"),
}
PARAMETERS: Mapping[str, Mapping[str, Alias]] = {
    "ensemble": {},
    "preprocessing": TOKENIZER
    | {
        "add_special_tokens": must_be("true", why="the tokenizer's special tokens are always added"),
        "engine_dir": ignored("the tokenizer determines the size of the vocabulary"),
        "max_num_images": ignored("use --limit-mm-per-prompt to limit images"),
        **dict.fromkeys(("visual_model_path", "multimodal_model_path"), omitted(IMAGES)),
    },
    "postprocessing": TOKENIZER
    | {"skip_special_tokens": must_be("true", why="special tokens are never part of the text")},
    "tensorrt_llm_bls": {
        "accumulate_tokens": Alias("accumulate_tokens", switched),
        "tensorrt_llm_model_name": Alias(read=lambda text: {}),  # the engine's model, used by _group_by_engine
        "tensorrt_llm_draft_model_name": omitted("use --speculative-config for a draft model"),
        "multimodal_encoders_name": omitted(IMAGES),
    },
    "tensorrt_llm": {
        "gpt_model_path": Alias("engine_dir"),
        "gpt_model_type": Alias("batching_type", one_of(BATCHING)),
        "batch_scheduler_policy": Alias("batch_scheduler_policy", one_of(POLICIES)),
        "kv_cache_free_gpu_mem_fraction": Alias("kv_cache_free_memory_fraction", float),
        "max_tokens_in_paged_kv_cache": Alias("num_gpu_blocks_override", _blocks),
        "enable_chunked_context": Alias("enable_chunked_prefill", switched),
        "enable_kv_cache_reuse": Alias("enable_prefix_caching", switched),
        "exclude_input_in_output": Alias("exclude_input_in_output", switched),
        "max_beam_width": Alias("max_beam_width", int),
        "decoding_mode": Alias(read=_decoding),
        **dict.fromkeys(
            ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
            ignored("the draft length adapts to the acceptance rate, up to the limit of --speculative-config"),
        ),
        **{name: Alias(name, _tree) for name in CHOICES},
        "max_attention_window_size": Alias(read=_check_windows),
        "sink_token_length": must_be("0", why="the attention of a model cannot be changed"),
        **TOKENIZER,
        "guided_decoding_backend": Alias("guided_decoding_backend", one_of({"xgrammar": "xgrammar"})),
        "xgrammar_tokenizer_info_path": ignored("grammars are compiled for the tokenizer's vocabulary"),
        "encoder_model_path": omitted("encoder-decoder models are not served as tensorrt_llm"),
        "lora_prefetch_dir": omitted("use --lora-modules for adapters"),
        "gpu_weights_percent": must_be("1", "1.0", why="all weights are on the GPU"),
        "speculative_decoding_fast_logits": must_be("false", "0", why="use --speculative-config for draft models"),
        "num_nodes": must_be("1", why="use --nnodes to run a model on several nodes"),
        "participant_ids": ignored("the server starts its ranks"),
        "cross_kv_cache_fraction": ignored("encoder-decoder models are not served as tensorrt_llm"),
        **dict.fromkeys(
            ("cuda_graph_mode", "cuda_graph_cache_size"), ignored("use --enforce-eager to turn CUDA graphs off")
        ),
        **dict.fromkeys(("multi_block_mode", "enable_context_fmha_fp32_acc"), ignored("kernels accumulate in FP32")),
        "gpu_device_ids": Alias(read=_instances),
        "kv_cache_host_memory_bytes": Alias("kv_offloading_size", lambda text: int(text) / GIB),
        "normalize_log_probs": must_be("true", why="logprobs are always normalized"),
        **dict.fromkeys(
            ("kv_cache_onboard_blocks", "enable_trt_overlap", "executor_worker_path", "FORCE_CPU_ONLY_INPUT_TENSORS"),
            ignored("TensorRT-LLM's executor is not used"),
        ),
        **dict.fromkeys(
            (
                "iter_stats_max_iterations",
                "request_stats_max_iterations",
                "stats_check_period_ms",
                "recv_poll_period_ms",
            ),
            ignored("statistics are in /metrics"),
        ),
        "cancellation_check_period_ms": ignored("disconnects are detected immediately"),
        **dict.fromkeys(
            (
                "lora_cache_optimal_adapter_size",
                "lora_cache_max_adapter_size",
                "lora_cache_gpu_memory_fraction",
                "lora_cache_host_memory_bytes",
            ),
            ignored("use --max-loras and --max-lora-rank to limit adapters"),
        ),
    },
}
"""Aliases by kind of model and parameter in ``config.pbtxt``."""
