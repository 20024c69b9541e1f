"""Worker processes that are killed, hang or fail end requests and engine with an error; rings between processes."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from checkpoints import SMALL, save
from repository import SUPPORT
from serving import Served, worker_pids
from transformers import Qwen3Config

from penstock.config.options import EngineOptions
from penstock.core import (
    Code,
    EngineRequest,
    FinishReason,
    PenstockError,
    PoolingParams,
    SamplingParams,
    TokenDelta,
)
from penstock.engine.engine import Engine
from penstock.engine.executor.poller import PeerLostError, Poller
from penstock.engine.executor.ring import Descriptors, Reader, Writer

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

DEPTHS = pytest.mark.parametrize("depth", [1, 3])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save(Qwen3Config(**SMALL, head_dim=32, sliding_window=None), folder)
    return folder


def options(checkpoint: Path, **more: Any) -> EngineOptions:
    fixed = {"model": str(checkpoint), "dtype": "float32", "weight_cache_dir": "none", "max_model_len": 256}
    fixed |= {"num_gpu_blocks_override": 40, "block_size": 16, "distributed_executor_backend": "mp"}
    return EngineOptions(**fixed | more)


def start(checkpoint: Path, **more: Any) -> Engine:
    return Engine(options(checkpoint, **more))


def request(name: str, **params: Any) -> EngineRequest:
    sampling = SamplingParams(**{"max_tokens": 200, "ignore_eos": True, "seed": 1} | params)
    return EngineRequest(request_id=name, prompt=[1, 2, 3, len(name)], sampling=sampling)


def worker_of(parent: int) -> int:
    """Return the process id of a process's only worker."""
    return worker_pids(parent)["penstock-rank0"]


def run(engine: Engine) -> list[TokenDelta]:
    found: list[TokenDelta] = []
    while engine.busy:
        found += engine.step()
    return found


@pytest.mark.slow
def test_statistics_do_not_wait_for_steps_in_flight(checkpoint: Path) -> None:
    """Waiting for the steps would leave the workers idle."""
    with closing(
        start(checkpoint, max_concurrent_batches=2, engine_iteration_timeout=5.0, speculation=False)
    ) as engine:
        engine.add(request("a"))
        engine.step()
        worker = worker_of(os.getpid())
        os.kill(worker, signal.SIGSTOP)
        assert engine.gpu_memory == 0 and engine.failure is None
        os.kill(worker, signal.SIGCONT)
        assert len(run(engine)) == 199


def lose_worker(engine: Engine, stop: Callable[[], None]) -> str:
    """End a worker under load by calling ``stop``; check that every sequence fails; return the error message."""
    for number in range(4):
        engine.add(request(str(number), n=2))
    for _ in range(5):
        engine.step()
    stop()
    deltas = run(engine)
    last = {(delta.request_id, delta.sequence): delta for delta in deltas if delta.finished}
    assert len(last) == 8, "each sequence must end once"
    for delta in last.values():
        assert delta.finished is FinishReason.ERROR and delta.failure and delta.failure.code is Code.UNAVAILABLE
    assert engine.scheduler.device_pool.num_free == engine.scheduler.device_pool.total
    with pytest.raises(PenstockError) as refused:
        engine.add(request("more"))
    assert refused.value.failure == delta.failure
    return delta.failure.message


@pytest.mark.slow_after(1)
@DEPTHS
def test_killed_worker_ends_engine_with_message_naming_worker(checkpoint: Path, depth: int) -> None:
    with closing(start(checkpoint, max_concurrent_batches=depth)) as engine:
        worker = worker_of(os.getpid())
        message = lose_worker(engine, lambda: os.kill(worker, signal.SIGKILL))
    assert f"the worker of rank 0 (process {worker}) ended: killed by SIGKILL" in message


@pytest.mark.slow
@DEPTHS
def test_hanging_worker_is_killed(checkpoint: Path, depth: int) -> None:
    with closing(start(checkpoint, max_concurrent_batches=depth, engine_iteration_timeout=1.0)) as engine:
        worker = worker_of(os.getpid())
        message = lose_worker(engine, lambda: os.kill(worker, signal.SIGSTOP))
        assert not Path(f"/proc/{worker}").exists()
    assert f"the worker of rank 0 (process {worker}) has not answered in time" in message


@pytest.mark.slow
def test_result_too_large_to_send_fails_its_step(checkpoint: Path, tmp_path: Path) -> None:
    """The step's result would be 4 GiB of hidden states (untouched pages, which take no memory)."""
    flag = tmp_path / "large"
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
        import pathlib
        import numpy, torch
        original = torch.Tensor.numpy
        flag = pathlib.Path({str(flag)!r})
        def to_numpy(self, **options):
            if self.ndim == 2 and self.dtype is torch.float32 and flag.exists():
                return numpy.zeros((2**24, 64), numpy.float32)
            return original(self, **options)
        torch.Tensor.numpy = to_numpy
        """)
    )
    path = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}:{path}")
        engine = start(checkpoint)
    embed = msgspec.structs.replace(request("embed"), pooling=PoolingParams(pooling_type="mean"))
    with closing(engine):
        flag.touch()
        engine.add(embed)
        (delta,) = run(engine)
        assert delta.failure and delta.failure.code is Code.INTERNAL
        flag.unlink()
        engine.add(embed)
        assert [delta.embedding is not None for delta in run(engine)] == [True]


def test_prompt_logits_too_large_to_send_are_refused(tmp_path: Path) -> None:
    """The logits would take 4 GiB: 8,192 tokens with 131,072 logits of four bytes each."""
    config = Qwen3Config(
        **SMALL | {"vocab_size": 2**17, "max_position_embeddings": 8300, "num_hidden_layers": 1}, head_dim=32
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    options = {"load_format": "dummy", "max_model_len": 8200, "num_gpu_blocks_override": 520}
    with closing(start(tmp_path, distributed_executor_backend="uni", **options)) as engine:
        sampling = SamplingParams(max_tokens=1, return_context_logits=True)
        for prompt, returned in ((8191, True), (8192, False)):
            params = sampling.replace(return_context_logits=returned)
            engine.validate(EngineRequest(request_id="fits", prompt=[1] * prompt, sampling=params))
        with pytest.raises(PenstockError) as refused:
            engine.add(EngineRequest(request_id="larger", prompt=[1] * 8192, sampling=sampling))
    assert refused.value.failure.code is Code.INVALID and refused.value.failure.field == "return_context_logits"


@pytest.mark.slow
def test_worker_ends_when_engine_is_killed(checkpoint: Path) -> None:
    """The engine's process is killed in the middle of a step."""
    code = textwrap.dedent("""
        import sys, msgspec
        from penstock.config.options import EngineOptions
        from penstock.core import EngineRequest
        from penstock.engine.engine import Engine
        engine = Engine(msgspec.json.decode(sys.argv[1], type=EngineOptions))
        print("ready", flush=True)
        while True:
            engine.add(msgspec.json.decode(sys.argv[2], type=EngineRequest))
            while engine.busy:
                engine.step()
        """)
    arguments = [msgspec.json.encode(options(checkpoint)), msgspec.json.encode(request("again"))]
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        worker = os.pidfd_open(worker_of(process.pid))
        process.kill()
        ended, _, _ = select.select([worker], [], [], 30)
        os.close(worker)
    assert ended, "the worker is still running"


@pytest.mark.slow
def test_interrupted_step_leaves_no_tokens_for_next_request(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is pressed while the engine waits for a step."""
    repeated = request("again", temperature=0, max_tokens=20)
    with closing(start(checkpoint)) as engine:
        engine.add(repeated)
        alone = [token for delta in run(engine) for token in delta.token_ids]
        engine.add(request("interrupted"))
        engine.step()
        wait = Reader.receive

        def interrupted(self: Reader, deadline: float = 0.0) -> bytes:
            monkeypatch.setattr(Reader, "receive", wait)
            raise KeyboardInterrupt

        monkeypatch.setattr(Reader, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert not engine.busy and engine.scheduler.device_pool.num_free == engine.scheduler.device_pool.total
        engine.add(repeated)
        assert [token for delta in run(engine) for token in delta.token_ids] == alone


@pytest.mark.slow
def test_failed_start_leaves_no_worker(checkpoint: Path) -> None:
    """The start fails after the workers have loaded the weights."""
    with pytest.raises(PenstockError, match="kv_cache_sequences"):
        start(checkpoint, num_gpu_blocks_override=0, kv_cache_sequences=1e9)
    gc.collect()
    assert not worker_pids(os.getpid())


@pytest.mark.slow
def test_workers_outlive_fork_server(checkpoint: Path) -> None:
    """After the fork server is killed, its workers continue, and a new fork server starts the next workers."""
    with closing(start(checkpoint)) as engine:
        worker = worker_of(os.getpid())
        parent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        assert Path(f"/proc/{parent}/comm").read_text() == "penstock-forks\n"
        os.kill(parent, signal.SIGKILL)
        engine.add(request("a"))
        assert run(engine)[-1].finished is FinishReason.LENGTH
        with closing(start(checkpoint)) as other:
            other.add(request("b"))
            assert run(other)[-1].finished is FinishReason.LENGTH
        engine.add(request("c"))
        engine.step()
        os.kill(worker, signal.SIGKILL)
        (*_, last) = run(engine)
        assert last.failure and "ended: exit status unknown" in last.failure.message


@pytest.mark.slow
def test_interrupted_start_leaves_no_worker(checkpoint: Path) -> None:
    """Ctrl-C is pressed while the fork server starts."""
    code = textwrap.dedent("""
        import os, signal, subprocess, sys, threading
        import msgspec
        from penstock.config.options import EngineOptions
        from penstock.engine.engine import Engine
        sys.path.insert(0, sys.argv[2])
        from serving import descendants, worker_pids
        options = msgspec.json.decode(sys.argv[1], type=EngineOptions)
        def interrupt():
            while not descendants(os.getpid()):
                pass
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            Engine(options)
        except KeyboardInterrupt:
            print(len(worker_pids(os.getpid())))
        engine = Engine(options)
        print(len(worker_pids(os.getpid())))
        """)
    arguments = [msgspec.json.encode(options(checkpoint)), str(SUPPORT)]
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert ran.stdout.split() == ["0", "1"], ran.stderr


@pytest.mark.slow
def test_worker_killed_while_loading_adapter_fails_start(checkpoint: Path, tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    os.mkfifo(config)

    def kill() -> None:
        with config.open("w"):  # opening the pipe waits until the worker reads it
            os.kill(worker_of(os.getpid()), signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    with pytest.raises(PenstockError, match=r"adapters could not be loaded: the worker of rank 0 .* killed by SIGKILL"):
        start(checkpoint, lora_modules=(f"a={tmp_path}",))
    killing.join()


@pytest.mark.slow
def test_start_error_is_the_same_with_worker_processes(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    messages = []
    for backend in ("uni", "mp"):
        with pytest.raises(PenstockError) as refused:
            start(tmp_path, distributed_executor_backend=backend)
        messages.append(str(refused.value))
    assert messages[0] == messages[1] and "safetensors" in messages[0]


@pytest.mark.slow
def test_server_recovers_from_killed_worker() -> None:
    """The log names the worker, open streams continue in a new engine, and it answers the next request."""
    flags = ("--num-gpu-blocks-override", "64", "--distributed-executor-backend", "mp")
    long = {"prompt": "The story of a fox:", "max_tokens": 600, "ignore_eos": True, "temperature": 0}
    with Served(*flags) as served:
        expected = httpx.post(f"{served.url}/completions", json=long, timeout=60).json()["choices"][0]["text"]
        (engine,) = served.pids["engine"]
        worker = worker_of(engine)
        streamed = long | {"stream": True}
        with httpx.stream("POST", f"{served.url}/completions", json=streamed, timeout=60) as stream:
            lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: "))
            first = next(lines)
            os.kill(worker, signal.SIGKILL)
            *chunks, done = lines
        assert done == "[DONE]"
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in (first, *chunks)) == expected
        served.find(rf"the engine has failed: the worker of rank 0 \(process {worker}\) ended: killed by SIGKILL")
        served.find(rf"the engine \(process {engine}\) ended: exit status 1")
        httpx.post(f"{served.url}/completions", json={"prompt": "Hi", "max_tokens": 2}).raise_for_status()
        assert worker_of(served.pids["engine"][0]) != worker


@pytest.fixture
def ring() -> Iterator[tuple[Writer, Reader, int]]:
    """Two ends of a small ring buffer, and the write end of a pipe, whose closing simulates the peer's death."""
    descriptors = Descriptors.create(64)
    peer, alive = os.pipe()
    writer, reader = Writer(descriptors, Poller(peer)), Reader(descriptors, Poller(peer))
    yield writer, reader, alive
    writer.close()
    reader.close()
    descriptors.close()
    os.close(peer)


def test_ring_keeps_order_of_messages(ring: tuple[Writer, Reader, int]) -> None:
    writer, reader, alive = ring
    messages = [bytes([number % 256]) * (number % 40) for number in range(500)]
    for message in messages:
        assert not reader.has_message()
        writer.send(message, time.monotonic() + 10)
        assert reader.has_message()
        assert reader.receive(time.monotonic() + 10) == message
    os.close(alive)


def test_message_longer_than_ring_is_received(ring: tuple[Writer, Reader, int]) -> None:
    writer, reader, alive = ring
    message = os.urandom(10_000)
    child = os.fork()
    if not child:  # the child process is the reader
        status = 1
        try:
            status = int(reader.receive(time.monotonic() + 30) != message)
        finally:
            os._exit(status)
    writer.send(message, time.monotonic() + 30)
    assert os.waitpid(child, 0)[1] == 0
    os.close(alive)


def test_ring_operations_end_by_timeout_or_lost_peer(ring: tuple[Writer, Reader, int]) -> None:
    writer, reader, alive = ring
    with pytest.raises(TimeoutError):
        reader.receive(time.monotonic() + 0.01)
    with pytest.raises(TimeoutError):
        writer.send(bytes(100), time.monotonic() + 0.01)
    os.close(alive)
    with pytest.raises(PeerLostError):
        writer.send(bytes(100), time.monotonic() + 30)


@pytest.mark.slow
def test_draft_model_runs_in_worker(checkpoint: Path) -> None:
    config = json.dumps({"model": str(checkpoint), "adaptive": False})
    with closing(start(checkpoint, speculative_config=config)) as engine:
        engine.add(request("drafted", temperature=0, max_tokens=40))
        run(engine)
        assert engine.speculation and engine.speculation.stats.accepted_tokens > 20
