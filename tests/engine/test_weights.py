"""Weight updates of a running engine: outputs before and after an update are bit-identical to those of new engines."""

from __future__ import annotations

import gc
import json
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, save
from executors import engine_options
from safetensors.torch import load_file, save_file
from test_lora import adapter
from test_speculation import with_head
from transformers import Qwen3Config

from penstock import LLM, PenstockError
from penstock.core import Code, EngineRequest, SamplingParams, TokenDelta
from penstock.engine.engine import Engine
from penstock.engine.modes import WeightUpdateMode
from penstock.models.decoder import Decoder

OPTIONS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 60, "weight_cache_dir": "none"}
TENSOR_PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PIPELINE_PARALLEL = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
PROMPTS = [list(range(5 * i, 5 * i + 40)) for i in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
Answer = list[tuple[int, tuple[tuple[int, float], ...]]]
"""Per generated token: its id, and the (token id, logprob) pairs of its logprobs entry."""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    save(Qwen3Config(**SMALL, head_dim=32, sliding_window=None), folder)
    return folder


@pytest.fixture(scope="module")
def new(old: Path) -> Path:
    return perturbed(old, old.parent / "new")


def perturbed(folder: Path, target: Path, seed: int = 1) -> Path:
    """Save a copy of a model with perturbed weights; return its folder."""
    shutil.copytree(folder, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    return target


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[LLM]:
    llm = LLM(folder, **OPTIONS | options)
    with closing(llm.engine):
        yield llm


def answers(llm: LLM) -> list[Answer]:
    """Return generated tokens and logprobs, after checking the weights version of each output."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert {output.weights_version for output in outputs} == {llm.engine.info.weights_version}
    return [
        [
            (token, tuple((key, entry.logprob) for key, entry in position.items()))
            for token, position in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True)
        ]
        for output in outputs
    ]


def fresh(folder: Path, **options: Any) -> list[Answer]:
    with opened(folder, **options) as llm:
        return answers(llm)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("options", [{}, TENSOR_PARALLEL, PIPELINE_PARALLEL, {"quantization": "w8a8"}], ids=str)
def test_update_from_folder_or_tensors_equals_new_engine(old: Path, new: Path, options: Mapping[str, Any]) -> None:
    same_bits = {name: value for name, value in options.items() if name == "quantization"}
    before, after = fresh(old, **same_bits), fresh(new, **same_bits)
    assert before != after
    with opened(old, enable_prefix_caching=True, **options) as llm:
        first = llm.engine.info.weights_version
        assert answers(llm) == before
        version = llm.update_weights(new)
        assert version == llm.engine.info.weights_version != first
        assert answers(llm) == after
        llm.update_weights(load_file(old / "model.safetensors"))
        assert answers(llm) == before
        assert not list(Path("/dev/shm").glob(f"penstock-weights-{os.getpid()}-*"))
        assert llm.update_weights(new) == version
        assert answers(llm) == after


def request(number: int, prompt: list[int], tokens: int = 24) -> EngineRequest:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return EngineRequest(request_id=str(number), prompt=prompt, sampling=sampling)


class Run:
    """Runs an engine and collects its output by request id."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, TokenDelta] = {}

    def step(self) -> None:
        for delta in self.engine.step():
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finished:
                self.ended[delta.request_id] = delta

    def until(self, future: Future[Any]) -> Any:
        while not future.done():
            self.step()
        return future.result()

    def finish(self) -> dict[str, list[int]]:
        while self.engine.busy:
            self.step()
        return self.tokens


def generated(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    with opened(folder) as llm:
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        return output[0].outputs[0].token_ids


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("running", ["finish", "recompute"])
def test_running_requests_finish_or_recompute_at_update(old: Path, new: Path, running: WeightUpdateMode) -> None:
    options = engine_options(
        model=str(old), **OPTIONS, max_num_seqs=2, enable_prefix_caching=True, preemption_mode="swap", swap_space=0.01
    )
    engine = Engine(options)
    with closing(engine):
        run = Run(engine)
        run.until(engine.weights.load(str(new)))
        for number, prompt in enumerate(PROMPTS):  # the last request waits for a free row
            engine.add(request(number, prompt))
        while min([len(run.tokens.get(str(number), [])) for number in range(2)]) < 5:
            run.step()
        committed = engine.weights.commit(running)
        while not committed.done():
            before_update = {name: list(tokens) for name, tokens in run.tokens.items()}
            run.step()
        assert engine.info.weights_version == committed.result()
        assert "2" not in before_update
        tokens = run.finish()
        assert engine.scheduler.device_pool.num_free == engine.scheduler.device_pool.total
    assert tokens["2"] == generated(new, PROMPTS[2], 24)
    for number in range(2):
        before = generated(old, PROMPTS[number], 24)
        if running == "finish":
            assert before_update[str(number)] == before == tokens[str(number)]
        else:
            given = before_update[str(number)]
            assert given == before[: len(given)]
            assert tokens[str(number)] == given + generated(new, PROMPTS[number] + given, 24 - len(given))


@pytest.mark.parametrize("method", ["draft_model", "mtp", "ngram"])
def test_update_with_drafts_adapters_and_beams_equals_new_engine(method: str, tmp_path: Path) -> None:
    """Requests that run during the update end without an error. Later requests have the bits of a new engine."""
    before = with_head(tmp_path / "before", accurate=True)
    after = perturbed(before, tmp_path / "after")
    lora = adapter(before, tmp_path / "lora")
    speculative = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    options = {
        **OPTIONS,
        "enable_lora": True,
        "enable_prefix_caching": True,
        "speculative_config": json.dumps(speculative | ({"model": str(before)} if method == "draft_model" else {})),
    }
    sampled = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=20, ignore_eos=True)
    beams = SamplingParams(temperature=0, use_beam_search=True, n=2, max_tokens=12, ignore_eos=True)
    requests = {"plain": GREEDY, "sampled": sampled, "beams": beams, "adapter": sampled}

    def ask(run: Run, prefix: str) -> None:
        for number, (name, sampling) in enumerate(requests.items()):
            used = "lora" if name == "adapter" else ""
            new = EngineRequest(request_id=prefix + name, prompt=PROMPTS[number % 3], sampling=sampling, adapter=used)
            run.engine.add(new)

    def load(engine: Engine) -> Run:
        engine.adapters.wait(engine.adapters.load("lora", str(lora)))
        return Run(engine)

    with closing(Engine(engine_options(model=str(after), **options))) as engine:
        run = load(engine)
        ask(run, "new ")
        expected = run.finish()
    with closing(Engine(engine_options(model=str(before), **options))) as engine:
        run = load(engine)
        ask(run, "old ")
        while len(run.tokens.get("old sampled", [])) < 6:
            run.step()
        run.until(engine.weights.load(str(after)))
        run.until(engine.weights.commit("recompute"))
        run.finish()
        assert {name for name, delta in run.ended.items() if not delta.failure} == {f"old {name}" for name in requests}
        ask(run, "new ")
        assert {name: tokens for name, tokens in run.finish().items() if name in expected} == expected
        assert engine.scheduler.device_pool.num_free == engine.scheduler.device_pool.total


def test_paused_request_does_not_delay_update(old: Path, new: Path) -> None:
    with closing(Engine(engine_options(model=str(old), **OPTIONS))) as engine:
        run = Run(engine)
        run.until(engine.weights.load(str(new)))
        engine.add(request(0, PROMPTS[0]))
        while len(run.tokens.get("0", [])) < 5:
            run.step()
        engine.scheduler.pause("0", True)
        engine.add(request(1, PROMPTS[1]))
        run.until(engine.weights.commit("finish"))
        given = list(run.tokens["0"])
        assert len(given) < 24
        engine.scheduler.pause("0", False)
        run.finish()
    assert run.tokens["0"] == given + generated(new, PROMPTS[0] + given, 24 - len(given))
    assert run.tokens["1"] == generated(new, PROMPTS[1], 24)


DAMAGES: dict[str, Any] = {
    "no folder": lambda folder: shutil.rmtree(folder),
    "no file": lambda folder: (folder / "model.safetensors").unlink(),
    "truncated": lambda folder: os.truncate(folder / "model.safetensors", 100_000),
    "no tensor": lambda folder: rewrite(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight")),
    "wrong shape": lambda folder: rewrite(folder, lambda tensors: tensors.update({NORM: torch.ones(7)})),
    "integers": lambda folder: rewrite(folder, lambda tensors: tensors.update({NORM: torch.ones(64).int()})),
    "NaN": lambda folder: rewrite(folder, lambda tensors: tensors[NORM].fill_(float("nan"))),
    "infinity": lambda folder: rewrite(folder, lambda tensors: tensors[LAST][1, 1].fill_(float("inf"))),
    "other layers": lambda folder: reconfigure(folder, num_hidden_layers=2),
    "other architecture": lambda folder: reconfigure(folder, architectures=["LlamaForCausalLM"]),
}
NORM, LAST = "model.norm.weight", "model.layers.2.mlp.down_proj.weight"


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("options", [{}, TENSOR_PARALLEL], ids=str)
def test_failed_update_keeps_weights(old: Path, new: Path, tmp_path: Path, options: Mapping[str, Any]) -> None:
    with opened(old, enable_prefix_caching=True, **options) as llm:
        before, version = answers(llm), llm.engine.info.weights_version
        for number, (kind, damage) in enumerate(DAMAGES.items()):
            shutil.copytree(new, folder := tmp_path / str(number))
            damage(folder)
            with pytest.raises(PenstockError) as caught:
                llm.update_weights(folder)
            assert caught.value.failure.code in (Code.INVALID, Code.UNSUPPORTED), (kind, caught.value)
            assert llm.engine.info.weights_version == version
            assert not llm.engine.has_pending
        with pytest.raises(PenstockError, match="no tensor"):
            llm.update_weights({NORM: torch.ones(64)})
        assert answers(llm) == before
        llm.update_weights(new)
        assert answers(llm) != before


def test_update_without_enough_memory_is_refused(old: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(old) as llm:
        before = answers(llm)
        monkeypatch.setattr("penstock.engine.worker.model_swap.free_host_bytes", lambda: 2**20)
        with pytest.raises(PenstockError, match=r"no memory .* sleep \(level 2\)"):
            llm.update_weights(new)
        monkeypatch.undo()
        assert answers(llm) == before


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, TENSOR_PARALLEL], ids=str)
def test_sleep_and_wake_up_do_not_change_outputs(old: Path, new: Path, options: Mapping[str, Any]) -> None:
    after = fresh(new)
    with opened(old, enable_prefix_caching=True, **options) as llm:
        before = answers(llm)
        for level in (1, 2):
            llm.sleep(level)
            assert llm.is_sleeping()
            with pytest.raises(PenstockError, match="wake_up"):
                answers(llm)
            llm.wake_up()
            assert not llm.is_sleeping()
            assert answers(llm) == before
        llm.sleep(2)
        llm.wake_up(["weights"])
        assert llm.is_sleeping()
        llm.wake_up(["kv_cache"])
        assert answers(llm) == before
        for _ in range(2):  # update while asleep: a trainer uses the memory between sleep and update_weights
            llm.sleep(2)
            llm.update_weights(load_file(new / "model.safetensors"))
            assert llm.is_sleeping()
            llm.wake_up(["kv_cache"])
            assert answers(llm) == after
        llm.sleep(2)
        with pytest.raises(PenstockError, match="came from update_weights"):
            llm.wake_up()
        llm.wake_up(["weights"])  # allocate the weights only, for the next update
        llm.update_weights(old)
        llm.wake_up()
        assert answers(llm) == before
        with pytest.raises(PenstockError, match="level"):
            llm.sleep(3)
        with pytest.raises(PenstockError, match="tags"):
            llm.wake_up(["kv"])


@pytest.mark.slow
def test_sleep_frees_the_kv_cache(old: Path) -> None:
    with opened(old, num_gpu_blocks_override=20_000) as llm:  # the KV cache takes 300 MB
        outputs = llm.generate([[i] * 200 for i in range(3, 250)], GREEDY, use_tqdm=False)
        assert all(output.finished for output in outputs)
        used = resident()
        llm.sleep(1)
        assert used - resident() > 30e6
        llm.wake_up()
        assert answers(llm) == fresh(old)


@pytest.mark.slow
def test_sleep_frees_weights(tmp_path: Path) -> None:
    wide = SMALL | {"hidden_size": 512, "intermediate_size": 4096}
    save(Qwen3Config(**wide, head_dim=32, sliding_window=None), tmp_path)
    with opened(tmp_path) as llm:  # the weights take 80 MB
        before, used = answers(llm), resident()
        llm.sleep(2)
        assert used - resident() > 60e6
        llm.wake_up()
        assert answers(llm) == before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_updates_leak_no_models_and_no_descriptors(old: Path, new: Path) -> None:
    def count_models() -> int:
        gc.unfreeze()
        gc.collect()
        count = sum(type(each) is Decoder for each in gc.get_objects())
        gc.freeze()  # as in conftest.py, collections in later tests skip imported objects
        return count

    others = count_models()  # models left by earlier tests
    with opened(old) as llm:
        folders = [old, new]

        def update(times: int) -> tuple[int, int]:
            for i in range(times):
                llm.update_weights(folders[i % 2])
                answers(llm)
            return count_models(), len(os.listdir("/proc/self/fd"))

        assert update(2) == update(6)
        assert update(0)[0] == others + 1


def test_dropped_engine_is_freed_at_once(old: Path, new: Path) -> None:
    """No reference cycle keeps the engine and its memory until the next garbage collection."""

    def count_models() -> int:
        return sum(type(each) is Decoder for each in gc.get_objects())

    gc.collect()
    others = count_models()  # models left by earlier tests
    llm = LLM(old, **OPTIONS)
    answers(llm)
    llm.update_weights(new)
    llm.sleep(2)
    llm.wake_up()
    engine = weakref.ref(llm.engine)
    gc.disable()
    try:
        del llm
        assert engine() is None
        assert count_models() <= others
    finally:
        gc.enable()
