"""Speculative decoding: outputs are the same with and without drafts, for every drafter."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from checkpoints import SMALL, save
from safetensors.torch import load_file, save_file
from serving import Served
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from penstock import LLM, GuidedDecodingParams, PenstockError, demo
from penstock.core import Code, EngineRequest, SamplingParams, TokenDelta
from penstock.engine.spec_decode.speculation import MAX_FAILURES
from penstock.frontend.outputs import RequestOutput

QUESTIONS = [
    "What is the capital of Canada?",
    "Repeat the list: apple pear plum apple pear plum kiwi",
    "Tell me about Anna, who lives in Paris.",
    "Count from 1 to 20.",
    "Tell me a story.",
]
NUM_QUESTIONS = int(os.environ.get("PENSTOCK_SPECULATION_QUESTIONS", "3"))
"""Number of prompts per drafter."""
LIST = GuidedDecodingParams(json={"type": "array", "items": {"enum": ["abc", "def", 12]}, "minItems": 6, "maxItems": 8})
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60),
    SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, logprobs=2, repetition_penalty=1.1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=60, n=3, top_p=0.9, logprobs=0),
    SamplingParams(temperature=1.2, seed=4, max_tokens=40, min_tokens=30, frequency_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=60, guided_decoding=LIST),
    SamplingParams(temperature=1, seed=5, max_tokens=60, guided_decoding=LIST, logprobs=1),
    SamplingParams(temperature=0, max_tokens=60, stop=["the", "3"], prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=60, stop=[" once", " is", "ing"], min_tokens=3, logprobs=1),
    SamplingParams(temperature=0.9, seed=9, max_tokens=40, stop=["a"], n=2, best_of=4),
    SamplingParams(temperature=0, max_tokens=30, use_beam_search=True, n=2, best_of=3),
]


def llm(**options: Any) -> LLM:
    return LLM(**{"num_gpu_blocks_override": 300, "block_size": 16, "max_model_len": 512} | options)


def answers(model: LLM) -> list[Any]:
    requests = [(question, params) for question in QUESTIONS[:NUM_QUESTIONS] for params in PARAMS]
    conversations = [[{"role": "user", "content": question}] for question, _ in requests]
    outputs = model.chat(conversations, [params for _, params in requests], use_tqdm=False)
    return [result(output) for output in outputs]


def result(output: RequestOutput) -> Any:
    made = [(m.token_ids, m.text, m.logprobs, m.finish_reason, m.stop_reason) for m in output.outputs]
    return made, output.prompt_logprobs


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return answers(llm(speculation=False))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("method", ["suffix", "ngram", "draft_model"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 48},
        {"enable_prefix_caching": False, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 40, "preemption_mode": "swap", "swap_space": 0.01},
        {"num_gpu_blocks_override": 40, "kv_offloading_size": 0.1},
        {"batch_scheduler_policy": "guaranteed_no_evict", "num_gpu_blocks_override": 80},
    ],
)
def test_drafts_do_not_change_outputs(plain: list[Any], method: str, options: dict[str, Any]) -> None:
    speculative = {"method": method, "adaptive": False}
    model = llm(speculative_config=speculative, **options)
    assert answers(model) == plain
    speculation, scheduler = model.engine.scheduler.speculation, model.engine.scheduler
    assert speculation is not None
    assert speculation.stats.accepted_tokens > speculation.stats.drafts > 0
    assert scheduler.device_pool.num_free == scheduler.device_pool.total


@pytest.mark.slow
def test_adaptive_drafting_does_not_change_outputs(plain: list[Any]) -> None:
    assert answers(llm(speculative_config={"method": "draft_model", "num_speculative_tokens": 8})) == plain


def test_ngram_drafts_are_accepted_in_repetitive_text() -> None:
    model = llm(speculative_config={"method": "ngram", "adaptive": False})
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, return_perf_metrics=True)
    (output,) = model.generate("one two three four five " * 10, params, use_tqdm=False)
    speculation = model.engine.scheduler.speculation
    assert speculation and speculation.stats.accepted_tokens / speculation.stats.drafts > 2
    perf, counts = output.outputs[0].perf, speculation.stats
    assert perf and (perf.draft_tokens, perf.accepted_tokens) == (counts.draft_tokens, counts.accepted_tokens)


def with_head(folder: Path, accurate: bool, config: PreTrainedConfig | None = None) -> Path:
    """Save a checkpoint with an MTP layer that drafts accurately or at random.

    With ``accurate``, the decoder layers add nothing to the residual stream, so that the next token depends on the last
    token only, and the MTP layer computes the same function.

    Args:
        config: configuration of a model with three layers, without biases.
    """
    config = config or Qwen3Config(**{**SMALL, "vocab_size": 3584}, head_dim=32, sliding_window=None)
    save(config, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
    size = config.hidden_size
    head = {name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in layer.items()}
    head |= {f"model.layers.3.{name}.weight": torch.ones(size) for name in ("enorm", "hnorm")}
    head["model.layers.3.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    head["model.layers.3.eh_proj.weight"] = torch.randn(size, 2 * size)
    tensors |= head
    if accurate:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        tensors["model.layers.3.eh_proj.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    save_file(tensors, path, {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"num_nextn_predict_layers": 1}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("accurate", [True, False])
def test_mtp_drafts_do_not_change_outputs(accurate: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_heads(with_head(tmp_path_factory.mktemp("head"), accurate), accurate)


def check_heads(folder: Path, accurate: bool) -> None:
    """Check that drafting with a head leaves outputs unchanged, and that accurate drafts are accepted."""
    options: dict[str, Any] = {"block_size": 16, "dtype": "float32", "weight_cache_dir": "none"}
    prompts = [list(range(2, 2 + n)) for n in (3, 20, 40, 70, 70)]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=30, n=n, ignore_eos=True)
        for i, (t, n) in enumerate([(0, 1), (0.7, 2), (0, 1), (0, 1), (1.0, 1)])
    ]
    plain = LLM(folder, num_gpu_blocks_override=100, **options).generate(prompts, params, use_tqdm=False)
    for more in ({}, {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 24}):
        more = {"num_gpu_blocks_override": 100} | more
        speculative = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
        drafting = LLM(folder, speculative_config=speculative, **options, **more)
        found = drafting.generate(prompts, params, use_tqdm=False)
        assert [output.outputs for output in found] == [output.outputs for output in plain]
        counts = drafting.engine.scheduler.speculation.stats  # type: ignore[union-attr]
        assert counts.draft_tokens > 0
        assert not accurate or counts.accepted_tokens > 0.9 * counts.draft_tokens


@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_sequences_without_allowed_token_do_not_end_other_drafting(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Drafting of the other sequences continues after more than ``MAX_FAILURES`` such sequences."""
    folder = with_head(tmp_path, accurate=True)
    speculative = {"method": method, "adaptive": False} | ({"model": str(folder)} if method == "draft_model" else {})
    options: dict[str, Any] = {"block_size": 16, "dtype": "float32", "weight_cache_dir": "none"}
    engine = LLM(folder, speculative_config=speculative, num_gpu_blocks_override=100, **options).engine
    forbidden = tuple(product((8, 9), (8, 9)))
    for number in range(MAX_FAILURES + 1):
        none = SamplingParams(temperature=0, max_tokens=20, allowed_token_ids=(8, 9), bad_word_ids=forbidden)
        good = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, return_perf_metrics=True)
        for name, params in (("none", none), ("good", good)):
            engine.add(EngineRequest(request_id=name, prompt=[5, 6, 7, number], sampling=params))
        last: dict[str, TokenDelta] = {}
        while engine.busy:
            last |= {delta.request_id: delta for delta in engine.step()}
        assert last["none"].failure and last["none"].failure.code is Code.INVALID
        perf = last["good"].perf
        assert perf and perf.accepted_tokens > 10
    assert not caplog.records


def test_nan_logits_of_draft_model_do_not_end_other_drafting(tmp_path: Path) -> None:
    """One token has an embedding of NaN in the draft model, but not in the target model."""
    folder, draft_model = with_head(tmp_path, accurate=True), tmp_path / "draft_model"
    shutil.copytree(folder, draft_model)
    tensors = load_file(draft_model / "model.safetensors")
    tensors["model.embed_tokens.weight"][200] = float("nan")
    save_file(tensors, draft_model / "model.safetensors", {"format": "pt"})
    options: dict[str, Any] = {"block_size": 16, "dtype": "float32", "weight_cache_dir": "none"}
    speculative = {"model": str(draft_model), "adaptive": False}
    engine = LLM(folder, speculative_config=speculative, num_gpu_blocks_override=100, **options).engine
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, return_perf_metrics=True)
    for name, token in (("bad", 200), ("good", 201)):
        engine.add(EngineRequest(request_id=name, prompt=[5, token, 7], sampling=params))
    last: dict[str, TokenDelta] = {}
    while engine.busy:
        last |= {delta.request_id: delta for delta in engine.step()}
    accepted = {name: delta.perf.accepted_tokens for name, delta in last.items() if delta.perf}
    assert accepted["bad"] == 0 and accepted["good"] > 10


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "medusa"}, "medusa"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"tokens": 3}, "tokens"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min"),
        ({"method": "ngram", "model": "here"}, "model cannot be set"),
        ({"model": "/nowhere"}, "config.json"),
        ({"method": "mtp"}, "num_nextn_predict_layers"),
    ],
)
def test_invalid_speculative_config_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        llm(speculative_config=given)


def test_draft_model_with_other_vocabulary_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("other")
    save(LlamaConfig(**SMALL), folder)
    with pytest.raises(PenstockError, match="300 tokens"):
        llm(speculative_config={"model": str(folder)})


def test_draft_model_with_shorter_context_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(demo.DRAFT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    with pytest.raises(
        PenstockError, match=r"max_model_len: is 1024, and the draft model .* has a context of 512 tokens"
    ):
        llm(speculative_config={"model": str(folder)}, max_model_len=1024)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    config = json.dumps({"model": str(demo.DRAFT), "num_speculative_tokens": 3, "adaptive": False})
    with Served("--speculative-config", config, "--num-gpu-blocks-override", "400") as server:
        yield server


def test_server_with_draft_model_keeps_outputs_and_counts_drafts(served: Served, plain: list[Any]) -> None:
    client = openai.OpenAI(base_url=served.url, api_key="none")
    request: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0}
    whole = client.chat.completions.create(model="default", max_tokens=60, **request).choices[0].message.content
    assert whole == plain[0][0][0][1]
    chunks = client.chat.completions.create(model="default", max_tokens=60, stream=True, **request)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    fields = {"text_input": QUESTIONS[0], "max_tokens": 40, "return_perf_metrics": True}
    http_request = urllib.request.Request(f"{served.root}/v2/models/ensemble/generate", json.dumps(fields).encode())
    perf = json.load(urllib.request.urlopen(http_request))
    accepted, drafted = perf["total_accepted_draft_tokens"], perf["total_draft_tokens"]
    assert 0 < accepted <= drafted and perf["acceptance_rate"] == pytest.approx(accepted / drafted)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        page = urllib.request.urlopen(f"{served.root}/metrics").read().decode()
        found = {
            name: float(value)
            for name, value in re.findall(r"^penstock:spec_decode_(\w+)\{[^}]*\} (\S+)$", page, re.MULTILINE)
        }
        if found.get("num_accepted_tokens_total"):
            break
        time.sleep(0.1)  # the engine reports metrics once a second
    assert 0 < found["num_accepted_tokens_total"] <= found["num_draft_tokens_total"]
    assert found["num_drafts_total"] > 0
