"""The CUDA backend end to end, with a small model in Triton's interpreter on the CPU: tokens equal the reference
backend's, and results do not depend on other requests or on the number of steps in flight."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import interpreted  # noqa: F401 - must precede the import of the kernels
import msgspec
import pytest
import torch
from checkpoints import SMALL, save
from peft import LoraConfig, get_peft_model
from test_exactness import ADAPTERS, Result, draw_request, run, vocabulary
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from penstock import LLM
from penstock.config.options import EngineOptions
from penstock.core import EngineRequest, SamplingParams
from penstock.engine.engine import Engine
from penstock.ops import CaptureOptions, cuda

TINY = SMALL | {
    "max_position_embeddings": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
KINDS = ["float16 w8a8 int8"]
MORE_KINDS = [
    "float16 none auto",
    "float16 none int8",
    "float16 w8a8 auto",
    "float16 w4a8 int8",
    "float16 wint8 auto",
    "float16 wint4-g32 auto",
    "float16 fp8 fp8",
]
"""Dtype, weight quantization and KV cache dtype of the tested engines, by name."""
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
GEMMA4 = {
    "layer_types": ["full_attention"] * 2,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": SMALL["vocab_size"],
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
GEMMA3N = {
    "layer_types": ["full_attention"] * 2,
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": SMALL["vocab_size"],
    "activation_sparsity_pattern": [0.9, 0.0],
    "laurel_rank": 8,
}
MORE_OF_FAMILY = {
    Qwen3Config: {"sliding_window": None},
    LlamaConfig: {"attention_bias": True},
    Gemma4TextConfig: GEMMA4,
    Gemma3nTextConfig: GEMMA3N,
}
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}'


@pytest.fixture(autouse=True)
def batch_invariant() -> Iterator[None]:
    """Restore the batch-invariant mode, which other tests expect."""
    yield
    cuda.set_batch_invariant(True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save(Qwen3Config(**TINY, sliding_window=None), folder)
    return folder


def start(checkpoint: Path, kind: str, **options: Any) -> Engine:
    dtype, quantization, kv_cache_dtype = kind.split()
    fixed = {"model": str(checkpoint), "dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    fixed |= {"device": "cpu", "ops": "cuda", "cudagraph_capture_sizes": (4,), "block_size": 16}
    fixed |= {"max_model_len": 320, "weight_cache_dir": "none", "num_gpu_blocks_override": 100}
    return Engine(EngineOptions(**fixed | options))


def draw_requests(rng: Random, long: int) -> list[EngineRequest]:
    """A few short requests, since the interpreter is slow; the last prompt has ``long`` random tokens."""
    return [
        EngineRequest(
            request_id=str(number),
            prompt=[2, 3, 4] * 3 + [rng.randrange(2, 300) for _ in range(length)],
            sampling=SamplingParams(
                temperature=(0.0, 0.9)[number % 2],
                n=1 + (number == 1),
                top_p=0.9,
                top_k=20,
                seed=number,
                logprobs=number % 3,
                prompt_logprobs=1 if number == 1 else None,
                repetition_penalty=1.1 if number == 2 else 1.0,
                max_tokens=4,
                ignore_eos=True,
            ),
        )
        for number, length in enumerate((1, 12, long))
    ]


SCHEDULES: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 24, "num_gpu_blocks_override": 0, "preemption_mode": "swap", "swap_space": 0.001},
    {"max_concurrent_batches": 3, "max_num_seqs": 3, "block_size": 32, "speculative_config": NGRAM},
]
"""Engine options of each schedule; by default two steps are in flight. 0 KV blocks: the number that the longest
sequence needs."""


def differing(checkpoint: Path, kind: str, schedules: list[dict[str, Any]], long: int) -> list[tuple[int, str]]:
    """Schedule number and id of each request with other results than the request has alone, one step at a time, without
    graphs and prefix cache."""
    rng, wrong = Random(kind), []
    requests = draw_requests(rng, long)
    lone = start(checkpoint, kind, enable_prefix_caching=False, max_concurrent_batches=1, enforce_eager=True)
    alone: dict[str, Result] = {}
    for request in requests:
        alone |= run(lone, [request])
    for number, options in enumerate(schedules):
        max_len = 128 if long < 100 else 320
        blocks = options.get("num_gpu_blocks_override", 100) or max_len // 16
        engine = start(checkpoint, kind, **options | {"max_model_len": max_len, "num_gpu_blocks_override": blocks})
        assert engine.info.asynchronous
        together = run(engine, requests, rng)
        engine.close()
        wrong += [(number, name) for name in together if together[name] != alone[name]]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_other_requests(checkpoint: Path, kind: str) -> None:
    """Results also do not depend on prefix hits, padding, drafts and steps in flight, and (``thorough``) on chunks and
    preemption."""
    assert differing(checkpoint, kind, SCHEDULES[2:], 48) == []


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [SCHEDULES[2:], pytest.param(SCHEDULES, marks=pytest.mark.thorough)])
def test_results_of_recurrent_layers_do_not_depend_on_other_requests(
    tmp_path: Path, schedules: list[dict[str, Any]]
) -> None:
    save(Qwen3_5TextConfig(**TINY | DELTA_NET), tmp_path)
    assert differing(tmp_path, "float16 none auto", schedules, 48) == []


@pytest.mark.thorough
def test_results_of_layers_with_different_heads_do_not_depend_on_other_requests(tmp_path: Path) -> None:
    heads = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24, "num_kv_shared_layers": 0}
    save(Gemma4TextConfig(**TINY | GEMMA4 | heads), tmp_path)
    assert differing(tmp_path, "float16 none auto", SCHEDULES[2:], 48) == []


@pytest.mark.thorough
def test_prefix_is_restored_from_host_memory(checkpoint: Path) -> None:
    engine = start(checkpoint, KINDS[0], kv_offloading_size=0.001, max_model_len=128)
    (request,) = draw_requests(Random(0), 24)[2:]
    first = run(engine, [request])
    engine.scheduler.device_pool.clear_cache()
    assert run(engine, [request]) == first
    assert engine.kv_offloading and engine.kv_offloading.num_loaded == 2
    engine.close()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS + MORE_KINDS)
def test_results_of_long_prompts_do_not_depend_on_other_requests(checkpoint: Path, kind: str) -> None:
    assert differing(checkpoint, kind, SCHEDULES, 240) == []


@pytest.mark.thorough
def test_grammar_beam_lora_and_draft_results_do_not_depend_on_others(checkpoint: Path, tmp_path: Path) -> None:
    for rank, name in enumerate(ADAPTERS, 3):
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(checkpoint), LoraConfig(r=rank, target_modules=["q_proj", "down_proj"])
        )
        for weight in model.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.2)
        model.save_pretrained(tmp_path / name)
    rng, requests = Random(5), list[EngineRequest]()
    for number in range(40):
        request = draw_request(rng, number)
        kinds = request.sampling.guided_decoding, request.sampling.use_beam_search, request.adapter
        if any(kinds) and len(request.prompt) < 60 and len(requests) < 8:
            requests.append(msgspec.structs.replace(request, sampling=request.sampling.replace(max_tokens=6)))
    assert any(r.sampling.guided_decoding for r in requests) and any(r.sampling.use_beam_search for r in requests)
    adapters = {"lora_modules": tuple(f"{name}={tmp_path / name}" for name in ADAPTERS)}
    lone = start(checkpoint, "float16 none auto", enable_prefix_caching=False, max_concurrent_batches=1, **adapters)
    lone.set_vocabulary(vocabulary)
    alone: dict[str, Result] = {}
    for request in requests:
        alone |= run(lone, [request])
    draft = json.dumps({"model": str(checkpoint), "num_speculative_tokens": 2})
    for options in ({}, {"speculative_config": draft}, {"num_gpu_blocks_override": 20}):
        engine = start(checkpoint, "float16 none auto", **adapters | options)
        engine.set_vocabulary(vocabulary)
        together = run(engine, requests, rng)
        engine.close()
        assert [name for name in together if together[name] != alone[name]] == []


@pytest.mark.slow
def test_tensor_parallel_tokens_equal_single_rank(checkpoint: Path) -> None:
    """Workers submit a step before they wait for the previous step. Only tokens are compared: in workers, NumPy
    multiplies matrices, and its sums depend on the shapes."""
    requests = draw_requests(Random(0), 20)[1:2]
    found = []
    for size, backend in ((1, "uni"), (2, "mp")):
        engine = start(checkpoint, "float32 none auto", tensor_parallel_size=size, distributed_executor_backend=backend)
        assert engine.info.asynchronous
        results = run(engine, requests)
        found.append({name: [tokens for tokens, _ in result.values()] for name, result in results.items()})
        engine.close()
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(LlamaConfig, marks=pytest.mark.thorough),
        Qwen3Config,
        Gemma4TextConfig,
        pytest.param(Gemma3nTextConfig, marks=pytest.mark.thorough),
    ],
)
def test_tokens_equal_reference_backend(tmp_path: Path, family: Any) -> None:
    save(family(**TINY | MORE_OF_FAMILY[family]), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
    prompts = [[5, 6, 7], [*range(2, 80)]]
    fixed = {"device": "cpu", "dtype": "float32", "weight_cache_dir": "none", "num_gpu_blocks_override": 64}
    fixed |= {"cudagraph_capture_sizes": (4,), "max_model_len": 128}
    found = {}
    for ops, invariant in (("reference", True), ("cuda", True), ("cuda", False)):
        llm = LLM(tmp_path, ops=ops, batch_invariant=invariant, **fixed)
        found[ops, invariant] = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        info = llm.engine.info
        assert info.fingerprint.startswith(ops) and info.batch_invariant == (ops == "cuda" and invariant)
        assert ("cublas" in info.fingerprint) == (not invariant)
    for (ops, _), outputs in found.items():
        for ours, theirs in zip(outputs, found["reference", True], strict=True):
            assert ours.token_ids == theirs.token_ids, ops
            assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)


def test_captured_step_is_freed_with_last_reference() -> None:
    """A captured step holds the KV cache, so it must not be part of a reference cycle."""
    captured = cuda.capture(lambda batch: batch.token_ids, CaptureOptions(8, 4, 2, graph_sizes=(2, 4)))
    reference = weakref.ref(captured)
    gc.disable()
    try:
        del captured
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_cuda_backend_is_refused_without_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for flags, message in (
        ("--device cuda", "device: no GPU found"),
        ("--ops cuda --device cpu", "the CUDA kernels do not run on cpu: use device cuda"),
    ):
        command = [sys.executable, "-m", "penstock.cli.main", "generate", *flags.split(), "Hello"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert result.returncode != 0
        assert message in result.stderr.splitlines()[-1]
