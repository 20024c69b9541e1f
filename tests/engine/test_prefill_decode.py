"""Prefill and decode engines: every request gets the tokens and logprob bytes of a single engine, with engines of any
sizes and with faults of the messages between them.

``PENSTOCK_PD_REQUESTS`` sets the number of random requests, ``PENSTOCK_PD_SCHEDULES`` the number of schedules for
engines with small caches.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import test_exactness
from kv_proxy import Fault, Frames, KVProxy, flipped_bit, lossy, swapped_pieces, wrong_epoch
from serving import free_ports
from test_exactness import (
    GUESSING,
    HEADS,
    LONGEST,
    NGRAM,
    ONLY_STATES,
    STATES,
    STREAMS,
    Result,
    append,
    draw_request,
    results,
    start,
    without_adapters,
)
from test_exactness import answers as run
from test_weights import perturbed

from penstock.core import Code, EngineRequest, PenstockError, SamplingParams, TokenDelta
from penstock.engine.engine import Engine
from penstock.engine.kv_transfer.messages import Message, Read
from penstock.engine.kv_transfer.receiver_link import REFUSAL_SECONDS

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

REQUESTS = int(os.environ.get("PENSTOCK_PD_REQUESTS", "120"))
AT_ONCE = 100
"""Maximum number of concurrently open requests, below the limit of the queues."""
SCHEDULES = int(os.environ.get("PENSTOCK_PD_SCHEDULES", "6"))
SEED = os.environ.get("PENSTOCK_PD_SEED", "")
checkpoint = test_exactness.checkpoint


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_text("of this test's cluster")
    file.chmod(0o600)
    return str(file)


class Cluster:
    """Prefill and decode engines, all driven by this thread, with the interface of one engine.

    Args:
        prefill, decode: options of each engine.
        fault: fault of the network between them, or None.
    """

    def __init__(
        self,
        checkpoint: Path,
        kind: str,
        secret: str,
        rng: Random,
        prefill: list[dict[str, Any]],
        decode: list[dict[str, Any]],
        fault: Fault | None = None,
        **options: Any,
    ) -> None:
        self._random = rng
        common = {"cluster_secret_file": secret, "kv_buffer_size": 2**22, "kv_timeout": 20.0} | options
        if fault:
            common["kv_transport"] = "tcp"
        self.engines: list[Engine] = []
        self.proxies: list[KVProxy] = []
        try:
            for each in prefill:
                self.engines.append(start(checkpoint, kind, role="prefill", **common | each))
            self.prefill = list(self.engines)
            self.addresses = [_connector(engine).address for engine in self.prefill]
            if fault:
                self.proxies = [KVProxy(address, fault, rng.getrandbits(32)) for address in self.addresses]
                self.addresses = [proxy.address for proxy in self.proxies]
            for each in decode:
                self.engines.append(start(checkpoint, kind, role="decode", **common | each))
            self.decode = self.engines[len(prefill) :]
        except BaseException:
            self.close()
            raise

    def add(self, request: EngineRequest) -> None:
        addresses = self._random.sample(self.addresses, len(self.addresses))
        engine = self._random.choice(self.decode)
        engine.add(msgspec.structs.replace(request, prefill=tuple(addresses)))

    def step(self) -> list[TokenDelta]:
        return [delta for engine in self.engines if engine.busy for delta in engine.step()]

    @property
    def busy(self) -> bool:
        return any(engine.busy for engine in self.decode)

    def counts(self, name: str) -> int:
        """Return the sum of a counter over the decode engines."""
        return sum(_connector(engine).counts[name] for engine in self.decode)

    def wait_until_free(self, seconds: float = 60) -> None:
        """Step until all blocks and transfer buffer slots are free. Raises ``TimeoutError`` after ``seconds``."""
        end = time.monotonic() + seconds
        while self._in_use():
            if time.monotonic() > end:
                raise TimeoutError
            self.step()

    def _in_use(self) -> bool:
        pools = [engine.scheduler.device_pool for engine in self.engines]
        buffers = [_connector(engine).buffer for engine in self.engines]
        snapshots = [engine.scheduler.kv.snapshots for engine in self.engines]
        return (
            any(p.num_free < p.total for p in pools)
            or any(b.num_free < b.num_slots for b in buffers)
            or any(each and each.num_taken for each in snapshots)
        )

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for proxy in self.proxies:
            proxy.close()


def _connector(engine: Engine) -> Any:
    assert engine.kv_connector
    return engine.kv_connector


SMALL_CACHE = {"num_gpu_blocks_override": LONGEST // 16 + 8}
TOPOLOGIES: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "1p1d": ("bfloat16 none auto", [{}], [{}]),
    "2p1d, little room": ("float32 none auto", [SMALL_CACHE, {"kv_buffer_size": 2**17}], [SMALL_CACHE]),
    "1p2d, int8": ("bfloat16 w8a8 int8", [{"max_num_batched_tokens": 48}], [{}, {"speculative_config": NGRAM}]),
    "other block sizes": ("bfloat16 none int8", [{"block_size": 64}], [{}, {"block_size": 32}]),
    "tp 2 to tp 1": ("bfloat16 none auto", [{"tensor_parallel_size": 2}], [{"preemption_mode": "swap"}]),
    "pp 2 to tp 2": ("float32 none auto", [{"pipeline_parallel_size": 2}], [{"tensor_parallel_size": 2}]),
    "states": (f"float32 none auto {STATES}", [{}], [{"speculative_config": NGRAM}]),
    "states, tp 2, little room": (
        f"bfloat16 none auto {STATES}",
        [SMALL_CACHE | {"tensor_parallel_size": 2, "num_state_snapshots": 2}],
        [{"tensor_parallel_size": 2, "num_state_snapshots": 4}],
    ),
    "states, pp 2": (f"float32 none auto {STATES}", [{"pipeline_parallel_size": 2}], [{"pipeline_parallel_size": 2}]),
    "only states, tp 2": (
        f"float32 none auto {ONLY_STATES}",
        [{"tensor_parallel_size": 2}],
        [{"tensor_parallel_size": 2}],
    ),
    "heads, pp 2 to tp 2": (
        f"bfloat16 none int8 {HEADS}",
        [{"pipeline_parallel_size": 2}],
        [SMALL_CACHE | {"tensor_parallel_size": 2}],
    ),
    "streams, tp 2 to pp 2": (
        f"bfloat16 none auto {STREAMS}",
        [{"tensor_parallel_size": 2}],
        [SMALL_CACHE | {"pipeline_parallel_size": 2}],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("fault", [None, lossy(0.01)], ids=["", "1 % lost, late or repeated"])
def test_prefill_decode_results_equal_single_engine(
    checkpoint: Path, secret: str, name: str, fault: Fault | None
) -> None:
    kind, prefill, decode = TOPOLOGIES[name]
    rng = Random(f"{name}{bool(fault)}{SEED}")
    requests = [draw_request(rng, number) for number in range(REQUESTS // len(TOPOLOGIES) // 2)]
    requests = without_adapters(requests, kind)
    single = start(checkpoint, kind, enable_prefix_caching=False, threads=1)
    cluster = Cluster(checkpoint, kind, secret, rng, prefill, decode, fault)
    wrong: list[str] = []
    try:
        for begin in range(0, len(requests), AT_ONCE):
            batch = requests[begin : begin + AT_ONCE]
            expected, found = run(single, batch), run(cluster, batch, rng)
            wrong += [name for name in expected if found[name] != expected[name]]
        assert not wrong, f"{len(wrong)} of {len(requests)} requests differ"
        cluster.wait_until_free()
        print(f"\n{name}: {len(requests)} requests, {cluster.counts('completed')} transfers, {len(wrong)} wrong")
        assert cluster.counts("completed") > len(requests) // 8
        assert not cluster.counts("checksum_failures")
        if not fault:
            assert not cluster.counts("failed")
    finally:
        cluster.close()


def test_transfers_by_nixl_give_same_results(checkpoint: Path, secret: str) -> None:
    pytest.importorskip("nixl_cu12", reason="the extra nixl is not installed")
    name = "2p1d, little room"
    kind, prefill, decode = TOPOLOGIES[name]
    rng = Random(f"nixl{SEED}")
    requests = [draw_request(rng, number) for number in range(REQUESTS // 4)]
    alone = run(start(checkpoint, kind, enable_prefix_caching=False, threads=1), requests)
    cluster = Cluster(checkpoint, kind, secret, rng, prefill, decode, kv_transport="nixl")
    try:
        assert run(cluster, requests, rng) == alone
        cluster.wait_until_free()
        assert cluster.counts("completed") > len(requests) // 8
        assert not cluster.counts("failed")
        assert not cluster.counts("checksum_failures")
    finally:
        cluster.close()


def draw_long_requests(rng: Random, count: int) -> list[EngineRequest]:
    """Draw requests with a transferred prompt that takes at least two slots of the buffer."""
    drawn = (draw_request(rng, number) for number in itertools.count())
    return list(itertools.islice((r for r in drawn if len(r.prompt) > 70 and _is_transferred(r)), count))


def _is_transferred(request: EngineRequest) -> bool:
    return request.sampling.prompt_logprobs is None and not request.sampling.return_context_logits


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("fault", "counter"),
    [
        (flipped_bit(0.3), "checksum_failures"),
        (swapped_pieces(1.0), "checksum_failures"),
        (wrong_epoch(0.3), "recomputed"),
        (flipped_bit(1.0), "recomputed"),
    ],
    ids=["a flipped bit", "swapped slots", "a wrong epoch", "every piece wrong"],
)
def test_corrupted_pieces_are_detected(checkpoint: Path, secret: str, fault: Fault, counter: str) -> None:
    """Corrupted pieces are read again, or the decode engine recomputes the prompt; no answer is wrong."""
    rng = Random(counter)
    requests = draw_long_requests(rng, 20)
    alone = run(start(checkpoint, "bfloat16 none auto", threads=1), requests)
    cluster = Cluster(checkpoint, "bfloat16 none auto", secret, rng, [{}], [{}], fault, kv_timeout=4.0)
    try:
        assert run(cluster, requests, rng) == alone
        cluster.wait_until_free()
        assert cluster.proxies[0].faults
        assert cluster.counts(counter)
    finally:
        cluster.close()


def test_slot_overwritten_during_read_is_detected(checkpoint: Path, secret: str) -> None:
    """The prefill engine reuses a slot while the decode engine reads it."""
    rng = Random("early")
    requests = draw_long_requests(rng, 20)
    alone = run(start(checkpoint, "bfloat16 none auto", threads=1), requests)

    def overwrite(rng: Random, way: str, message: Message, data: bytes) -> Frames:
        if isinstance(message, Read) and rng.random() < 0.3:
            _connector(cluster.prefill[0]).buffer.data[message.slot] = 255
        return [(message, data)]

    cluster = Cluster(checkpoint, "bfloat16 none auto", secret, rng, [{}], [{}], overwrite)
    try:
        assert run(cluster, requests, rng) == alone
        cluster.wait_until_free()
        assert cluster.counts("checksum_failures")
    finally:
        cluster.close()


def test_prompt_without_prefill_engine_is_recomputed_or_fails(checkpoint: Path, secret: str) -> None:
    """``kv_load_failure`` selects: the decode engine recomputes the prompt, or the request fails, without a timeout."""
    rng = Random("gone")
    requests = draw_long_requests(rng, 4)
    alone = run(start(checkpoint, "bfloat16 none auto", threads=1), requests)
    for policy in ("recompute", "fail"):
        cluster = Cluster(checkpoint, "bfloat16 none auto", secret, rng, [{}], [{}], kv_load_failure=policy)
        try:
            cluster.prefill[0].close()
            if policy == "recompute":
                assert run(cluster, requests) == alone
                continue
            cluster.add(requests[0])
            deltas = []
            while cluster.busy:
                deltas += cluster.step()
            assert {delta.failure.code for delta in deltas if delta.failure} == {Code.UNAVAILABLE}
        finally:
            cluster.engines.remove(cluster.prefill[0])
            cluster.close()


def test_restarted_prefill_engine_is_used_again(checkpoint: Path, secret: str) -> None:
    """The decode engine reconnects without delay, although no request is waiting for the prefill engine."""
    rng, kind = Random("back"), "bfloat16 none auto"
    requests = draw_long_requests(rng, 30)
    (port,) = free_ports(1)
    cluster = Cluster(checkpoint, kind, secret, rng, [{"kv_port": port}], [{}])
    try:
        run(cluster, requests[:2])
        assert cluster.counts("completed")
        closed = cluster.prefill.pop()
        cluster.engines.remove(closed)
        closed.close()
        run(cluster, requests[2:4])
        completed, began = cluster.counts("completed"), time.monotonic()
        assert cluster.counts("recomputed")
        restarted = start(
            checkpoint, kind, role="prefill", kv_port=port, cluster_secret_file=secret, kv_buffer_size=2**22
        )
        cluster.engines.append(restarted)
        remaining = requests[4:]
        while cluster.counts("completed") == completed:
            run(cluster, [remaining.pop()])
        assert time.monotonic() - began < REFUSAL_SECONDS
    finally:
        cluster.close()


@pytest.mark.slow
def test_mismatched_engines_refuse_each_other(checkpoint: Path, secret: str, caplog: Any) -> None:
    """Engines differ in weights, KV cache or fingerprint. The log names the difference, and the decode engine computes
    the prompt."""
    rng = Random("other")
    [request] = draw_long_requests(rng, 1)
    for options, message in (
        ({"load_format": "dummy", "seed": 1}, "other weights"),
        ({"kv_cache_dtype": "int8"}, "its KV cache has other"),
        ({"quantization": "w8a8"}, "allow-fingerprint-mismatch"),
    ):
        kind = "bfloat16 none auto"
        alone = run(start(checkpoint, kind, threads=1, **options), [request])
        cluster = Cluster(checkpoint, kind, secret, rng, [{}], [options])
        try:
            assert run(cluster, [request]) == alone
            assert message in caplog.text
            assert not cluster.counts("completed")
        finally:
            cluster.close()


def draw_options(rng: Random) -> dict[str, Any]:
    """Draw the options that both roles have, for an engine with a small cache."""
    block_size = rng.choice((16, 16, 32, 48))
    blocks = -(-LONGEST // block_size)
    return {
        "block_size": block_size,
        "num_gpu_blocks_override": blocks + rng.choice((0, 0, 1, 4, 40)),
        "max_num_batched_tokens": rng.choice((24, 48, 100, 512)),
        "long_prefill_token_threshold": rng.choice((0, 0, 24)),
        "max_num_partial_prefills": 4,
        "max_long_partial_prefills": 4,
        "max_num_seqs": rng.choice((3, 64)),
        "max_concurrent_batches": rng.choice((1, 1, 2, 3)),
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "preemption_mode": rng.choice(("recompute", "swap")),
        "swap_space": 0.001,
        "kv_buffer_size": rng.choice((2**17, 2**18, 2**20)),
        "kv_offloading_size": rng.choice((0.0, 0.0005, 0.01)),
    }


def draw_decode_options(rng: Random, checkpoint: Path) -> dict[str, Any]:
    drafted = json.dumps(GUESSING | {"model": str(checkpoint)})
    return draw_options(rng) | {
        "batch_scheduler_policy": rng.choice(("max_utilization", "guaranteed_no_evict")),
        "kv_cache_ratio": rng.choice((1.0, 1.0, 0.7)),
        "static_decode_blocks": rng.choice((0, 0, 2)),
        "speculative_config": rng.choice(("", "", NGRAM, drafted)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32 none auto", f"float32 none auto {STATES}"])
def test_small_caches_and_ended_requests_keep_other_results(checkpoint: Path, secret: str, kind: str) -> None:
    """Requests are preempted, aborted or time out, and prefix caches are cleared on either side. The other requests get
    their results, and every block and slot is freed."""
    rng = Random(f"little room {SEED}")
    requests = draw_long_requests(rng, 14)
    requests = without_adapters(requests, kind)
    alone = run(start(checkpoint, kind, threads=1), requests)
    for number in range(SCHEDULES):
        rng = Random(f"schedule {number} {SEED}")
        prefill, decode = draw_options(rng), draw_decode_options(rng, checkpoint)
        if rng.random() < 0.3:
            prefill["max_queue_time"] = 0.02
        cluster = Cluster(checkpoint, kind, secret, rng, [prefill], [decode])
        try:
            results = _run_some(cluster, requests, rng, 0.0 if number % 3 == 0 else 0.03)
            wrong = [name for name, result in results.items() if result != alone[name]]
            assert not wrong, (number, prefill, decode)
            cluster.wait_until_free(10)
            assert not cluster.counts("checksum_failures")
        except TimeoutError:
            pytest.fail(f"schedule {number} of {prefill} and {decode} does not end")
        finally:
            cluster.close()


def _run_some(cluster: Cluster, requests: list[EngineRequest], rng: Random, ending: float) -> dict[str, Result]:
    """Run requests of which some are aborted or time out; return the results of the others.

    Args:
        ending: probability per step that a request is aborted, and probability per step that a cache is cleared.
    """
    outputs: dict[str, dict[int, list[Any]]] = {}
    remaining = rng.sample(requests, len(requests))
    running: list[str] = []
    end = time.monotonic() + 30
    while remaining or cluster.busy:
        if time.monotonic() > end:
            raise TimeoutError
        while remaining and rng.random() < 0.3:
            request = remaining.pop()
            deadline = time.monotonic() + rng.random() if rng.random() < 4 * ending else None
            try:
                cluster.add(msgspec.structs.replace(request, deadline=deadline, priority=rng.randint(-3, 3)))
            except PenstockError as error:  # the cache cannot hold all of the request's sequences
                assert error.failure.code is Code.INVALID
                continue
            running.append(request.request_id)
            outputs[request.request_id] = {}
        if running and rng.random() < ending:
            name = running.pop(rng.randrange(len(running)))
            for engine in cluster.decode:
                engine.abort(name)
            outputs.pop(name, None)
        if rng.random() < ending:
            rng.choice(cluster.engines).scheduler.device_pool.clear_cache()
        for delta in cluster.step():
            if delta.request_id not in outputs:
                continue
            if delta.failure:
                assert delta.failure.code is Code.TIMEOUT, delta
                del outputs[delta.request_id]
                continue
            append(outputs[delta.request_id], delta)
    return results(outputs)


@pytest.mark.slow
def test_weight_updates_and_sleep_give_old_or_new_results(checkpoint: Path, secret: str, tmp_path: Path) -> None:
    """Engines change weights one after the other while KV is in transit between them: each request has the result of
    either the old or the new weights. Sleeping changes no bit. All blocks and slots are freed."""
    kind, folders = "bfloat16 none auto", [checkpoint, perturbed(checkpoint, tmp_path / "other")]
    drawn = draw_long_requests(Random("weights"), 16)
    requests = [each for each in drawn if not each.sampling.guided_decoding]  # other weights may violate a grammar
    alone = [run(start(folder, kind, threads=1), requests) for folder in folders]
    assert alone[0] != alone[1]
    for number in range(SCHEDULES):
        rng = Random(f"weights {number} {SEED}")
        options = {"num_gpu_blocks_override": rng.choice((LONGEST // 16 + 40, 400)), "kv_buffer_size": 2**18}
        cluster = Cluster(checkpoint, kind, secret, rng, [options], [options])
        try:
            outputs: dict[str, dict[int, list[Any]]] = {request.request_id: {} for request in requests}
            remaining = rng.sample(requests, len(requests))
            in_progress: dict[Engine, Any] = {}
            changes = [(engine, rng.choice(("weights", "sleep", "sleep"))) for engine in cluster.engines * 2]
            rng.shuffle(changes)
            limit = time.monotonic() + 60
            while remaining or changes or in_progress or cluster.busy:
                assert time.monotonic() < limit, (number, remaining, changes, in_progress)
                if remaining and rng.random() < 0.2:
                    cluster.add(remaining.pop())
                if changes and len(in_progress) < 2 and rng.random() < 0.05 and changes[-1][0] not in in_progress:
                    engine, action = changes.pop()
                    in_progress[engine] = _change(engine, action, folders[1], rng)
                for engine in cluster.engines:
                    if engine in in_progress and next(in_progress[engine], "done") == "done":
                        del in_progress[engine]
                    if engine.busy or engine.has_pending:
                        for delta in engine.step():
                            assert not delta.failure, delta
                            append(outputs[delta.request_id], delta)
            found = results(outputs)
            assert not [name for name in found if found[name] not in (alone[0][name], alone[1][name])], number
            cluster.wait_until_free(10)
        finally:
            cluster.close()


def _change(engine: Engine, action: str, folder: Path, rng: Random) -> Iterator[None]:
    """Change an engine's weights, or put it to sleep for a few steps. Resume the iterator after each engine step."""
    if action == "weights":
        steps = [lambda: engine.weights.load(str(folder)), lambda: engine.weights.commit("finish")]
    else:
        level = rng.choice((1, 2))
        steps = [lambda: engine.sleeper.sleep(level, "keep"), lambda: engine.sleeper.wake_up()]
    for begin in steps:
        done = begin()
        while not done.done():
            yield
        done.result()
        for _ in range(rng.randint(1, 30)):
            yield


def test_abort_is_sent_to_prefill_engine(checkpoint: Path, secret: str) -> None:
    """An otherwise idle decode engine sends the abort message, and its blocks are free at once."""
    rng = Random("aborted")
    [request] = draw_long_requests(rng, 1)
    cluster = Cluster(checkpoint, "bfloat16 none auto", secret, rng, [{"max_num_batched_tokens": 16}], [{}])
    [prefill], [decode] = cluster.prefill, cluster.decode
    try:
        cluster.add(request)
        decode.step()
        pool = decode.scheduler.device_pool
        assert pool.num_used
        wait([_connector(prefill).activity], 10)
        prefill.step()  # computes 16 tokens, too few for an offer
        decode.abort(request.request_id)
        while decode.busy:
            decode.step()
        assert not pool.num_used
        wait([_connector(prefill).activity], 10)
        prefill.step()
        assert not prefill.scheduler.num_unfinished_requests
    finally:
        cluster.close()


def test_wakeup_is_cleared_when_events_are_taken(checkpoint: Path, secret: str) -> None:
    """``wakeup`` is not readable after ``poll``, even if it was just being set: an idle engine waits for it."""
    rng = Random("wakeup")
    cluster = Cluster(checkpoint, "bfloat16 none auto", secret, rng, [{}], [{}])
    try:
        connector = _connector(cluster.prefill[0])
        taken = threading.Event()

        def take(activity: object) -> None:
            connector.poll()
            taken.set()

        connector.activity.add_done_callback(take)  # called by the thread that is setting wakeup
        cluster.add(draw_long_requests(rng, 1)[0])
        cluster.decode[0].step()
        assert taken.wait(10)
        assert not select.select([connector.wakeup], [], [], 0.2)[0]
    finally:
        cluster.close()


def test_imports_take_no_more_blocks_than_kv_cache_ratio(checkpoint: Path, secret: str) -> None:
    """If imports took all blocks, sequences could not grow and would run one after the other."""
    rng = Random("growth")
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    requests = [
        EngineRequest(request_id=str(i), prompt=[rng.randrange(2, 300) for _ in range(100)], sampling=sampling)
        for i in range(16)
    ]
    decode = {"kv_cache_ratio": 0.5, "num_gpu_blocks_override": 64}
    cluster = Cluster(checkpoint, "bfloat16 none auto", secret, rng, [{}], [decode])
    try:
        run(cluster, requests)
        assert cluster.counts("completed") == len(requests)
        assert cluster.decode[0].steps < 16 * 40 / 2
    finally:
        cluster.close()


def test_full_decode_engine_leaves_prompts_to_prefill_engine(checkpoint: Path, secret: str) -> None:
    """After a timeout, the full engine computes the first prompt of its queue, but not all others that have waited."""
    rng = Random("full")
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requests = [
        EngineRequest(request_id=str(i), prompt=[rng.randrange(2, 300) for _ in range(120)], sampling=sampling)
        for i in range(7)
    ]
    decode = {"num_gpu_blocks_override": 18}  # enough blocks for two sequences
    cluster = Cluster(checkpoint, "bfloat16 none auto", secret, rng, [{}], [decode], kv_timeout=0.5)
    scheduler = cluster.decode[0].scheduler
    try:
        for request in requests:
            cluster.add(request)
        while len(scheduler.running) < 2:
            cluster.step()
        for request in requests:
            scheduler.pause(request.request_id, True)
        while not scheduler.waiting:
            cluster.step()
        assert len(scheduler.waiting) == 1
        for request in requests:
            scheduler.pause(request.request_id, False)
        while cluster.busy:
            cluster.step()
        assert cluster.counts("completed") >= 4
    finally:
        cluster.close()
