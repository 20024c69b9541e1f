"""Tensor-parallel ranks and pipeline stages: bits equal to one rank's. A rank that dies, hangs or fails is named in the
error and ends all ranks."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import SMALL, save
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from serving import worker_pids
from test_executors import lose_worker, request, run
from test_speculation import with_head
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from penstock import LLM, GuidedDecodingParams, LoRARequest, PenstockError, PoolingParams, SamplingParams
from penstock.cli.main import main
from penstock.config.options import EngineOptions
from penstock.core import Code
from penstock.engine.engine import Engine
from penstock.engine.executor import local_ranks, multiproc
from penstock.engine.executor.base import Executor, StepFailedError, WorkerLostError
from penstock.engine.executor.multiproc import MultiprocExecutor
from penstock.engine.step import EMPTY, Propose, RowUpdates, StepInput, WorkerCall
from penstock.ops.cores import bind_replica, cores_of_rank
from penstock.parallel import RankFailedError
from penstock.planning.model_size import model_size_of
from penstock.planning.pipeline import split_layers

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
from penstock.parallel.shared_memory import SharedMemoryGroup, create_memory  # the module imports the compiled kernels

KINDS = ("float32 none auto", "bfloat16 none auto", "bfloat16 w8a8 int8", "bfloat16 w4a8 auto", "bfloat16 wint8 int8")
"""Kinds of engines: data type, quantization of the weights, data type of the KV cache."""
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
OPTIONS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 200, "weight_cache_dir": "none", "max_loras": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint with a LoRA adapter in the subfolder ``adapter``."""
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = SMALL | HEADS | {"vocab_size": 3584}  # vocabulary size of the tokenizer, which grammars need
    model = save(Qwen3Config(**sizes, head_dim=16, sliding_window=None), folder)
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=targets, init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    return folder


def results(llm: LLM, adapter: Path) -> str:
    """Return tokens, logprobs, logits and embeddings of requests of all kinds."""
    rng = Random(0)
    prompts = [[rng.randrange(2, 300) for _ in range(length)] for length in (3, 20, 70, 5, 30, 9, 12, 40)]
    regex = GuidedDecodingParams(regex="(ab|[0-9]|x+y){30,}")
    params = [
        GREEDY,
        SamplingParams(temperature=1, seed=1, n=3, max_tokens=30, ignore_eos=True, repetition_penalty=1.1),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=2, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0, use_beam_search=True, n=2, best_of=3, max_tokens=10, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, guided_decoding=regex),
        SamplingParams(temperature=1, seed=3, max_tokens=20, guided_decoding=regex),
        SamplingParams(temperature=0, max_tokens=5, return_generation_logits=True, return_context_logits=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    ]
    adapters = [None, None, LoRARequest("adapter", 1, str(adapter))]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=[adapters[i % 3] for i in range(8)])
    pooled = llm.embed(prompts[:3], use_tqdm=False, pooling_params=PoolingParams(normalize=True))
    generated = [
        (o.prompt_logprobs, [(c.token_ids, c.logprobs, c.cumulative_logprob, c.generation_logits) for c in o.outputs])
        for o in outputs
    ]
    return repr((generated, [o.context_logits for o in outputs], [o.outputs.embedding for o in pooled]))


Grid = tuple[int, int]
"""(tensor-parallel size, pipeline-parallel size)"""


def parallel(grid: Grid) -> dict[str, int]:
    return dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), grid, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "grids"),
    [
        ("float32 none auto", [(4, 1)]),
        ("bfloat16 none int8", [(2, 1), (1, 3)]),
        ("bfloat16 w8a8 auto", [(3, 1)]),
        ("bfloat16 wint4-g32 auto", [(2, 2)]),
        *(
            pytest.param(kind, [(2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (2, 2), (3, 2)], marks=pytest.mark.thorough)
            for kind in KINDS
        ),
    ],
)
def test_ranks_give_bits_of_one_rank(checkpoint: Path, kind: str, grids: list[Grid]) -> None:
    dtype, quantization, kv_cache_dtype = kind.split()
    options = OPTIONS | {
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "enable_lora": True,
    }
    expected = results(LLM(checkpoint, **options), checkpoint / "adapter")
    for grid in grids:
        llm = LLM(checkpoint, **parallel(grid), **options)
        assert results(llm, checkpoint / "adapter") == expected, grid
        llm.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "grid"),
    [
        (Qwen2Config(**SMALL), (1, 2)),
        (
            LlamaConfig(**SMALL, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
            (4, 1),
        ),  # two ranks per KV head
    ],
    ids=["qwen2", "llama"],
)
def test_ranks_generate_tokens_of_transformers(config: PreTrainedConfig, grid: Grid, tmp_path: Path) -> None:
    model: PreTrainedModel = save(config, tmp_path)
    prompt = list(range(2, 40))
    made = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    llm = LLM(tmp_path, dtype="float32", **parallel(grid), **OPTIONS)
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    llm.engine.close()
    assert output.outputs[0].token_ids == made[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "mtp"])
def test_tensor_parallel_outputs_with_drafts_and_swapping_equal_single_rank(
    method: str, checkpoint: Path, tmp_path: Path
) -> None:
    """The KV cache is so small that sequences are swapped out and in."""
    folder = with_head(tmp_path, accurate=False) if method == "mtp" else checkpoint
    config = {"num_speculative_tokens": 2, "adaptive": False, "method": method}
    config |= {"model": str(folder)} if method == "draft_model" else {}
    options = OPTIONS | {"dtype": "float32", "num_gpu_blocks_override": 20, "preemption_mode": "swap"}
    prompts = [[2 + (7 * i + j) % 5 for j in range(20)] for i in range(6)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=60, ignore_eos=True) for i in range(6)]
    expected = LLM(folder, **options).generate(prompts, params, use_tqdm=False)
    llm = LLM(folder, tensor_parallel_size=2, swap_space=0.001, speculative_config=config, **options)
    found = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs for output in found] == [output.outputs for output in expected]
    assert llm.engine.scheduler.num_preemptions > 0
    assert llm.engine.speculation and llm.engine.speculation.stats.draft_tokens > 0
    llm.engine.close()


@contextmanager
def ranks(checkpoint: Path, grid: Grid = (2, 1), **options: Any) -> Iterator[tuple[Engine, list[int]]]:
    """Start an engine; yield it and the process ids of its workers (empty without worker processes)."""
    fixed = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 256, **parallel(grid)}
    with closing(Engine(EngineOptions(**OPTIONS | fixed | options))) as engine:
        executor = engine._executor
        yield engine, executor.pids if isinstance(executor, MultiprocExecutor) else []


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("grid", "rank"), [((2, 1), 1), ((1, 2), 0)])
def test_killed_rank_is_named_and_all_ranks_end(checkpoint: Path, grid: Grid, rank: int) -> None:
    with ranks(checkpoint, grid) as (engine, pids):
        message = lose_worker(engine, lambda: os.kill(pids[rank], signal.SIGKILL))
        assert f"the worker of rank {rank} (process {pids[rank]}) ended: killed by SIGKILL" in message
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "rank"), [((2, 1), 1), ((1, 2), 0), ((1, 2), 1)])
def test_hanging_rank_is_named_and_all_ranks_end(checkpoint: Path, grid: Grid, rank: int) -> None:
    with ranks(checkpoint, grid, engine_iteration_timeout=2.0) as (engine, pids):
        message = lose_worker(engine, lambda: os.kill(pids[rank], signal.SIGSTOP))
        assert f"the worker of rank {rank} (process {pids[rank]}) has not answered in time" in message
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


class FaultInjector:
    """Makes functions fail once, in a chosen process.

    Args:
        functions: module and name of each function, such as ``penstock.ops.cpu:copy_blocks``.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *functions: str) -> None:
        self._flag = folder / "fails"
        (folder / "sitecustomize.py").write_text(
            textwrap.dedent(f"""
            import functools, importlib, os, pathlib
            flag = pathlib.Path({str(self._flag)!r})
            def fail_once(where):
                module, _, path = where.partition(":")
                *parents, name = path.split(".")
                owner = functools.reduce(getattr, parents, importlib.import_module(module))
                original = getattr(owner, name)
                def function(*args, **options):
                    if flag.exists() and flag.read_text() == f"{{os.getpid()}} {{where}}":
                        flag.unlink()
                        raise RuntimeError("the device has failed")
                    return original(*args, **options)
                setattr(owner, name, function)
            for where in {functions!r}:
                fail_once(where)
            """)
        )
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")

    def fail(self, pid: int, function: str) -> None:
        self._flag.write_text(f"{pid} {function}")


def tokens(engine: Engine, n: int) -> dict[int, list[int]]:
    """Return the tokens of each of the ``n`` sequences of a request. Their logits are in the ranks' shared memory."""
    engine.add(request("a" * n, n=n, temperature=1, max_tokens=8))
    found: dict[int, list[int]] = {}
    for delta in run(engine):
        found.setdefault(delta.sequence, []).extend(delta.token_ids)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
def test_step_failing_on_one_rank_fails_on_all(
    grid: Grid, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails on one rank before some of its barriers. Later requests get their usual tokens, also those that
    need more shared memory than the failed rank has allocated."""
    with ranks(checkpoint, (1, 1)) as (engine, _):
        expected = {n: tokens(engine, n) for n in (1, 2, 4, 8)}
    copy_blocks = "penstock.ops.cpu:copy_blocks"
    injector = FaultInjector(tmp_path, monkeypatch, copy_blocks)
    with ranks(checkpoint, grid) as (engine, pids):
        for rank, n in ((1, 4), (0, 8)):
            engine.add(request("failing", n=n))
            injector.fail(pids[rank], copy_blocks)
            deltas = engine.step()
            assert [delta.failure and delta.failure.code for delta in deltas] == [Code.INTERNAL] * n
            assert engine.failure is None and not engine.busy
            for size in (1, 8, 2, 4):
                assert tokens(engine, size) == expected[size]
            injector.fail(pids[rank], copy_blocks)
            engine._executor.submit(StepInput(RowUpdates(), EMPTY, EMPTY, EMPTY, EMPTY.astype(bool)))
            with pytest.raises(StepFailedError):  # the step only copies blocks
                engine._executor.collect()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "drafter"),
    [
        ("mtp", "penstock.engine.worker.spec_decode.head_drafter:HeadDrafter"),
        ("draft_model", "penstock.engine.worker.spec_decode.draft_model:DraftModel"),
    ],
)
def test_drafter_failing_on_one_rank_loses_only_drafts(
    method: str, drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter fails on one rank before some of its barriers. Only a failure of ``apply`` fails the step."""
    (tmp_path / "checkpoint").mkdir()
    folder = with_head(tmp_path / "checkpoint", accurate=False)
    with ranks(folder, (1, 1)) as (engine, _):
        expected = {n: tokens(engine, n) for n in (1, 2, 8)}
    functions = [f"{drafter}.{name}" for name in ("propose", "after_step", "apply")]
    injector = FaultInjector(tmp_path, monkeypatch, *functions)
    config = {"num_speculative_tokens": 3, "adaptive": False, "method": method}
    config |= {"model": str(folder)} if method == "draft_model" else {}
    with ranks(folder, speculative_config=json.dumps(config)) as (engine, pids):
        for function in functions:
            engine.add(request("failing", n=4, temperature=1, max_tokens=30))
            engine.step()
            injector.fail(pids[1], function)
            failed = [delta for delta in run(engine) if delta.failure]
            assert len(failed) == (4 if function.endswith("apply") else 0) and engine.failure is None
            assert {n: tokens(engine, n) for n in (1, 8, 2)} == expected


@pytest.mark.slow
def test_ranks_draft_same_tokens_as_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_head(tmp_path, accurate=False)
    config = json.dumps({"num_speculative_tokens": 3, "adaptive": False, "method": "mtp"})
    drafted: list[list[list[int] | None]] = []
    run_call = Executor.run

    def recording_run(self: Executor, call: WorkerCall) -> Any:
        answer = run_call(self, call)
        if isinstance(call, Propose):
            drafted.append(answer)
        return answer

    monkeypatch.setattr(Executor, "run", recording_run)
    found = []
    for size in (1, 2):
        drafted.clear()
        with ranks(folder, (size, 1), speculative_config=config) as (engine, _):
            for number in range(4):
                engine.add(request("a" * number, temperature=number % 2, max_tokens=20))
            run(engine)
        found.append(drafted.copy())
    assert found[0] == found[1] and len(found[0]) > 4


@pytest.mark.slow
def test_adapter_unreadable_on_one_rank_leaves_no_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank has loaded the adapter into the slot. The next adapter in this slot has fewer layers."""
    tensors = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
    (tmp_path / "smaller").mkdir()
    shutil.copy(checkpoint / "adapter" / "adapter_config.json", tmp_path / "smaller")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.0.self_attn.q_proj" in name}
    save_file(kept, tmp_path / "smaller" / "adapter_model.safetensors")
    read = "penstock.models.weights.lora:_tensors"
    injector = FaultInjector(tmp_path, monkeypatch, read)
    found = []
    for size in (1, 2):
        with ranks(checkpoint, (size, 1), enable_lora=True) as (engine, pids):
            if size > 1:
                injector.fail(pids[1], read)
                loading = engine.adapters.load("larger", str(checkpoint / "adapter"))
                with pytest.raises(PenstockError, match="could not be read"):
                    engine.adapters.wait(loading)
            engine.adapters.wait(engine.adapters.load("smaller", str(tmp_path / "smaller")))
            engine.add(msgspec.structs.replace(request("adapted", temperature=0, max_tokens=20), adapter="smaller"))
            found.append([token for delta in run(engine) for token in delta.token_ids])
    assert found[0] == found[1]


@pytest.mark.slow
def test_grammar_with_small_vocabulary_is_same_on_two_ranks(tmp_path: Path) -> None:
    """Two ranks share 100 tokens: the bitmask of a rank's tokens does not fill whole words."""
    save(Qwen3Config(**SMALL | {"vocab_size": 100}, head_dim=16, sliding_window=None), tmp_path)
    characters = [chr(code) for code in range(33, 131)]
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *characters])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    params = SamplingParams(temperature=0, guided_decoding=GuidedDecodingParams(regex="[a-z]{3}[0-9]{4}"))
    found = []
    for size in (1, 2):
        llm = LLM(tmp_path, dtype="float32", tensor_parallel_size=size, **OPTIONS)
        found += [output.outputs[0].token_ids for output in llm.generate([[3, 4, 5]], params, use_tqdm=False)]
        llm.engine.close()
    assert found[0] == found[1] and len(found[0]) >= 7


@pytest.mark.slow
def test_rank_detects_every_failed_step() -> None:
    """The failure is detected even if the rank checks only after the next step has failed, too."""
    memory, steps = create_memory(), 20_000
    child = os.fork()
    group = SharedMemoryGroup(memory, int(not child), 2, timeout=30)
    if not child:
        for _ in range(steps):
            with suppress(ZeroDivisionError), group.step():
                raise ZeroDivisionError
        os._exit(0)
    for _ in range(steps):
        with pytest.raises(RankFailedError, match="rank 1"), group.step():
            pass
    os.waitpid(child, 0)
    os.close(memory)


@pytest.mark.slow
def test_failed_start_of_a_rank_leaves_no_ranks(checkpoint: Path) -> None:
    """The process runs out of file descriptors after some ranks have started."""
    options = EngineOptions(model=str(checkpoint), tensor_parallel_size=2, pipeline_parallel_size=2)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with closing(MultiprocExecutor(options)):
        num_used = len(os.listdir("/proc/self/fd")) - before
        assert len(worker_pids(os.getpid())) == 4
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    failed = 0
    for fraction in (0.2, 0.4, 0.6, 0.8):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + int(fraction * num_used), hard))
        try:
            with closing(MultiprocExecutor(options)):
                pass
        except OSError:
            failed += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not worker_pids(os.getpid())
    assert failed >= 3
    with ranks(checkpoint) as (engine, _):
        assert tokens(engine, 2)


@pytest.mark.slow
def test_messages_longer_than_rings_do_not_block_pipeline(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than their ring buffers at the same time: a step message, the hidden states between stages, and the
    logits."""
    prompts = [[i % 300 + 2 for i in range(length)] for length in (230, 240, 250)]
    params = SamplingParams(temperature=0, max_tokens=3, return_context_logits=True)
    options = OPTIONS | {"max_num_batched_tokens": 64, "dtype": "float32"}
    expected = [output.context_logits for output in LLM(checkpoint, **options).generate(prompts, params)]
    monkeypatch.setattr(local_ranks, "RING_BYTES", 1024)
    llm = LLM(checkpoint, **options, pipeline_parallel_size=2, max_concurrent_batches=4, engine_iteration_timeout=20.0)
    with closing(llm.engine):
        assert [output.context_logits for output in llm.generate(prompts, params)] == expected


@pytest.mark.slow
def test_ranks_that_do_not_end_are_killed_at_the_same_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(checkpoint, (2, 2)) as (engine, pids):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(multiproc, "CLOSE_TIMEOUT", 1.0)
        begun = time.monotonic()
        engine.close()
        assert 1.0 <= time.monotonic() - begun < 3.0
        assert not worker_pids(os.getpid())


@pytest.mark.slow
def test_close_in_forked_process_does_not_end_ranks(checkpoint: Path) -> None:
    with ranks(checkpoint) as (engine, _):
        child = os.fork()
        if not child:
            engine.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert tokens(engine, 2)
        assert engine.failure is None


@pytest.mark.slow
def test_rank_hanging_while_loading_adapter_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(checkpoint, enable_lora=True) as (engine, pids):
        monkeypatch.setattr(multiproc, "LOAD_TIMEOUT", 5.0)
        os.kill(pids[1], signal.SIGSTOP)
        loading = engine.adapters.load("adapter", str(checkpoint / "adapter"))
        with pytest.raises(WorkerLostError, match=f"the worker of rank 1 .process {pids[1]}. has not answered"):
            engine.adapters.wait(loading)


def test_invalid_parallel_options_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL), tmp_path)
    with pytest.raises(PenstockError, match="3 ranks cannot share 4 query heads"):
        LLM(tmp_path, tensor_parallel_size=3, **OPTIONS)
    for layers, message in (
        ("3", "2 numbers of at least 1 that add up to 3"),
        ("1,x", "not a list of numbers of layers"),
    ):
        with pytest.raises(PenstockError, match=message):
            LLM(checkpoint, pipeline_parallel_size=2, pipeline_parallel_layers=layers, **OPTIONS)
    with pytest.raises(PenstockError, match="1 numbers of at least 1 that add up to 3"):
        LLM(checkpoint, pipeline_parallel_layers="1,2", **OPTIONS)
    with pytest.raises(PenstockError, match="is 4, more than the model's 3 layers"):
        LLM(checkpoint, pipeline_parallel_size=4, **OPTIONS)
    draft = {"model": str(checkpoint), "num_speculative_tokens": 2}
    with pytest.raises(PenstockError, match="only the methods suffix and ngram"):
        LLM(checkpoint, pipeline_parallel_size=2, speculative_config=draft, **OPTIONS)
    with pytest.raises(PenstockError, match="several ranks need CPUs, or one GPU each on one machine"):
        LLM(checkpoint, tensor_parallel_size=2, device="meta", **OPTIONS)
    for binding in ("1-0|0", "0-|0", "²|0", "|0"):
        with pytest.raises(PenstockError, match="not a core or a range"):
            cores_of_rank(binding, 0, 2)
    with pytest.raises(PenstockError, match="need worker processes"):
        LLM(checkpoint, tensor_parallel_size=2, distributed_executor_backend="uni", **OPTIONS)
    first = min(os.sched_getaffinity(0))
    for cores in ("1023", f"{first},1023", "99999999999"):
        message = f"this process cannot use the cores {cores.rpartition(',')[2]}"
        with pytest.raises(PenstockError, match=message):
            LLM(checkpoint, tensor_parallel_size=2, cpu_binding=f"{first}|{cores}", **OPTIONS)
        assert first in os.sched_getaffinity(0)
        with pytest.raises(PenstockError, match=message):
            bind_replica(f"{first}|{cores}", 1, 2, 1)
    with pytest.raises(PenstockError, match="has cores for 1 ranks, but this host has 2 ranks"):
        LLM(checkpoint, tensor_parallel_size=2, cpu_binding="0-1", **OPTIONS)


@pytest.mark.slow
def test_without_kernels_one_rank_generates_and_several_are_refused(tmp_path: Path) -> None:
    hidden = "import sys\nsys.modules['penstock.ops._kernels'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    script = """
    from penstock import LLM, PenstockError, SamplingParams
    options = {"num_gpu_blocks_override": 40, "distributed_executor_backend": "mp"}
    llm = LLM(**options)
    assert len(llm.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids) == 2
    llm.engine.close()
    try:
        LLM(tensor_parallel_size=2, **options)
    except PenstockError as error:
        print(error)
    """
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert "several ranks need the CPU kernels, which cannot be imported" in run.stdout, run.stderr


@pytest.mark.slow
def test_ranks_are_bound_to_separate_cores(checkpoint: Path) -> None:
    """The cores are divided evenly or given by ``cpu_binding``, which may give the same core to several ranks."""
    shares = [cores_of_rank("auto", rank, 2) for rank in range(2)]
    usable = os.sched_getaffinity(0)
    assert set.union(*shares) == (usable if len(usable) > 1 else set()) and not set.intersection(*shares)
    assert cores_of_rank("0-2,8-15", 1, 2) == set(range(8, 16))
    assert cores_of_rank("0-1,4|2-3,5", 0, 2) == {0, 1, 4}
    first = min(usable)
    with ranks(checkpoint, cpu_binding=f"{first}|{first}") as (_, pids):
        assert [os.sched_getaffinity(pid) for pid in pids] == [{first}, {first}]


@pytest.mark.row("bladellm", "--tensor_parallel_size", "--pipeline_parallel_size")
@pytest.mark.row("fastdeploy", "tensor_parallel_size")
@pytest.mark.row("vllm", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
@pytest.mark.parametrize(
    ("profile", "flag", "setting"),
    [
        ("vllm", "-tp", "tensor_parallel_size"),
        ("ascend-vllm", "--tensor-parallel-size", "tensor_parallel_size"),
        ("bladellm", "--tensor_parallel_size", "tensor_parallel_size"),
        ("fastdeploy", "--tensor-parallel-size", "tensor_parallel_size"),
        ("vllm", "-pp", "pipeline_parallel_size"),
        ("bladellm", "--pipeline_parallel_size", "pipeline_parallel_size"),
    ],
)
def test_compat_flags_set_parallel_sizes(
    capsys: pytest.CaptureFixture[str], profile: str, flag: str, setting: str
) -> None:
    assert main(["config", "--json", "--compat", profile, flag, "4"]) == 0
    assert json.loads(capsys.readouterr().out)[setting]["value"] == 4


def test_layers_are_split_by_bytes_read_per_stage() -> None:
    """The last stage also reads the language model head, which can be as large as several layers."""
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 12, "intermediate_size": 128}
    small, large = (model_size_of(config | {"vocab_size": size}) for size in (100, 2500))
    layer = small.layer_weights // 12
    assert large.head_weights // layer == 3
    assert [len(layers) for layers in split_layers(small, 3)] == [4, 4, 4]
    assert [len(layers) for layers in split_layers(large, 3)] == [5, 5, 2]
    assert split_layers(large, 2, "10,2") == [range(10), range(10, 12)]


@pytest.mark.slow
def test_torchrun_starts_one_server() -> None:
    """torchrun is told to start two processes; one server with two ranks starts instead."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "penstock.cli.main",
        "serve",
    ]
    command += ["--port", "0", "--host", "127.0.0.1", "--num-gpu-blocks-override", "40"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as torchrun:
        assert torchrun.stderr is not None
        assert any("ready: " in line for line in torchrun.stderr)
        workers = worker_pids(torchrun.pid)
        torchrun.terminate()
        assert sorted(workers) == ["penstock-rank0", "penstock-rank1"]
    refused = subprocess.run([*command, "--pipeline-parallel-size", "3"], capture_output=True, text=True)
    assert refused.returncode and "torchrun started 2" in refused.stderr
