"""Contract 2 (batch invariance): tokens and logprobs of a request are bit-identical in any batch, with any number of
ranks.

About 200 random schedules are run here; ``make exactness`` runs 10,000 in ten portions with different requests. At
least a fifth of the sequences are preempted.
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
from transformers import (
    Gemma3nTextConfig,
    Gemma4TextConfig,
    Mamba2Config,
    MixtralConfig,
    Qwen3Config,
    Qwen3NextConfig,
    StableLmConfig,
)

from penstock.config.options import EngineOptions
from penstock.core import EngineRequest, GuidedDecodingParams, SamplingParams, TokenDelta, Vocabulary
from penstock.engine.engine import Engine
from penstock.ops import reference

SCHEDULES = int(os.environ.get("PENSTOCK_EXACTNESS_SCHEDULES", "200"))
LARGEST = 64 if SCHEDULES >= 1000 else 24
"""Number of distinct requests, and maximum number of requests in a schedule."""
SEED = os.environ.get("PENSTOCK_EXACTNESS_SEED", "")
"""Seed of the requests and schedules (any text)."""
BLOCK = 16
LONGEST = 256
ADAPTERS = ("a", "b")
PROCESSES = 1.0 if executors.DEFAULT == "mp" else 0.02 if SCHEDULES >= 1000 else 0.0
"""Share of the engines that have worker processes. The first engine of each kind always has them."""
STATES = "states"
"""Name of the checkpoint with recurrent states, and mark of the kinds of engines with this model."""
ONLY_STATES = "only-states"
"""The same for a model without keys and values."""
HEADS = "heads"
"""The same for a model whose layers differ in their heads, and share keys and values."""
STREAMS = "streams"
"""The same for a model with several residual streams."""
LIBRARY, LIBRARY_EXPERTS = "library", "library-experts"
"""The same for models run by the modules of transformers."""
GRIDS = ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (2, 2))
"""(tensor, pipeline) parallel sizes of the engines with worker processes. The first engine of kind i has entry i."""
SCHEDULES_PER_START = 10 if SCHEDULES >= 1000 else 4
"""Number of schedules per engine with worker processes (starting one takes seconds)."""
Result = dict[int, tuple[list[int], bytes]]
"""Results of a request by sequence index: tokens, and encoded logprobs, prompt logprobs and logits."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}  # four ranks can divide the heads
    model = save(Qwen3Config(**SMALL | heads, head_dim=16, sliding_window=None), folder)
    for rank, name in enumerate(ADAPTERS, 3):
        config = LoraConfig(r=rank, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
        adapted = get_peft_model(model, config)
        for weight in adapted.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.2)
        adapted.save_pretrained(folder / name)
        model = adapted.unload()
    delta_nets = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    delta_nets |= {"linear_key_head_dim": 16, "linear_value_head_dim": 24}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = Qwen3NextConfig(**SMALL | heads | delta_nets | experts, head_dim=16, layer_types=kinds)
    config.shared_expert_intermediate_size = 32
    save(config, folder / STATES)
    sizes = {"num_heads": 8, "head_dim": 2 * config.hidden_size // 8, "state_size": 16, "n_groups": 4}
    common = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id")}
    save(Mamba2Config(**common | sizes), folder / ONLY_STATES)
    kinds = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full", "full")]
    gemma = {"head_dim": 16, "global_head_dim": 32, "layer_types": kinds, "sliding_window": 24}
    gemma |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_global_key_value_heads": 4}
    gemma |= {"attention_k_eq_v": True, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16}
    gemma |= {"num_hidden_layers": 6, "vocab_size_per_layer_input": SMALL["vocab_size"]}
    save(Gemma4TextConfig(**SMALL | gemma), folder / HEADS)
    kinds = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "full")]
    gemma = {"head_dim": 16, "layer_types": kinds, "sliding_window": 24, "laurel_rank": 8, "num_kv_shared_layers": 2}
    gemma |= {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size_per_layer_input": 16}
    gemma |= {"num_hidden_layers": 5, "vocab_size_per_layer_input": 290}
    gemma |= {"activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.9, 0.0]}
    save(Gemma3nTextConfig(**SMALL | gemma), folder / STREAMS)
    save(StableLmConfig(**SMALL | heads, partial_rotary_factor=0.5), folder / LIBRARY)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40}
    save(MixtralConfig(**SMALL | heads | experts, sliding_window=24), folder / LIBRARY_EXPERTS)
    return folder


GUESSING = {"num_speculative_tokens": 2, "adaptive": False}
NGRAM = json.dumps(GUESSING | {"method": "ngram", "prompt_lookup_min": 1})
SUFFIX = json.dumps(GUESSING | {"method": "suffix"})
NO_DRAFTS = json.dumps({"method": "none"})

OPS = os.environ.get("PENSTOCK_EXACTNESS_OPS", "auto")
"""``ops`` option of the engines. ``cuda`` selects GPU kernels, which run in the engine's process."""
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
    "float32 none auto states",
    "bfloat16 none int8 states",
    f"float32 none auto {ONLY_STATES}",
    "bfloat16 none auto heads",
    f"bfloat16 w8a8 auto {STREAMS}",
    f"float32 none auto {LIBRARY}",
    f"bfloat16 wint8 int8 {LIBRARY_EXPERTS}",
]
"""Kinds of engines: data type, quantization of the weights, data type of the KV cache, and a mark."""
SCHEDULES_PER_KIND = -(-SCHEDULES // len(KINDS))
"""Number of schedules per kind."""


def start(checkpoint: Path, kind: str, **options: Any) -> Engine:
    dtype, quantization, kv_cache_dtype, *more = kind.split()
    folder = checkpoint.joinpath(*more)
    fixed = {"model": str(folder), "dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    fixed |= {"ops": OPS, "device": "cuda" if OPS == "cuda" else "auto"}
    fixed |= {"block_size": BLOCK, "max_model_len": LONGEST, "weight_cache_dir": "none"}
    if LIBRARY in kind:
        fixed["model_impl"] = "transformers"
        options |= {"kv_offloading_size": 0.0, "kv_offloading_disk_path": ""}  # not supported
    if not more:
        fixed["lora_modules"] = tuple(f"{name}={checkpoint / name}" for name in ADAPTERS)
    engine = Engine(EngineOptions(**{"num_gpu_blocks_override": 400} | fixed | options))
    engine.set_vocabulary(vocabulary)
    return engine


def vocabulary() -> Vocabulary:
    """Return a vocabulary with a token for each byte, and three tokens of two bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("1", "1"), ('"', "a")]
    tokens = ["<eos>", *alphabet, *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(tokenizer.to_str(), [0])


CONSTRAINTS = (
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
    """Draw a request whose prompt and output together fill at least three blocks of the smallest size. Some prompts
    share a prefix."""
    prompt = [2 + i for i in range(rng.choice((0, 20, 60)))] + [
        rng.randrange(2, 300) for _ in range(rng.randint(1, 100))
    ]
    constraint = rng.choice((None, None, None, *CONSTRAINTS))
    drawn: dict[str, Any] = {
        "n": rng.choice((1, 1, 1, 3)),
        "temperature": rng.choice((0.0, 0.8, 1.5)),
        "top_p": rng.choice((1.0, 0.9)),
        "top_k": rng.choice((0, 20)),
        "logprobs": rng.choice((None, 0, 5)),
        "return_generation_logits": number % 5 == 1,
    }
    more = rng.randint(4, 32)
    if rng.random() < 0.15:  # short beam searches: all beams must fit into the smallest cache
        prompt, more = prompt[-20:], min(more, BLOCK)
        drawn = {"n": rng.randint(1, 3), "best_of": 3, "temperature": 0, "use_beam_search": True}
        drawn["logprobs"] = (None, 0)[number % 2]
    sampling = SamplingParams(
        repetition_penalty=rng.choice((1.0, 1.1)),
        frequency_penalty=number % 3 * 0.2,
        seed=number,
        max_tokens=max(3 * BLOCK - len(prompt), 0) + more,
        guided_decoding=constraint,
        ignore_eos=constraint is None,
        prompt_logprobs=rng.choice((None, None, None, 2)),
        return_context_logits=number % 5 == 2,
        **drawn,
    )
    return EngineRequest(
        request_id=str(number), prompt=prompt, sampling=sampling, adapter=("", "", *ADAPTERS)[number % 4]
    )


def without_adapters(requests: list[EngineRequest], kind: str) -> list[EngineRequest]:
    """The requests, without adapters if engines of this kind have none."""
    if len(kind.split()) == 3:
        return requests
    return [msgspec.structs.replace(request, adapter="") for request in requests]


class Steps(Protocol):
    """Interface of an engine, or of several engines that are driven as one."""

    @property
    def busy(self) -> bool: ...
    def add(self, request: EngineRequest) -> None: ...
    def step(self) -> list[TokenDelta]: ...


def answers(engine: Steps, requests: list[EngineRequest], rng: Random | None = None) -> dict[str, Result]:
    """Run all requests to their end; return their results. With ``rng``, requests arrive at random steps."""
    outputs: dict[str, dict[int, list[Any]]] = {r.request_id: {} for r in requests}
    left = list(requests)
    while left or engine.busy:
        while left and (rng is None or rng.random() < 0.5):
            engine.add(left.pop(0))
        for delta in engine.step():
            assert not delta.failure, delta
            append(outputs[delta.request_id], delta)
    return results(outputs)


def append(sequences: dict[int, list[Any]], delta: TokenDelta) -> None:
    """Append a delta to the outputs of its sequence."""
    output = sequences.setdefault(delta.sequence, [[], [], [], bytearray()])
    output[0] += delta.token_ids
    output[1] += delta.logprobs or ([] if delta.cumulative_logprob is None else [delta.cumulative_logprob])
    output[2] += delta.prompt_logprobs or []
    output[3] += (delta.context_logits or b"") + (delta.generation_logits or b"")


def results(outputs: dict[str, dict[int, list[Any]]]) -> dict[str, Result]:
    return {
        name: {index: (tokens, msgspec.msgpack.encode(rest)) for index, (tokens, *rest) in sequences.items()}
        for name, sequences in outputs.items()
    }


def run(engine: Engine, requests: list[EngineRequest], rng: Random | None = None) -> dict[str, Result]:
    """Return ``answers`` after checking that every block was freed."""
    found = answers(engine, requests, rng)
    assert engine.scheduler.device_pool.num_free == engine.scheduler.device_pool.total
    assert not (engine.kv_offloading and engine.kv_offloading.has_stores)
    return found


def draw_engine(
    rng: Random, checkpoint: Path, kind: str, requests: int, processes: bool, grid: tuple[int, int]
) -> Engine:
    """Draw an engine. Most have only the blocks for one sequence of maximum length. The token budget grows with the
    number of requests, to limit the test's duration."""
    block_size = rng.choice((BLOCK, BLOCK, 2 * BLOCK, 3 * BLOCK))
    fewest = max(-(-LONGEST // block_size), 9)  # at least three blocks per beam
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
        speculative_config=rng.choice(("", "", NO_DRAFTS, SUFFIX, NGRAM, drafted)),
        kv_offloading_size=rng.choice((0.0, 0.0005, 0.01)),
        kv_offloading_disk_path=rng.choice(("", str(checkpoint / "kv"))),  # shared by engines of all kinds
        kv_offloading_disk_size=0.02,
    )


class Counts(NamedTuple):
    """Totals over the schedules that were run."""

    schedules: int
    over_ranks: int
    """Number of schedules over several tensor-parallel ranks or pipeline stages."""
    requests: int
    sequences: int
    preempted: int
    """Number of sequences that were preempted at least once."""
    preemptions: int
    wrong: int
    """Number of requests with results that differ from those computed alone."""

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self._asdict().items())


@functools.cache
def count_differences(checkpoint: Path, kind: str, schedules: int, ranks_first: bool = True) -> Counts:
    rng = Random(f"exactness:{kind}{SEED}")
    requests = [draw_request(rng, number) for number in range(LARGEST)]
    requests = without_adapters(requests, kind)
    single_engine = start(checkpoint, kind, enable_prefix_caching=False, threads=1, speculation=False)
    alone: dict[str, Result] = {}
    processes_share = 0.0 if OPS == "cuda" else PROCESSES
    wrong = total = preempted = preemptions = sequences = over_ranks = left = 0
    for number in tqdm(range(schedules), desc=f"{kind} schedules", unit="schedule", disable=schedules < 1000):
        chosen = rng.sample(requests, rng.choice((2, 4, 8, 16, rng.randint(2, LARGEST))))
        for request in chosen:
            if request.request_id not in alone:
                alone |= run(single_engine, [request])
        if not left:
            processes = (ranks_first and not number and OPS != "cuda") or rng.random() < processes_share
            left = min(SCHEDULES_PER_START if processes else 1, schedules - number)
            grid = rng.choice(GRIDS) if number else GRIDS[KINDS.index(kind) % len(GRIDS)]
            grid = (1, 1) if not processes else (max(grid), 1) if LIBRARY in kind else grid
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


@pytest.mark.parametrize("kind", [*KINDS[:4:3], *KINDS[-5:-2]])
def test_results_do_not_depend_on_batch_in_few_schedules(checkpoint: Path, kind: str) -> None:
    counts = count_differences(checkpoint, kind, 2, ranks_first=False)
    assert counts.wrong == 0, f"{counts.wrong} of {counts.requests} requests"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_results_do_not_depend_on_batch(checkpoint: Path, kind: str) -> None:
    counts = count_differences(checkpoint, kind, SCHEDULES_PER_KIND)
    print(f"\n{kind}: {counts}")
    assert counts.wrong == 0, f"{counts.wrong} of {counts.requests} requests differ"


@pytest.mark.slow
def test_at_least_a_fifth_of_sequences_are_preempted(checkpoint: Path) -> None:
    """A sequence that is preempted several times counts once."""
    total = Counts(
        *map(sum, zip(*(count_differences(checkpoint, kind, SCHEDULES_PER_KIND) for kind in KINDS), strict=True))
    )
    print(f"\nportion {SEED or 'of make test'}: {total}")
    assert total.preempted >= 0.2 * total.sequences, total


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:2])
def test_reordered_sum_changes_results(checkpoint: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers sum in two parts if there is more than one row, as a batched library might: this is detected."""
    if cpu is None:
        pytest.skip("needs the CPU kernels, one of which is replaced")
    linear = cpu.linear

    def split_linear(x: torch.Tensor, matrix: Any, out_float32: bool = False, out: None = None) -> torch.Tensor:
        if len(x) == 1:
            return linear(x, matrix, out_float32)
        end = x.shape[1] // 3  # every kernel computes this range as a single sum
        first, second = x.clone(), x.clone()
        first[:, end:], second[:, :end] = 0, 0
        total = linear(first, matrix, True) + linear(second, matrix, True)
        return total if out_float32 else total.to(x.dtype)

    monkeypatch.setitem(globals(), "PROCESSES", 0)  # worker processes would use the original kernel
    monkeypatch.setattr(cpu, "linear", split_linear)
    monkeypatch.setattr(cpu, "capture", reference.capture)  # a captured graph would not call the replacement
    assert count_differences.__wrapped__(checkpoint, kind, 3, ranks_first=False).wrong > 0
