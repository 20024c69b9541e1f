"""Features of the engine in plain PyTorch (``ops="reference"``): the built-in model generates the tokens that it
generates with the CPU kernels."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock import LLM, GuidedDecodingParams, SamplingParams

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

FIXED: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 80, "max_model_len": 256}
QUESTIONS = [
    [{"role": "user", "content": text}]
    for text in ("What is the capital of Canada?", "What is the capital of France?", "Count from one to ten.")
]
GREEDY = {"temperature": 0.0, "max_tokens": 12}
CHOICE = {"guided_decoding": GuidedDecodingParams(choice=["Oslo is a city", "Ottawa is a town"])}
FEW_BLOCKS = {"num_gpu_blocks_override": 8, "max_model_len": 128}
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sampling": ({}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3, "repetition_penalty": 1.2}),
    "logprobs": ({}, {"logprobs": 2, "prompt_logprobs": 1}),
    "guided": ({}, CHOICE),
    "beams": ({}, {"use_beam_search": True, "n": 2}),
    "chunked prefill": ({"max_num_batched_tokens": 16}, {}),
    "recomputation": (FEW_BLOCKS | {"enable_prefix_caching": False}, {"n": 2, "ignore_eos": True, "max_tokens": 20}),
    "swapping": (FEW_BLOCKS | {"preemption_mode": "swap"}, {"n": 2, "ignore_eos": True, "max_tokens": 20}),
    "host memory": ({"kv_offloading_size": 0.01}, {}),
    "ngram": ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}, {}),
    "draft model": ({"speculative_config": '{"method": "draft_model", "num_speculative_tokens": 2}'}, {}),
    "int8 KV cache": ({"kv_cache_dtype": "int8"}, {}),
    "w8a8": ({"quantization": "w8a8"}, {}),
    "w4a8": ({"quantization": "w4a8"}, {}),
    "wint8": ({"quantization": "wint8", "dtype": "bfloat16"}, {}),
    "wint4": ({"quantization": "wint4", "dtype": "bfloat16"}, {}),
    "tensor parallelism": ({"tensor_parallel_size": 2}, {}),
    "pipeline parallelism": ({"pipeline_parallel_size": 2}, {}),
}
"""Options and sampling parameters."""


def generate(ops: str, options: dict[str, Any], sampling: dict[str, Any]) -> list[list[list[int]]]:
    """Token ids of each sequence of each question, asked twice, so that the second time finds cached prefixes."""
    llm = LLM(ops=ops, weight_cache_dir="none", **FIXED | options)
    params = SamplingParams(**GREEDY | sampling)
    found = [output for _ in range(2) for output in llm.chat(QUESTIONS, params, use_tqdm=False)]
    if options.keys() >= FEW_BLOCKS.keys():
        assert llm.engine.scheduler.num_preemptions
    llm.engine.close()
    return [[sequence.token_ids for sequence in output.outputs] for output in found]


@pytest.mark.parametrize("name", SCENARIOS)
def test_tokens_equal_cpu_kernels(name: str) -> None:
    options, sampling = SCENARIOS[name]
    found = generate("reference", options, sampling)
    assert found == generate("cpu", options, sampling)
    assert found[:3] == found[3:]


@pytest.mark.parametrize("option", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=json.dumps)
def test_fp8_without_cpu_kernels_keeps_answer(option: dict[str, Any]) -> None:
    llm = LLM(ops="reference", weight_cache_dir="none", **FIXED | option)
    (output,) = llm.chat(QUESTIONS[0], SamplingParams(**GREEDY), use_tqdm=False)
    assert output.outputs[0].text == "The capital of Canada is Ottawa."
