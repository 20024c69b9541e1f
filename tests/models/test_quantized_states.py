"""Quantized models with recurrent state: checkpoints, ``penstock quantize``, and quantization at load."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from quantized import (
    CHANNEL,
    DYNAMIC,
    Kind,
    awq_kind,
    bnb_kind,
    ct_config,
    fp8_kind,
    fp8_tensors,
    gptq_kind,
    llm_int8_kind,
    nvfp4_kind,
    packed_kind,
    quantize_checkpoint,
)
from state_families import FAMILIES, draw
from test_families import GREEDY, OPTIONS, check
from test_family_features import NO, TABLE, YES
from test_state_families import ERROR_RATIO, NGRAMS, REPEATED, outputs
from transformers import PreTrainedModel

from penstock import LLM, PenstockError, SamplingParams, demo
from penstock.calibration import texts
from penstock.calibration.options import METHODS, QuantizeOptions
from penstock.calibration.quantize import quantize
from penstock.core import Code
from penstock.text import Tokenizer

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

DRAWS = int(os.environ.get("PENSTOCK_FAMILY_DRAWS", "20"))
"""Number of checkpoints per family in the thorough test."""
NEVER = re.compile(r"embed|lm_head|norm|conv|\.gate\.|\.router\.|_adapter_list\.")
"""Tensors that no tool quantizes."""
SMALL = re.compile(r"\.(in_proj_(ba|a|b)|[ab]_proj|[fg]_[ab]_proj|dt_proj|x_proj|shared_expert_gate)\.")
"""Small projections, which published checkpoints often leave unquantized."""


@dataclass(frozen=True)
class Format:
    kind: Kind
    fits: Callable[[int, int], bool] = lambda outputs, inputs: True
    """Whether a matrix of these outputs and inputs can have the format."""
    stacks_experts: bool = False
    """Experts of a layer in one tensor can have the format, too."""


FORMATS = {
    "awq": Format(awq_kind(8, bits=4, version="gemm"), lambda outputs, inputs: outputs % 8 == inputs % 8 == 0),
    "gptq": Format(
        gptq_kind(4, 8, order="shuffled", sym=False, desc_act=True),
        lambda outputs, inputs: outputs % 8 == inputs % 8 == 0,
    ),
    "compressed-tensors 4 bits": Format(packed_kind(4, 8), lambda outputs, inputs: inputs % 8 == 0),
    "compressed-tensors fp8": Format(
        Kind(ct_config("float-quantized", CHANNEL, DYNAMIC), *fp8_tensors("weight_scale", 1, 0)), stacks_experts=True
    ),
    "fp8 blocks": Format(fp8_kind(32, 32)),
    "fp8 one scale": Format(fp8_kind(0, 0, lambda x: x.reshape(()))),
    "NVFP4": Format(nvfp4_kind(modelopt=True), lambda outputs, inputs: inputs % 16 == 0),
    "bitsandbytes nf4": Format(bnb_kind("nf4"), lambda outputs, inputs: outputs * inputs % 2 == 0),
    "bitsandbytes int8": Format(llm_int8_kind()),
}
BY_LAYER = ("Qwen3Next", "GraniteMoeHybrid", "NemotronH", "KimiLinear", "Lfm2Moe", "Jamba", "RecurrentGemma", "MiniMax")
"""A family with each kind of recurrent layer, and Nemotron-H for its experts without gates."""
AT_LOAD = ("w8a8", "w4a8", "wint4")
METHODS_THAT_ROUND = [name for name in METHODS if name not in ("awq", "smoothquant")]


def quantized(family: str, format: Format, seed: int, folder: Path) -> PreTrainedModel:
    """Write a quantized checkpoint, in which some matrices are not quantized; return the dequantized model."""
    rng = Random(f"{family} {seed}")
    draw(family, seed, folder)
    with_small, choices = rng.random() < 0.5, dict[str, bool]()

    def is_quantized(name: str, outputs: int, inputs: int) -> bool:
        if NEVER.search(name) or (SMALL.search(name) and not with_small) or not format.fits(outputs, inputs):
            return False
        if name.endswith(("input_linear.weight", "output_linear.weight")) and not format.stacks_experts:
            return "block_sparse_moe" not in name
        matrix = re.sub(r"experts\.\d+", "experts", name)  # experts of a layer have the same format
        return choices.setdefault(matrix, rng.random() < 0.8)

    model = quantize_checkpoint(folder, format.kind, is_quantized, seed)
    if model.config.to_dict().get("num_local_experts") or model.config.to_dict().get("num_experts"):
        model.set_experts_implementation("eager")  # the other implementations do not support float64
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("number", "family"), [*enumerate(FAMILIES)])
def test_quantized_checkpoint_matches_transformers(number: int, family: str, tmp_path: Path) -> None:
    """The CPU kernels dequantize fp8 in float32, so activations are not rounded."""
    format = [*FORMATS.values()][number % len(FORMATS)]
    check(tmp_path, quantized(family, format, 0, tmp_path), ERROR_RATIO)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", FORMATS)
def test_drawn_quantized_checkpoints_match_transformers(format: str, family: str, tmp_path: Path) -> None:
    for seed in range(max(DRAWS // 5, 1)):
        folder = tmp_path / str(seed)
        check(folder, quantized(family, FORMATS[format], seed, folder), ERROR_RATIO)


def columns() -> dict[str, dict[str, str]]:
    """The cells of the table of models with recurrent state, by architecture and column."""
    section = TABLE.read_text(encoding="utf-8").partition("## Recurrent state")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *others = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name: dict(zip(head, cells, strict=True)) for cells in others for name in re.findall(r"`(\w+)`", cells[1])}


def calibrated(method: str, folder: Path) -> dict[str, Any]:
    """Quantize a checkpoint to ``folder / method``; return the report. Numbers of inputs have few divisors."""
    size = {"group_size": 8} if METHODS[method].format.group_size else {}
    config = QuantizeOptions(method, calib_size=6, calib_seq_len=32, eval_size=2, **size)
    return quantize(folder, folder / method, config, threads=1, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "family"), [*enumerate(FAMILIES)])
def test_written_checkpoint_has_the_reported_perplexity(number: int, family: str, tmp_path: Path) -> None:
    """The engine computes the perplexity of the written checkpoint. Families without ``penstock quantize`` are
    refused."""
    draw(family, 4, tmp_path, 3584)
    cell = columns()[f"{family}ForCausalLM"]["`quantize`"]
    method = METHODS_THAT_ROUND[number % len(METHODS_THAT_ROUND)]
    if cell == NO:
        with pytest.raises(PenstockError) as refused:
            calibrated(method, tmp_path)
        assert refused.value.failure.code is Code.UNSUPPORTED
        return
    assert cell == YES
    report = calibrated(method, tmp_path)
    sample = texts.read_samples("", Tokenizer(demo.CHAT), 8, 32, 0)[0].tolist()
    llm = LLM(tmp_path / method, num_gpu_blocks_override=40, max_model_len=256, ops="reference")
    (output,) = llm.generate([sample], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    places = (output.prompt_logprobs or [])[1:]
    losses = [-place[token].logprob for place, token in zip(places, sample[1:], strict=True) if place]
    assert sum(losses) / len(losses) == pytest.approx(math.log(report["perplexity_quantized"]), rel=0.01)


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_methods_that_scale_norms_are_refused(method: str, tmp_path: Path) -> None:
    draw("Bamba", 0, tmp_path, 3584)
    with pytest.raises(PenstockError, match=f"{method} scales the norms .* BambaForCausalLM: use --method gptq"):
        calibrated(method, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "family"),
    [
        pytest.param(number, family, marks=() if family in BY_LAYER else pytest.mark.thorough)
        for number, family in enumerate(FAMILIES)
    ],
)
def test_quantization_at_load(number: int, family: str, tmp_path: Path) -> None:
    """Outputs have the same bits with drafts and on two ranks. Weights of 8 bits change log probabilities less than
    weights of 4 bits."""
    draw(family, int(family == "NemotronH"), tmp_path)  # seed 0: rounding changes the choice of experts
    plain = scores(tmp_path, REPEATED[0], "none")
    errors = {
        scheme: float((scores(tmp_path, REPEATED[0], scheme) - plain).abs().median()) for scheme in ("wint8", "wint4")
    }
    assert 0 < errors["wint8"] < errors["wint4"]
    options = {"dtype": "bfloat16", "quantization": AT_LOAD[number % len(AT_LOAD)]}
    expected = outputs(tmp_path, GREEDY, REPEATED, **options)
    for more in ({"speculative_config": NGRAMS}, {"tensor_parallel_size": 2}):
        assert outputs(tmp_path, GREEDY, REPEATED, **options, **more) == expected, more


def scores(folder: Path, prompt: list[int], quantization: str) -> torch.Tensor:
    """Log probability of each token of a prompt."""
    llm = LLM(folder, **OPTIONS | {"dtype": "bfloat16", "quantization": quantization})
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    places = (output.prompt_logprobs or [])[1:]
    return torch.tensor([place[token].logprob for place, token in zip(places, prompt[1:], strict=True) if place])
