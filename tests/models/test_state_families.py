"""Models with recurrent state, with random configurations, compared with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from state_families import FAMILIES, draw
from test_families import check

from penstock.checkpoint.config_json import read_config_json
from penstock.planning.kv_size import weight_bytes
from penstock.planning.model_size import model_size_of

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_matches_transformers(family: str, tmp_path: Path) -> None:
    check(tmp_path, draw(family, 0, tmp_path))


@pytest.mark.parametrize("family", ["Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "OlmoHybrid", "KimiLinear", "MiniMax"])
def test_planned_weight_bytes_equal_the_checkpoint(family: str, tmp_path: Path) -> None:
    model = draw(family, 1, tmp_path)
    matrices = {
        id(each): each.numel()
        for name, each in model.named_parameters()
        if each.dim() > 1 and not name.endswith(("norm.weight", "A_log"))
    }
    assert weight_bytes(model_size_of(read_config_json(tmp_path)), dtype="float32") == 4 * sum(matrices.values())
