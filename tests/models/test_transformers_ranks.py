"""Tensor parallelism of models run by transformers' modules: results have the same bits as with one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from quantized import KINDS, quantize_checkpoint
from repository import SUPPORT
from test_transformers_quantized import is_quantized
from transformers_architectures import OPTIONS, compare, save, tiny

from penstock.frontend.llm import LLM

create_memory = pytest.importorskip(
    "penstock.parallel.shared_memory", reason="the CPU kernels were not built", exc_type=ImportError
).create_memory
SPLIT = {
    "AfmoeForCausalLM": 0.5,
    "ApertusForCausalLM": 0.5,
    "ArceeForCausalLM": 0.5,
    "Dots1ForCausalLM": 0.5,
    "Gemma3nForCausalLM": 0.5,
    "GPT2LMHeadModel": 0.5,
    "GPTNeoXForCausalLM": 0.5,
    "GptOssForCausalLM": 0.5,
    "HeliumForCausalLM": 0.5,
    "MixtralForCausalLM": 0.5,
    "NemotronForCausalLM": 0.5,
    "OPTForCausalLM": 0.5,
    "PhiForCausalLM": 0.5,
    "RobertaForCausalLM": 0.5,
    "StableLmForCausalLM": 0.5,
    "YoutuForCausalLM": 0.5,
    "BloomForCausalLM": 1,
    "DeepseekV32ForCausalLM": 1,
    "FalconForCausalLM": 1,
    "MambaForCausalLM": 0,
    "MBartForCausalLM": 1,
}
"""Share of the KV cache that each of two ranks stores."""


def run_ranks(folders: list[str], size: int) -> dict[str, tuple[str, float]]:
    """Run models on several ranks. Returns, by the names of their folders, "True" if the bits are those of one rank,
    and the share of the KV cache."""
    memory, script = create_memory(), SUPPORT / "transformers_ranks.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(memory), str(rank), str(size), *folders],
            pass_fds=[memory],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        output, *_ = [process.communicate(timeout=600)[0] for process in processes]
        assert not any(process.returncode for process in processes), output
    finally:
        for process in processes:
            process.kill()
        os.close(memory)
    rows = [line.split() for line in output.splitlines()]
    return {name: (same, float(share)) for name, same, share in rows}


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    for architecture in SPLIT:
        save(architecture, tiny(architecture), tmp_path / architecture)
    found = run_ranks([f"none:{tmp_path / name}" for name in SPLIT], 2)
    assert found == {name: ("True", share) for name, share in SPLIT.items()}


@pytest.mark.slow
def test_four_ranks_have_the_bits_of_one(tmp_path: Path) -> None:
    """With two key and value heads, two ranks have the same head."""
    names = ["GPTNeoXForCausalLM", "MixtralForCausalLM", "StableLmForCausalLM"]
    for architecture in names:
        save(architecture, tiny(architecture), tmp_path / architecture)
    found = run_ranks([f"none:{tmp_path / name}" for name in names], 4)
    assert found == {names[0]: ("True", 0.25), names[1]: ("True", 0.5), names[2]: ("True", 0.5)}


@pytest.mark.slow
def test_heads_that_ranks_cannot_divide_are_computed_by_all(tmp_path: Path) -> None:
    save("StableLmForCausalLM", tiny("StableLmForCausalLM"), tmp_path / "model")
    assert run_ranks([f"none:{tmp_path / 'model'}"], 3) == {"model": ("True", 1)}


@pytest.mark.slow
def test_ranks_read_their_outputs_of_quantized_matrices(tmp_path: Path) -> None:
    kinds = ["gptq asymmetric, act-order, v2", "awq g32", "compressed-tensors w4a16 asymmetric", "fp8 blocks"]
    folders = []
    for index, kind in enumerate([*kinds, "bitsandbytes nf4", "nvfp4 of compressed-tensors"]):
        architecture = ("StableLmForCausalLM", "AfmoeForCausalLM")[index % 2]
        save(architecture, tiny(architecture), tmp_path / str(index))
        quantize_checkpoint(tmp_path / str(index), KINDS[kind], is_quantized)
        folders.append(f"none:{tmp_path / str(index)}")
    save("StableLmForCausalLM", tiny("StableLmForCausalLM"), tmp_path / "w8a8")
    found = run_ranks([*folders, f"w8a8:{tmp_path / 'w8a8'}"], 2)
    assert found == {Path(folder).name: ("True", 0.5) for folder in [*folders, "w8a8"]}


@pytest.mark.slow
def test_engine_on_two_ranks_matches_transformers(tmp_path: Path) -> None:
    model = save("StableLmForCausalLM", tiny("StableLmForCausalLM"), tmp_path)
    llm = LLM(tmp_path, **OPTIONS, tensor_parallel_size=2)
    found = compare(llm, model)
    assert (found.wrong_tokens, found.difference < 2e-5) == (0, True), found
    assert llm.engine.scheduler.num_preemptions
