"""Ray clusters: results bit-identical to those of a server without Ray, streams, autoscaling, killed nodes, and Ray
Serve LLM."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest
from ray_commands import RayCluster, RayCommand, scratch
from repository import ROOT
from serving import SERVE, Served, Servers, free_ports

from penstock import PenstockError, demo
from penstock.config.options import EngineOptions
from penstock.engine.engine import Engine
from penstock.ray import Arguments, app

pytestmark = pytest.mark.slow

BLOCKS = ("--num-gpu-blocks-override", "100")
LONG = {"prompt": "One two three", "max_tokens": 1900, "ignore_eos": True, "temperature": 0, "stream": True}
LLM_APP = "ray.serve.llm:build_openai_app"
PROMPTS = [f"The story of {i}:" for i in range(8)]
CHAT = {"messages": [{"role": "user", "content": "What is the capital of Canada?"}], "max_tokens": 20, "temperature": 0}


@pytest.fixture(scope="module")
def deployed() -> Iterator[RayCommand]:
    """Application with one or two replicas. Only the usage of the KV cache changes their number."""
    args = {
        "num_gpu_blocks_override": 100,
        "max_replicas": 2,
        "target_ongoing_requests": 1000,
        "target_kv_cache_usage": 0.02,
        "deployment_config": {
            "autoscaling_config": {
                "upscale_delay_s": 0,
                "downscale_delay_s": 0,
                "metrics_interval_s": 0.1,
                "look_back_period_s": 0.5,
            }
        },
    }
    with RayCluster(4) as cluster, cluster.serve(args) as running:
        yield running


def complete(url: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json={"max_tokens": 20, "logprobs": 3, "temperature": 0, **body})
    found: dict[str, Any] = answer.json()
    assert answer.status_code == 200, found
    return found


def bits(answer: dict[str, Any]) -> Any:
    """Return the parts of an answer that do not depend on id and time: text and logprobs of each choice."""
    return [(choice["text"], choice["logprobs"]) for choice in answer["choices"]]


def test_answers_on_ray_equal_answers_of_server(deployed: RayCommand, servers: Servers) -> None:
    """Answers of several dialects are compared, and a stream's text."""
    served = servers.get(*BLOCKS)
    requests = [{"prompt": prompt, "temperature": i % 2, "seed": i, "n": 1 + i % 3} for i, prompt in enumerate(PROMPTS)]
    expected = [bits(complete(served.root, **body)) for body in requests]
    with ThreadPoolExecutor(len(requests)) as threads:
        assert list(threads.map(lambda body: bits(complete(deployed.url, **body)), requests)) == expected
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "logprobs": True}),
        ("/v1/messages", {**CHAT, "model": "default"}),
        ("/v2/models/ensemble/generate", {"text_input": PROMPTS[0], "max_tokens": 20}),
        ("/v1/embeddings", {"input": PROMPTS[0]}),
    ):
        answers = [httpx.post(root + path, json=body).json() for root in (served.root, deployed.url)]
        for answer in answers:
            for field in ("id", "created"):
                answer.pop(field, None)
        assert answers[0] == answers[1], path
    with httpx.stream("POST", f"{deployed.url}/v1/completions", json={**requests[0], "stream": True}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]" and len(events) > 5
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1] if '"choices":[{' in event)
    assert text == complete(served.root, prompt=PROMPTS[0], temperature=0, seed=0, max_tokens=16)["choices"][0]["text"]


def test_errors_have_format_of_dialect(deployed: RayCommand) -> None:
    body = {"prompt": "x", "temperature": -1}
    answer = httpx.post(f"{deployed.url}/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "temperature"
    assert answer.headers.get_list("X-Request-Id") == ["mine"]
    assert httpx.get(f"{deployed.url}/nowhere").status_code == 404
    assert httpx.get(f"{deployed.url}/health").status_code == 200
    assert "penstock:num_requests_running" in httpx.get(f"{deployed.url}/metrics").text


def test_number_of_replicas_depends_on_kv_cache_usage(deployed: RayCommand) -> None:
    """Clients that fill the KV cache start a second replica, which ends after them. Clients that disconnect cancel
    their requests."""
    after = len(deployed.lines)
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            with httpx.stream("POST", f"{deployed.url}/v1/completions", json=LONG) as response:
                for _ in response.iter_lines():
                    if stop.is_set():
                        break

    with ThreadPoolExecutor(3) as threads:
        clients = [threads.submit(load) for _ in range(3)]
        try:
            deployed.find("Upscaling .* from 1 to 2", after)
        finally:
            stop.set()
        for client in clients:
            client.result()
    deployed.find("Downscaling .* from 2 to 1", after)
    assert bits(complete(deployed.url, prompt=PROMPTS[0]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"role": "decode"}, "--role has no meaning on Ray: use penstock serve for separate prefill"),
        ({"port": 8001}, "--port has no meaning on Ray: Ray Serve's proxies listen"),
        ({"models": '{"a": "b"}'}, "a deployment has one model"),
        ({"max_num_seq": 4}, "did you mean max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas"),
    ],
)
def test_invalid_deployment_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        app(Arguments(**given))


def test_invalid_options_for_ranks_on_ray_are_refused() -> None:
    for given in ({"nnodes": 2}, {"data_parallel_size": 2}):
        with pytest.raises(PenstockError, match=next(iter(given))):
            Engine(EngineOptions(tensor_parallel_size=2, distributed_executor_backend="ray", **given))


def test_unreachable_cluster_is_refused_after_node_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    options = EngineOptions(tensor_parallel_size=2, distributed_executor_backend="ray", node_timeout=0.5)
    with pytest.raises(PenstockError, match=f"no Ray cluster answers at RAY_ADDRESS, 127.0.0.1:{port}, within 0.5"):
        Engine(options)


def test_error_is_equal_after_pickling() -> None:
    """Ray pickles an error to send it from an actor to its caller."""
    with pytest.raises(PenstockError) as raised:
        app(Arguments(max_num_seqs=0))
    assert pickle.loads(pickle.dumps(raised.value)).failure == raised.value.failure


def test_import_without_ray_names_the_extra() -> None:
    code = "import sys; sys.modules['ray'] = None; import penstock.ray"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'penstock-llm[ray]'" in ran.stderr.splitlines()[-1]


@pytest.mark.thorough
def test_killed_node_causes_errors_until_its_replica_is_replaced() -> None:
    """Two of three nodes have a replica, and one of these nodes is killed under load. No request hangs or gets a wrong
    answer; the third node gets a replica, and then all requests are answered."""
    args = {
        "num_gpu_blocks_override": 100,
        "min_replicas": 2,
        "deployment_config": {"max_replicas_per_node": 1, "health_check_period_s": 1},
    }
    outcomes = Counter[str]()
    stop = threading.Event()
    with RayCluster(0, 1, 1, 1) as cluster, cluster.serve(args) as running:
        expected = {prompt: text_of(running.url, prompt) for prompt in PROMPTS}

        def load(number: int) -> None:
            while not stop.is_set():
                prompt = PROMPTS[number % len(PROMPTS)]
                number += 1
                began = time.monotonic()
                try:
                    text = text_of(running.url, prompt)
                    outcomes["right" if text == expected[prompt] else "wrong"] += 1
                except (httpx.HTTPError, AssertionError):
                    outcomes["failed"] += 1
                outcomes["slow"] += time.monotonic() - began > 30

        with ThreadPoolExecutor(8) as threads:
            clients = [threads.submit(load, number) for number in range(8)]
            try:
                until(lambda: outcomes["right"] > 50)
                victim = next(raylet for raylet in cluster.raylets if cluster.replicas_of(raylet))
                replicas = cluster.replicas_of(victim)
                os.kill(victim, signal.SIGKILL)
                for replica in replicas:
                    os.kill(replica, signal.SIGKILL)  # simulate a failure of the whole machine
                killed = outcomes["right"]
                until(lambda: outcomes["right"] > killed + 50)
                until(lambda: sum(bool(cluster.replicas_of(raylet)) for raylet in cluster.raylets) == 2)
                until(lambda: len(answering_replicas(running.url)) == 2)
            finally:
                stop.set()
            for client in clients:
                client.result()
        assert not outcomes["wrong"] and not outcomes["slow"] and outcomes["failed"] < outcomes["right"]
        assert [text_of(running.url, prompt) for prompt in PROMPTS] == list(expected.values())


@pytest.mark.thorough
def test_replica_is_replaced_after_three_engine_failures() -> None:
    """Streams of a killed engine continue in the next one, but for the third one: its replica ends. Killing a replica
    ends its engine. Open requests are completed before a deployment is deleted."""
    args = {"num_gpu_blocks_override": 100, "deployment_config": {"health_check_period_s": 1}}
    with RayCluster(2) as cluster, cluster.serve(args) as running:
        expected = text_of(running.url, PROMPTS[0])
        (raylet,) = cluster.raylets

        def recovers() -> bool:
            with suppress(AssertionError, httpx.HTTPError):
                return text_of(running.url, PROMPTS[0]) == expected
            return False

        first = cluster.replicas_of(raylet)
        whole = stream_text(running.url)
        for number in range(3):
            assert cluster.replicas_of(raylet) == first
            killing = lambda: os.kill(*cluster.engines, signal.SIGKILL)  # noqa: E731
            if number < 2:
                assert stream_text(running.url, killing) == whole
            else:
                with pytest.raises((AssertionError, httpx.HTTPError)):
                    stream_text(running.url, killing)
            until(recovers)
        (second,) = cluster.replicas_of(raylet)
        assert [second] != first
        (engine,) = cluster.engines
        os.kill(second, signal.SIGKILL)
        until(lambda: engine not in cluster.engines)
        until(recovers)
        after = len(running.lines)
        with httpx.stream("POST", f"{running.url}/v1/completions", json={**LONG, "n": 3}) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            delete = "import ray, ray.serve; ray.init(); ray.serve.delete('default')"
            environment = os.environ | cluster.environment | {"RAY_ADDRESS": cluster.address}
            deleting = subprocess.Popen([sys.executable, "-c", delete], env=environment)
            running.find("Removing 1 replica", after)
            assert not any("output=5700" in line for line in running.lines[after:])  # the request is still running
            assert list(lines)[-1] == "data: [DONE]"
        running.find("output=5700 .*finish=length", after)
        assert deleting.wait(60) == 0 and not cluster.engines


def stream_text(url: str, during: Callable[[], None] | None = None) -> str:
    """Return the text of the stream of ``LONG``. Raises ``AssertionError`` if it has an error or no last event.

    Args:
        during: called after the first event.
    """
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=90) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        events = [next(lines)]
        if during:
            during()
        events += lines
    assert events[-1] == "[DONE]" and not any('"error"' in event for event in events), events[-2:]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def text_of(url: str, prompt: str) -> str:
    """Return the text of a streamed answer. Raises ``AssertionError`` if the response is an error or contains one."""
    text = ""
    body = {"prompt": prompt, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events and events[-1] == "[DONE]", events[-1:]
    for event in map(json.loads, events[:-1]):
        assert "error" not in event, event
        text += "".join(choice["text"] for choice in event["choices"])
    return text


def answering_replicas(url: str) -> set[int]:
    """Return the start times of the replicas that answer requests."""
    answers = [httpx.get(f"{url}/v1/models") for _ in range(20)]
    return {answer.json()["data"][0]["created"] for answer in answers if answer.status_code == 200}


def until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


PLACED = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "ray", "--threads", "1")


@pytest.mark.thorough
def test_ranks_on_placement_group_recover_from_killed_node(servers: Servers) -> None:
    """Two ranks on two of three nodes give the bits of a single rank. If a node's process or the whole node is killed,
    the engine starts again with ranks on the remaining nodes, and streams continue."""
    expected = {prompt: bits(complete(servers.get(*BLOCKS).root, prompt=prompt)) for prompt in PROMPTS}
    with RayCluster(1, 1, 1) as cluster:
        environment = cluster.environment | {"RAY_ADDRESS": cluster.address}
        with Served(*BLOCKS, *PLACED, environment=environment) as served:
            assert served.find("Ray has placed 2 ranks on (.) of its nodes")[1] == "2"
            with ThreadPoolExecutor(4) as threads:
                found = threads.map(lambda prompt: bits(complete(served.root, prompt=prompt)), PROMPTS)
                assert list(found) == list(expected.values())
            whole = stream_text(served.root)
            for whole_node in (False, True):
                after = len(served.lines)

                def kill() -> None:
                    (node,) = (raylet for raylet in cluster.raylets if cluster.actors_of(raylet))
                    for pid in [node] * whole_node + cluster.actors_of(node):  # noqa: B023
                        os.kill(pid, signal.SIGKILL)

                assert stream_text(served.root, kill) == whole
                served.find("node 1 .* (is lost|ended)", after)
                served.find("Ray has placed 2 ranks on 2 of its nodes", after)
                until(lambda: httpx.get(f"{served.root}/ready").status_code == 200)
                assert bits(complete(served.root, prompt=PROMPTS[0])) == expected[PROMPTS[0]]


REMOVE_GROUPS = """
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
ray.init()
for group, info in placement_group_table().items():
    if info["state"] == "PENDING":
        remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group)))
"""


@pytest.mark.thorough
def test_reason_why_ranks_cannot_be_placed_is_logged(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['penstock.ops.cores'] = None")
    with RayCluster(1) as cluster:
        environment = {**cluster.environment, "RAY_ADDRESS": cluster.address}
        without_token = {**environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "", "HOME": str(tmp_path)}

        def serve(environment: dict[str, str], timeout: int = 60) -> RayCommand:
            return RayCommand([*SERVE, "--port", "0", *PLACED, "--node-timeout", str(timeout)], environment)

        for given, timeout, message in (
            (environment, 1, "the Ray cluster had no room for 2 ranks .* the first on this machine, within 1 seconds"),
            (without_token, 60, "penstock serve: no Ray cluster .* no authentication token"),
        ):
            with serve(given, timeout) as refused:
                refused.find(message)
        with serve(environment) as waiting:
            waiting.find("waiting for the Ray cluster to have room for 2 ranks")
            subprocess.run([sys.executable, "-c", REMOVE_GROUPS], env=os.environ | environment, check=True)
            waiting.find("the placement group of the ranks has been removed")
        start = "from ray.scripts.scripts import main; main()", "start", f"--address={cluster.address}", "--block"
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        other = {**cluster.environment, "PYTHONPATH": path}
        with RayCommand([sys.executable, "-c", *start, "--num-cpus=1"], other) as node:
            node.find("Ray runtime started")
            with serve(environment) as refused:
                refused.find("the process of node 1 has ended: .*import of penstock.ops.cores")


@pytest.mark.thorough
def test_nodes_of_a_replica_have_its_runtime_env(servers: Servers) -> None:
    args = {
        "deployment_config": {"ray_actor_options": {"runtime_env": {"env_vars": {"OF_THE_REPLICA": "1"}}}},
        "num_gpu_blocks_override": 100,
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "ray",
        "num_cpus": 2,
    }
    expected = [bits(complete(servers.get(*BLOCKS).root, prompt=prompt)) for prompt in PROMPTS]
    with RayCluster(0, 1, 1) as cluster, cluster.serve(args) as running:
        (node,) = (actor for raylet in cluster.raylets for actor in cluster.actors_of(raylet))
        assert "OF_THE_REPLICA=1" in Path(f"/proc/{node}/environ").read_text().split("\0")
        assert [bits(complete(running.url, prompt=prompt)) for prompt in PROMPTS] == expected


SMALL = {
    "model_loading_config": {"model_id": "small", "model_source": str(demo.CHAT)},
    "server_cls": "penstock.ray.llm:PenstockServer",
    "engine_kwargs": {"num_gpu_blocks_override": 100},
    "deployment_config": {"num_replicas": 1},
}


@pytest.mark.thorough
def test_direct_streaming_of_ray_serve_llm_gives_same_answers(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients connect directly to the replica's application, which has all dialects."""
    pytest.importorskip("ray.serve.llm", exc_type=ImportError)
    monkeypatch.setenv("RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING", "1")
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    served = servers.get(*BLOCKS)
    path = "/v1/models"
    with RayCluster(4) as cluster, cluster.serve({"llm_configs": [SMALL]}, LLM_APP, path) as running:
        for prompt in PROMPTS:
            assert bits(complete(running.url, prompt=prompt)) == bits(complete(served.root, prompt=prompt))
            assert text_of(running.url, prompt) == text_of(served.root, prompt)
        answers = [
            httpx.post(f"{root}/v1/messages", json={**CHAT, "model": model}).json()["content"]
            for root, model in ((served.root, "default"), (running.url, "small"))
        ]
        assert answers[0] == answers[1]


@pytest.mark.thorough
def test_penstock_as_engine_of_ray_serve_llm_gives_same_answers(servers: Servers) -> None:
    """Ray Serve LLM takes its request classes from vLLM or SGLang. Its OpenAI application requires FastAPI below
    0.137."""
    pytest.importorskip("ray.serve.llm", exc_type=ImportError)
    if tuple(map(int, fastapi.__version__.split(".")[:2])) >= (0, 137):
        pytest.skip("Ray Serve LLM's OpenAI application needs FastAPI below 0.137")
    served = servers.get(*BLOCKS)
    ingress = {"num_replicas": 1, "autoscaling_config": None}
    args = {"llm_configs": [SMALL], "ingress_deployment_config": ingress}
    with RayCluster(4) as cluster, cluster.serve(args, LLM_APP, "/v1/models") as running:
        for path, body in (
            ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
            ("/v1/completions", {"prompt": PROMPTS[1], "temperature": 1, "seed": 3, "logprobs": 3}),
        ):
            expected, found = (
                httpx.post(root + path, json={**body, "model": model}).json()["choices"][0]
                for root, model in ((served.root, "default"), (running.url, "small"))
            )
            assert all(expected["logprobs"][name] == value for name, value in found["logprobs"].items())
            assert found.get("text") == expected.get("text")
        chat = {**CHAT, "model": "small"}
        whole = httpx.post(f"{running.url}/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
        with httpx.stream("POST", f"{running.url}/v1/chat/completions", json={**chat, "stream": True}) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        chunks = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
        assert events[-1] == "[DONE]" and "".join(chunks) == whole
        expected, found = (
            httpx.post(f"{root}/v1/embeddings", json={"model": model, "input": "The sea"}).json()["data"]
            for root, model in ((served.root, "default"), (running.url, "small"))
        )
        assert expected[0]["embedding"] == found[0]["embedding"]
        tokens = httpx.post(f"{running.url}/tokenize", json={"model": "small", "prompt": "The sea"}).json()["tokens"]
        detokenized = httpx.post(f"{running.url}/detokenize", json={"model": "small", "tokens": tokens}).json()
        assert "The sea" in detokenized.values()
        wrong = {"model": "small", "prompt": "x", "temperature": -1}
        refused = httpx.post(f"{running.url}/v1/completions", json=wrong)
        assert refused.status_code == 400 and "temperature" in refused.text


@pytest.mark.thorough
@pytest.mark.parametrize("page", ["ray.md", "zh/ray.md"])
def test_documented_commands_start_application_that_answers(page: str) -> None:
    """The page's commands start two nodes and the application (by command and from its file), and send a request."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    start, request = re.findall(r"```sh\n((?:export|curl) .*?)```", text, re.DOTALL)
    file, _ = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    export, head, node, command = start.splitlines()
    port, cluster_port, *_ = (port for port in free_ports(40) if port >= 20_000)  # Ray's workers use lower ports
    with scratch() as (folder, environment):
        (folder / "bin").mkdir()
        for name, code in {"ray": "scripts.scripts import main as cli", "serve": "serve.scripts import cli"}.items():
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "from ray.{code}; cli()" "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        changes = {
            "--head ": f"--head --port={cluster_port} --include-dashboard=false --num-cpus=1 ",
            "=HEAD:6379": f"=127.0.0.1:{cluster_port} --num-cpus=1",
            "/models/qwen": str(demo.CHAT),
            "num_cpus=8": "num_cpus=1 num_gpu_blocks_override=100",
            "num_cpus: 8": "num_cpus: 1",
            "port: 8000": f"port: {port}",
            ":8000": f":{port}",
        }
        for old, new in changes.items():
            assert old in text
            head, node, command, file, request = (
                part.replace(old, new) for part in (head, node, command, file, request)
            )
        (folder / "app.yaml").write_text(file)
        environment["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
        with RayCommand(["bash", "-ec", f"{export}\n{head}\n{node}\necho both run\ncat"], environment) as nodes:
            nodes.find("both run")
            environment["RAY_ADDRESS"] = f"127.0.0.1:{cluster_port}"
            on_that_port = f"serve start --http-port {port}\n{command}"  # the documented command has no port
            for script in (on_that_port, f"serve run {folder}/app.yaml"):
                with RayCommand(
                    ["bash", "-ec", f"{export}\n{script}"], environment, f"http://127.0.0.1:{port}"
                ) as running:
                    running.wait_ready("/ready")
                    answer = subprocess.run(["bash", "-c", request], capture_output=True, text=True)
                    assert "Ottawa" in answer.stdout, script
