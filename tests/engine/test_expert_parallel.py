"""Expert parallelism: expert load equal to transformers' routing, placements, and equal bits with any placement."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import torch
from checkpoints import SMALL, save
from image_checkpoints import ernie4_5_vl
from serving import Served
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig

from penstock import LLM, SamplingParams
from penstock.cli.main import main
from penstock.config.options import EngineOptions
from penstock.core import PenstockError
from penstock.core.expert_placement import Ranks, balancedness, contiguous_placement, even_placement, place, rank_loads
from penstock.engine.engine import Engine

EXPERTS, TOP_K, SPARSE_LAYERS = 8, 2, (0, 2)
PROMPTS = [[Random(length).randrange(2, 300) for _ in range(length)] for length in (1, 7, 40, 100)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
OPTIONS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 50, "ops": "cpu"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = {"moe_intermediate_size": 32, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    return folder, save(Qwen3MoeConfig(**SMALL, **sizes, mlp_only_layers=[1], sliding_window=None), folder)


def generate(llm: LLM) -> list[Any]:
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [
        (made.token_ids, [{token: found.logprob for token, found in row.items()} for row in made.logprobs or []])
        for made in outputs
    ]


def count_routed_tokens(model: PreTrainedModel, sequences: list[list[int]]) -> dict[int, list[int]]:
    """Return the number of tokens that transformers' router sends to each expert, by layer."""
    counts = {layer: torch.zeros(EXPERTS, dtype=torch.int64) for layer in SPARSE_LAYERS}

    def count(total: Tensor, _: object, __: object, out: tuple[Tensor, ...]) -> None:
        total += out[2].flatten().bincount(minlength=EXPERTS)

    hooks = [
        model.model.layers[layer].mlp.gate.register_forward_hook(partial(count, total))
        for layer, total in counts.items()
    ]
    with torch.inference_mode():
        for tokens in sequences:
            model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return {layer: total.tolist() for layer, total in counts.items()}


@pytest.mark.parametrize("ops", ["cpu", "reference"])
def test_expert_load_equals_routing_of_transformers(ops: str, checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """Prompts are computed in chunks. The last layer computes only the tokens whose logits are needed."""
    folder, model = checkpoint
    llm = LLM(folder, dtype="float32", expert_load=True, **OPTIONS | {"ops": ops})
    assert llm.engine.expert_load == {layer: [0] * EXPERTS for layer in SPARSE_LAYERS}
    outputs = generate(llm)
    computed = [prompt + made[0][:-1] for prompt, made in zip(PROMPTS, outputs, strict=True)]
    found = llm.engine.expert_load
    assert found[0] == count_routed_tokens(model, computed)[0]
    assert sum(found[0]) == TOP_K * sum(map(len, computed))
    sampled = sum(len(made[0]) for made in outputs)
    assert sampled <= sum(found[2]) / TOP_K < sum(map(len, computed))
    assert not LLM(folder, dtype="float32", **OPTIONS).engine.expert_load


def test_expert_placement_changes_neither_bits_nor_load(
    checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """Variants: a planned placement, and redundant experts with pipeline stages."""
    folder, _ = checkpoint
    options = OPTIONS | {"dtype": "bfloat16", "quantization": "w4a8", "expert_load": True}
    llm = LLM(folder, **options)
    expected, load = generate(llm), llm.engine.expert_load
    report, placement = tmp_path / "load.json", tmp_path / "placement.json"
    report.write_text(json.dumps({"num_experts": EXPERTS, "layers": load}))
    redundant = ["--num-redundant-experts", "3"]
    assert not main(
        ["plan", "experts", str(report), "--expert-parallel-size", "2", *redundant, "--output", str(placement)]
    )
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "distributed_executor_backend": "mp"}
    for more in (
        {"expert_placement": str(placement)},
        {"num_redundant_experts": 5, "pipeline_parallel_size": 2},
    ):
        llm = LLM(folder, **options, **ranks, **more)
        assert generate(llm) == expected
        assert llm.engine.expert_load == load


def check_placement(placement: Ranks, num_experts: int, ranks: int, redundant: int) -> None:
    assert len(placement) == ranks
    assert {expert for experts in placement for expert in experts} == set(range(num_experts))
    assert all(len(set(experts)) == len(experts) for experts in placement)
    sizes = [len(experts) for experts in placement]
    assert sum(sizes) == num_experts + redundant
    assert max(sizes) - min(sizes) <= 1


def test_placements_are_valid_and_balanced() -> None:
    rng = Random(0)
    for _ in range(300):
        ranks = rng.randrange(1, 9)
        num_experts = rng.randrange(ranks, 33)
        redundant = rng.randrange(num_experts * (ranks - 1) + 1) if rng.random() < 0.5 else min(ranks - 1, 4)
        load = [int(rng.paretovariate(1.2) * 10) if rng.random() < 0.9 else 0 for _ in range(num_experts)]
        placement = place(load, ranks, redundant)
        check_placement(placement, num_experts, ranks, redundant)
        check_placement(even_placement(num_experts, ranks, redundant), num_experts, ranks, redundant)
        loads = rank_loads(load, placement)
        assert sum(loads) == pytest.approx(sum(load))
    assert place([1, 1, 1, 1], 2) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])
    assert place([90, 10, 10, 10], 2, 2) == [[0, 1, 3], [0, 2, 3]] or place([90, 10, 10, 10], 2, 2)[0][0] == 0
    skewed = [int(rng.paretovariate(1.1) * 100) for _ in range(64)]
    before, after = (rank_loads(skewed, each) for each in (contiguous_placement(64, 8), place(skewed, 8, 16)))
    assert balancedness(after) > max(balancedness(before), 0.9)


def test_plan_experts_prints_table_and_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, placement = tmp_path / "load.json", tmp_path / "placement.json"
    report.write_text(json.dumps({"num_experts": 4, "layers": {"3": [900, 100, 50, 50], "4": [100] * 4}}))
    flags = ["--expert-parallel-size", "2", "--num-redundant-experts", "2", "--output", str(placement)]
    assert not main(["plan", "experts", str(report), *flags])
    printed = capsys.readouterr().out
    assert "0 (3.3 x mean)" in printed
    assert "0 x 2" in printed
    bars = [line for line in printed.splitlines() if "█" in line]
    assert len(bars) == 2
    assert "1,000" in bars[0]
    assert "550" in bars[0] or "525" in bars[0] or "575" in bars[0]
    written = json.loads(placement.read_text())
    assert written["num_experts"] == 4
    check_placement(written["layers"]["3"], 4, 2, 2)
    assert not main(["plan", "experts", str(report), *flags, "--json"])
    row, even = json.loads(capsys.readouterr().out)
    assert row["balance_before"] == pytest.approx(550 / 1000)
    assert row["balance_after"] > 0.9
    assert (even["balance_before"], even["balance_after"]) == (1, 1)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({0: [[0, 1, 2, 3, 4, 5, 6]]}, "is for 1 ranks, not 2"),
        ({0: [[0, 1, 2, 3], [4, 5, 6]]}, r"must place the experts 0 to 7; missing or unknown: \[7\]"),
        ({0: [[0, 1, 2, 3], [4, 5, 6, 7, 7]]}, r"rank 1 must have .* each once, has \[4, 5, 6, 7, 7\]"),
        ({0: [[0, 1, 2, 3, 9], [4, 5, 6, 7]]}, r"missing or unknown: \[9\]"),
    ],
)
def test_invalid_placement_is_refused(
    layers: dict[int, Ranks], message: str, checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"num_experts": EXPERTS, "layers": layers}))
    with pytest.raises(PenstockError, match=message):
        LLM(checkpoint[0], tensor_parallel_size=2, enable_expert_parallel=True, expert_placement=str(path))


def test_invalid_expert_options_are_refused(
    checkpoint: tuple[Path, PreTrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, ranks = checkpoint[0], {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(PenstockError, match=r"num_redundant_experts: .* enable_expert_parallel"):
        LLM(folder, tensor_parallel_size=2, num_redundant_experts=2)
    with pytest.raises(PenstockError, match=r"expert_placement: .* enable_expert_parallel"):
        LLM(folder, expert_placement="placement.json")
    with pytest.raises(PenstockError, match="do not share experts"):
        Engine(EngineOptions(model=str(folder), enable_expert_parallel=True, data_parallel_size=2))
    with pytest.raises(PenstockError, match="must be at most 8, is 9"):
        LLM(folder, **ranks, num_redundant_experts=9)
    with pytest.raises(PenstockError, match="cannot be read: no such file"):
        LLM(folder, **ranks, expert_placement=str(tmp_path / "none.json"))
    config = ernie4_5_vl().config
    config.architectures = ["Ernie4_5_VLMoeForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(PenstockError, match="expert_load: not supported for Ernie4_5_VL"):
        Engine(EngineOptions(model=str(tmp_path), expert_load=True))
    (tmp_path / "load.json").write_text('{"num_experts": 4, "layers": {"0": [1, 2]}}')
    assert main(["plan", "experts", str(tmp_path / "load.json"), "--expert-parallel-size", "2"])
    assert "layer 0: has 2 experts, not 4" in capsys.readouterr().err


def test_plan_memory_includes_expert_replicas(
    checkpoint: tuple[Path, PreTrainedModel], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, model = checkpoint
    experts = model.model.layers[0].mlp.experts
    expert = sum(weight.numel() for weight in experts.parameters()) // EXPERTS

    def planned(*flags: str) -> int:
        ranks = ["--tensor-parallel-size", "2", "--enable-expert-parallel", "--dtype", "float32"]
        assert not main(["plan", "memory", "--model", str(folder), "--json", *ranks, *flags])
        return int(json.loads(capsys.readouterr().out)["weight_bytes"])

    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"num_experts": EXPERTS, "layers": {0: place([1] * EXPERTS, 2, 4)}}))
    for flags in (("--num-redundant-experts", "4"), ("--expert-placement", str(path))):
        assert planned(*flags) - planned() == 4 * expert * len(SPARSE_LAYERS) * 4 // 2


@pytest.fixture(scope="module")
def served(checkpoint: tuple[Path, PreTrainedModel]) -> Iterator[Served]:
    options = ["--tensor-parallel-size", "2", "--enable-expert-parallel", "--expert-load"]
    with Served(str(checkpoint[0]), *options, "--num-gpu-blocks-override", "40", "--block-size", "16") as served:
        yield served


def test_server_reports_expert_load(served: Served) -> None:
    body = {"prompt": PROMPTS[2], "max_tokens": 4, "ignore_eos": True}
    httpx.post(f"{served.url}/completions", json=body, timeout=60).raise_for_status()
    report: dict[str, Any] = {"layers": {}}
    while sum(report["layers"].get("0", ())) < TOP_K * 43:  # the engine reports its expert load once a second
        report = httpx.get(f"{served.root}/expert_load").raise_for_status().json()
    assert sum(report["layers"]["0"]) == TOP_K * 43
    assert report["num_experts"] == EXPERTS
    loads = report["ranks"]["0"]
    assert loads == [sum(report["layers"]["0"][:4]), sum(report["layers"]["0"][4:])]
    page = httpx.get(f"{served.root}/metrics").text
    assert f'penstock:expert_rank_balancedness{{layer="0",model_name="{report["model"]}"}}' in page
    ranks = [line for line in page.splitlines() if line.startswith("penstock:expert_rank_tokens_total")]
    assert len(ranks) == 2
    assert page.count("penstock:expert_balancedness{") == len(SPARSE_LAYERS)
