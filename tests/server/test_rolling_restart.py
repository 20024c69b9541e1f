"""Restarts of engine processes (SIGHUP, ``POST /v1/restart``) beside other events."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import storm
from serving import Served
from test_lora import adapter

from penstock import demo

BLOCKS = ("--num-gpu-blocks-override", "400")


@pytest.mark.slow
def test_signal_to_all_processes_restarts_only_engines() -> None:
    """``systemctl kill --signal HUP`` sends it to every process of the unit."""
    with Served(*BLOCKS) as server:
        (engine,), api = server.pids["engine"], server.pids["api"]
        os.killpg(server.pid, signal.SIGHUP)
        server.find(f"engine process {engine} was replaced by")
        assert server.pids["api"] == api
        assert not [line for line in server.lines if "ended:" in line]


@pytest.mark.slow
def test_model_unloaded_during_restart_is_gone() -> None:
    flags = ("--model-control-mode", "explicit", "--load-model", "penstock-demo", "--server-dev-mode")
    with Served(*BLOCKS, *flags) as server, ThreadPoolExecutor(1) as pool:
        restarting = pool.submit(httpx.post, f"{server.root}/v1/restart", timeout=60)
        asyncio.run(storm.eventually(lambda: two_engines(server)))
        unload = f"{server.root}/v2/repository/models/{server.name}/unload"
        assert httpx.post(unload, timeout=60).status_code == 200
        assert restarting.result().status_code in (200, 503)
        assert not server.pids["engine"]
        assert not httpx.get(f"{server.url}/models").json()["data"]
        assert httpx.post(unload.replace("unload", "load"), timeout=60).status_code == 200
        assert len(server.pids["engine"]) == 1


async def two_engines(server: Served) -> None:
    assert len(server.pids["engine"]) == 2


@pytest.mark.slow
def test_unloaded_adapter_does_not_return_with_new_engine(tmp_path: Path) -> None:
    folder = adapter(demo.CHAT, tmp_path / "a", r=4)
    with Served(*BLOCKS, "--lora-modules", f"a={folder}", "--allow-runtime-lora-updating") as server:
        answer = httpx.post(f"{server.url}/unload_lora_adapter", json={"lora_name": "a"}, timeout=60)
        assert answer.status_code == 200, answer.text
        asyncio.run(storm.replace_engines(server))
        assert [model["id"] for model in httpx.get(f"{server.url}/models").json()["data"]] == [server.name]


@pytest.mark.slow
def test_api_process_without_cpu_time_misses_a_restart() -> None:
    """When it runs again, it learns of two replacements at once; the first new engine has already ended."""
    with Served(*BLOCKS) as server:
        (api,), (first,) = server.pids["api"], server.pids["engine"]
        os.kill(api, signal.SIGSTOP)
        os.kill(server.pid, signal.SIGHUP)
        second = int(server.find(rf"engine process {first} was replaced by (\d+)")[1])
        os.kill(server.pid, signal.SIGHUP)
        server.find(f"engine process {second} was replaced by")
        os.kill(api, signal.SIGCONT)
        answer = httpx.post(f"{server.url}/completions", json={"prompt": "The sea", "max_tokens": 3}, timeout=60)
        assert answer.status_code == 200, answer.text
        asyncio.run(storm.eventually(lambda: one_replica(server)))


async def one_replica(server: Served) -> None:
    """Metrics per replica exist only for several replicas."""
    assert "penstock:replica_" not in httpx.get(f"{server.root}/metrics").text
