"""Parameters of TensorRT-LLM's ``config.pbtxt`` files, translated to our flags."""

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
"""``decoding_mode`` → method of ``speculative_config``. The nearest to lookahead are n-grams of the text so far, which
need no model either."""
CHOICES = {"medusa_choices": "medusa", "eagle_choices": "eagle"}
"""Parameter with a tree of draft tokens → method of ``speculative_config``."""
BRANCH = r"\{\s*\d+(?:\s*,\s*\d+)*\s*\}"
GIB = 2**30
BLOCK = 64
"""Tokens of a KV block."""

Flags = Mapping[str, Any]


def must_be(first: str, *more: str, why: str) -> Alias:
    """A parameter with values that change nothing; others are refused."""
    allowed = (first, *more)

    def read(text: str) -> Flags:
        if text.strip().lower() not in allowed:
            raise ValueError(f"{why}; possible is {' or '.join(allowed)}")
        return {}

    return Alias(read=read)


def left_out(why: str) -> Alias:
    """A parameter that must not be given."""
    return refused(f"{why}; leave it out")


def _blocks(text: str) -> int:
    return max(int(text) // BLOCK, 1)


def device_groups(text: str) -> list[list[int]]:
    """``gpu_device_ids``: the devices of each instance, as ``0,1;2,3``. Raises ``ValueError``."""
    groups = [[int(number) for number in group.split(",")] for group in text.split(";")]
    devices = [device for group in groups for device in group]
    if devices[0] < 0 or devices != list(range(devices[0], devices[0] + len(devices))):
        raise ValueError("devices must have consecutive numbers; CUDA_VISIBLE_DEVICES can put them in order")
    if any(len(group) != len(groups[0]) for group in groups):
        raise ValueError("all instances must have the same number of devices")
    return groups


def _instances(text: str) -> Flags:
    """The number of instances, and the first one's GPU. On a machine without GPUs the numbers mean nothing."""
    groups = device_groups(text)
    result: dict[str, Any] = {"data_parallel_size": len(groups)} if len(groups) > 1 else {}
    return result | ({"device": f"cuda:{first}"} if (first := groups[0][0]) and has_gpus() else {})


def has_gpus() -> bool:
    """Whether this machine has a GPU of NVIDIA's, told without loading PyTorch."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def attention_windows(text: str) -> list[int]:
    """``max_attention_window_size``: tokens that layers attend to, repeated for all layers. Raises ``ValueError``."""
    windows = [int(number) for number in text.strip("{} ").split(",")]
    if min(windows) < 1:
        raise ValueError("a window has one token at least")
    return windows


def _check_windows(text: str) -> Flags:
    attention_windows(text)  # what it may be depends on the model, see model_repository
    return {}


def _decoding(text: str) -> Flags:
    if method := DRAFTERS.get(text.lower()):
        return {"speculative_config": json.dumps({"method": method})}
    return must_be(*DECODING, why="each request selects its decoding").settings(text)


def _tree(text: str) -> list[list[int]]:
    """The branches of a tree of draft tokens."""
    if not re.fullmatch(rf"\s*{BRANCH}(?:\s*,\s*{BRANCH})*\s*", text):
        raise ValueError("it is no tree of choices such as {0, 0, 0}, {0, 1}")
    return [[int(number) for number in re.findall(r"\d+", branch)] for branch in re.findall(BRANCH, text)]


IMAGES = "images are sent with OpenAI's API, to a checkpoint that sees them"
TOKENIZER = {
    "tokenizer_dir": Alias("tokenizer"),
    "tokenizer_type": ignored("the type is recognized in the tokenizer's files"),
}
PARAMETERS: Mapping[str, Mapping[str, Alias]] = {
    "ensemble": {},
    "preprocessing": TOKENIZER
    | {
        "add_special_tokens": must_be("true", why="the tokenizer's special tokens are always added"),
        "engine_dir": ignored("the vocabulary's size is the tokenizer's"),
        "max_num_images": ignored("--limit-mm-per-prompt limits images"),
        **dict.fromkeys(("visual_model_path", "multimodal_model_path"), left_out(IMAGES)),
    },
    "postprocessing": TOKENIZER
    | {"skip_special_tokens": must_be("true", why="special tokens are never part of the text")},
    "tensorrt_llm_bls": {
        "accumulate_tokens": Alias("accumulate_tokens", switched),
        "tensorrt_llm_model_name": Alias(read=lambda text: {}),  # the model of its engine, see _group_by_engine
        "tensorrt_llm_draft_model_name": left_out("a draft model is given with --speculative-config"),
        "multimodal_encoders_name": left_out(IMAGES),
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
        "sink_token_length": must_be("0", why="a model's attention is its own"),
        **TOKENIZER,
        "guided_decoding_backend": Alias("guided_decoding_backend", one_of({"xgrammar": "xgrammar"})),
        "xgrammar_tokenizer_info_path": ignored("grammars are compiled for the tokenizer's own vocabulary"),
        "encoder_model_path": left_out("encoder-decoder models are not served as tensorrt_llm"),
        "lora_prefetch_dir": left_out("--lora-modules names adapters"),
        "gpu_weights_percent": must_be("1", "1.0", why="all weights are on the GPU"),
        "speculative_decoding_fast_logits": must_be("false", "0", why="--speculative-config sets up draft models"),
        "num_nodes": must_be("1", why="--nnodes starts one model on several nodes"),
        "participant_ids": ignored("the server starts its ranks itself"),
        "cross_kv_cache_fraction": ignored("it is for encoder-decoder models"),
        **dict.fromkeys(("cuda_graph_mode", "cuda_graph_cache_size"), ignored("--enforce-eager turns CUDA graphs off")),
        **dict.fromkeys(("multi_block_mode", "enable_context_fmha_fp32_acc"), ignored("kernels accumulate in FP32")),
        "gpu_device_ids": Alias(read=_instances),
        "kv_cache_host_memory_bytes": Alias("kv_offloading_size", lambda text: int(text) / GIB),
        "normalize_log_probs": must_be("true", why="logprobs are always normalized"),
        **dict.fromkeys(
            ("kv_cache_onboard_blocks", "enable_trt_overlap", "executor_worker_path", "FORCE_CPU_ONLY_INPUT_TENSORS"),
            ignored("it is for TensorRT-LLM's executor"),
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
        "cancellation_check_period_ms": ignored("disconnects are noticed at once"),
        **dict.fromkeys(
            (
                "lora_cache_optimal_adapter_size",
                "lora_cache_max_adapter_size",
                "lora_cache_gpu_memory_fraction",
                "lora_cache_host_memory_bytes",
            ),
            ignored("--max-loras and --max-lora-rank limit adapters"),
        ),
    },
}
"""(model, key in ``config.pbtxt``) → parameter."""
