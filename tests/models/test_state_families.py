"""Models with recurrent state, with random configurations, compared with transformers, and with themselves under other
options: their tokens and log probabilities have the same bits."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from state_families import FAMILIES, add_mtp_layer, draw
from test_families import GREEDY, OPTIONS, PROMPTS, VOCABULARY, check

from penstock import LoRARequest
from penstock.checkpoint.config_json import read_config_json
from penstock.config.options import EngineOptions
from penstock.core import EngineRequest, PenstockError, SamplingParams
from penstock.engine.engine import Engine
from penstock.frontend.llm import LLM
from penstock.models import read_config
from penstock.planning.kv_size import weight_bytes
from penstock.planning.model_size import model_size_of

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

DRAWS = int(os.environ.get("PENSTOCK_FAMILY_DRAWS", "20"))
"""Number of configurations per family in the thorough test."""
ERROR_RATIO = 10.0
"""Maximum error relative to that of transformers: a recurrence amplifies differences in the order of sums."""
REPEATED = [prompt[:20] * 4 for prompt in PROMPTS if len(prompt) >= 20]
"""Prompts with repetitions, for drafts of n-grams."""
SEVERAL = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=12, logprobs=1, ignore_eos=True)
BEAMS = SamplingParams(temperature=0, use_beam_search=True, n=2, best_of=3, max_tokens=8, ignore_eos=True)
MIXERS = re.compile(r"\.(self_attn|attn|linear_attn|mamba|mixer|conv|temporal_block)\.")
"""Modules of attention and recurrent layers."""
NOT_ADAPTED = {
    "dt_proj",  # of Mamba: transformers ignores its adapters
    *("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj"),  # Kimi-Linear
    "kv_b_proj",  # absorbed by latent attention
}
"""Linear modules that adapters cannot change."""
NOT_BY_PEFT = ("Mamba", "Mamba2", "FalconMamba", "NemotronH", "FalconH1")
"""Families whose ``out_proj`` PEFT refuses to change."""
MTP = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
"""Families with an MTP layer."""
WITHOUT_ATTENTION = ("Mamba", "Mamba2", "FalconMamba")
"""Families that are never preempted for KV blocks."""
PREEMPTED = sorted({*FAMILIES}.difference(WITHOUT_ATTENTION), key=lambda family: (family != "FalconH1", family))
"""The other families, first that of whose drafts most are accepted."""
NGRAMS = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "adaptive": False})


def outputs(folder: Path, sampling: SamplingParams, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Tokens and log probabilities of all sequences."""
    llm = LLM(folder, **OPTIONS | options)
    return [
        [(one.token_ids, one.logprobs) for one in output.outputs]
        for output in llm.generate(prompts, sampling, use_tqdm=False)
    ]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_matches_transformers(family: str, tmp_path: Path) -> None:
    check(tmp_path, draw(family, 0, tmp_path), ERROR_RATIO)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_configs_match_transformers(family: str, tmp_path: Path) -> None:
    for seed in range(1, DRAWS + 1):
        check(tmp_path / str(seed), draw(family, seed, tmp_path / str(seed)), ERROR_RATIO)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_drafts_ranks_and_stages(family: str, tmp_path: Path) -> None:
    draw(family, 0, tmp_path)
    for sampling in (GREEDY, SEVERAL):
        expected = outputs(tmp_path, sampling, REPEATED, max_num_batched_tokens=512, num_gpu_blocks_override=400)
        for options in (
            {"speculative_config": NGRAMS},
            {"tensor_parallel_size": 2},
            {"pipeline_parallel_size": 2, "speculative_config": NGRAMS},
        ):
            assert outputs(tmp_path, sampling, REPEATED, **options) == expected, options


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("family", "stages"), [*((family, 1) for family in FAMILIES), ("Bamba", 2), ("Lfm2", 2)])
def test_prompts_of_a_prefill_instance_give_same_outputs(family: str, stages: int, tmp_path: Path) -> None:
    draw(family, 0, tmp_path)
    expected = outputs(tmp_path, GREEDY, REPEATED)
    (tmp_path / "secret").write_text("s" * 64)
    (tmp_path / "secret").chmod(0o600)
    common = {
        "cluster_secret_file": str(tmp_path / "secret"),
        "kv_buffer_size": 2**24,
        "pipeline_parallel_size": stages,
    }
    options = [EngineOptions(model=str(tmp_path), role=role, **OPTIONS | common) for role in ("prefill", "decode")]
    prefill, decode = map(Engine, options)
    assert prefill.kv_connector and decode.kv_connector
    address = prefill.kv_connector.address
    for count in (1, 2):  # the second time, the decode instance has the keys and values, but no states
        for number, prompt in enumerate(REPEATED):
            decode.add(EngineRequest(request_id=str(number), prompt=prompt, sampling=GREEDY, prefill=(address,)))
        found: dict[str, list[int]] = {str(number): [] for number in range(len(REPEATED))}
        while decode.busy:
            for delta in [delta for engine in (prefill, decode) if engine.busy for delta in engine.step()]:
                assert not delta.failure, delta
                found[delta.request_id] += delta.token_ids
        assert [[tokens] for tokens in found.values()] == [[tokens for tokens, _ in each] for each in expected]
        assert decode.kv_connector.counts["completed"] == count * len(REPEATED)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", PREEMPTED)
def test_swapped_sequences_continue_from_their_states(family: str, ranks: int, tmp_path: Path) -> None:
    """Drafts of the last step may be accepted, but not yet applied, when a sequence is swapped out."""
    draw(family, 0, tmp_path)
    sampling = GREEDY.replace(max_tokens=60)
    expected = outputs(tmp_path, sampling, REPEATED, num_gpu_blocks_override=400)
    swapping = {"preemption_mode": "swap", "swap_space": 0.1, "enable_prefix_caching": False}
    few_blocks = {"max_model_len": 144, "num_gpu_blocks_override": 15}
    options = OPTIONS | swapping | few_blocks | {"tensor_parallel_size": ranks, "speculative_config": NGRAMS}
    engine = Engine(EngineOptions(model=str(tmp_path), **options))
    for number, prompt in enumerate(REPEATED):
        engine.add(EngineRequest(request_id=str(number), prompt=prompt, sampling=sampling))
    found: dict[str, list[int]] = {str(number): [] for number in range(len(REPEATED))}
    num_swapped = 0
    while engine.busy:
        for delta in engine.step():
            assert not delta.failure, delta
            found[delta.request_id] += delta.token_ids
        num_swapped = max(num_swapped, engine.scheduler.num_swapped)
    engine.close()
    assert num_swapped > 0
    assert [[tokens] for tokens in found.values()] == [[tokens for tokens, _ in each] for each in expected]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_beams_continue_from_their_parents(family: str, tmp_path: Path) -> None:
    draw(family, 0, tmp_path)
    found = outputs(tmp_path, BEAMS, PROMPTS[1:3], num_gpu_blocks_override=100)
    llm = LLM(tmp_path, **OPTIONS)
    for prompt, beams in zip(PROMPTS[1:3], found, strict=True):
        assert len({tuple(tokens) for tokens, _ in beams}) == 2
        for tokens, _ in beams:  # each beam's score is the sum of the log probabilities that it has as a prompt
            scored = llm.generate(
                [prompt + tokens], SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0), use_tqdm=False
            )
            assert scored[0].prompt_logprobs


@pytest.mark.parametrize("family", ["Qwen3Next"])
def test_snapshots_are_made_at_ends_of_prompts_and_outputs_and_at_forks(family: str, tmp_path: Path) -> None:
    draw(family, 0, tmp_path)
    llm = LLM(tmp_path, **OPTIONS | {"num_gpu_blocks_override": 400})
    rng = Random(1)
    system, first, second = ([rng.randrange(2, VOCABULARY) for _ in range(length)] for length in (90, 30, 40))

    def cached(prompt: list[int], max_tokens: int = 30) -> tuple[int, list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        return output.num_cached_tokens or 0, output.outputs[0].token_ids

    assert cached(system + first)[0] == 0
    count, answer = cached(system + first)
    assert count == 112  # the last whole block of the prompt's 120 tokens
    assert cached(system + first + answer + second)[0] == 144  # the last whole block of the output
    assert cached(system + second)[0] == 0  # keys and values of 80 tokens are cached, but no snapshot: one is made
    assert cached(system + second[::-1])[0] == 80
    cold = LLM(tmp_path, **OPTIONS | {"num_gpu_blocks_override": 400, "enable_prefix_caching": False})
    (expected,) = cold.generate([system + second[::-1]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert cached(system + second[::-1])[1] == expected.outputs[0].token_ids


@pytest.mark.parametrize("family", ["Qwen3Next"])
def test_snapshots_are_made_within_long_prompts(family: str, tmp_path: Path) -> None:
    """The second question about a document starts at the last step that ended within the document."""
    draw(family, 0, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2048}))
    rng = Random(1)
    document = [rng.randrange(2, VOCABULARY) for _ in range(1500)]
    questions = [document + [rng.randrange(2, VOCABULARY) for _ in range(20)] for _ in range(2)]
    options = OPTIONS | {"num_gpu_blocks_override": 400, "max_model_len": 2048, "max_num_batched_tokens": 640}
    results = []
    for caching in (True, False):
        llm = LLM(tmp_path, **options, enable_prefix_caching=caching)
        found = [llm.generate([question], GREEDY, use_tqdm=False)[0] for question in questions]
        results.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found])
        assert [one.num_cached_tokens for one in found] == ([0, 1024] if caching else [0, 0])
    assert results[0] == results[1]


@pytest.mark.parametrize("family", MTP)
def test_drafts_of_mtp_layer_do_not_change_outputs(family: str, tmp_path: Path) -> None:
    draw(family, 0, tmp_path)
    add_mtp_layer(tmp_path)
    expected = outputs(tmp_path, GREEDY, REPEATED)
    drafting = json.dumps({"method": "mtp", "num_speculative_tokens": 2, "adaptive": False})
    llm = LLM(tmp_path, **OPTIONS, speculative_config=drafting)
    found = llm.generate(REPEATED, GREEDY, use_tqdm=False)
    assert [[(one.token_ids, one.logprobs) for one in output.outputs] for output in found] == expected
    assert llm.engine.speculation and llm.engine.speculation.stats.draft_tokens > 0


def test_drafts_of_nemotron_mtp_layers_equal_transformers_layers(tmp_path: Path) -> None:
    """The reference uses the model's own attention and expert layers for the drafts: their tensors are copied."""
    model = draw("NemotronH", 0, tmp_path)
    kinds, size = model.config.layers_block_type, model.config.hidden_size
    layers = [kinds.index(kind) for kind in ("full_attention", "moe")]
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    mtp = {
        re.sub(rf"^\w+\.layers\.{layer}\.", f"mtp.layers.{number}.", name): tensor.clone()
        for number, layer in enumerate(layers)
        for name, tensor in tensors.items()
        if f".layers.{layer}." in name
    }
    mtp["mtp.layers.0.eh_proj.weight"] = torch.cat((torch.eye(size) / 8, torch.eye(size)), 1)
    for name in ("0.enorm", "0.hnorm", "1.final_layernorm"):
        mtp[f"mtp.layers.{name}.weight"] = torch.rand(size) + 0.5
    save_file({**tensors, **mtp}, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]}
    (tmp_path / "config.json").write_text(json.dumps(config))

    sampling = SamplingParams(temperature=0, max_tokens=60, logprobs=1, ignore_eos=True)
    expected = outputs(tmp_path, sampling, REPEATED)
    drafting = json.dumps({"method": "mtp", "num_speculative_tokens": 1, "adaptive": False})
    room = {"num_gpu_blocks_override": 100, "max_num_batched_tokens": 512}  # each step drafts for all sequences
    llm = LLM(tmp_path, **OPTIONS | room, speculative_config=drafting)
    found = llm.generate(REPEATED, sampling, use_tqdm=False)
    assert [[(one.token_ids, one.logprobs) for one in output.outputs] for output in found] == expected

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = mtp[f"mtp.layers.{name}.weight"]
        return torch.nn.functional.rms_norm(x, (size,), weight, model.config.layer_norm_epsilon)

    accepted = 0
    for prompt, [(tokens, _)] in zip(REPEATED, expected, strict=True):
        ids = torch.tensor([prompt + tokens])
        with torch.inference_mode():
            mask = torch.full((1, 1, ids.shape[1] - 1, ids.shape[1] - 1), -torch.inf).triu(1)
            states = model.model(ids).last_hidden_state[:, :-1]
            inputs = norm(model.model.embeddings(ids[:, 1:]), "0.enorm"), norm(states, "0.hnorm")
            x = torch.cat(inputs, -1) @ mtp["mtp.layers.0.eh_proj.weight"].T
            for layer in layers:
                x = model.model.layers[layer](x, attention_mask=mask)
            drafts = model.lm_head(norm(x, "1.final_layernorm")).argmax(-1)[0].tolist()  # drafts[i] is for token i + 2
        position = len(prompt)  # of the last token
        while position + 2 < len(prompt + tokens):
            is_accepted = drafts[position - 1] == ids[0, position + 1]
            position += 1 + is_accepted
            accepted += is_accepted
    assert llm.engine.speculation and accepted
    assert llm.engine.speculation.stats.accepted_tokens == accepted


def test_unsupported_options_are_refused_by_name(tmp_path: Path) -> None:
    draw("Qwen3Next", 0, tmp_path)
    tree = json.dumps({"model": str(tmp_path), "speculative_token_tree": "[(0,), (1,)]"})
    for options, named in (
        ({"speculative_config": tree}, "tree"),
        ({"role": "prefill", "num_state_snapshots": 0}, "num_state_snapshots: must be at least 1"),
        ({"kv_offloading_size": 1e-5}, "kv_offloading_size: must be at least"),
    ):
        with pytest.raises(PenstockError, match=named):
            Engine(EngineOptions(model=str(tmp_path), **OPTIONS | options))


@pytest.mark.slow
def test_instances_with_other_layers_on_their_stages_do_not_exchange_states(tmp_path: Path) -> None:
    draw("Qwen3Next", 0, tmp_path)
    expected = outputs(tmp_path, GREEDY, REPEATED[:1])
    (tmp_path / "secret").write_text("s" * 64)
    (tmp_path / "secret").chmod(0o600)
    common = {"cluster_secret_file": str(tmp_path / "secret"), "kv_buffer_size": 2**24, "pipeline_parallel_size": 2}
    layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    prefill, decode = (
        Engine(EngineOptions(model=str(tmp_path), role=role, pipeline_parallel_layers=split, **OPTIONS | common))
        for role, split in (("prefill", f"1,{layers - 1}"), ("decode", f"{layers - 1},1"))
    )
    assert prefill.kv_connector and decode.kv_connector
    address = prefill.kv_connector.address
    decode.add(EngineRequest(request_id="0", prompt=REPEATED[0], sampling=GREEDY, prefill=(address,)))
    found: list[int] = []
    while decode.busy:
        for delta in [delta for engine in (prefill, decode) if engine.busy for delta in engine.step()]:
            assert not delta.failure, delta
            found += delta.token_ids
    assert found == expected[0][0][0]
    assert decode.kv_connector.counts["recomputed"] == 1


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "Zamba2"])  # PEFT cannot adapt it
def test_adapter_of_projections_matches_peft(family: str, tmp_path: Path) -> None:
    """The adapter changes all linear modules of attention and recurrent layers, except those of ``NOT_ADAPTED``."""
    model = draw(family, 0, tmp_path)
    modules = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and MIXERS.search(name)
    }
    modules -= NOT_ADAPTED | ({"out_proj"} if family in NOT_BY_PEFT else set())
    torch.manual_seed(1)
    config = LoraConfig(r=3, target_modules=sorted(modules), init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    llm = LLM(tmp_path, **OPTIONS, enable_lora=True, max_loras=1)
    request = LoRARequest("a", 1, str(tmp_path / "adapter"))
    for prompt, output in zip(
        PROMPTS[:4], llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False, lora_request=request), strict=True
    ):
        token_ids = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = adapted(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_planned_weight_bytes_equal_the_checkpoint(family: str, tmp_path: Path) -> None:
    model = draw(family, 1, tmp_path)
    assert model_size_of(read_config(tmp_path).raw) == model_size_of(read_config_json(tmp_path))
    matrices = {
        id(each): each.numel()
        for name, each in model.named_parameters()
        if each.dim() > 1 and not name.endswith(("norm.weight", "A_log", "bias"))
    }
    assert weight_bytes(model_size_of(read_config_json(tmp_path)), dtype="float32") == 4 * sum(matrices.values())
