"""Prefill and decode engines: every request gets the tokens and the logprob bytes of a single engine, whatever the
engines' sizes and whatever happens to the messages between them.

``PENSTOCK_PD_REQUESTS`` says how many requests are drawn.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import test_exactness
from kv_proxy import Fault, KVProxy, lossy
from test_exactness import LONGEST, NGRAM, Result, draw_request, start

from penstock.core import EngineRequest, TokenDelta
from penstock.engine.engine import Engine

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

REQUESTS = int(os.environ.get("PENSTOCK_PD_REQUESTS", "200"))
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
        fault: of the network between them; None where there is none.
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
            for one in prefill:
                self.engines.append(start(checkpoint, kind, role="prefill", **common | one))
            self.prefill = list(self.engines)
            self.addresses = [_connector(engine).address for engine in self.prefill]
            if fault:
                self.proxies = [KVProxy(address, fault, rng.getrandbits(32)) for address in self.addresses]
                self.addresses = [proxy.address for proxy in self.proxies]
            for one in decode:
                self.engines.append(start(checkpoint, kind, role="decode", **common | one))
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
        """The sum of a counter of the decode engines."""
        return sum(_connector(engine).counts[name] for engine in self.decode)

    def wait_until_free(self) -> None:
        """Every block and every slot of a transfer buffer comes back."""
        while self._held():
            self.step()

    def _held(self) -> bool:
        pools = [engine.scheduler.device_pool for engine in self.engines]
        buffers = [_connector(engine).buffer for engine in self.engines]
        return any(p.num_free < p.total for p in pools) or any(b.num_free < b.num_slots for b in buffers)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for proxy in self.proxies:
            proxy.close()


def _connector(engine: Engine) -> Any:
    assert engine.kv_connector
    return engine.kv_connector


def run(engine: Engine | Cluster, requests: list[EngineRequest], rng: Random | None = None) -> dict[str, Result]:
    """All requests to their end; with ``rng`` they arrive bit by bit."""
    told: dict[str, dict[int, list[Any]]] = {r.request_id: {} for r in requests}
    left = list(requests)
    while left or engine.busy:
        while left and (rng is None or rng.random() < 0.5):
            engine.add(left.pop(0))
        for delta in engine.step():
            assert not delta.failure, delta
            own = told[delta.request_id].setdefault(delta.sequence, [[], [], [], bytearray()])
            own[0] += delta.token_ids
            own[1] += delta.logprobs or ([] if delta.cumulative_logprob is None else [delta.cumulative_logprob])
            own[2] += delta.prompt_logprobs or []
            own[3] += (delta.context_logits or b"") + (delta.generation_logits or b"")
    return {
        name: {index: (tokens, msgspec.msgpack.encode(rest)) for index, (tokens, *rest) in sequences.items()}
        for name, sequences in told.items()
    }


SMALL_CACHE = {"num_gpu_blocks_override": LONGEST // 16 + 8}
TOPOLOGIES: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "1p1d": ("bfloat16 none auto", [{}], [{}]),
    "2p1d, little room": ("float32 none auto", [SMALL_CACHE, {"kv_buffer_size": 2**17}], [SMALL_CACHE]),
    "1p2d, int8": ("bfloat16 w8a8 int8", [{"max_num_batched_tokens": 48}], [{}, {"speculative_config": NGRAM}]),
    "tp 2 to tp 1": ("bfloat16 none auto", [{"tensor_parallel_size": 2}], [{"preemption_mode": "swap"}]),
    "pp 2 to tp 2": ("float32 none auto", [{"pipeline_parallel_size": 2}], [{"tensor_parallel_size": 2}]),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("fault", [None, lossy(0.01)], ids=["", "1 % lost, late or repeated"])
def test_answers_are_those_of_a_single_engine(checkpoint: Path, secret: str, name: str, fault: Fault | None) -> None:
    kind, prefill, decode = TOPOLOGIES[name]
    rng = Random(f"{name}{bool(fault)}{SEED}")
    requests = [draw_request(rng, number) for number in range(REQUESTS // len(TOPOLOGIES) // 2)]
    lone = start(checkpoint, kind, enable_prefix_caching=False, threads=1)
    alone = run(lone, requests)
    cluster = Cluster(checkpoint, kind, secret, rng, prefill, decode, fault)
    try:
        apart = run(cluster, requests, rng)
        wrong = [name for name in alone if apart[name] != alone[name]]
        assert not wrong, f"{len(wrong)} of {len(requests)} requests differ"
        cluster.wait_until_free()
        assert cluster.counts("completed") > len(requests) // 8
        assert not cluster.counts("checksum_failures")
        if not fault:
            assert not cluster.counts("failed")
    finally:
        cluster.close()
