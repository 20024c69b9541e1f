"""Prefill and decode instances that fail under load: every request is answered as by a single instance, or told an
error, and nothing stays in use. ``make reliability-pd`` has all rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pd_storm
import pytest
from pd_storm import KV_TIMEOUT, Deployment, FaultResult, Instance, Outcome, Right, in_thread

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

FEW_BLOCKS = ("--max-model-len", "512", "--num-gpu-blocks-override", "10")
"""A decode instance computes two requests at a time."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("failures"), decode=2, decode_flags=FEW_BLOCKS) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def right(deployment: Deployment) -> Right:
    """By the prefill instance, which computes alone what it is asked itself."""
    (single,) = deployment.with_role("prefill")
    return asyncio.run(pd_storm.right_answers(single.served.root, pd_storm.questions(20)))


def struck(deployment: Deployment, right: Right, victim: Instance | None, *rest: pd_storm.Act | float) -> FaultResult:
    return asyncio.run(pd_storm.run_with_fault(deployment, right, victim, *rest, clients=6, pause=0.4))  # type: ignore[arg-type]


async def nothing() -> None:
    """No fault begins now."""


def test_a_decode_instance_runs_out_of_blocks(deployment: Deployment, right: Right) -> None:
    row = struck(deployment, right, None, nothing)
    row.assert_none(Outcome.ERROR, Outcome.BROKEN)
    assert row.transfers


def test_kill_of_a_prefill_engine(deployment: Deployment, right: Right) -> None:
    (victim,) = deployment.with_role("prefill")
    row = struck(deployment, right, victim, lambda: in_thread(victim.kill, victim.engine))
    row.assert_none(Outcome.ERROR, Outcome.BROKEN)


@pytest.mark.thorough
def test_kill_of_a_decode_engine(deployment: Deployment, right: Right) -> None:
    """What it had begun is told an error."""
    victim = deployment.with_role("decode")[0]
    row = struck(deployment, right, victim, lambda: in_thread(victim.kill, victim.engine))
    row.assert_none(Outcome.BROKEN)
    errors = [one.message for one in row.replies if one.outcome is Outcome.ERROR]
    assert all("was lost" in words for words in errors), errors


@pytest.mark.thorough
def test_a_prefill_engine_is_stopped_for_longer_than_a_transfer_waits(deployment: Deployment, right: Right) -> None:
    (victim,) = deployment.with_role("prefill")
    pid = victim.engine
    row = struck(
        deployment,
        right,
        victim,
        lambda: in_thread(pd_storm.suspend, pid),
        lambda: in_thread(pd_storm.resume, pid),
        KV_TIMEOUT + 1,
    )
    row.assert_none(Outcome.ERROR, Outcome.BROKEN)
