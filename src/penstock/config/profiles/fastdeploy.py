"""Profile of FastDeploy: parameters of its API server and of its ``LLM`` class."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from typing import Any

from penstock.config.addresses import own_index
from penstock.config.options import EngineOptions
from penstock.core.errors import invalid
from penstock.core.sampling import MAX_LOGPROBS

from . import COMBINED, Alias, DerivedMetric, Profile, Settings, cuda_graphs, json_object, on, one_of, share
from .fastdeploy_untranslated import FLAGS
from .fastdeploy_variables import PREFIXES, VARIABLES
from .vllm import TASKS, pooler

LENGTH = 2048
"""Default of ``max_model_len``."""
LONG = 0.04
"""Default of ``long_prefill_token_threshold``, as a share of ``max_model_len``."""
PARSERS = {"ernie-x1": "ernie", "ernie-45-vl": "ernie", "ernie_x1": "ernie", "ernie_45_vl": "ernie"}
WORDS = {"0": False, "1": True, "false": False, "true": True}
SAME_METRICS = (
    "num_requests_running num_requests_waiting cache_config_info time_to_first_token_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_params_max_tokens request_prompt_tokens "
    "request_generation_tokens prompt_tokens generation_tokens request_success"
).split()
"""Metrics that have the same name in Penstock."""
HIT_TOKENS = "Share of prompt tokens found in the prefix cache, 0 to 1."


def _number(given: Mapping[str, str], name: str, usual: int) -> int:
    text = given.get(f"--{name}", "")
    if text and not text.isdecimal():
        raise invalid(f"--{name}", f"{text!r} is not a number of tokens")
    return int(text or usual)


def _defaults(given: Mapping[str, str]) -> Mapping[str, Any]:
    length = _number(given, "max_model_len", LENGTH)
    result = {"max_num_batched_tokens": length}
    if given.get("--enable_chunked_prefill") == "true":
        result["long_prefill_token_threshold"] = int(length * LONG)
    return result


def _media_kwargs(text: str) -> str:
    """Translate ``mm_processor_kwargs`` (pixels and frames) to vLLM's names."""
    kept: dict[str, Any] = {}
    for name, value in json_object(text).items():
        kind, _, key = name.partition("_")
        if kind not in ("image", "video"):
            kept[name] = value
        elif value not in (None, -1):  # FastDeploy's values for "not set"
            key = "num_frames" if key == "target_frames" else key
            kept.setdefault(f"{kind}s_kwargs", {})[key] = value
    return json.dumps(kept) if kept else ""


def _nodes(text: str) -> Mapping[str, Any]:
    """Multi-node settings from the addresses of all nodes, node 0 first."""
    ips = [ip.strip() for ip in text.split(",") if ip.strip()]
    if len(ips) < 2:
        return {}
    own = own_index(ips)
    if own is None:
        raise ValueError("none of them is an address of this machine")
    return {"nnodes": len(ips), "node_rank": own, "master_addr": ips[0]}


def _waiting(text: str) -> float:
    """Parse ``max_waiting_time``; -1 (no limit) is 0."""
    return 0.0 if float(text) == -1 else float(text)


def _first_port(text: str) -> int:
    """First of a list of ports, one per data-parallel engine; Penstock uses consecutive ports."""
    return int(text.split(",")[0])


def _prefill_ports(text: str) -> tuple[str, ...]:
    """Addresses of prefill instances on this machine, given by their ``engine_worker_queue_port``."""
    return tuple(f"127.0.0.1:{int(port)}" for port in text.strip("[] ").split(","))


def _engine_address(given: Mapping[str, str]) -> Settings:
    """Set ``engine_address`` to ``engine_worker_queue_port`` if routers or decode instances connect to the engine."""
    port = given.get("--engine_worker_queue_port", "")
    try:
        number = _first_port(port or "0")
    except ValueError as error:
        raise invalid("--engine_worker_queue_port", f"{port!r} is not a port") from error
    if given.get("--splitwise_role", "mixed") == "mixed" and not given.get("--router"):
        return
    yield "engine_address", f"0.0.0.0:{number}", "--engine_worker_queue_port"


def _protocol(text: str) -> Mapping[str, Any]:
    if unknown := set(text.replace(" ", "").split(",")) - {"ipc", "rdma"}:
        raise ValueError(f"{min(unknown)!r} is neither ipc nor rdma")
    return {}


def _host_memory(given: Mapping[str, str]) -> Settings:
    """Translate ``swap_space``: with prefix caching, it offloads cached prefixes (including those of preempted
    sequences); otherwise it swaps preempted sequences."""
    if text := given.get("--swap_space", ""):
        try:
            size = float(text)
        except ValueError as error:
            raise invalid("--swap_space", f"{text!r} is not a number of GiB") from error
        if given.get("--enable_prefix_caching", "").lower() == "true":
            yield "kv_offloading_size", size, "--swap_space"
        else:
            yield "swap_space", size, "--swap_space"
            yield "preemption_mode", "swap", "--swap_space"


def _ready_message(blocks: int, options: EngineOptions) -> str:
    admitting = int(blocks * options.kv_cache_ratio)
    return f"Reset block num, the total_block_num:{blocks}, prefill_kvcache_block_num:{admitting}"


PROFILE = Profile(
    name="fastdeploy",
    title="FastDeploy",
    defaults={
        "port": 8000,
        "metrics_port": 8001,
        "max_concurrency": 512,
        "max_model_len": LENGTH,
        "max_num_seqs": 8,
        "kv_cache_ratio": 0.75,
        "static_decode_blocks": 2,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "guided_decoding_backend": "off",
        "enable_logprob": False,
        "log_file": "log/fastdeploy.log",
    },
    flags={
        **FLAGS,
        "max_waiting_time": Alias("max_queue_time", _waiting),
        "engine_worker_queue_port": COMBINED,
        "max_model_len": Alias("max_model_len"),
        "tensor_parallel_size": Alias("tensor_parallel_size", short="-tp"),
        "data_parallel_size": Alias("data_parallel_size"),
        "ips": Alias(read=_nodes),
        "mm_processor_kwargs": Alias("mm_processor_kwargs", _media_kwargs),
        "use_warmup": Alias("use_warmup", one_of(WORDS)),
        "max_num_batched_tokens": Alias("max_num_batched_tokens"),
        "enable_prefix_caching": Alias("enable_prefix_caching", on, switch=True),
        "swap_space": COMBINED,
        "enable_chunked_prefill": Alias("enable_chunked_prefill", on, switch=True),
        "reasoning_parser": Alias("reasoning_parser", lambda text: PARSERS.get(text, text)),
        "use_cudagraph": Alias("enforce_eager", lambda text: not on(text), switch=True),
        # graph_opt_level, which selects static graphs, has no effect
        "graph_optimization_config": Alias(read=lambda text: cuda_graphs.read_json(text, "use_cudagraph", ("false",))),
        "splitwise_role": Alias("role", one_of({name: name for name in ("mixed", "prefill", "decode")})),
        "innode_prefill_ports": Alias("prefill_instances", _prefill_ports),
        "pd_comm_port": Alias("kv_port", _first_port),
        "cache_transfer_protocol": Alias(read=_protocol),
        "router": Alias("router_address"),
        "guided_decoding_disable_any_whitespace": Alias("guided_decoding_disable_any_whitespace", on, switch=True),
        "dynamic_load_weight": Alias("server_dev_mode", one_of(WORDS), switch=True),
        "quantization": Alias("quantization"),
        "tool_call_parser": Alias("tool_call_parser", lambda text: PARSERS.get(text, text)),
        "load_choices": Alias("load_format", one_of({"default": "auto", "default_v1": "auto", "dummy": "dummy"})),
        "model_impl": Alias("model_impl", one_of({"auto": "auto", "fastdeploy": "penstock"})),
        "max_logprobs": Alias("max_logprobs", lambda text: MAX_LOGPROBS if text == "-1" else int(text)),
        "task": Alias("pooling_task", one_of(TASKS)),
        "convert": Alias("pooling_task", one_of(TASKS)),
        "override_pooler_config": Alias(read=pooler),
        "timeout_graceful_shutdown": Alias("drain_timeout"),
        "timeout": Alias("timeout_keep_alive"),
        "request_timeout_secs": Alias("request_timeout"),
        "enable_logprob": Alias("enable_logprob", on, switch=True),
        "workers": Alias("api_server_count"),
    },
    variables=VARIABLES,
    prefixes=PREFIXES,
    defaults_for=_defaults,
    together=lambda given: chain(_engine_address(given), _host_memory(given)),
    metrics={
        "fastdeploy:batch_size": "num_requests_running",
        "fastdeploy:max_batch_size": DerivedMetric(
            "Maximum number of running sequences.", lambda metrics, options: options.max_num_seqs
        ),
        "fastdeploy:available_batch_size": DerivedMetric(
            "Number of additional sequences that could run.",
            lambda metrics, options: options.max_num_seqs - metrics["num_requests_running"],
        ),
        "fastdeploy:requests_number": "requests",
        "fastdeploy:gpu_cache_usage_perc": "kv_cache_usage_perc",
        "fastdeploy:max_gpu_block_num": "kv_blocks",
        "fastdeploy:available_gpu_block_num": "kv_blocks_free",
        "fastdeploy:free_gpu_block_num": "kv_blocks_free",
        "fastdeploy:available_gpu_resource": share(
            "Share of KV blocks that are free, 0 to 1.", "kv_blocks_free", "kv_blocks"
        ),
        "fastdeploy:hit_req_rate": share(
            "Share of requests with cached tokens, 0 to 1.", "prefix_cache_hit_requests", "requests"
        ),
        "fastdeploy:hit_token_rate": share(HIT_TOKENS, "prefix_cache_hits", "prefix_cache_queries"),
        "fastdeploy:gpu_hit_token_rate": share(HIT_TOKENS, "prefix_cache_hits", "prefix_cache_queries"),
        "fastdeploy:cpu_hit_token_rate": share(
            "Share of prompt tokens found in host memory, 0 to 1.", "external_prefix_cache_hits", "prefix_cache_queries"
        ),
        "fastdeploy:prefix_cache_token_num": "prefix_cache_hits",
        "fastdeploy:prefix_gpu_cache_token_num": "prefix_cache_hits",
        "fastdeploy:prefix_cpu_cache_token_num": "external_prefix_cache_hits",
        "fastdeploy:time_per_output_token_seconds": "inter_token_latency_seconds",
        **{f"fastdeploy:{name}": name for name in SAME_METRICS},
    },
    ready_message=_ready_message,
)
