"""Token trees: several draft tokens per position are verified in one step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_speculative_heads import OPTIONS, answers, simple, speculative

from penstock import LLM, PenstockError, SamplingParams
from penstock.checkpoint.kv_spec import KVSpec, transfer_layouts
from penstock.config.token_tree import TokenTree, depths, segments
from penstock.engine.spec_decode.speculation import SpecDecodingStats
from penstock.ops import cpu, reference

__all__ = ["simple"]  # re-export the fixture

TREE = [[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1], [0, 1, 0], [1], [1, 0], [1, 0, 0], [2], [2, 1]]
Heads = tuple[Path, dict[str, Path]]


@pytest.fixture(scope="module")
def attending(simple: Heads, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """The model of ``simple`` with a small attention output, which changes every logprob."""
    folder = tmp_path_factory.mktemp("attending") / "model"
    shutil.copytree(simple[0], folder, ignore=shutil.ignore_patterns("eagle*", "medusa"))
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith("o_proj.weight"):
            tensor.normal_(std=0.003, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, simple[1]


@pytest.fixture(scope="module")
def plain(attending: Heads) -> list[Any]:
    return answers(LLM(attending[0], **OPTIONS), 60)


def tokens_of(outputs: list[Any]) -> list[list[tuple[int, ...]]]:
    return [[tuple(output.token_ids) for output in sequences] for sequences in outputs]


def stats(llm: LLM) -> SpecDecodingStats:
    assert llm.engine.scheduler.speculation
    return llm.engine.scheduler.speculation.stats


def test_token_trees_are_read_in_every_notation() -> None:
    trees = [
        TokenTree(TREE),
        TokenTree.read(str(TREE)),
        TokenTree.read(str([tuple(path) for path in TREE])),
        TokenTree.read("{0, 0, 0}, {0, 0, 1}, {0, 1, 0}, {1, 0, 0}, {2, 1}"),
    ]
    assert [tree.nodes for tree in trees] == [[tuple(path) for path in TREE]] * 4
    assert depths(trees[0].parents) == [len(path) for path in TREE]
    assert segments(trees[0].parents) == [range(3), range(3, 4), range(4, 6), range(6, 9), range(9, 11)]
    assert TokenTree(TREE).up_to(1).nodes == [(0,), (1,), (2,)]
    assert (TokenTree(TREE).scratch_blocks(16), TokenTree([[0], [1], [2]]).scratch_blocks(16)) == (8, 2)


@pytest.mark.parametrize("latent", [0, 32])
@pytest.mark.parametrize("quantization", ["", "int8"])
def test_copied_slots_are_equal(latent: int, quantization: str) -> None:
    spec = KVSpec(1 if latent else 2, 48, "bfloat16", 16, quantization, latent=latent)
    layout = transfer_layouts([spec], 8)[0]
    sources, targets, places = torch.tensor([3, 17, 40]), torch.tensor([60, 4, 16]), torch.arange(3)
    for ops in (cpu, reference):
        (cache,) = ops.new_kv_cache([spec], 4, torch.device("cpu"))
        filled, copied = torch.randint(256, (layout.slot_bytes,), dtype=torch.uint8), torch.zeros(layout.slot_bytes)
        copied = copied.to(torch.uint8)
        ops.import_kv(cache, sources, filled, places, layout)
        ops.copy_slots(cache, sources, targets)
        ops.export_kv(cache, targets, copied, places, layout)
        ops.export_kv(cache, sources, filled := torch.zeros_like(copied), places, layout)
        assert torch.equal(copied, filled) and filled.any()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("medusa", {"block_size": 32}),
        ("eagle", {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 40}),
        ("medusa", {"kv_cache_dtype": "int8", "preemption_mode": "swap", "swap_space": 0.01}),
        ("eagle3", {}),
        ("eagle3", {"ops": "reference"}),
    ],
    ids=str,
)
def test_tree_drafts_do_not_change_outputs(
    attending: Heads, plain: list[Any], method: str, options: dict[str, Any]
) -> None:
    folder, heads = attending
    inexact = options.keys() & {"kv_cache_dtype", "ops"}
    expected = answers(LLM(folder, **OPTIONS | options), 60) if inexact else plain
    given = speculative(heads[method], method, speculative_token_tree=TREE)
    llm = LLM(folder, speculative_config=given, **OPTIONS | options)
    for _ in range(2):  # the second pass reads the prefixes from the cache
        got = answers(llm, 60)
        if "ops" in options:  # the reference kernels are not batch-invariant
            assert tokens_of(got) == tokens_of(expected)
        else:
            assert got == expected
    assert stats(llm).draft_tokens > 3 * stats(llm).drafts
    assert stats(llm).accepted_tokens > 0.1 * stats(llm).drafts > 10


def test_tree_has_more_accepted_tokens_than_its_first_path(attending: Heads, plain: list[Any]) -> None:
    """Sequences run one at a time, greedy or sampled. With penalties, only the tree's first path is drafted."""
    folder, heads = attending
    accepted = []
    for more in ({"medusa_choices": TREE}, {"num_speculative_tokens": 3}):
        llm = LLM(folder, speculative_config=speculative(heads["medusa"], **more), **OPTIONS)
        params = [SamplingParams(temperature=t, seed=1, max_tokens=60, ignore_eos=True) for t in (0, 1, 1, 1)]
        for i, each in enumerate(params):
            llm.generate([2 + i], each, use_tqdm=False)
        accepted.append(stats(llm).accepted_tokens / stats(llm).drafts)
        before = stats(llm).draft_tokens, stats(llm).drafts
        llm.generate([3], SamplingParams(temperature=0, repetition_penalty=1.1, max_tokens=20), use_tqdm=False)
        assert stats(llm).draft_tokens - before[0] <= 3 * (stats(llm).drafts - before[1]) > 0
    assert accepted[0] > 1.2 * accepted[1] > 0.2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"medusa_choices": "[(0,"}, "it is not a tree such as"),
        ({"medusa_choices": [[0]], "eagle_choices": [[0]]}, "set only one of medusa_choices and eagle_choices"),
        ({"eagle_choices": [[0]], "method": "medusa"}, "eagle_choices cannot be set with the method medusa"),
        ({"speculative_token_tree": "[(0,)]", "method": "ngram"}, "cannot be set with the method ngram"),
        ({"speculative_token_tree": [[0] * 33]}, "33 nodes and depth 33; .* at most depth 32"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens must be at most 32"),
        (
            {"method": "medusa", "model": "HEADS/medusa", "medusa_choices": [[0] * 4]},
            "has depth 4, and the model 3 draft heads",
        ),
        ({"model": "MODEL", "speculative_token_tree": [[0]]}, "draft models cannot draft trees"),
        (
            {"model": "HEADS/medusa", "medusa_choices": [[i] for i in range(100)]},
            "takes 99 KV blocks, but the KV cache has 50",
        ),
    ],
)
def test_invalid_token_tree_is_refused(simple: Heads, given: dict[str, Any], message: str) -> None:
    if "model" in given:
        given["model"] = given["model"].replace("MODEL", str(simple[0])).replace("HEADS", str(simple[0]))
    with pytest.raises(PenstockError, match=message):
        LLM(simple[0], speculative_config=given, **OPTIONS | {"num_gpu_blocks_override": 50})
