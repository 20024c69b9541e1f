"""Models with recurrent state, with random configurations, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from state_families import FAMILIES, draw
from test_families import GREEDY, OPTIONS, PROMPTS, check

from penstock.checkpoint.config_json import read_config_json
from penstock.core import PenstockError
from penstock.frontend.llm import LLM
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


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe"])
def test_composite_qwen3_5_runs_text_and_refuses_images(family: str, tmp_path: Path) -> None:
    model = draw(family, 0, tmp_path)
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())
    names = {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": text["model_type"].removesuffix("_text"),
    }
    path.write_text(json.dumps({**names, "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text}))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    llm = LLM(tmp_path, **OPTIONS)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[2]])).logits[0, -1].argmax().item()
    (output,) = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids[0] == expected
    with pytest.raises(PenstockError, match="images: are not supported by this model"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}])
