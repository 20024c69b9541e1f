"""Checks that random engines, ranks, stages and prefill instances give the outputs of a lone engine, bit for bit."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
from test_exactness import Result, answers, draw_engine, draw_request, run, start
from test_prefill_decode import Cluster

from penstock.core import EngineRequest


def _requests(rng: Random, count: int, adapters: bool) -> list[EngineRequest]:
    drawn = [draw_request(rng, number) for number in range(count)]
    return drawn if adapters else [msgspec.structs.replace(request, adapter="") for request in drawn]


def check_random_engines(checkpoint: Path, kind: str, seed: str, adapters: bool = True) -> None:
    """Check three engines with random chunks, prefix caching, preemption, host and disk tiers, drafts and adapters.

    Args:
        kind: argument of ``test_exactness.start``.
        adapters: False if the checkpoint has no adapters.
    """
    rng = Random(f"{seed}:{kind}")
    requests = _requests(rng, 12, adapters)
    lone = start(checkpoint, kind, enable_prefix_caching=False, threads=1)
    alone: dict[str, Result] = {}
    for request in requests:
        alone |= run(lone, [request])
    lone.close()
    for _ in range(3):
        engine = draw_engine(rng, checkpoint, kind, len(requests), False, (1, 1))
        assert run(engine, requests, rng) == alone
        engine.close()


def check_ranks_and_stages(checkpoint: Path, kind: str, seed: str, adapters: bool = True) -> None:
    """Check a random engine with two ranks and two pipeline stages. Arguments as for ``check_random_engines``."""
    rng = Random(f"{seed}:{kind}:ranks")
    requests = _requests(rng, 6, adapters)
    lone = start(checkpoint, kind)
    alone = run(lone, requests)
    lone.close()
    engine = draw_engine(rng, checkpoint, kind, len(requests), True, (2, 2))
    assert answers(engine, requests, rng) == alone
    engine.close()


def check_prefill_instance(
    checkpoint: Path,
    kind: str,
    secret: str,
    seed: str,
    prefill: dict[str, object],
    decode: dict[str, object],
    adapters: bool = True,
) -> None:
    """Check a prefill and a decode instance with the given options. Other arguments as for ``check_random_engines``."""
    rng = Random(f"{seed}:{kind}:prefill")
    requests = _requests(rng, 8, adapters)
    lone = start(checkpoint, kind)
    alone = run(lone, requests)
    lone.close()
    cluster = Cluster(checkpoint, kind, secret, rng, [prefill], [decode])
    try:
        assert answers(cluster, requests, rng) == alone
        assert cluster.counts("completed") > 0
    finally:
        cluster.close()
