"""Requests that another engine began: the engine that resumes them returns the rest of the same output, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from test_exactness import LARGEST, Result, append, checkpoint, draw_engine, draw_request, results, run, start

from penstock.core import EngineRequest, GeneratedSequence, ReasoningSpan
from penstock.engine.engine import Engine

__all__ = ["checkpoint"]

ROUNDS = int(os.environ.get("PENSTOCK_RESUME_ROUNDS", "4"))
"""Number of pairs of engines per kind."""


def draw(rng: Random) -> list[EngineRequest]:
    """Draw requests; some have reasoning with a limit."""
    requests = [draw_request(rng, number) for number in range(LARGEST)]
    for i in range(0, LARGEST, 3):
        one = requests[i]
        if not one.sampling.use_beam_search:
            span = ReasoningSpan(begin=5, end=6, answer=(7, 8), begun=i % 2 == 0, opening=() if i % 2 == 0 else (9, 5))
            limits = {"reasoning_max_tokens": rng.randint(1, 20)}
            if not one.sampling.guided_decoding:
                limits["min_tokens"] = rng.randint(0, 4)
            sampling = one.sampling.replace(**limits)
            requests[i] = msgspec.structs.replace(one, sampling=sampling, reasoning=span)
    return requests


def begin(
    engine: Engine, requests: list[EngineRequest], share: float
) -> tuple[dict[str, dict[int, list[Any]]], list[EngineRequest]]:
    """Run requests until about ``share`` of their tokens are generated.

    Returns the output so far, and the unfinished requests as another engine resumes them.
    """
    outputs: dict[str, dict[int, list[Any]]] = {request.request_id: {} for request in requests}
    finished: dict[str, set[int]] = {request.request_id: set() for request in requests}
    for request in requests:
        engine.add(request)
    count = 0
    total = sum((request.sampling.max_tokens or 0) * request.sampling.num_returned for request in requests)
    while engine.busy and count < share * total:
        for delta in engine.step():
            assert not delta.failure, delta
            append(outputs[delta.request_id], delta)
            count += len(delta.token_ids)
            if delta.finished:
                finished[delta.request_id].add(delta.sequence)
    resumed = []
    for request in requests:
        sequences, ended = outputs[request.request_id], finished[request.request_id]
        if len(ended) == request.sampling.num_returned:
            continue
        generated = tuple(
            GeneratedSequence(list(sequences[index][0]), index in ended)
            for index in (range(request.sampling.num_sequences) if sequences else ())
        )
        resumed.append(msgspec.structs.replace(request, resumed=generated))
    return outputs, resumed


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["float32 none auto", "bfloat16 w8a8 int8"])
def test_resumed_requests_have_bits_of_uninterrupted_ones(checkpoint: Path, kind: str) -> None:
    rng = Random(f"resume:{kind}")
    requests = draw(rng)
    single = start(checkpoint, kind, enable_prefix_caching=False, threads=1)
    alone: dict[str, Result] = {}
    num_resumed = 0
    for _ in range(ROUNDS):
        chosen = rng.sample(requests, rng.randint(4, LARGEST))
        for request in chosen:
            if request.request_id not in alone:
                alone |= run(single, [request])
        first, second = (draw_engine(rng, checkpoint, kind, len(chosen), False, (1, 1)) for _ in range(2))
        outputs, resumed = begin(first, chosen, rng.uniform(0.1, 0.7))
        first.close()
        num_resumed += sum(bool(request.resumed) for request in resumed)
        for request in resumed:
            second.add(request)
        while second.busy:
            for delta in second.step():
                assert not delta.failure, delta
                append(outputs[delta.request_id], delta)
        assert second.scheduler.device_pool.num_free == second.scheduler.device_pool.total
        second.close()
        for name, result in results(outputs).items():
            assert result == alone[name], name
    assert num_resumed >= ROUNDS
