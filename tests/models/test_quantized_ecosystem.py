"""Checkpoints written by other quantization tools: dequantized weights equal the tool's dequantized weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import save
from ecosystem import DEQUANTIZED
from quantized import KINDS, SIZES, quantize
from repository import ROOT, SUPPORT
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen3Config

from penstock.core import SamplingParams
from penstock.frontend.llm import LLM
from penstock.models import read_config
from penstock.models.weights import Checkpoint
from penstock.ops import QuantizedWeight
from penstock.quant import read_quantization_config

pytestmark = pytest.mark.thorough

TORCH = f"torch=={torch.__version__.partition('+')[0]}"
TOOLS = {
    "bitsandbytes": ["bitsandbytes==0.50.2", "transformers==5.24.0", "accelerate"],
    "llmcompressor": ["llmcompressor==0.14.0.1"],
    "gptqmodel": ["gptqmodel==7.6.0"],
}
SIZES_OF_TOOLS = SIZES | {"hidden_size": 128, "intermediate_size": 256}


def interpreter(tool: str) -> Path:
    """Python interpreter of a separate environment with the tool, kept in ``build`` for later runs."""
    folder = ROOT / "build" / "ecosystem" / tool
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        for needed in ([TORCH, "setuptools", "wheel", "numpy"], [TORCH, *TOOLS[tool]]):
            subprocess.run([folder / "bin/pip", "install", "-q", *needed], check=True)
        (folder / "complete").touch()
    return folder / "bin/python"


@pytest.mark.parametrize("maker", ["bitsandbytes", "llmcompressor", "gptqmodel", "awq"])
def test_dequantized_weights_equal_the_tools_output(maker: str, tmp_path: Path) -> None:
    """The bits are equal in the tool's output dtype; for bitsandbytes' int8, up to the rounding of float32."""
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    if maker == "awq":
        quantize(source, KINDS["awq g32"])
    else:
        save(LlamaConfig(**SIZES_OF_TOOLS) if maker == "gptqmodel" else Qwen3Config(**SIZES_OF_TOOLS), source)
    python = interpreter("gptqmodel" if maker == "awq" else maker)
    subprocess.run([python, SUPPORT / "ecosystem.py", maker, source, target], check=True, cwd=tmp_path)
    folders = sorted(target.iterdir())
    assert len(folders) == {"bitsandbytes": 4, "llmcompressor": 9, "gptqmodel": 7, "awq": 1}[maker]
    for folder in folders:
        format = read_quantization_config(read_config(folder).quantization_config)
        checkpoint = Checkpoint(folder, format)
        weights = load_file(folder / DEQUANTIZED)
        assert len(weights) >= 11
        for name, expected in weights.items():
            matrix = name.removesuffix(".weight")
            assert checkpoint.format_of(matrix).bits, (folder.name, matrix)
            found = checkpoint.read_quantized(matrix, *expected.shape, (0, len(expected)))
            found = found.dequantize() if isinstance(found, QuantizedWeight) else found
            tolerance = {"rtol": 1e-6, "atol": 0} if folder.name == "int8" else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(found.to(expected.dtype), expected, **tolerance, msg=f"{folder.name} {matrix}")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / file, folder)
        llm = LLM(folder, dtype="bfloat16", num_gpu_blocks_override=8)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate([list(range(2, 30))], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
