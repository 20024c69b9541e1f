"""Models with recurrent state, with random configurations, compared with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from state_families import FAMILIES, draw
from test_families import check

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_matches_transformers(family: str, tmp_path: Path) -> None:
    check(tmp_path, draw(family, 0, tmp_path))
