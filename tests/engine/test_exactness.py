"""Contract 2: the same request gives the same tokens and the same logprob bytes, whatever it shares the engine with,
and however many ranks compute.

56 schedules are drawn here; ``make exactness`` draws 10,000 in ten portions, each with requests of its own. Of the
requests in them more than a fifth is preempted.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

import executors
import msgspec
import pytest
import torch
from checkpoints import SMALL, save
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import Qwen3Config

from penstock.config.options import EngineOptions
from penstock.core import EngineRequest, GuidedDecodingParams, SamplingParams, TokenDelta, Vocabulary
from penstock.engine.engine import Engine
from penstock.ops import reference

SCHEDULES = int(os.environ.get("PENSTOCK_EXACTNESS_SCHEDULES", "200"))
LARGEST = 64 if SCHEDULES >= 1000 else 24
"""Requests to draw from, and in the largest schedules."""
SEED = os.environ.get("PENSTOCK_EXACTNESS_SEED", "")
"""Other requests and other schedules with another text."""
BLOCK = 16
LONGEST = 256
ADAPTERS = ("a", "b")
PROCESSES = 1.0 if executors.DEFAULT == "mp" else 0.02 if SCHEDULES >= 1000 else 0.0
"""Share of the engines that have worker processes, besides the first one of each kind."""
GRIDS = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (2, 2))
"""Their tensor-parallel ranks and pipeline stages; those of the first one of each kind."""
MANY = 10 if SCHEDULES >= 1000 else 4
"""Schedules that these run, as they take seconds to start."""
Result = dict[int, tuple[list[int], bytes]]
"""By sequence of the request: its tokens, and all it was told of their probabilities, in bytes."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}  # which four ranks can share
    model = save(Qwen3Config(**SMALL | heads, head_dim=16, sliding_window=None), folder)
    for rank, name in enumerate(ADAPTERS, 3):
        config = LoraConfig(r=rank, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
        adapted = get_peft_model(model, config)
        for weight in adapted.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.2)
        adapted.save_pretrained(folder / name)
        model = adapted.unload()
    return folder


GUESSING = {"num_speculative_tokens": 2, "adaptive": False}
NGRAM = json.dumps(GUESSING | {"method": "ngram", "prompt_lookup_min": 1})

OPS = os.environ.get("PENSTOCK_EXACTNESS_OPS", "auto")
"""Kernels to draw for: with ``cuda``, those of a GPU, in the engine's own process."""
cpu: Any = None
if OPS != "cuda":
    cpu = pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

KINDS = [
    "float32 none auto",
    "bfloat16 none auto",
    "bfloat16 none int8",
    "bfloat16 w8a8 int8",
    "bfloat16 w4a8 auto",
    "bfloat16 wint8 auto",
    "bfloat16 wint4-g32 int8",
]
"""What is computed in, and what weights and the cache are rounded to."""
OF_EACH = -(-SCHEDULES // len(KINDS))
"""Schedules."""


def start(checkpoint: Path, kind: str, **options: Any) -> Engine:
    dtype, quantization, kept = kind.split()
    fixed = {"model": str(checkpoint), "dtype": dtype, "quantization": quantization, "kv_cache_dtype": kept}
    fixed |= {"ops": OPS, "device": "cuda" if OPS == "cuda" else "auto"}
    fixed |= {"block_size": BLOCK, "max_model_len": LONGEST, "weight_cache_dir": "none"}
    fixed["lora_modules"] = tuple(f"{name}={checkpoint / name}" for name in ADAPTERS)
    engine = Engine(EngineOptions(**{"num_gpu_blocks_override": 400} | fixed | options))
    engine.set_vocabulary(vocabulary)
    return engine


def vocabulary() -> Vocabulary:
    """A token for each byte, and a few for two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("1", "1"), ('"', "a")]
    tokens = ["<eos>", *alphabet, *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(tokenizer.to_str(), [0])


FORMS = (
    GuidedDecodingParams(regex="(ab|[0-9]é|x+y){30,}"),
    GuidedDecodingParams(
        json={
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"enum": ["abc", 11, None]}, "minItems": 9}},
            "required": ["a"],
            "additionalProperties": False,
        }
    ),
)


def draw_request(rng: Random, number: int) -> EngineRequest:
    """At least three of the smallest blocks long in the end. Some begin alike, so that they share prefixes."""
    prompt = [2 + i for i in range(rng.choice((0, 20, 60)))] + [
        rng.randrange(2, 300) for _ in range(rng.randint(1, 100))
    ]
    form = rng.choice((None, None, None, *FORMS))
    drawn: dict[str, Any] = {
        "n": rng.choice((1, 1, 1, 3)),
        "temperature": rng.choice((0.0, 0.8, 1.5)),
        "top_p": rng.choice((1.0, 0.9)),
        "top_k": rng.choice((0, 20)),
        "logprobs": rng.choice((None, 0, 5)),
        "return_generation_logits": number % 5 == 1,
    }
    more = rng.randint(4, 32)
    if rng.random() < 0.15:  # whose beams must find room in the smallest cache together
        prompt, more = prompt[-20:], min(more, BLOCK)
        drawn = {"n": rng.randint(1, 3), "best_of": 3, "temperature": 0, "use_beam_search": True}
        drawn["logprobs"] = (None, 0)[number % 2]
    sampling = SamplingParams(
        repetition_penalty=rng.choice((1.0, 1.1)),
        frequency_penalty=number % 3 * 0.2,
        seed=number,
        max_tokens=max(3 * BLOCK - len(prompt), 0) + more,
        guided_decoding=form,
        ignore_eos=form is None,
        prompt_logprobs=rng.choice((None, None, None, 2)),
        return_context_logits=number % 5 == 2,
        **drawn,
    )
    return EngineRequest(
        request_id=str(number), prompt=prompt, sampling=sampling, adapter=("", "", *ADAPTERS)[number % 4]
    )


class Steps(Protocol):
    """An engine, or several that are driven as one."""

    @property
    def busy(self) -> bool: ...
    def add(self, request: EngineRequest) -> None: ...
    def step(self) -> list[TokenDelta]: ...


def answers(engine: Steps, requests: list[EngineRequest], rng: Random | None = None) -> dict[str, Result]:
    """All requests to their end; with ``rng`` they arrive bit by bit."""
    told: dict[str, dict[int, list[Any]]] = {r.request_id: {} for r in requests}
    left = list(requests)
    while left or engine.busy:
        while left and (rng is None or rng.random() < 0.5):
            engine.add(left.pop(0))
        for delta in engine.step():
            assert not delta.failure, delta
            append(told[delta.request_id], delta)
    return results(told)


def append(sequences: dict[int, list[Any]], delta: TokenDelta) -> None:
    """Add a delta to what a request was told, by sequence."""
    own = sequences.setdefault(delta.sequence, [[], [], [], bytearray()])
    own[0] += delta.token_ids
    own[1] += delta.logprobs or ([] if delta.cumulative_logprob is None else [delta.cumulative_logprob])
    own[2] += delta.prompt_logprobs or []
    own[3] += (delta.context_logits or b"") + (delta.generation_logits or b"")


def results(told: dict[str, dict[int, list[Any]]]) -> dict[str, Result]:
    return {
        name: {index: (tokens, msgspec.msgpack.encode(rest)) for index, (tokens, *rest) in sequences.items()}
        for name, sequences in told.items()
    }


def run(engine: Engine, requests: list[EngineRequest], rng: Random | None = None) -> dict[str, Result]:
    """As ``answers``; every block is back in the end."""
    found = answers(engine, requests, rng)
    assert engine.scheduler.device_pool.num_free == engine.scheduler.device_pool.total
    assert not (engine.kv_offloading and engine.kv_offloading.has_stores)
    return found


def draw_engine(
    rng: Random, checkpoint: Path, kind: str, requests: int, processes: bool, grid: tuple[int, int]
) -> Engine:
    """Most have no more blocks than a sequence of the greatest length takes; many requests get longer steps, so that
    the test ends."""
    block_size = rng.choice((BLOCK, BLOCK, 2 * BLOCK, 3 * BLOCK))
    fewest = max(-(-LONGEST // block_size), 9)  # three for each beam
    tensor_parallel_size, pipeline_parallel_size = grid
    drafted = NGRAM if pipeline_parallel_size > 1 else json.dumps(GUESSING | {"model": str(checkpoint)})
    return start(
        checkpoint,
        kind,
        block_size=block_size,
        threads=rng.randint(1, 2),
        max_concurrent_batches=rng.randint(1, 3),
        distributed_executor_backend="mp" if processes else "uni",
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        num_gpu_blocks_override=rng.choice((*[fewest] * 5, fewest + rng.randint(1, requests), 400)),
        max_num_batched_tokens=requests // 4
        + rng.choice((rng.randint(1, 8), rng.randint(8, 64), rng.randint(64, 496), rng.randint(64, 496))),
        max_num_seqs=rng.choice((3, 16, 64, 64, 64)),
        enable_prefix_caching=rng.random() < 0.5,
        preemption_mode=rng.choice(("recompute", "swap")),
        swap_space=0.001,
        max_num_partial_prefills=rng.randint(1, 3),
        scheduling_policy=rng.choice(("fcfs", "priority")),
        speculative_config=rng.choice(("", "", "", NGRAM, drafted)),
        kv_offloading_size=rng.choice((0.0, 0.0005, 0.01)),
        kv_offloading_disk_path=rng.choice(("", str(checkpoint / "kv"))),  # which engines of all kinds share
        kv_offloading_disk_size=0.02,
    )


class Counts(NamedTuple):
    """Of the schedules that were drawn."""

    schedules: int
    over_ranks: int
    """Schedules over several ranks or pipeline stages."""
    requests: int
    sequences: int
    preempted: int
    """Sequences that were preempted at least once."""
    preemptions: int
    wrong: int
    """Requests that came out otherwise than alone."""

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self._asdict().items())


@functools.cache
def differing(checkpoint: Path, kind: str, schedules: int, ranks_first: bool = True) -> Counts:
    rng = Random(f"exactness:{kind}{SEED}")
    requests = [draw_request(rng, number) for number in range(LARGEST)]
    lone = start(checkpoint, kind, enable_prefix_caching=False, threads=1)
    alone: dict[str, Result] = {}
    processes_share = 0.0 if OPS == "cuda" else PROCESSES
    wrong = total = preempted = preemptions = sequences = over_ranks = left = 0
    for number in tqdm(range(schedules), desc=f"{kind} schedules", unit="schedule", disable=schedules < 1000):
        chosen = rng.sample(requests, rng.choice((2, 4, 8, 16, rng.randint(2, LARGEST))))
        for request in chosen:
            if request.request_id not in alone:
                alone |= run(lone, [request])
        if not left:
            processes = (ranks_first and not number and OPS != "cuda") or rng.random() < processes_share
            left = min(MANY if processes else 1, schedules - number)
            grid = rng.choice(GRIDS) if number else GRIDS[KINDS.index(kind)]
            grid = grid if processes else (1, 1)
            engine = draw_engine(rng, checkpoint, kind, len(chosen), processes, grid)
        together = run(engine, chosen, rng)
        wrong += sum(together[name] != alone[name] for name in together)
        total += len(chosen)
        over_ranks += grid != (1, 1)
        sequences += sum(r.sampling.best_of or r.sampling.n for r in chosen)
        left -= 1
        if not left:
            preempted += engine.scheduler.num_preempted_sequences
            preemptions += engine.scheduler.num_preemptions
            engine.close()
    return Counts(schedules, over_ranks, total, sequences, preempted, preemptions, wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_depends_on_its_company(checkpoint: Path, kind: str) -> None:
    counts = differing(checkpoint, kind, OF_EACH)
    print(f"\n{kind}: {counts}")
    assert counts.wrong == 0, f"{counts.wrong} of {counts.requests} requests"


def test_enough_is_preempted(checkpoint: Path) -> None:
    """At least a fifth of the sequences, each counted once."""
    total = Counts(*map(sum, zip(*(differing(checkpoint, kind, OF_EACH) for kind in KINDS), strict=True)))
    print(f"\nportion {SEED or 'of make test'}: {total}")
    assert total.preempted >= 0.2 * total.sequences, total


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_reordered_sum_is_noticed(checkpoint: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers that sum in two parts whenever there is more than one row, as a batched library might."""
    if cpu is None:
        pytest.skip("the CPU kernels are what is replaced")
    whole = cpu.linear

    def parted(x: torch.Tensor, matrix: Any, out_float32: bool = False, out: None = None) -> torch.Tensor:
        if len(x) == 1:
            return whole(x, matrix, out_float32)
        end = x.shape[1] // 3  # within what any kernel adds at once
        first, second = x.clone(), x.clone()
        first[:, end:], second[:, :end] = 0, 0
        total = whole(first, matrix, True) + whole(second, matrix, True)
        return total if out_float32 else total.to(x.dtype)

    monkeypatch.setitem(globals(), "PROCESSES", 0)  # which would have the whole one
    monkeypatch.setattr(cpu, "linear", parted)
    monkeypatch.setattr(cpu, "capture", reference.capture)  # a graph would not contain the call that is replaced
    assert differing.__wrapped__(checkpoint, kind, 3, ranks_first=False).wrong > 0
