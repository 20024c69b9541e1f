"""Parameters of TensorRT-LLM's ``config.pbtxt`` files, translated to our flags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.profiles import one_of
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


@dataclass(frozen=True)
class ParameterTranslation:
    """The translation of one parameter."""

    flags: Callable[[str], Flags] = lambda text: {}
    """Converts a value to our settings. Raises ``ValueError`` where it is wrong."""
    why: str = ""
    """Reason why it has no effect, for the log."""


def setting(name: str, read: Callable[[str], Any] = str) -> ParameterTranslation:
    return ParameterTranslation(lambda text: {name: read(text)})


def ignored_parameter(why: str) -> ParameterTranslation:
    return ParameterTranslation(why=why)


def must_be(first: str, *more: str, why: str) -> ParameterTranslation:
    """A parameter with values that change nothing; others are refused."""
    allowed = (first, *more)

    def read(text: str) -> Flags:
        if text.strip().lower() not in allowed:
            raise ValueError(f"{why}; possible is {' or '.join(allowed)}")
        return {}

    return ParameterTranslation(read)


def refused_parameter(why: str) -> ParameterTranslation:
    def read(text: str) -> Flags:
        raise ValueError(f"{why}; leave it out")

    return ParameterTranslation(read)


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
    return must_be(*DECODING, why="each request selects its decoding").flags(text)


def _tree(text: str) -> list[list[int]]:
    """The branches of a tree of draft tokens."""
    if not re.fullmatch(rf"\s*{BRANCH}(?:\s*,\s*{BRANCH})*\s*", text):
        raise ValueError("it is no tree of choices such as {0, 0, 0}, {0, 1}")
    return [[int(number) for number in re.findall(r"\d+", branch)] for branch in re.findall(BRANCH, text)]


IMAGES = "images are sent with OpenAI's API, to a checkpoint that sees them"
TOKENIZER = {
    "tokenizer_dir": setting("tokenizer"),
    "tokenizer_type": ignored_parameter("the type is recognized in the tokenizer's files"),
}
PARAMETERS: Mapping[str, Mapping[str, ParameterTranslation]] = {
    "ensemble": {},
    "preprocessing": TOKENIZER
    | {
        "add_special_tokens": must_be("true", why="the tokenizer's special tokens are always added"),
        "engine_dir": ignored_parameter("the vocabulary's size is the tokenizer's"),
        "max_num_images": ignored_parameter("--limit-mm-per-prompt limits images"),
        **dict.fromkeys(("visual_model_path", "multimodal_model_path"), refused_parameter(IMAGES)),
    },
    "postprocessing": TOKENIZER
    | {"skip_special_tokens": must_be("true", why="special tokens are never part of the text")},
    "tensorrt_llm_bls": {
        "accumulate_tokens": setting("accumulate_tokens", switched),
        "tensorrt_llm_model_name": ParameterTranslation(),  # the model of its engine, see _group_by_engine
        "tensorrt_llm_draft_model_name": refused_parameter("a draft model is given with --speculative-config"),
        "multimodal_encoders_name": refused_parameter(IMAGES),
    },
    "tensorrt_llm": {
        "gpt_model_path": setting("engine_dir"),
        "gpt_model_type": setting("batching_type", one_of(BATCHING)),
        "batch_scheduler_policy": setting("batch_scheduler_policy", one_of(POLICIES)),
        "kv_cache_free_gpu_mem_fraction": setting("kv_cache_free_memory_fraction", float),
        "max_tokens_in_paged_kv_cache": setting("num_gpu_blocks_override", _blocks),
        "enable_chunked_context": setting("enable_chunked_prefill", switched),
        "enable_kv_cache_reuse": setting("enable_prefix_caching", switched),
        "exclude_input_in_output": setting("exclude_input_in_output", switched),
        "max_beam_width": setting("max_beam_width", int),
        "decoding_mode": ParameterTranslation(_decoding),
        **dict.fromkeys(
            ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
            ignored_parameter(
                "the draft length adapts to the acceptance rate, up to the limit of --speculative-config"
            ),
        ),
        **{name: setting(name, _tree) for name in CHOICES},
        "max_attention_window_size": ParameterTranslation(_check_windows),
        "sink_token_length": must_be("0", why="a model's attention is its own"),
        "tokenizer_dir": setting("tokenizer"),
        "tokenizer_type": ignored_parameter("the type is recognized in the tokenizer's files"),
        "guided_decoding_backend": setting("guided_decoding_backend", one_of({"xgrammar": "xgrammar"})),
        "xgrammar_tokenizer_info_path": ignored_parameter("grammars are compiled for the tokenizer's own vocabulary"),
        "encoder_model_path": refused_parameter("encoder-decoder models are not served as tensorrt_llm"),
        "lora_prefetch_dir": refused_parameter("--lora-modules names adapters"),
        "gpu_weights_percent": must_be("1", "1.0", why="all weights are on the GPU"),
        "speculative_decoding_fast_logits": must_be("false", "0", why="--speculative-config sets up draft models"),
        "num_nodes": must_be("1", why="--nnodes starts one model on several nodes"),
        "participant_ids": ignored_parameter("the server starts its ranks itself"),
        "cross_kv_cache_fraction": ignored_parameter("it is for encoder-decoder models"),
        **dict.fromkeys(
            ("cuda_graph_mode", "cuda_graph_cache_size"), ignored_parameter("--enforce-eager turns CUDA graphs off")
        ),
        **dict.fromkeys(
            ("multi_block_mode", "enable_context_fmha_fp32_acc"), ignored_parameter("kernels accumulate in FP32")
        ),
        "gpu_device_ids": ParameterTranslation(_instances),
        "kv_cache_host_memory_bytes": setting("kv_offloading_size", lambda text: int(text) / GIB),
        "normalize_log_probs": must_be("true", why="logprobs are always normalized"),
        **dict.fromkeys(
            ("kv_cache_onboard_blocks", "enable_trt_overlap", "executor_worker_path", "FORCE_CPU_ONLY_INPUT_TENSORS"),
            ignored_parameter("it is for TensorRT-LLM's executor"),
        ),
        **dict.fromkeys(
            (
                "iter_stats_max_iterations",
                "request_stats_max_iterations",
                "stats_check_period_ms",
                "recv_poll_period_ms",
            ),
            ignored_parameter("statistics are in /metrics"),
        ),
        "cancellation_check_period_ms": ignored_parameter("disconnects are noticed at once"),
        **dict.fromkeys(
            (
                "lora_cache_optimal_adapter_size",
                "lora_cache_max_adapter_size",
                "lora_cache_gpu_memory_fraction",
                "lora_cache_host_memory_bytes",
            ),
            ignored_parameter("--max-loras and --max-lora-rank limit adapters"),
        ),
    },
}
"""(model, key in ``config.pbtxt``) → parameter."""
