"""GGUF files of models with recurrent state against transformers. Files of the converter: ``test_gguf_families.py``."""

from pathlib import Path

import pytest
from gguf_families import state_checkpoint
from gguf_states import FAMILIES, write_state_gguf
from test_gguf_families import OPTIONS, PROMPT, check

from penstock import LLM, PenstockError
from penstock.core import Code


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_gguf_file_with_state_matches_transformers(architecture: str, kind: str, tmp_path: Path) -> None:
    """Matrices in ``Q8_0`` have only three distinct values, so that quantization does not round them."""
    quantized = kind != "F32"
    model = state_checkpoint(architecture.removesuffix("ForCausalLM"), int(quantized), tmp_path, ternary=quantized)
    write_state_gguf(tmp_path, tmp_path / "model.gguf", kind)
    check(tmp_path / "model.gguf", model, PROMPT, 8, 3e-4)


def test_groups_of_several_value_heads_are_refused(tmp_path: Path) -> None:
    """Files of Qwen3.5 have value heads in another order, so that groups of inputs must not span heads."""
    state_checkpoint("Qwen3_5Moe", 0, tmp_path)
    write_state_gguf(tmp_path, tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(PenstockError, match="groups of 32 weights, which must divide a value head's 24") as refused:
        LLM(tmp_path / "model.gguf", **OPTIONS)
    assert refused.value.failure.code is Code.UNSUPPORTED
