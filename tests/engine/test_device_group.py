"""Device groups: ranks gather tensors. The test uses Gloo in place of NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import SUPPORT

pytest.importorskip("penstock.ops._kernels", reason="the CPU kernels were not built")


def test_every_rank_gathers_outputs_of_all_ranks(tmp_path: Path) -> None:
    from penstock.parallel.shared_memory import create_memory

    size, memory = 3, create_memory()
    script = [sys.executable, str(SUPPORT / "device_ranks.py"), str(memory)]
    try:
        ranks = [
            subprocess.Popen(
                [*script, str(rank), str(size), str(tmp_path / "ranks")],
                pass_fds=[memory],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
        assert all(
            rank.returncode == 0 and text.endswith("gathered\n") for rank, text in zip(ranks, outputs, strict=True)
        ), outputs
    finally:
        for rank in ranks:
            rank.kill()
        os.close(memory)
