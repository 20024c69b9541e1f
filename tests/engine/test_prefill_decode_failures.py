"""Prefill and decode instances that fail under load: each request gets the answer of a single instance, and all
resources are released. ``make reliability-pd`` runs all faults."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pd_storm
import pytest
from pd_storm import KV_TIMEOUT, Deployment, FaultResult, Instance, Outcome, Right, in_thread

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

FEW_BLOCKS = ("--max-model-len", "512", "--num-gpu-blocks-override", "10")
"""Flags of a decode instance whose KV cache has room for two requests."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("failures"), decode=2, decode_flags=FEW_BLOCKS) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def right(deployment: Deployment) -> Right:
    """Expected answers. The prefill instance computes requests that are sent to it directly."""
    (single,) = deployment.with_role("prefill")
    return asyncio.run(pd_storm.right_answers(single.served.root, pd_storm.questions(20)))


def run_with_fault(
    deployment: Deployment, right: Right, victim: Instance | None, *rest: pd_storm.Act | float
) -> FaultResult:
    return asyncio.run(pd_storm.run_with_fault(deployment, right, victim, *rest, clients=6, pause=0.4))  # type: ignore[arg-type]


async def no_fault() -> None:
    """Inject no fault."""


@pytest.mark.slow
def test_decode_instance_out_of_blocks_answers_all_requests(deployment: Deployment, right: Right) -> None:
    result = run_with_fault(deployment, right, None, no_fault)
    result.assert_none(Outcome.ERROR, Outcome.BROKEN)
    assert result.transfers


@pytest.mark.slow
def test_killed_prefill_engine_fails_no_request(deployment: Deployment, right: Right) -> None:
    (victim,) = deployment.with_role("prefill")
    result = run_with_fault(deployment, right, victim, lambda: in_thread(victim.kill, victim.engine))
    result.assert_none(Outcome.ERROR, Outcome.BROKEN)


@pytest.mark.thorough
def test_killed_decode_engine_fails_no_request(deployment: Deployment, right: Right) -> None:
    """Requests that the killed engine had started continue on the other decode instance."""
    victim = deployment.with_role("decode")[0]
    result = run_with_fault(deployment, right, victim, lambda: in_thread(victim.kill, victim.engine))
    result.assert_none(Outcome.ERROR, Outcome.BROKEN)


@pytest.mark.thorough
def test_prefill_engine_stopped_beyond_kv_timeout_fails_no_request(deployment: Deployment, right: Right) -> None:
    (victim,) = deployment.with_role("prefill")
    pid = victim.engine
    result = run_with_fault(
        deployment,
        right,
        victim,
        lambda: in_thread(pd_storm.suspend, pid),
        lambda: in_thread(pd_storm.resume, pid),
        KV_TIMEOUT + 1,
    )
    result.assert_none(Outcome.ERROR, Outcome.BROKEN)
