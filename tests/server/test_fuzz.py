"""Mutated requests to every endpoint: ``PENSTOCK_FUZZ_REQUESTS`` is their number, ``PENSTOCK_FUZZ_SEED`` the seed."""

from __future__ import annotations

import asyncio
import os
import re

import httpx
import pytest
from fuzz import Fuzzer
from serving import Served
from storm import LOOP_BLOCKED, MAX_LOOP_BLOCK, read_metrics

REQUESTS = int(os.environ.get("PENSTOCK_FUZZ_REQUESTS", "800"))
SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "1"))
SLACK = 64
"""Allowed growth in MiB of a process after warm-up: memory that allocators keep."""


def test_mutated_requests_cause_no_faults_or_leaks(capsys: pytest.CaptureFixture[str]) -> None:
    with Served("--num-gpu-blocks-override", "64", "--max-model-len", "256", "--grpc-port", "0") as served:
        before = served.pids
        report = asyncio.run(Fuzzer(served, SEED).run(REQUESTS))
        holds = asyncio.run(read_metrics(served))["penstock:event_loop_holds_total"]
        with capsys.disabled():
            print(f"\nseed {SEED}: {report}\npenstock:event_loop_holds_total {holds:.0f}")
        assert not report.faults
        assert served.pids["engine"] == before["engine"] and served.pids["api"] == before["api"], (
            "no process may be restarted"
        )
        assert httpx.get(f"{served.root}/health").status_code == 200
        assert not [line for line in served.lines if "Traceback" in line]
        assert not report.leaks
        assert not [
            line
            for line in report.block_lines
            if (found := re.search(LOOP_BLOCKED, line)) and float(found[1]) > MAX_LOOP_BLOCK
        ]
        assert all(now <= then + SLACK for then, now in report.memory.values())
