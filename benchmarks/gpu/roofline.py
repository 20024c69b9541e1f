"""Decode and prefill compared with the roofline of the limits measured by ``device``."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from engines import Decoding, engine, prompts, time_decoding, time_prefill
from report import KERNELS
from shapes import Model, Scale

KINDS = {"bf16": "bf16", "fp8": "fp8", "int8": "int8", "int4": "bf16"}
"""Key of ``limits`` for the matrix products of each format."""


def run(scale: Scale, limits: dict[str, float], model_name: str, format: str) -> dict[str, Any]:
    """Measure prefill and decode of a model in a format; returns rows of results, and the start time in seconds."""
    model = next(each for each in (*scale.models, *scale.measured) if each.name == model_name)
    batches = [batch for batch in scale.batches if batch in model.batches or scale.interpret]
    longest = max(*scale.prompts, scale.context + 4 * scale.steps + 2 * max(batches) * scale.context // 8192)
    step_tokens = max(*scale.prompts, 64)
    options = {
        "max_model_len": longest + 64,
        "max_num_batched_tokens": step_tokens,
        "max_num_seqs": max(batches),
        "enable_prefix_caching": False,
        "cudagraph_capture_sizes": tuple(batches),
    }
    rows = []
    begun = time.perf_counter()
    with engine(model, scale, format, **options) as one:
        start = time.perf_counter() - begun
        time_prefill(one, prompts(model, 1, scale.prompts[0], 9))  # compiles kernels
        for length in scale.prompts:
            taken = time_prefill(one, prompts(model, 1 if scale.interpret else 4, length))
            rows.append(prefill(model, limits, format, length, min(taken[1:] or taken)))
        for batch in batches:
            given = prompts(model, batch, scale.context)
            time_decoding(one, prompts(model, min(batch, 2), 4, 8), 2, step_tokens)
            rows.append(decode(model, limits, format, time_decoding(one, given, scale.steps, step_tokens)))
            if batch == 1 and format == "bf16" and not scale.interpret:
                rows[-1] |= profiled(partial(time_decoding, one, given, scale.steps, step_tokens))
    return {"rows": rows, "start": start}


def prefill(model: Model, limits: dict[str, float], format: str, length: int, seconds: float) -> dict[str, Any]:
    flops = model.flops(length, length * (length + 1) // 2, 1)
    moved = model.weight_bytes(format, length) + 2 * model.kv_bytes(length)
    return {"model": model.name, "format": format, "work": f"prefill {length}"} | share(
        limits, format, flops, moved, seconds, length / seconds
    )


def decode(model: Model, limits: dict[str, float], format: str, timed: Decoding) -> dict[str, Any]:
    contexts = round(timed.context * timed.sequences)
    flops = model.flops(timed.sequences, contexts, timed.sequences)
    moved = model.weight_bytes(format, timed.sequences) + model.kv_bytes(contexts)
    return {"model": model.name, "format": format, "work": f"decode {timed.sequences}"} | share(
        limits, format, flops, moved, timed.step, timed.sequences / timed.step
    )


def share(
    limits: dict[str, float], format: str, flops: float, moved: float, seconds: float, rate: float
) -> dict[str, Any]:
    """Shares of the measured limits of memory and matrix products; the larger one is the share of the roofline."""
    of_memory = moved / limits["copy"] / seconds
    found = {
        "milliseconds": seconds * 1e3,
        "tokens/s": rate,
        "bytes": moved,
        "operations": flops,
        "of copy bandwidth": of_memory,
    }
    rate_of_products = limits.get(KINDS[format])
    if rate_of_products:
        found["of products"] = flops / rate_of_products / seconds
    return found | {"of the roofline": max(of_memory, found.get("of products", 0.0))}


def profiled(decode: Callable[[], object]) -> dict[str, Any]:
    """Profile decode steps, which are the second half of the launched kernels: share of time in which the GPU is idle,
    and the kernels that take the most time. The profiler adds overhead."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            decode()
        spans = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        spans = spans[len(spans) // 2 :]
        busy, end, kernels = 0.0, spans[0][0], dict[str, list[float]]()
        for start, stop, name in spans:
            busy += max(stop - max(start, end), 0)
            end = max(end, stop)
            kernels.setdefault(name, []).append(stop - start)
        whole = end - spans[0][0]
        most = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:12]
        found = [[name, len(taken), round(sum(taken) / len(taken), 2), sum(taken) / whole] for name, taken in most]
        return {"idle share, profiled": 1 - busy / whole, KERNELS: found}
    except Exception as error:
        return {"idle share, profiled": f"not measured: {error}"}
