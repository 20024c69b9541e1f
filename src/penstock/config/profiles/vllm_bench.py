"""Profile of vLLM's command ``bench serve``: flags of the main branch of September 2026.

Flags with the same name and meaning in Penstock are not listed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.core.errors import invalid

from . import Alias, Settings, all_ignored, ignored, json_object, named, on, only_value, refused

DATASETS = {
    **{name: name for name in ("random", "sharegpt", "custom", "sonnet", "burstgpt", "prefix_repetition", "trace")},
    "timed_trace": "trace",
}
TO_CUSTOM = 'write its prompts to a JSONL file of {"prompt": TEXT}, and use --dataset-name custom --dataset-path FILE'
TEXT_ONLY = "prompts are text: images, videos and audio are not sent"
BACKENDS = ("openai", "vllm", "openai-chat", "openai-embeddings")
OTHER_DATASETS = {
    "hf": f"datasets are not downloaded from a hub: {TO_CUSTOM}",
    "spec_bench": f"this dataset is not read: {TO_CUSTOM}",
    "speed_bench": f"this dataset is not read: {TO_CUSTOM}",
    **dict.fromkeys(("random-mm", "custom_image", "custom_audio"), TEXT_ONLY),
    "random-rerank": "rerankers are not measured; --backend openai-embeddings measures embeddings",
}
LENGTHS = {
    "random": ("random_input_len", "random_output_len", "random_prefix_len"),
    "sonnet": ("sonnet_input_len", "sonnet_output_len", "sonnet_prefix_len"),
    "sharegpt": ("", "sharegpt_output_len", ""),
    "custom": ("", "custom_output_len", ""),
    "prefix_repetition": (
        *("prefix_repetition_suffix_len", "prefix_repetition_output_len", "prefix_repetition_prefix_len"),
    ),
}
"""Flags of the lengths of prompt, output and shared prefix, by dataset."""
DEFAULT_LENGTHS = {"random_input_len": "1024", "random_output_len": "128", "custom_output_len": "256"}
"""vLLM's defaults that differ from Penstock's."""
SAMPLING = "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty".split()
COUNTED = "the server counts tokens"


def _dataset(text: str) -> str:
    if text not in DATASETS:
        raise ValueError(OTHER_DATASETS.get(text, f"it is not one of {', '.join(DATASETS)}"))
    return DATASETS[text]


def _backend(text: str) -> str:
    if text not in BACKENDS:
        raise ValueError(f"this API is not measured; use one of {', '.join(BACKENDS)}")
    return text


def _count(text: str) -> Mapping[str, Any]:
    return {"num_prompts": 2**31, "oversample": False} if text == "-1" else {"num_prompts": text}


def _ratio(text: str) -> Mapping[str, Any]:
    if not text.startswith("{"):
        return {"range_ratio": text}
    ratios = set(json_object(text).values())
    if len(ratios) != 1:
        raise ValueError("only one ratio for input and output is possible")
    return {"range_ratio": ratios.pop()}


def together(given: Mapping[str, str]) -> Settings:
    """Settings that depend on several flags: address, dataset, sampling parameters and file of the results."""
    if given.keys() & {"--host", "--port"} and "--base_url" not in given:
        host = given.get("--host", "127.0.0.1")
        address = f"[{host}]" if ":" in host else host
        yield "base_url", f"http://{address}:{given.get('--port', 8000)}", "--host"
    yield from dataset_settings(given, {})
    yield from _body(given)
    yield from _file(given)


def vllm_together(given: Mapping[str, str]) -> Settings:
    """The same with vLLM's defaults, which depend on the dataset."""
    dataset = given.get("--dataset_name", "random")
    if dataset in ("random", "timed_trace"):
        yield "ignore_eos", True, "--dataset-name"
    if dataset in ("custom", "sonnet") and "--skip_chat_template" not in given:
        yield "chat_template", True, "--dataset-name"
    yield from together(given)
    yield from dataset_settings(given, DEFAULT_LENGTHS)


def dataset_settings(given: Mapping[str, str], defaults: Mapping[str, str]) -> Settings:
    dataset = given.get("--dataset_name", "random")
    if given.get("--num_prompts") == "-1" and dataset in ("random", "prefix_repetition"):
        raise invalid("--num-prompts", f"-1 is all rows of a file, but {dataset} has no file: set a number")
    for setting, name in zip(("input_len", "output_len", "prefix_len"), LENGTHS.get(dataset, ()), strict=False):
        value = given.get(f"--{name}", defaults.get(name))
        if value is not None and (name, value) != ("custom_output_len", "-1"):
            yield setting, value, f"--{name.replace('_', '-')}"
    if dataset != "timed_trace":
        if "--self_timed" in given:
            raise invalid("--self-timed", "requires --dataset-name timed_trace")
        return
    yield "trace_block_size", given.get("--timed_trace_chunk_hash_size", "16"), "--timed-trace-chunk-hash-size"
    yield "trace_time_unit", given.get("--timed_trace_sec_multiplier", "1"), "--timed-trace-sec-multiplier"
    timed = given.get("--self_timed", "true") == "true"
    yield "request_rate", 0 if timed else given.get("--request_rate", "inf"), "--self-timed"


def _body(given: Mapping[str, str]) -> Settings:
    """Sampling parameters as fields of requests. ``--extra-body`` overrides them."""
    fields: dict[str, Any] = {}
    for name in SAMPLING:
        if (text := given.get(f"--{name}")) is not None:
            try:
                fields[name] = json.loads(text)
            except ValueError as error:
                raise invalid(f"--{name.replace('_', '-')}", f"{text!r} is not a number") from error
    if (number := given.get("--logprobs")) is not None:
        if not number.isdecimal():
            raise invalid("--logprobs", f"{number!r} is not a number")
        chat = given.get("--backend", given.get("--endpoint_type")) == "openai-chat"
        fields |= {"logprobs": True, "top_logprobs": int(number)} if chat else {"logprobs": int(number)}
    if "--extra_body" in given:
        try:
            fields |= json_object(given["--extra_body"])
        except ValueError as error:
            raise invalid("--extra-body", f"{given['--extra_body']!r} is wrong: {error}") from error
    if fields:
        yield "extra_body", json.dumps(fields), "--extra-body"


def _file(given: Mapping[str, str]) -> Settings:
    """File of the results, with vLLM's name."""
    if not given.keys() & {"--save_result", "--append_result"}:
        return
    label = given.get("--label") or given.get("--backend") or given.get("--endpoint_type", "openai")
    rate = f"{given.get('--request_rate', 'inf')}"
    rate = f"{float(rate)}qps" if _is_number(rate) else f"{rate}qps"
    if strategy := given.get("--ramp_up_strategy"):
        rate = f"ramp-up-{strategy}-{given.get('--ramp_up_start_rps')}qps-{given.get('--ramp_up_end_rps')}qps"
    concurrency = f"-concurrency{given['--max_concurrency']}" if "--max_concurrency" in given else ""
    name = given.get("--result_filename", f"{label}-{rate}{concurrency}-{{model}}-{{date}}.json")
    folder = given.get("--result_dir")
    yield "json", f"{folder}/{name}" if folder else name, "--save-result"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


ABOUT = {
    "host": "host of the server (default: 127.0.0.1)",
    "port": "port of the server (default: 8000)",
    "logprobs": "number of log probabilities per token in responses",
    "extra_body": "additional fields of all requests, as JSON",
    "result_dir": "folder of the file of --save-result, created if it is missing (default: the current folder)",
    "result_filename": "name of the file of --save-result (default: LABEL-RATEqps-MODEL-DATE.json)",
    "timed_trace_chunk_hash_size": "same as --trace-block-size (tokens, default: 16)",
    "timed_trace_sec_multiplier": "same as --trace-time-unit (seconds, default: 1)",
    **{name: f"{name} of all requests (default: the server's)" for name in SAMPLING},
}
"""Descriptions of flags that are evaluated together with others."""


def _off(option: str) -> Alias:
    """Switch that turns an option off."""
    about = f"same as --no-{option.replace('_', '-')}"
    return Alias(read=lambda text: {option: not on(text)}, switch=True, about=about)


FLAGS: Mapping[str, Alias] = {
    **{name: Alias(read=lambda text: {}, about=about) for name, about in ABOUT.items()},
    **{
        name: Alias(read=lambda text: {}, about=f"same as --{option} with --dataset-name {dataset} (tokens)")
        for dataset, names in LENGTHS.items()
        for option, name in zip(("input-len", "output-len", "prefix-len"), names, strict=True)
        if name
    },
    "base_url": Alias("base_url"),
    "backend": Alias("backend", _backend),
    "endpoint_type": Alias("backend", _backend),
    "dataset_name": Alias("dataset_name", _dataset),
    "num_prompts": Alias(read=_count, about="number of requests; -1: all rows of the file"),
    "random_range_ratio": Alias(read=_ratio, about="same as --range-ratio"),
    "prefix_repetition_num_prefixes": Alias("num_prefixes"),
    "disable_shuffle": _off("shuffle"),
    "skip_chat_template": _off("chat_template"),
    "disable_tqdm": _off("progress"),
    "save_result": Alias(read=lambda text: {}, switch=True, about="write the results as JSON to a file"),
    "append_result": Alias("append_result", on, switch=True),
    "self_timed": Alias(read=lambda text: {}, switch=True, about="keep the times of timed_trace (default)"),
    "label": Alias("label"),
    "request_rate": Alias("request_rate"),
    "max_concurrency": Alias("max_concurrency"),
    "ramp_up_strategy": Alias("ramp_up_strategy"),
    "ramp_up_start_rps": Alias("ramp_up_start_rps"),
    "ramp_up_end_rps": Alias("ramp_up_end_rps"),
    "ready_check_timeout_sec": Alias("ready_timeout"),
    **all_ignored(COUNTED, "tokenizer_mode", "skip_tokenizer_init"),
    "trust_remote_code": ignored("code of a checkpoint is never executed", switch=True),
    "no_stream": ignored("datasets are read from files", switch=True),
    "timeline_itl_thresholds": ignored("there is no timeline"),
    "use_beam_search": refused('use --extra-body \'{"use_beam_search": true, "n": 4}\'', switch=True),
    "profile": refused("a server has no profiler: use --otlp-endpoint of penstock serve for traces", switch=True),
    "probe_request_rate": only_value("0", "run a second penstock bench serve with --random-output-len 1"),
    "plot_timeline": refused("use --picture FILE.png, which plots latencies and load over time", switch=True),
    "plot_dataset_stats": refused("use --save-detailed, which has input_lens and output_lens", switch=True),
    "random_batch_size": only_value("1", "each request has one prompt"),
    "no_reranker": refused(OTHER_DATASETS["random-rerank"], switch=True),
    "timed_trace_label_timestamp": only_value("timestamp", "rename the fields of the file"),
    "timed_trace_label_input_length": only_value("input_length", "rename the fields of the file"),
    "timed_trace_label_output_length": only_value("output_length", "rename the fields of the file"),
    "timed_trace_label_hash_ids": only_value("hash_ids", "rename the fields of the file"),
    **named("hf_subset hf_split hf_name hf_output_len", refused(OTHER_DATASETS["hf"])),
    **named(
        "blazedit_min_distance blazedit_max_distance asr_min_audio_len_sec asr_max_audio_len_sec bfcl_categories",
        refused(OTHER_DATASETS["hf"]),
    ),
    **named("spec_bench_output_len spec_bench_category", refused(OTHER_DATASETS["spec_bench"])),
    **named(
        "speed_bench_dataset_subset speed_bench_output_len speed_bench_category",
        refused(OTHER_DATASETS["speed_bench"]),
    ),
    **named(
        "random_mm_base_items_per_request random_mm_num_mm_items_range_ratio random_mm_limit_mm_per_prompt "
        "random_mm_bucket_config",
        refused(TEXT_ONLY),
    ),
    **named("enable_multimodal_chat custom_ensure_client_side_data", refused(TEXT_ONLY, switch=True)),
}
