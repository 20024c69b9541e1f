"""Decode and prefill beside what the device's memory and arithmetic allow, which ``facts`` has measured."""

from __future__ import annotations

import time
from typing import Any

import torch
from engines import Decoding, engine, prompts, time_decoding, time_prefill
from shapes import Model, Scale

from penstock.engine.engine import Engine

KINDS = {"bf16": "bf16", "fp8": "fp8", "int8": "int8", "int4": "bf16"}
"""Products that a format's are made of."""


def run(scale: Scale, limits: dict[str, float], model_name: str) -> dict[str, Any]:
    """All formats of a model. One that fails is told as such."""
    model = next(each for each in scale.models if each.name == model_name)
    rows: list[dict[str, Any]] = []
    starts: dict[str, float] = {}
    for format in scale.formats:
        try:
            rows += _format(model, scale, limits, format, starts)
        except Exception as error:
            rows.append({"model": model.name, "format": format, "failure": f"{type(error).__name__}: {error}"[-1500:]})
    return {"rows": rows, "start": starts}


def _format(
    model: Model, scale: Scale, limits: dict[str, float], format: str, starts: dict[str, float]
) -> list[dict[str, Any]]:
    longest = max(*scale.prompts, scale.context + 4 * scale.steps + 2 * max(scale.batches) * scale.context // 8192)
    step_tokens = max(*scale.prompts, 64)
    options = {
        "max_model_len": longest + 64,
        "max_num_batched_tokens": step_tokens,
        "max_num_seqs": max(scale.batches),
        "enable_prefix_caching": False,
        "cudagraph_capture_sizes": scale.batches,
    }
    rows = []
    begun = time.perf_counter()
    with engine(model, scale, format, **options) as one:
        starts[format] = time.perf_counter() - begun
        time_prefill(one, prompts(model, 1, scale.prompts[0], 9))  # compiles what it needs
        for length in scale.prompts:
            taken = time_prefill(one, prompts(model, 1 if scale.interpret else 4, length))
            rows.append(prefill(model, limits, format, length, min(taken[1:] or taken)))
        for batch in scale.batches:
            given = prompts(model, batch, scale.context)
            time_decoding(one, prompts(model, min(batch, 2), 4, 8), 2, step_tokens)
            rows.append(decode(model, limits, format, time_decoding(one, given, scale.steps, step_tokens)))
            if batch == 1 and not scale.interpret:
                rows[-1] |= idle_share(one, given, scale.steps, step_tokens)
    return rows


def prefill(model: Model, limits: dict[str, float], format: str, length: int, seconds: float) -> dict[str, Any]:
    flops = model.flops(length, length * (length + 1) // 2, 1)
    moved = model.weight_bytes(format) + 2 * model.kv_bytes(length)
    return {"model": model.name, "format": format, "work": f"prefill {length}"} | share(
        limits, format, flops, moved, seconds, length / seconds
    )


def decode(model: Model, limits: dict[str, float], format: str, timed: Decoding) -> dict[str, Any]:
    contexts = round(timed.context * timed.sequences)
    flops = model.flops(timed.sequences, contexts, timed.sequences)
    moved = model.weight_bytes(format) + model.kv_bytes(contexts)
    return {"model": model.name, "format": format, "work": f"decode {timed.sequences}"} | share(
        limits, format, flops, moved, timed.step, timed.sequences / timed.step
    )


def share(
    limits: dict[str, float], format: str, flops: float, moved: float, seconds: float, rate: float
) -> dict[str, Any]:
    """Shares of what was measured of memory and of products; the larger one is how near the roofline it is."""
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


def idle_share(one: Engine, given: list[list[int]], steps: int, step_tokens: int) -> dict[str, Any]:
    """Share of a decode step in which the GPU computes nothing, by the profiler, which itself costs time."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            time_decoding(one, given, steps, step_tokens)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        spans = spans[len(spans) // 2 :]  # decode steps
        busy, end = 0.0, spans[0][0]
        for start, stop in spans:
            busy += max(stop - max(start, end), 0)
            end = max(end, stop)
        return {"idle share, profiled": 1 - busy / (end - spans[0][0])}
    except Exception as error:
        return {"idle share, profiled": f"not measured: {error}"}
