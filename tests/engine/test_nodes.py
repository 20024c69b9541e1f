"""Engines on several nodes (network namespaces): results are bit-identical to those of one rank. If a node is killed,
stopped or disconnected, the engine ends with an error that names the node, and can be started again when the node is
back."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import namespaces
import numpy as np
import pytest
import torch
from checkpoints import SMALL, save
from namespaces import Namespaces
from serving import Served, worker_pids
from test_downloads import Command
from test_executors import lose_worker, request, run
from test_hub import NEW, Hub
from test_ranks import HEADS, OPTIONS, FaultInjector, Grid, parallel, ranks, results, tokens
from test_ranks import checkpoint as checkpoint  # the checkpoint fixture
from test_seed_paddlenlp import PORTS, SEVERAL, START, Terminal
from test_speculation import with_head
from torch import Tensor
from transformers import Qwen3Config

from penstock import LLM, PenstockError, SamplingParams
from penstock.cli.main import main
from penstock.config.options import EngineOptions
from penstock.core import Code
from penstock.engine.engine import Engine
from penstock.engine.executor.cluster_secret import read_secret
from penstock.engine.executor.layout import connections, ranks_of
from penstock.engine.executor.node_link import NodeLink, NodeLostError, SecretError, connect
from penstock.engine.executor.node_process import NodeProcess
from penstock.engine.executor.rendezvous import Listener
from penstock.parallel import Shard

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
# the module imports the compiled kernels
from penstock.parallel.shared_memory import PeerLink, SharedMemoryGroup, create_memory

pytestmark = pytest.mark.slow

TIMEOUT = 4.0
"""Value of ``engine_iteration_timeout`` in seconds."""


@pytest.fixture(scope="module")
def machines() -> Iterator[Namespaces]:
    if reason := namespaces.unavailable_reason():
        pytest.skip(reason)
    with Namespaces(3) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def secret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Path of the cluster secret file. All nodes share a file system."""
    folder = tmp_path_factory.mktemp("config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield folder / "penstock" / "cluster-secret"


@pytest.fixture(scope="module")
def shared_secret(secret: Path) -> None:
    secret.parent.mkdir(exist_ok=True)
    secret.write_text("a secret of the tests")
    secret.chmod(0o600)


def options_of(checkpoint: Path, grid: Grid, nnodes: int, **more: Any) -> dict[str, Any]:
    fixed = {"model": str(checkpoint), "dtype": "float32", "max_model_len": 256, "engine_iteration_timeout": TIMEOUT}
    place = {"nnodes": nnodes, "master_addr": "10.0.0.1", "node_timeout": 60.0}
    return OPTIONS | fixed | parallel(grid) | place | more


def node(machines: Namespaces, rank: int, options: dict[str, Any], **environment: str) -> Served:
    """Return the server process of one node, configured by flags only."""
    flags = []
    for name, value in (options | {"node_rank": rank}).items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, str(value)]
    with machines.inside(rank):
        return Served(*flags, environment=environment)


@contextmanager
def nodes(machines: Namespaces, options: dict[str, Any], **environment: str) -> Iterator[list[Served]]:
    """Start all nodes except node 0; end them with SIGTERM."""
    started = [node(machines, rank, options, **environment) for rank in range(1, options["nnodes"])]
    try:
        yield started
        for each in started:
            if each.running:
                each.terminate()
                assert each.ended() == 0, "\n".join(each.lines[-50:])
    finally:
        for each in started:
            each.kill()


def engine_on(machines: Namespaces, options: dict[str, Any]) -> Engine:
    with machines.inside(0):
        return Engine(EngineOptions(**options))


@pytest.mark.parametrize(
    ("grid", "nnodes"),
    [
        ((3, 2), 3),  # each stage spans two nodes, and one node has ranks of two stages
        pytest.param((1, 2), 2, marks=pytest.mark.thorough),
        pytest.param((2, 1), 2, marks=pytest.mark.thorough),
        pytest.param((4, 1), 2, marks=pytest.mark.thorough),
        pytest.param((2, 2), 2, marks=pytest.mark.thorough),
        pytest.param((1, 3), 3, marks=pytest.mark.thorough),
        pytest.param((3, 1), 3, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.usefixtures("shared_secret")
def test_nodes_give_bits_of_one_rank(machines: Namespaces, checkpoint: Path, grid: Grid, nnodes: int) -> None:
    engine = {"enable_lora": True, "max_model_len": 0, "quantization": "w8a8", "dtype": "bfloat16", "swap_space": 0.1}
    options = options_of(checkpoint, grid, nnodes, **engine, engine_iteration_timeout=60.0)
    single = {name: options[name] for name in (*OPTIONS, *engine)}
    expected = results(LLM(checkpoint, **single), checkpoint / "adapter")
    with nodes(machines, options):
        with machines.inside(0):
            llm = LLM(**options)
        assert results(llm, checkpoint / "adapter") == expected
        machines.slow_down(nnodes - 1, "20mbit")
        assert results(llm, checkpoint / "adapter") == expected
        machines.speed_up(nnodes - 1)
        llm.engine.close()


def test_connections_cover_all_communicating_ranks() -> None:
    for size, stages, nnodes in ((1, 2, 2), (2, 1, 2), (3, 2, 3), (2, 2, 2), (4, 3, 6), (3, 4, 2), (6, 1, 3)):
        ranks = ranks_of(size, stages, nnodes)
        pairs = set(connections(ranks))
        assert [rank.world_rank for rank in ranks] == list(range(size * stages))
        for rank in ranks:
            others = {other.node for other in ranks if other.stage == rank.stage} - {rank.node}
            assert {other.node for other in ranks if rank.sends_to(other)} == others, (
                "each rank must send to one rank of every other node of its stage"
            )
            for other in ranks:
                communicate = rank.sends_to(other) or (rank.precedes(other) and rank.node != other.node)
                assert not communicate or tuple(sorted((rank.world_rank, other.world_rank))) in pairs


HEADER = struct.Struct("<Qqqqqii")
"""Message header: progress, offset, bytes per row, stride, number of rows; flags: numbered rows, failed step."""
FIRST_PROGRESS = (1 << 24) + 1
"""Progress of a rank at the first barrier of step 1: the step number in the high bits, the number of barriers in the
low 24 bits (csrc/group.h)."""


@contextmanager
def group_of_two() -> Iterator[tuple[SharedMemoryGroup, socket.socket]]:
    """Yield rank 0 of a group of two ranks, and the remote end of its connection to rank 1."""
    memory = create_memory()
    local, other = socket.socketpair()
    try:
        with local, other:
            yield SharedMemoryGroup(memory, 0, 2, timeout=10, links=[PeerLink(local.fileno(), 1, True, True)]), other
    finally:
        os.close(memory)


def gather(group: SharedMemoryGroup) -> Tensor:
    return group.all_gather(lambda out: out.fill_(1.0), 3, Shard(0, 2, 4), torch.float32)  # type: ignore[union-attr]


def test_fragmented_outputs_of_another_node_are_gathered() -> None:
    with group_of_two() as (group, other):
        with group.step():
            rows = np.arange(6, dtype=np.float32).reshape(3, 2)
            message = HEADER.pack(FIRST_PROGRESS, 4096 + 8, 8, 16, 3, 0, 0) + rows.tobytes()
            message += HEADER.pack(2 << 24, 0, 0, 0, 0, 0, 0)  # header that ends the step

            def send() -> None:
                for byte in message:
                    other.sendall(bytes([byte]))

            sender = threading.Thread(target=send)
            sender.start()
            gathered = gather(group)
            assert gathered[:, 2:].tolist() == rows.tolist() and (gathered[:, :2] == 1).all()
        sender.join()
        assert other.recv(HEADER.size) == HEADER.pack(FIRST_PROGRESS, 4096, 8, 16, 3, 0, 0)


@pytest.mark.parametrize(
    "header",
    [
        # offset 0: would overwrite the progress of the ranks, which is at the start of the shared memory
        (FIRST_PROGRESS, 0, 8, 16, 3, 0, 0),
        (FIRST_PROGRESS, 2**36 - 8, 8, 16, 3, 0, 0),
        (FIRST_PROGRESS, 4096, 8, 2**62, 3, 0, 0),
        (FIRST_PROGRESS, 4096, 8, -16, 3, 0, 0),
        (FIRST_PROGRESS, 4096, 2**61, 16, 8, 0, 0),
        (FIRST_PROGRESS, 4096, 8, 16, 2**61, 0, 0),
        (FIRST_PROGRESS, -8, 8, 16, 3, 0, 0),
        (FIRST_PROGRESS, 4096, 8, 8, 3, 1, 0),  # all row numbers are negative
    ],
)
def test_message_outside_shared_memory_is_a_lost_connection(header: tuple[int, ...]) -> None:
    with group_of_two() as (group, other):
        other.sendall(HEADER.pack(*header) + b"\xff" * 100)
        with pytest.raises(ConnectionError, match="lost the connection to rank 1 of the group"), group.step():
            gather(group)


# --- Failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(2, 1), pytest.param((1, 2), marks=pytest.mark.thorough)])
@pytest.mark.usefixtures("shared_secret")
def test_lost_node_is_named_and_rejoins(machines: Namespaces, checkpoint: Path, grid: Grid) -> None:
    options = options_of(checkpoint, grid, 2)

    def kill_rank(served: Served, pids: list[int]) -> None:
        os.kill(pids[1], signal.SIGKILL)

    def stop_rank(served: Served, pids: list[int]) -> None:
        os.kill(pids[1], signal.SIGSTOP)

    def stop_node(served: Served, pids: list[int]) -> None:
        os.kill(served.pid, signal.SIGSTOP)

    def disconnect(served: Served, pids: list[int]) -> None:
        machines.connect(1, False)

    def kill_node(served: Served, pids: list[int]) -> None:
        os.kill(served.pid, signal.SIGKILL)

    def kill_local_rank(served: Served, pids: list[int]) -> None:
        os.kill(pids[0], signal.SIGKILL)

    failures: list[tuple[Callable[[Served, list[int]], None], str]] = [
        (kill_rank, r"the worker of rank 1 \(process {1}\) of node 1 \(.*, 10.0.0.2\) ended: killed by SIGKILL"),
        (stop_rank, r"the worker of rank 1 \(process {1}\) of node 1 \(.*, 10.0.0.2\) has not answered in time"),
        (kill_local_rank, r"the worker of rank 0 \(process {0}\) ended: killed by SIGKILL"),
        (stop_node, r"node 1 \(.*, 10.0.0.2\) has not answered in time"),
        (disconnect, r"the connection to node 1 \(.*, 10.0.0.2\) is lost: connection timed out"),
        (kill_node, r"the connection to node 1 \(.*, 10.0.0.2\) is lost: connection (closed by the peer|reset)"),
    ]
    with nodes(machines, options) as (served,):
        expected = None
        for fail, pattern in failures:
            with closing(engine_on(machines, options)) as engine:
                expected = expected or tokens(engine, 4)
                assert tokens(engine, 4) == expected
                pids = engine._executor.pids  # type: ignore[attr-defined]
                begun = time.monotonic()
                message = lose_worker(engine, lambda: fail(served, pids))  # noqa: B023
                assert time.monotonic() - begun < 3 * TIMEOUT
                assert re.search(pattern.format(*pids), message), message
                if fail is disconnect:
                    served.find("lost node 0 .*: connection timed out")
                machines.connect(1, True)
                if served.running:
                    os.kill(served.pid, signal.SIGCONT)
                deadline = time.monotonic() + 30
                while (left := worker_pids(served.pid)) and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert not left, "a worker is still running on the other node"
                assert not any(Path(f"/proc/{pid}").exists() for pid in pids[:1])
        served.kill()


@pytest.mark.usefixtures("shared_secret")
def test_step_failing_on_one_node_fails_on_all(
    machines: Namespaces, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only this step fails: all ranks compute the next one together."""
    options = options_of(checkpoint, (2, 1), 2, engine_iteration_timeout=30.0)
    with ranks(checkpoint, (1, 1)) as (engine, _):
        expected = {n: tokens(engine, n) for n in (1, 2, 8)}
    copy_blocks = "penstock.ops.cpu:copy_blocks"
    injector = FaultInjector(tmp_path, monkeypatch, copy_blocks)
    with nodes(machines, options), closing(engine_on(machines, options)) as engine:
        pids = engine._executor.pids  # type: ignore[attr-defined]
        for rank in (1, 0):
            engine.add(request("failing", n=4))
            injector.fail(pids[rank], copy_blocks)
            failed = [delta.failure for delta in run(engine) if delta.finished]
            assert [failure and failure.code for failure in failed] == [Code.INTERNAL] * 4
            assert engine.failure is None
            assert {n: tokens(engine, n) for n in (1, 8, 2)} == expected
        os.kill(pids[1], signal.SIGKILL)
        while engine.failure is None:  # an idle engine asks all ranks for statistics
            assert engine.gpu_memory == 0
        assert f"process {pids[1]}) of node 1" in engine.failure.message


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_secret")
def test_disconnected_nodes_end_the_engine(machines: Namespaces, checkpoint: Path) -> None:
    """Node 0 still reaches both nodes. A new engine starts only when they reach each other again."""
    options = options_of(checkpoint, (3, 1), 3)
    with nodes(machines, options):
        try:
            with closing(engine_on(machines, options)) as engine:
                assert tokens(engine, 1)
                begun = time.monotonic()
                message = lose_worker(engine, lambda: machines.separate(1, 2))
                assert time.monotonic() - begun < 3 * TIMEOUT
                assert re.search("rank [12] .* of node [12] .* has not answered in time", message), message
            message = "a node was lost while ranks were started: node 2 .*: node 1 at 10.0.0.2:[0-9]+ cannot be reached"
            with pytest.raises(PenstockError, match=message):
                engine_on(machines, options)
        finally:
            machines.separate(1, 2, False)
        engine_on(machines, options).close()


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_secret")
def test_drafts_on_several_nodes_keep_tokens(machines: Namespaces, tmp_path: Path) -> None:
    folder = with_head(tmp_path, accurate=False)
    config = json.dumps({"num_speculative_tokens": 3, "adaptive": False, "method": "mtp"})
    with ranks(folder, (1, 1)) as (engine, _):
        expected = {n: tokens(engine, n) for n in (1, 2, 8)}
    options = options_of(folder, (2, 1), 2, speculative_config=config)
    with nodes(machines, options), closing(engine_on(machines, options)) as engine:
        assert {n: tokens(engine, n) for n in (1, 2, 8)} == expected
        assert engine.speculation and engine.speculation.stats.draft_tokens > 0


# --- The start --------------------------------------------------------------------------------------------------------


def test_mismatched_nodes_are_refused(
    machines: Namespaces, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every refused node reports why. Node 0 keeps waiting for a matching node, until ``node_timeout`` ends it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    options = options_of(checkpoint, (2, 1), 2)
    with pytest.raises(PenstockError, match=r"cluster-secret cannot be read .No such file.*copy this file from node 0"):
        NodeProcess(EngineOptions(**options | {"node_rank": 1}))
    with pytest.raises(PenstockError, match=r"node 1 of 2 did not join at 10.0.0.1:29501 within 0.1 seconds"):
        engine_on(machines, options | {"node_timeout": 0.1})
    started_engines: list[Engine] = []
    waiting = threading.Thread(target=lambda: started_engines.append(engine_on(machines, options)))
    waiting.start()
    other = tmp_path / "other"
    save(Qwen3Config(**SMALL | HEADS | {"vocab_size": 3584}, head_dim=16, sliding_window=None), other)
    with (other / "model.safetensors").open("r+b") as weights:
        weights.seek(-100, os.SEEK_END)
        weights.write(bytes(100))
    secret = tmp_path / "own" / "penstock" / "cluster-secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    readable = tmp_path / "readable"
    readable.write_text("another secret of the tests")
    readable.chmod(0o644)
    refused = [
        ({"quantization": "w8a8"}, "quantization is 'w8a8' on the node and 'none' on node 0"),
        ({"nnodes": 4, "tensor_parallel_size": 4}, "nnodes is 4 on the node and 2 on node 0"),
        ({"model": str(other)}, "its checkpoint differs from node 0's"),
        ({"cluster_secret_file": str(readable)}, "is accessible to other users: run chmod 600"),
    ]
    started = [(node(machines, 1, options | different), message) for different, message in refused]
    wrong_secret = tmp_path / "wrong-secret"
    wrong_secret.write_text("another secret of the tests")
    wrong_secret.chmod(0o600)
    started.append(
        (node(machines, 1, options | {"cluster_secret_file": str(wrong_secret)}), "has another cluster secret")
    )
    (tmp_path / "sitecustomize.py").write_text("import penstock.version\npenstock.version.__version__ = '9.9'\n")
    other_version = node(machines, 1, options, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    started.append((other_version, "it runs Penstock 9.9, and node 0 runs"))
    for served, message in started:
        served.find(re.escape(message))
        assert served.ended() == 2
        served.kill()
    with nodes(machines, options):
        waiting.join()
        assert tokens(started_engines[0], 1)
        started_engines[0].close()
    alone = node(machines, 1, options | {"node_timeout": 1.0, "master_port": 29999})
    alone.find("node 0 at 10.0.0.1:29999 has not answered within 1 seconds .--node-timeout.: connection refused")
    assert alone.ended() == 2
    alone.kill()


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_secret")
def test_node_with_other_fingerprint_is_refused(machines: Namespaces, checkpoint: Path) -> None:
    options = options_of(checkpoint, (2, 1), 2)
    message = r"rank 1 .* of node 1 .* differs from rank 0: fingerprint .*portable.* instead of "
    with nodes(machines, options, PENSTOCK_ISA="portable"), pytest.raises(PenstockError, match=message):
        engine_on(machines, options)


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_secret")
def test_second_node_of_same_rank_waits_for_end_of_first(machines: Namespaces, checkpoint: Path) -> None:
    """This happens after a network failure that node 0 has not detected yet."""
    options = options_of(checkpoint, (3, 1), 3)
    engines: list[Engine] = []
    waiting = threading.Thread(target=lambda: engines.append(engine_on(machines, options)))
    waiting.start()
    served = [node(machines, 1, options)]
    try:
        served[0].find("joined node 0")
        served.append(node(machines, 1, options))
        served[1].find("10.0.0.2 has already joined as node_rank 1")
        os.kill(served[0].pid, signal.SIGKILL)
        served[1].find("joined node 0")
        served.append(node(machines, 2, options))
        waiting.join()
        with closing(engines[0]) as engine:
            assert tokens(engine, 1)
            assert engine._executor.pids[1] in worker_pids(served[1].pid).values()  # type: ignore[attr-defined]
    finally:
        for each in served:
            each.kill()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "1 ranks .* cannot be divided among 2 nodes"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "3 ranks .* cannot be divided among 2 nodes"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, "2 is not below nnodes, 2"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 1}, "on other nodes run penstock serve --node-rank"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size must be 1"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "192.0.2.99"}, "cannot listen on 192.0.2.99:29501"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "cluster_secret_file": "/none"},
            "/none cannot be read .*leave out this option to create a secret",
        ),
    ],
)
@pytest.mark.usefixtures("shared_secret")
def test_invalid_node_options_are_refused(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        Engine(EngineOptions(model=str(checkpoint), **OPTIONS | options))


def test_processes_that_create_secret_concurrently_read_same_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = threading.Barrier(8)

    def read(_: int) -> bytes:
        barrier.wait()
        return read_secret("", make=True)

    with ThreadPoolExecutor(8) as threads:
        for attempt in range(20):
            monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / str(attempt)))
            assert len(set(threads.map(read, range(8)))) == 1
            assert [file.name for file in (tmp_path / str(attempt) / "penstock").iterdir()] == ["cluster-secret"]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_unauthenticated_connections_are_closed_and_block_no_node() -> None:
    listener = Listener("127.0.0.1", 0, b"a secret of the tests")
    address = "127.0.0.1", listener.port
    try:
        idle = [socket.create_connection(address) for _ in range(100)]  # more than are authenticated at once
        nested = b"\x81\xa1x" + b"\x91" * 1000 + b"\x90"
        deep = len(nested).to_bytes(8, "little") + bytes(4) + nested
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", (2**60).to_bytes(8, "little") + bytes(100), bytes(12), deep):
            with socket.create_connection(address, 10) as stranger:
                stranger.sendall(garbage)
                while stranger.recv(4096):  # read the challenge until the connection is closed
                    pass
        with pytest.raises(SecretError, match="another cluster secret"):
            connect(address, b"another secret")
        assert listener.next(0.0) is None
        link = connect(address, b"a secret of the tests")
        accepted = listener.next(10.0)
        assert accepted
        link.send(b"hello")
        assert accepted.receive(time.monotonic() + 10) == b"hello"
        link.close()
        with pytest.raises(NodeLostError):
            accepted.receive(time.monotonic() + 10)
        accepted.close()
        for each in idle:
            each.close()
    finally:
        listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect(address, b"a secret of the tests")


def test_other_server_is_refused_as_node() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:
        connecting = threads.submit(connect, server.getsockname(), b"a secret of the tests")
        connected, _ = server.accept()
        with connected:
            connected.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            with pytest.raises(SecretError, match="is not a Penstock node"):
                connecting.result()


def test_nodes_are_accepted_after_descriptors_ran_out(caplog: pytest.LogCaptureFixture) -> None:
    listener, limits = Listener("127.0.0.1", 0, b"a secret of the tests"), resource.getrlimit(resource.RLIMIT_NOFILE)
    address, held = ("127.0.0.1", listener.port), []
    with closing(listener), socket.socket() as early:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), limits[1]))
            with suppress(OSError):
                while True:
                    held.append(os.dup(0))
            early.connect(address)
            deadline = time.monotonic() + 10
            while "cannot accept a node's connection: too many open files" not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in held:
                os.close(descriptor)
        connect(address, b"a secret of the tests").close()


@pytest.mark.parametrize("timeout", [0.1, 1e6, 1e12, float("inf")])
def test_keep_alive_accepts_any_timeout(timeout: float) -> None:
    """Timeouts above the kernel's maximum are accepted."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(NodeLink(socket.create_connection(server.getsockname()))) as link,
    ):
        link.keep_alive(timeout)
        assert link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


# --- The server -------------------------------------------------------------------------------------------------------


@pytest.mark.row("vllm", "--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless")
@pytest.mark.usefixtures("shared_secret")
def test_server_recovers_from_killed_node(machines: Namespaces, checkpoint: Path) -> None:
    """The log names the missing node. A stream continues with the same text after the node has rejoined."""
    flags = ["--model", str(checkpoint), "--dtype", "float32", "--weight-cache-dir", "none", "--max-model-len", "256"]
    flags += ["--num-gpu-blocks-override", "40", "--engine-iteration-timeout", "10", "--master-addr", "10.0.0.1"]
    flags += ["-tp", "2", "--node-timeout", "60", "--master-port", "29555"]

    def start_node_1() -> Served:
        with machines.inside(1):
            return Served(*flags, "-n", "2", "-r", "1", "--headless")

    with machines.inside(0):
        served = Served(*flags, "--nnodes", "2", "--node-rank", "0")
    body = {"model": str(checkpoint), "prompt": "abc", "temperature": 0, "ignore_eos": True}
    other = None
    try:
        served.find(r"waiting at 10\.0\.0\.1:29555 for node 1 of 2")
        other = start_node_1()
        served.start()
        with machines.inside(0), httpx.Client(base_url=served.url) as client:
            expected = client.post("/completions", json=body | {"max_tokens": 20}).json()["choices"]
            long = body | {"max_tokens": 200}
            whole = client.post("/completions", json=long).json()["choices"][0]["text"]
            with client.stream("POST", "/completions", json=long | {"stream": True}, timeout=90) as stream:
                lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: "))
                first = next(lines)
                seen = len(served.lines)
                os.kill(other.pid, signal.SIGKILL)
                served.find("node 1 .* (is lost|ended)", after=seen)
                served.find("waiting at .* for node 1 of 2", after=seen)
                other.kill()
                other = start_node_1()
                served.find("all 2 nodes have joined", after=seen)
                *chunks, done = lines
            assert done == "[DONE]"
            assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in (first, *chunks)) == whole
            answer = client.post("/completions", json=body | {"max_tokens": 20})
            assert answer.json()["choices"] == expected
        served.terminate()
        assert served.ended() == 0
        other.find("waiting for node 0 at")
        other.terminate()
        assert other.ended() == 0
    finally:
        served.kill()
        if other:
            other.kill()


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_secret")
def test_nodes_rejoin_restarted_engine(machines: Namespaces, checkpoint: Path) -> None:
    flags = ["--model", str(checkpoint), "--dtype", "float32", "--weight-cache-dir", "none", "--max-model-len", "256"]
    flags += ["--num-gpu-blocks-override", "40", "--master-addr", "10.0.0.1", "-pp", "2", "--nnodes", "2"]
    started = []
    for rank in range(2):
        with machines.inside(rank):
            started.append(Served(*flags, "--node-rank", str(rank)))
    served, other = started
    try:
        served.start()
        os.kill(served.pids["engine"][0], signal.SIGKILL)
        other.find("lost node 0 at 10.0.0.1:29501: connection (closed by the peer|reset)")
        seen = len(other.lines)
        other.find("ready: node 1 of 2", after=seen)
        body = {"model": str(checkpoint), "prompt": "abc", "max_tokens": 3}
        with machines.inside(0), httpx.Client(base_url=served.url) as client:
            deadline = time.monotonic() + 30
            while client.post("/completions", json=body).status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        for each in started:
            each.terminate()
        assert [each.ended() for each in started] == [0, 0]
    finally:
        for each in started:
            each.kill()


# --- Started like other systems ---------------------------------------------------------------------------------------


@pytest.mark.row("paddlenlp", "MP_NNODE", "POD_IPS", "POD_0_IP", "INTER_PROC_PORT", "start_server")
@pytest.mark.usefixtures("shared_secret")
def test_two_node_commands_of_paddlenlp_start_two_nodes(machines: Namespaces, tmp_path: Path) -> None:
    """Each of the two nodes has one device."""
    several = SEVERAL.replace("MP_NUM=16", "MP_NUM=2").replace("0,1,2,3,4,5,6,7", "0")
    script = f"{PORTS}{several}{START}"
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
    terminals = [Terminal(tmp_path / folder) for folder in ("first", "second")]
    outputs: dict[int, tuple[int, str]] = {}

    def start(rank: int) -> None:
        with machines.inside(rank):
            outputs[rank] = terminals[rank].run(script)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in (0, 1)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [outputs[rank][0] for rank in (0, 1)] == [0, 0], outputs
        assert "Ready: process" in outputs[0][1] and re.search("Ready: process [0-9]+, node 1 of 2", outputs[1][1]), (
            outputs
        )
        with machines.inside(0):
            url = terminals[0].printed("http://127.0.0.1:9965/v1/chat/completions")
            answer = httpx.post(url, json={"text": "Hello", "max_dec_len": 2})
        assert answer.status_code == 200 and answer.json()["error_code"] == 0, answer.text
    finally:
        for terminal in terminals:
            assert terminal.run("stop_server")[1].startswith("Stopped process")


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_secret")
def test_mpirun_starts_and_stops_two_nodes(machines: Namespaces, tmp_path: Path) -> None:
    """mpirun reaches the nodes through a program instead of ssh. The nodes share a file system, as in some clusters."""
    terminal = Terminal(tmp_path)
    agent = tmp_path / "agent"
    names = " ".join(f"{address}) space={name};;" for address, name in machines.names.items())
    agent.write_text(f'#!/bin/sh\ncase $1 in {names} esac; shift; exec ip netns exec $space sh -c "$*"\n')
    agent.chmod(0o755)
    terminal.environment |= {"PRTE_MCA_plm_ssh_agent": str(agent), "PRTE_MCA_prte_allow_run_as_root": "1"}
    several = SEVERAL.replace("MP_NUM=16", "MP_NUM=2").replace("0,1,2,3,4,5,6,7", "0")
    mpirun = "mpirun -n 2 --map-by node --host 10.0.0.1,10.0.0.2"
    with machines.inside(0):
        status, output = terminal.run(f"{PORTS}{several}export MODEL_DIR=/models\n{mpirun} start_server")
        assert status == 0 and output.count("Ready: process") == 2 and "node 1 of 2" in output, output
        url = terminal.printed("http://127.0.0.1:9965/v1/chat/completions")
        assert httpx.post(url, json={"text": "Hello", "max_dec_len": 2}).json()["error_code"] == 0
        status, output = terminal.run(f"{several}{mpirun} stop_server")
        assert status == 0 and output.count("Stopped process") >= 2, output


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_secret")
def test_torchrun_starts_several_nodes(machines: Namespaces, checkpoint: Path) -> None:
    served: list[Served] = []
    for rank in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--node-rank", str(rank), "--master-addr", "10.0.0.1", "--master-port", "29501"]
        flags = ["--model", str(checkpoint), "--max-model-len", "256", "--num-gpu-blocks-override", "40"]
        with machines.inside(rank):
            served.append(Served(*flags, command=[*command, "-m", "penstock.cli.main", "serve"]))
    try:
        served[0].start()
        assert sorted(worker_pids(served[0].pid)) == ["penstock-rank0"]
        assert sorted(worker_pids(served[1].pid)) == ["penstock-rank1"]
        with machines.inside(0):
            body = {"model": str(checkpoint), "prompt": "abc", "max_tokens": 3}
            assert httpx.post(f"{served[0].url}/completions", json=body).status_code == 200
    finally:
        for each in served:
            each.terminate()  # torchrun's child processes are in other sessions
        for each in served:
            each.ended()
            each.kill()


@pytest.mark.row("fastdeploy", "ips")
def test_fastdeploy_ips_set_node_options(capsys: pytest.CaptureFixture[str]) -> None:
    for ips, expected in (
        ("127.0.0.1,198.51.100.1", (2, 0, "127.0.0.1")),
        ("198.51.100.1,127.0.0.1,198.51.100.2", (3, 1, "198.51.100.1")),
        ("127.0.0.1", (1, 0, "127.0.0.1")),
    ):
        assert main(["config", "--json", "--compat", "fastdeploy", "--ips", ips]) == 0
        found = json.loads(capsys.readouterr().out)
        assert tuple(found[name]["value"] for name in ("nnodes", "node_rank", "master_addr")) == expected
    assert main(["config", "--compat", "fastdeploy", "--ips", "198.51.100.1,198.51.100.2"]) == 2
    assert "none of them is an address of this machine" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.usefixtures("shared_secret")
def test_nodes_download_and_use_only_weights_of_their_stages(machines: Namespaces, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    config = SMALL | HEADS | {"vocab_size": 3584}
    save(Qwen3Config(**config, head_dim=16, sliding_window=None), whole, max_shard_size="100KB")
    hub = Hub()
    hub.files[NEW] = {path.name: path.read_bytes() for path in whole.iterdir()}
    command = Command(tmp_path, hub.url)
    split, tensor_parallel = ("--pipeline-parallel-size", "2", "--dtype", "float32"), ("--tensor-parallel-size", "2")
    try:
        folders = [
            command.download("org/chat", "--dir", f"{rank}", "--nnodes", "2", "--node-rank", f"{rank}", *split)
            for rank in (0, 1)
        ]
        status, all_files, output = command.run("org/chat", "--dir", "all", "--nnodes", "2", *tensor_parallel)
    finally:
        hub.stop()
    assert status == 0 and "this node needs all weight files" in output
    weights = [{path.name for path in folder.glob("*.safetensors")} for folder in (*folders, Path(all_files), whole)]
    assert weights[2] == weights[3] == weights[0] | weights[1]
    assert weights[0] - weights[1] and weights[1] - weights[0]
    options = options_of(folders[0], (1, 2), 2)
    sampling = SamplingParams(max_tokens=8, temperature=0)

    def answer(llm: LLM) -> list[int]:
        return llm.generate(["Hello"], sampling)[0].outputs[0].token_ids

    expected = answer(LLM(whole, dtype="float32", max_model_len=256))
    with nodes(machines, options | {"model": str(folders[1])}):
        with machines.inside(0):
            llm = LLM(**options)
        assert answer(llm) == expected
        llm.engine.close()
    with pytest.raises(PenstockError, match=r"lacks model-.* which its index names"):
        LLM(folders[0])
