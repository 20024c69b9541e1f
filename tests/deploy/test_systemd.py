"""The systemd unit: syntax and stop timeout."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from repository import ROOT

from penstock.config.options import EngineOptions

UNIT = ROOT / "deploy/systemd/penstock.service"
VERIFY = shutil.which("systemd-analyze")
INSTALLED = "/opt/penstock/bin/penstock"


@pytest.mark.skipif(VERIFY is None, reason="needs systemd-analyze")
def test_systemd_unit_is_valid(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert INSTALLED in text
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace(INSTALLED, str(shutil.which("true"))))  # systemd requires that the program exists
    assert VERIFY
    result = subprocess.run([VERIFY, "verify", "--man=no", str(copy)], capture_output=True, text=True)
    assert result.returncode == 0 and UNIT.name not in result.stderr, result.stderr


def test_systemd_stop_timeout_exceeds_drain_timeout() -> None:
    (seconds,) = [
        line.partition("=")[2] for line in UNIT.read_text().splitlines() if line.startswith("TimeoutStopSec=")
    ]
    assert float(seconds) > EngineOptions().drain_timeout
