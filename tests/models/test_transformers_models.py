"""Models run by transformers' modules with the paged KV cache (``model_impl``), against transformers alone."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import SMALL
from checkpoints import save as save_known
from transformers import PreTrainedModel, Qwen3Config
from transformers_architectures import (
    ALONE,
    OPTIONS,
    PAGE,
    PROMPTS,
    architectures,
    compare,
    draw,
    own,
    rows,
    save,
    summary,
    table,
    tiny,
    warnings,
)

from penstock.core import PenstockError, SamplingParams
from penstock.frontend.llm import LLM

RUN = [
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "Dots1ForCausalLM",
    "Gemma3nForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "HeliumForCausalLM",
    "NemotronForCausalLM",
    "OlmoForCausalLM",
    "OPTForCausalLM",
    "PersimmonForCausalLM",
    "PhiForCausalLM",
    "RobertaForCausalLM",
    "StableLmForCausalLM",
    "YoutuForCausalLM",
]
VARIANT = ["Gemma3nForCausalLM"]
"""Architectures of ``RUN`` that are not batch-invariant: their modules call products of PyTorch."""
RUN_ALONE = {
    "BloomForCausalLM": "position biases",
    "BambaForCausalLM": "a state, and positions that it does not count itself",
    "DeepseekV32ForCausalLM": "keys of an indexer",
    "FalconForCausalLM": "own attention function",
    "GPTNeoForCausalLM": "own attention function, with sliding windows",
    "JambaForCausalLM": "states, and tokens one after the other",
    "Lfm2MoeForCausalLM": "states of convolutions",
    "MBartForCausalLM": "positions from the length of the cache",
}
"""Architectures that are run one sequence at a time, and why."""
REFUSED = {
    "CpmAntForCausalLM": r"keys of shape \(1, 4, 34, 128\) for 2 tokens",
    "DeepseekV4ForCausalLM": r"state of its own kind \(DeepseekV4HCACache\)",
    "MoshiForCausalLM": "sliding windows of its masks differ from those of its KV cache",
    "XLNetLMHeadModel": "do not take a cache of transformers",
}


def results() -> dict[str, str]:
    """Results of the table by architecture."""
    return {row.architecture: row.library for row in table()}


def checkpoint(architecture: str, folder: Path, **more: Any) -> PreTrainedModel:
    return save(architecture, tiny(architecture, **more), folder)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("architecture", RUN)
def test_tokens_and_logprobs_match_transformers(architecture: str, tmp_path: Path) -> None:
    """Penstock runs a batch, in chunks, with cached prefixes and preemption; transformers alone runs one sequence at a
    time."""
    model = checkpoint(architecture, tmp_path)
    llm = LLM(tmp_path, **OPTIONS)
    found = compare(llm, model)
    assert (found.wrong_tokens, found.difference < 2e-5) == (0, True), found
    assert llm.engine.scheduler.num_preemptions
    assert llm.engine.info.batch_invariant == (architecture not in VARIANT)
    assert results()[architecture] == "runs"


@pytest.mark.slow
def test_log_names_products_that_depend_on_batch(tmp_path: Path) -> None:
    checkpoint("Llama4ForCausalLM", tmp_path)
    with warnings() as messages:
        llm = LLM(tmp_path, **OPTIONS)
    assert not llm.engine.info.batch_invariant
    assert any("not batch-invariant" in message and "PyTorch's bmm" in message for message in messages)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("architecture", RUN_ALONE)
def test_models_run_one_sequence_at_a_time_match_transformers(architecture: str, tmp_path: Path) -> None:
    model = checkpoint(architecture, tmp_path)
    with warnings() as messages:
        llm = LLM(tmp_path, **OPTIONS)
    found = compare(llm, model)
    assert (found.wrong_tokens, found.difference < 1e-4) == (0, True), found
    assert llm.engine.scheduler.num_preemptions
    assert any("one sequence of a step after the other" in message for message in messages)
    assert not llm.engine.info.batch_invariant
    assert results()[architecture] == ALONE


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("architecture", REFUSED)
def test_unsupported_architecture_is_refused(architecture: str, tmp_path: Path) -> None:
    checkpoint(architecture, tmp_path)
    with pytest.raises(PenstockError, match=f"{architecture} cannot be run by the modules.*{REFUSED[architecture]}"):
        LLM(tmp_path, **OPTIONS)
    assert results()[architecture].startswith("refused: ")


@pytest.mark.thorough
def test_table_of_architectures_is_up_to_date() -> None:
    assert list(rows()) == table()


@pytest.mark.slow
def test_table_names_penstocks_own_implementations_and_counts_architectures() -> None:
    found = table()
    assert {row.architecture for row in found} == set(architectures())
    assert [row.own for row in found] == [own(row.architecture) for row in found], (
        "python tests/support/transformers_architectures.py --own"
    )
    assert summary(found) in PAGE.read_text()
    assert sum(row.is_refused() for row in found) <= 45


@pytest.mark.slow
def test_drafts_of_model_with_states_do_not_change_tokens(tmp_path: Path) -> None:
    """Rejected drafts leave the states of the cache object unchanged; accepted ones are computed again."""
    checkpoint("JambaForCausalLM", tmp_path)
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    plain, llm = LLM(tmp_path, **OPTIONS), LLM(tmp_path, speculative_config=drafting, **OPTIONS)
    # a penalty below 1 makes answers repeat themselves
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=0.8)
    expected, found = (
        [output.outputs[0].token_ids for output in each.generate(PROMPTS[:4], params, use_tqdm=False)]
        for each in (plain, llm)
    )
    assert found == expected
    stats = llm.engine.speculation.stats if llm.engine.speculation else None
    assert stats and 0 < stats.accepted_tokens < stats.draft_tokens


def test_longrope_with_reference_ops_matches_transformers(tmp_path: Path) -> None:
    """The factors are fixed at load; transformers uses the same factors for prompts longer than the trained length."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors}
    model = checkpoint("Phi3ForCausalLM", tmp_path, rope_parameters=rope)
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 64]
    assert compare(LLM(tmp_path, ops="reference", **OPTIONS), model, prompts)[2:] < (1, 0)


@torch.inference_mode()
def errors(log_probabilities: list[list[float]], model: PreTrainedModel) -> float:
    """Root mean square error of the prompts' log probabilities, relative to ``model``."""
    squares = [
        (torch.tensor(found) - expected_log_probabilities(model, prompt)).square()
        for prompt, found in zip(PROMPTS[1:], log_probabilities, strict=True)
    ]
    return float(torch.cat(squares).mean().sqrt())


def expected_log_probabilities(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    table = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return table[range(len(prompt) - 1), prompt[1:]]


def log_probabilities(llm: LLM) -> list[list[float]]:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    return [
        [found.logprob for at in (output.prompt_logprobs or [])[1:] for found in (at or {}).values()]
        for output in llm.generate(PROMPTS[1:], params, use_tqdm=False)
    ]


@pytest.mark.parametrize("architecture", ["StableLmForCausalLM", "BloomForCausalLM"])
def test_quantized_weights_and_kv_cache_have_a_small_error(architecture: str, tmp_path: Path) -> None:
    model = checkpoint(architecture, tmp_path)
    options = OPTIONS | {"quantization": "w8a8", "kv_cache_dtype": "int8", "num_gpu_blocks_override": 60}
    assert 1e-4 < errors(log_probabilities(LLM(tmp_path, **options)), model) < 0.2


@torch.inference_mode()
def test_bfloat16_error_is_near_that_of_transformers(tmp_path: Path) -> None:
    model = checkpoint("StableLmForCausalLM", tmp_path)
    rough = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = log_probabilities(LLM(tmp_path, **OPTIONS | {"dtype": "bfloat16", "num_gpu_blocks_override": 60}))
    theirs = [expected_log_probabilities(rough, prompt).tolist() for prompt in PROMPTS[1:]]
    assert errors(ours, model) <= 1.2 * errors(theirs, model)


def test_auto_prefers_the_implementation_of_penstock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in (ours := tmp_path / "qwen3", theirs := tmp_path / "stablelm"):
        folder.mkdir()
    save_known(Qwen3Config(**SMALL, head_dim=16, sliding_window=None), ours)
    checkpoint("StableLmForCausalLM", theirs)
    options = OPTIONS | {"model_impl": "auto"}
    assert LLM(ours, **options).engine.info.batch_invariant
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        LLM(theirs, **options)
    (line,) = caplog.messages
    assert "StableLmForCausalLM is run by the modules of transformers" in line
    with pytest.raises(PenstockError, match=r"StableLmForCausalLM is not supported; supported: .*--model-impl auto"):
        LLM(theirs, **options | {"model_impl": "penstock"})


def test_unknown_architecture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint("StableLmForCausalLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if transformers were not installed
    with pytest.raises(PenstockError, match=r"supported: .* pip install 'penstock-llm\[transformers\]'"):
        LLM(tmp_path, **OPTIONS | {"model_impl": "auto"})
    with pytest.raises(PenstockError, match=r"pip install 'penstock-llm\[transformers\]'"):
        LLM(tmp_path, **OPTIONS)
    monkeypatch.undo()
    for architecture in ("Qwen99ForCausalLM", "T5ForConditionalGeneration"):
        config |= {"architectures": [architecture], "auto_map": {"AutoModelForCausalLM": "modeling.Qwen99"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "modeling.py").write_text("raise SystemExit")  # exits if code of the checkpoint runs
        for model_impl, known in {"auto": " is not .*", "transformers": ": "}.items():
            message = (
                f"architecture {architecture}{known}transformers {transformers.__version__} has no causal language"
            )
            with pytest.raises(PenstockError, match=message):
                LLM(tmp_path, **OPTIONS | {"model_impl": model_impl})


def test_unsupported_option_is_refused_before_reading_weights(tmp_path: Path) -> None:
    checkpoint("StableLmForCausalLM", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for options in (
        {"pipeline_parallel_size": 2},
        {"enable_expert_parallel": True},
        {"enable_lora": True},
        {"kv_offloading_size": 1.0},
    ):
        (name,) = options
        with pytest.raises(PenstockError, match=f"{name} is not supported for StableLmForCausalLM"):
            LLM(tmp_path, **OPTIONS, **options)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", 65, "hidden_size|divisible"),
        ("hidden_size", "x", "hidden_size is 'x'; it must be a whole number"),
        ("intermediate_size", 97, "its shape is not that of config.json"),
        ("num_hidden_layers", 4, "lacks model.layers.3"),
        ("torch_dtype", "load", "dtype is 'load'"),
    ],
)
def test_broken_checkpoint_is_refused(tmp_path: Path, name: str, value: object, message: str) -> None:
    checkpoint("StableLmForCausalLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(PenstockError, match=message):
        LLM(tmp_path, **OPTIONS)


@pytest.mark.slow
def test_updated_and_dummy_weights_are_used(tmp_path: Path) -> None:
    """Loads weights of another folder, and random weights for a folder without weights."""
    model = checkpoint("StableLmForCausalLM", tmp_path)
    llm, other = LLM(tmp_path, **OPTIONS), tmp_path / "other"
    shutil.copytree(tmp_path, other, ignore=shutil.ignore_patterns("other"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.9)
    model.save_pretrained(other)
    llm.update_weights(other)
    assert compare(llm, model)[2] == 0
    (tmp_path / "model.safetensors").unlink()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = [
        LLM(tmp_path, **OPTIONS, load_format="dummy").generate([draw(0, 9)], params, use_tqdm=False) for _ in "ab"
    ]
    assert outputs[0][0].outputs[0].token_ids == outputs[1][0].outputs[0].token_ids
