"""GGUF files of dense models that differ from Llama against transformers. Files of the converter:
``test_gguf_families.py``."""

from pathlib import Path

import pytest
from gguf_dense import write_dense_gguf
from gguf_families import checkpoint
from test_gguf_families import OPTIONS, PROMPT, check

from penstock import LLM, PenstockError


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("family", "seed"),
    [("Bloom", 0), ("Mpt", 0), *(("Falcon", seed) for seed in range(3)), ("Gemma3n", 1), ("Gemma4", 0), ("Gemma4", 1)],
)
def test_gguf_file_of_dense_model_matches_transformers(family: str, seed: int, tmp_path: Path) -> None:
    model = checkpoint(family, seed, tmp_path)
    write_dense_gguf(tmp_path, tmp_path / "model.gguf")
    check(tmp_path / "model.gguf", model, PROMPT, 8, 3e-4)


def test_file_of_unknown_architecture_is_refused(tmp_path: Path) -> None:
    """llama.cpp has no architecture for models such as Zamba2."""
    checkpoint("Bloom", 0, tmp_path)
    write_dense_gguf(tmp_path, tmp_path / "model.gguf")
    content = (tmp_path / "model.gguf").read_bytes().replace(b"bloom", b"zamba")
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(PenstockError, match="has architecture 'zamba', which is not supported; supported: llama"):
        LLM(tmp_path / "model.gguf", **OPTIONS)
