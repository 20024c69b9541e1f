"""Profiles of vLLM's commands besides ``serve``: flags of the main branch of September 2026, and vLLM's defaults.

Flags with the same name and meaning in Penstock are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import Alias, Command, Settings, all_ignored, ignored, on, only_value, refused
from .vllm_bench import DEFAULT_LENGTHS, FLAGS, dataset_settings, together, vllm_together

NO_OFFLINE_PROFILER = "use --otlp-endpoint of penstock serve for traces, or a profiler of Python such as py-spy"
DETOKENIZE = Alias(read=lambda text: {"detokenize": not on(text)}, switch=True, about="same as --no-detokenize")
LATENCY_FLAGS: Mapping[str, Alias] = {
    "disable_detokenize": DETOKENIZE,
    "profile": refused(NO_OFFLINE_PROFILER, switch=True),
}
THROUGHPUT_FLAGS: Mapping[str, Alias] = {
    **LATENCY_FLAGS,
    **{
        name: FLAGS[name]
        for name in (
            *("random_input_len", "random_output_len", "random_prefix_len", "random_range_ratio", "random_batch_size"),
            *("prefix_repetition_prefix_len", "prefix_repetition_suffix_len", "prefix_repetition_num_prefixes"),
            *("prefix_repetition_output_len", "no_reranker", "hf_subset", "hf_split", "random_mm_bucket_config"),
            *("random_mm_base_items_per_request", "random_mm_num_mm_items_range_ratio"),
            *("random_mm_limit_mm_per_prompt", "num_prompts", "dataset_name"),
        )
    },
    "backend": only_value("vllm", "the engine completes prompts, without the chat template and other libraries"),
    "dataset": Alias("dataset_path"),
    "dataset_path": Alias("dataset_path"),
    "hf_max_batch_size": refused("batches of transformers are not measured"),
    "lora_path": refused("measure adapters with penstock bench serve --lora-modules"),
    "async_engine": ignored("the engine is measured without a server or API process", switch=True),
}


def _throughput_together(given: Mapping[str, str]) -> Settings:
    yield from dataset_settings(given, {})


def _vllm_throughput_together(given: Mapping[str, str]) -> Settings:
    if given.keys() & {"--dataset", "--dataset_path"} and "--dataset_name" not in given:
        yield "dataset_name", "sharegpt", "--dataset-path"
    defaults = {} if given.keys() & {"--dataset", "--dataset_path"} else DEFAULT_LENGTHS
    yield from dataset_settings(given, defaults)


RUN_BATCH = Command(
    flags={
        "enable_metrics": refused("run-batch prints tokens per second at the end; servers have /metrics", switch=True),
        **all_ignored("results are written to --output-file at once", "output_tmp_dir"),
        **all_ignored("run-batch serves no metrics", "url host port"),
    }
)
COMMANDS = {
    "bench serve": Command(flags=FLAGS, together=together),
    "bench latency": Command(flags=LATENCY_FLAGS),
    "bench throughput": Command(flags=THROUGHPUT_FLAGS, together=_throughput_together),
    "bench startup": Command(flags={"num_iters_warm": Alias("num_iters")}),
    "run-batch": RUN_BATCH,
}
VLLM_COMMANDS = {
    "bench serve": Command(
        flags=FLAGS,
        defaults={"num_prompts": 1000, "num_warmups": 0, "metric_percentiles": "99", "temperature": None},
        together=vllm_together,
    ),
    "bench latency": Command(
        flags=LATENCY_FLAGS,
        defaults={
            **{"input_len": 32, "output_len": 128, "batch_size": 8, "num_iters_warmup": 10, "num_iters": 30},
            "detokenize": True,
        },
    ),
    "bench throughput": Command(
        flags=THROUGHPUT_FLAGS,
        defaults={"num_prompts": 1000, "detokenize": True},
        together=_vllm_throughput_together,
    ),
    "bench startup": Command(
        flags={"num_iters_warm": Alias("num_iters")},
        defaults={"num_iters_cold": 3, "num_iters_warmup": 1, "num_iters": 3},
    ),
    "run-batch": RUN_BATCH,
}
"""With vLLM's defaults, for ``--compat vllm`` and the command ``vllm``."""
