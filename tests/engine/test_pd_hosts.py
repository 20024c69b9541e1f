"""Scheduler, prefill instance and decode instance on three hosts (network namespaces), configured by rank tables."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import namespaces
import pytest
from namespaces import Namespaces
from serving import Served
from test_router import PROMPT, until

from penstock.cli.main import main
from penstock.engine.service.connection import HEARTBEAT_TIMEOUT

pytestmark = pytest.mark.slow

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)


class Hosts:
    """Three hosts with one server each: scheduler, prefill instance, decode instance."""

    def __init__(self, machines: Namespaces, folder: Path) -> None:
        self.machines = machines
        scheduler, prefill, decode = machines.addresses
        command = ["ranktable", "--save-dir", str(folder)]
        gen = [*command, "--mode", "gen", "--ip"]
        assert main([*gen, scheduler, "--api-server"]) == 0
        assert main([*gen, prefill, "--prefill-server-list", "0,1"]) == 0
        assert main([*gen, decode, "--decode-server-list", "0"]) == 0
        tables = [str(folder / f"global_ranktable_{address}.json") for address in machines.addresses]
        assert main([*command, "--mode", "merge", "--global-ranktable-list", *tables]) == 0
        names = [f"{scheduler}_host", f"{prefill}_01", f"{decode}_0"]
        self.servers: list[Served] = []
        for host, name in enumerate(names):
            environment = {
                "XDG_CONFIG_HOME": str(folder),  # all hosts share a file system
                "GLOBAL_RANK_TABLE_FILE_PATH": str(folder / "global_ranktable_merge.json"),
                "RANK_TABLE_FILE_PATH": str(folder / f"local_ranktable_{name}.json"),
                "NODE_PORTS": "8088,8088",
                "USE_OPENAI": "0",
            }
            flags = f"--compat ascend-vllm --host 0.0.0.0 --num-gpu-blocks-override 120 --port {8088 if host else 9000}"
            flags += f" --tensor-parallel-size {2 if host == 1 else 1} --pd-min-prefill-tokens 100 --kv-transport tcp"
            with machines.inside(host):
                self.servers.append(Served(*flags.split(), environment=environment))
        self.scheduler, self.prefill, self.decode = self.servers

    def ask(self, **changes: Any) -> httpx.Response:
        """Send a completion request to the scheduler from its host."""
        with self.machines.inside(0):
            body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, **changes}
            return httpx.post("http://127.0.0.1:9000/v1/completions", json=body, timeout=90)

    def instances(self) -> dict[str, dict[str, Any]]:
        """Return the scheduler's report on its instances, by role."""
        with self.machines.inside(0):
            found = httpx.get("http://127.0.0.1:9000/penstock/instances").json()["instances"]
        return {instance["role"]: instance for instance in found}

    def state(self, role: str) -> str:
        state: str = self.instances()[role]["state"]
        return state


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := namespaces.unavailable_reason():
        pytest.skip(reason)
    with Namespaces(3) as machines, ExitStack() as stack:
        hosts = Hosts(machines, tmp_path_factory.mktemp("hosts"))
        for server in hosts.servers:
            stack.callback(server.kill)
        for server in hosts.servers:
            server.start()
        until(lambda: [each["state"] for each in hosts.instances().values()] == ["ready", "ready"])
        yield hosts
        for server in hosts.servers:
            server.terminate()
        assert [server.ended() for server in hosts.servers] == [0, 0, 0]


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    result: str = answer.json()["choices"][0]["text"]
    return result


def test_hosts_give_answer_of_single_server(hosts: Hosts) -> None:
    """Two ranks compute the prompt, one rank decodes, and KV is transferred over TCP."""
    with Served("--num-gpu-blocks-override", "120", "--generation-config", "vllm") as single:
        body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        expected = httpx.post(f"{single.url}/completions", json=body).json()["choices"][0]["text"]
    assert text(hosts.ask()) == expected
    until(lambda: hosts.instances()["decode"]["kv_completed"] > 0)
    until(lambda: hosts.instances()["prefill"]["kv_bytes_sent"] > 0)


@pytest.mark.thorough  # slow: detecting a network failure takes several seconds
def test_disconnected_hosts_are_lost_and_rejoin(hosts: Hosts) -> None:
    """A request waits for the only decode instance until it has rejoined."""
    expected = text(hosts.ask())
    for host, role in ((1, "prefill"), (2, "decode")):
        hosts.machines.connect(host, False)
        began = time.monotonic()
        if role == "prefill":
            assert text(hosts.ask(prompt=f"{PROMPT} Again.", max_tokens=3)) is not None
        until(lambda role=role: "lost" in hosts.state(role))  # type: ignore[misc]
        assert time.monotonic() - began < 2 * HEARTBEAT_TIMEOUT + 35  # kv_timeout is 30 s
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(hosts.ask)
            if role == "decode":
                with pytest.raises(TimeoutError):
                    waiting.result(1)
            hosts.machines.connect(host, True)
            until(lambda role=role: hosts.state(role) == "ready")  # type: ignore[misc]
            assert text(waiting.result()) == expected


def test_engine_of_only_device_is_bound_to_all_cores(hosts: Hosts) -> None:
    """The decode instance has its host's only device. With several devices, each is bound to a part of the cores."""
    (engine,) = hosts.decode.pids["engine"]
    assert os.sched_getaffinity(engine) == os.sched_getaffinity(0)
