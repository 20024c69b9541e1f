"""vLLM 0.5 as Huawei's Ascend documents it: the flags of its API servers, and of ``start_servers.sh``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import invalid

from . import WITH_OTHERS, Alias, Given, Profile, chosen, ignored, only, refused

DTYPES = {"auto": "auto", "half": "float16", "bfloat16": "bfloat16", "float": "float32"}
LEVELS = {"trace": "debug", "debug": "debug", "info": "info", "warning": "warning", "error": "error"}
BACKENDS = dict.fromkeys(("auto", "outlines", "lm-format-enforcer"), "auto") | {"xgrammar": "xgrammar"}
"""Who keeps outputs to a form; what they keep to is the same."""
ONE_DEVICE = "a model runs on one device here"
GRAPHS = "a step is recorded once for batches of every size"
ROLES = "separate prefill and decode instances are not there yet; without it one instance does both"
SAME = (
    "num_requests_running num_requests_waiting num_preemptions prompt_tokens generation_tokens "
    "time_to_first_token_seconds e2e_request_latency_seconds request_prompt_tokens request_generation_tokens "
    "request_success"
).split()


def _origins(text: str) -> tuple[str, ...]:
    found = json.loads(text)
    if not isinstance(found, list):
        raise ValueError("it is no list in JSON")
    return tuple(map(str, found))


def _speculative(given: Mapping[str, str]) -> Given:
    model = given.get("--speculative_model")
    numbers = {
        "num_speculative_tokens": given.get("--num_speculative_tokens"),
        "prompt_lookup_max": given.get("--ngram_prompt_lookup_max"),
        "prompt_lookup_min": given.get("--ngram_prompt_lookup_min"),
    }
    found: dict[str, Any] = {}
    for name, text in numbers.items():
        if text is None:
            continue
        if model is None:
            raise invalid(f"--{name}", "goes with --speculative-model only")
        if not text.isdecimal():
            raise invalid(f"--{name}", f"{text!r} is no number")
        found[name] = int(text)
    if model is not None:
        found |= {"method": "ngram"} if model == "[ngram]" else {"method": "draft_model", "model": model}
        yield "speculative_config", json.dumps(found), "--speculative_model"


PROFILE = Profile(
    name="ascend-vllm",
    title="vLLM",
    defaults={
        "enable_prefix_caching": False,
        "require_model": True,
        "generation_config": "vllm",
        "guided_decoding_disable_additional_properties": True,
    },
    flags={
        "dtype": Alias("dtype", chosen(DTYPES | {"float16": "float16", "float32": "float32"})),
        "tensor_parallel_size": only("1", ONE_DEVICE),
        "pipeline_parallel_size": only("1", ONE_DEVICE),
        "guided_decoding_backend": Alias("guided_decoding_backend", chosen(BACKENDS)),
        "speculative_model": WITH_OTHERS,
        "num_speculative_tokens": WITH_OTHERS,
        "ngram_prompt_lookup_max": WITH_OTHERS,
        "ngram_prompt_lookup_min": WITH_OTHERS,
        "uvicorn_log_level": Alias("log_level", chosen(LEVELS)),
        "allowed_origins": Alias("allowed_origins", _origins),
        "tokenizer_mode": only("auto", "there is one kind of tokenizer"),
        "response_role": only("assistant", "answers are the assistant's"),
        "distributed_executor_backend": ignored(ONE_DEVICE),
        "worker_use_ray": ignored(ONE_DEVICE, switch=True),
        "disable_custom_all_reduce": ignored(ONE_DEVICE, switch=True),
        "max_parallel_loading_workers": ignored("weights are mapped, not copied"),
        "trust_remote_code": ignored("nothing that a checkpoint brings is executed", switch=True),
        "enforce_eager": ignored(GRAPHS, switch=True),
        "max_seq_len_to_capture": ignored(GRAPHS),
        "max_context_len_to_capture": ignored(GRAPHS),
        "use_v2_block_manager": ignored("there is one manager of blocks", switch=True),
        "disable_log_requests": ignored("the log has a line for each request, and never its text", switch=True),
        "disable_log_stats": ignored("figures are in /metrics, not in the log", switch=True),
        "max_log_len": ignored("no prompt is written to the log"),
    },
    variables={
        "USE_OPENAI": Alias("require_model", chosen({"0": False, "1": True})),
        "GLOBAL_RANK_TABLE_FILE_PATH": refused(ROLES),
        "RANK_TABLE_FILE_PATH": refused(ROLES),
        "NODE_PORTS": refused(ROLES),
    },
    together=_speculative,
    metrics={f"vllm:{name}": name for name in SAME}
    | {
        "vllm:gpu_cache_usage_perc": "kv_cache_usage_perc",
        "vllm:time_per_output_token_seconds": "inter_token_latency_seconds",
    },
)
