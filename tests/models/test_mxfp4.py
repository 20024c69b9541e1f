"""gpt-oss with experts in 4-bit floating point (MXFP4), as published, and random weights, compared with
transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import save
from families import SIZES
from safetensors.torch import load_file, save_file
from test_families import GREEDY, OPTIONS, PROMPTS, TOLERANCE, bfloat16_errors
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config, PreTrainedModel

from penstock.core import PenstockError
from penstock.frontend.llm import LLM
from penstock.planning.kv_size import weight_bytes
from penstock.planning.model_size import model_size_of

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
UNQUANTIZED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random blocks and scales."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    config = GptOssConfig(**sizes, num_local_experts=5, num_experts_per_tok=2, sliding_window=24)
    save(config, folder)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        drawn = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*drawn, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 126, drawn, generator=generator, dtype=torch.uint8)
    save_file(tensors, file, {"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": UNQUANTIZED}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    dequantized = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=dequantized, dtype=torch.float32)
    return model.float()


def test_tokens_and_logprobs_match_transformers(folder: Path, model: PreTrainedModel) -> None:
    for prompt, output in zip(PROMPTS, LLM(folder, **OPTIONS).generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
        (completion,) = output.outputs
        with torch.inference_mode():
            table = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert table.argmax(-1).tolist() == completion.token_ids
        for row, position in zip(table, completion.logprobs or [], strict=True):
            assert all(abs(found.logprob - row[token].item()) < 5 * TOLERANCE for token, found in position.items())


def test_bfloat16_error_is_near_that_of_transformers(folder: Path, model: PreTrainedModel) -> None:
    """Penstock's kernels multiply MXFP4 weights; transformers has the same weights in bfloat16."""
    ours, library = bfloat16_errors(folder, model)
    assert ours <= 1.2 * library


def test_planned_weight_bytes_equal_the_packed_weights(folder: Path, model: PreTrainedModel) -> None:
    size = model_size_of(json.loads((folder / "config.json").read_text())).on_cpu()
    matrices = {name: each.numel() for name, each in model.named_parameters() if each.dim() > 1 and "bias" not in name}
    experts = sum(number for name, number in matrices.items() if ".experts." in name)
    expected = 2 * (sum(matrices.values()) - experts) + experts * (1 / 2 + 2 / 32)
    assert weight_bytes(size, dtype="bfloat16") == pytest.approx(expected, abs=1)


def test_ranks_compute_the_same_bits_as_one(folder: Path) -> None:
    results = []
    for more in ({}, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}):
        llm = LLM(folder, **OPTIONS | {"dtype": "bfloat16"}, **more)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        results.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
        llm.engine.close()
    assert results[0] == results[1] == results[2]


def test_wrong_shape_of_experts_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    save_file(tensors | {name: tensors[name][:, :32].contiguous()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(PenstockError, match=r"down_proj_blocks has shape .* config.json requires 320 outputs of 96"):
        LLM(tmp_path, **OPTIONS)
