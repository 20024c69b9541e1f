"""Mutated requests to every endpoint: ``PENSTOCK_FUZZ_REQUESTS`` of them, drawn from ``PENSTOCK_FUZZ_SEED``."""

from __future__ import annotations

import asyncio
import os
import re

import httpx
import pytest
from fuzz import Fuzz
from serving import Served
from storm import LOOP_BLOCKED, MAX_LOOP_BLOCK, read_metrics

REQUESTS = int(os.environ.get("PENSTOCK_FUZZ_REQUESTS", "800"))
SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "1"))
SLACK = 64
"""MiB that a process may have grown by since it was warm: what allocators keep."""


def test_mutated_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with Served("--num-gpu-blocks-override", "64", "--max-model-len", "256", "--grpc-port", "0") as served:
        before = served.pids
        report = asyncio.run(Fuzz(served, SEED).run(REQUESTS))
        holds = asyncio.run(read_metrics(served))["penstock:event_loop_holds_total"]
        with capsys.disabled():
            print(f"\nseed {SEED}: {report}\npenstock:event_loop_holds_total {holds:.0f}")
        assert not report.faults
        assert served.pids["engine"] == before["engine"] and served.pids["api"] == before["api"], "one died"
        assert httpx.get(f"{served.root}/health").status_code == 200
        assert not [line for line in served.lines if "Traceback" in line]
        assert not report.left
        assert not [
            line
            for line in report.held
            if (found := re.search(LOOP_BLOCKED, line)) and float(found[1]) > MAX_LOOP_BLOCK
        ]
        assert all(now <= then + SLACK for then, now in report.memory.values())
