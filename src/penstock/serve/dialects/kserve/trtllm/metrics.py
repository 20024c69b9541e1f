"""``nv_trt_llm_*``: engine statistics under the names and labels of Triton's TensorRT-LLM backend."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric

from penstock.config.options import EngineOptions
from penstock.engine.service.messages import Stats
from penstock.serve.engine_metrics import EngineStats
from penstock.serve.models.served_models import ServedModels

from ..model import VERSION

MICROSECONDS = 1e6
KV_BLOCKS = "Number of KV cache blocks by state, tokens per block, and fraction of blocks in use."
GENERAL = "Current time (microseconds since 1970), and number of engine steps."


class Group(NamedTuple):
    """One metric, with one value per value of its label."""

    name: str
    about: str
    label: str
    values: Mapping[str, float]
    """Label value → metric value."""


class TrtLlmMetrics:
    """Collector of the metrics, called when ``/metrics`` is requested. Engines send statistics once per second."""

    def __init__(self, served_models: ServedModels) -> None:
        self._served_models = served_models

    def collect(self, engines: EngineStats) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for model in self._served_models.models:
            if model.name not in engines:
                continue
            name = next(
                (kserve_name for kserve_name, kind in model.kserve.items() if kind == "tensorrt_llm"), model.name
            )
            for group in groups(*engines[model.name]):
                labels = ["model", "version", group.label]
                family = families.setdefault(group.name, GaugeMetricFamily(group.name, group.about, labels=labels))
                for value, figure in group.values.items():
                    family.add_sample(group.name, dict(zip(labels, (name, VERSION, value), strict=True)), figure)
        yield from families.values()


def groups(stats: Stats, options: EngineOptions) -> list[Group]:
    """The metrics of one engine."""
    requests = {
        "active": stats.running,
        "max": options.max_num_seqs,
        "scheduled": stats.scheduled,
        "context": stats.in_prefill,
        "waiting": stats.waiting,
    }
    blocks = {
        "max": stats.blocks,
        "free": stats.blocks - stats.blocks_used,
        "used": stats.blocks_used,
        "tokens_per": options.block_size,
        "reused": stats.blocks_reused,
        "fraction": stats.blocks_used / max(stats.blocks, 1),
    }
    memory = {"cpu": stats.cpu_memory, "gpu": stats.gpu_memory, "pinned": 0}
    general = {"timestamp": time.time() * MICROSECONDS, "iteration_counter": stats.steps}
    generating = stats.scheduled - stats.in_prefill
    return [
        Group("nv_trt_llm_request_metrics", "Number of sequences by state.", "request_type", requests),
        Group("nv_trt_llm_runtime_memory_metrics", "Memory of the engine, bytes.", "memory_type", memory),
        Group("nv_trt_llm_kv_cache_block_metrics", KV_BLOCKS, "kv_cache_block_type", blocks),
        Group("nv_trt_llm_general_metrics", GENERAL, "general_type", general),
        _static(stats, options, generating) if options.batching_type == "static" else _inflight(stats, generating),
    ]


def _inflight(stats: Stats, generating: int) -> Group:
    values = {
        "total_context_tokens": stats.prefill_tokens,
        "generation_requests": generating,
        "micro_batch_id": 0,
        "paused_requests": stats.num_preempted_waiting,
    }
    about = "Prefill tokens and generating sequences of the last step, and number of preempted sequences that wait."
    return Group("nv_trt_llm_inflight_batcher_metrics", about, "inflight_batcher_specific_metric", values)


def _static(stats: Stats, options: EngineOptions, generating: int) -> Group:
    values = {
        "total_context_tokens": stats.prefill_tokens,
        "total_generation_tokens": generating,
        "empty_generation_slots": options.max_num_seqs - stats.scheduled,
    }
    about = "Prefill tokens, generated tokens and empty slots of the last step."
    return Group("nv_trt_llm_v1_metrics", about, "v1_specific_metric", values)
