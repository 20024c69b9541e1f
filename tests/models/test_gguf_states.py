"""GGUF files of models with recurrent state against transformers. Files of the converter: ``test_gguf_families.py``."""

from pathlib import Path

import pytest
from gguf_families import state_checkpoint
from gguf_states import FAMILIES, write_state_gguf
from test_gguf_families import PROMPT, check


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_gguf_file_with_state_matches_transformers(architecture: str, kind: str, tmp_path: Path) -> None:
    """Matrices in ``Q8_0`` have only three distinct values, so that quantization does not round them."""
    quantized = kind != "F32"
    model = state_checkpoint(architecture.removesuffix("ForCausalLM"), int(quantized), tmp_path, ternary=quantized)
    write_state_gguf(tmp_path, tmp_path / "model.gguf", kind)
    check(tmp_path / "model.gguf", model, PROMPT, 8, 3e-4)
