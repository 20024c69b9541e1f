"""Tables of ``benchmarks/peers``, computed from given times."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from repository import ROOT

FOLDER = ROOT / "benchmarks" / "peers"
LIMITS = {"read": 1e9, "bfloat16": 1e9, "int8": 1e9}


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("drawing", "isa"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("peers_benchmark", FOLDER / "__main__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_ratio_excludes_penstock_with_a_peers_file_format(peers: ModuleType, tmp_path: Path) -> None:
    work = (1, 512, 1)
    times = {"Penstock": 2.0, "llama.cpp": 6.0, "Penstock (GGUF file)": 1.0}  # seconds
    seconds = {f"{name} int8": {work: [taken] * 3} for name, taken in times.items()}
    rates = {name: {work: peers.rate(work, taken[work])} for name, taken in seconds.items()}
    *_, head, _, row = peers.table(rates, seconds, LIMITS, ["int8"]).splitlines()
    assert head == "| tokens/s | Penstock | llama.cpp | Penstock (GGUF file) | ratio to the best |"
    assert row == "| prefill 512 | 256 | 85 | 512 | 3.00 |"
    bars = {name: {"prefill 512": found[work]} for name, found in rates.items()}
    peers.draw(tmp_path / "rates.png", bars, ["int8"])
    assert (tmp_path / "rates.png").stat().st_size > 1000
