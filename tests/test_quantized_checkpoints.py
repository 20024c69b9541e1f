"""Quantized checkpoints: formats against their definitions, and models against transformers with those weights."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from quantized import KINDS, quantize
from torch import Tensor

from penstock import ops
from penstock.core import SamplingParams
from penstock.frontend.llm import LLM
from penstock.models import read_config
from penstock.models.weights import Checkpoint
from penstock.ops import QuantizedWeight
from penstock.quant import read_quantization_config

CPU = torch.device("cpu")


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, read_quantization_config(read_config(folder).quantization_config))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_what_the_format_defines(kind: str, tmp_path: Path) -> None:
    """To the bit; and some outputs are those of all."""
    model = quantize(tmp_path, KINDS[kind])
    checkpoint, found = open_checkpoint(tmp_path), 0
    for name, expected in model.state_dict().items():
        matrix = name.removesuffix(".weight")
        if not checkpoint.format_of(matrix).bits:
            continue

        def read(first: int, end: int, matrix: str = matrix, expected: Tensor = expected) -> Tensor:
            weight = checkpoint.read_quantized(matrix, *expected.shape, (first, end))
            return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight

        found += 1
        outputs = len(expected)
        assert torch.equal(read(0, outputs), expected)
        for first, end in ((0, 8), (outputs // 2, outputs), (5, 21)):
            assert torch.equal(read(first, end), expected[first:end])
    assert found == 14


def draw(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(2, 300) for _ in range(length)]


PROMPTS = [draw(length, length) for length in (1, 7, 40)]


def rounded(x: Tensor, kind: str, group: int) -> Tensor:
    """Activations of 8 bits, each row, or row and group of inputs, by its largest magnitude."""
    groups = x.unflatten(-1, (-1, min(group, x.shape[-1]))) if group else x[..., None, :]
    largest = groups.abs().amax(-1, keepdim=True)
    if kind == "int8":
        return ((groups * (127 / largest)).round() * (largest / 127)).flatten(-2)
    return ((groups * (448 / largest)).to(torch.float8_e4m3fn).float() * (largest / 448)).flatten(-2)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_compute_with_these_weights(kind: str, backend: str, tmp_path: Path) -> None:
    """Tokens and log probabilities are those of transformers in float32. Activations are rounded there as the backend
    does where it multiplies what the checkpoint has."""
    if backend == "cpu":
        pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    model = quantize(tmp_path, KINDS[kind])
    format = open_checkpoint(tmp_path).format_of("model.layers.0.mlp.up_proj")
    rounds = format.activation_bits and ops.backend(CPU, backend).supports(format, torch.float32)
    if rounds:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.register_forward_pre_hook(lambda _, x: (rounded(x[0], *KINDS[kind].activations),))
    llm = LLM(tmp_path, ops=backend, dtype="float32", block_size=16, num_gpu_blocks_override=50)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        (made,) = output.outputs
        with torch.inference_mode():
            table = model(torch.tensor([prompt + made.token_ids])).logits[0].log_softmax(-1)
        if not rounds:
            assert table[len(prompt) - 1 : -1].argmax(-1).tolist() == made.token_ids
        told = [*(output.prompt_logprobs or [])[1:], *(made.logprobs or [])]
        for row, position in zip(table, told, strict=False):
            for token_id, found in (position or {}).items():
                assert found.logprob == pytest.approx(row[token_id].item(), abs=0.05 if rounds else 1e-4)
