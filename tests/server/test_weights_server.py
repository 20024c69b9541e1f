"""Weight updates, pause and sleep of ``penstock serve``, over the routes of vLLM, SGLang, FastDeploy and Penstock."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import SMALL, save
from safetensors.torch import load_file, save_file
from serving import Served, run_in_process
from test_weights import perturbed
from transformers import Qwen3Config

from penstock import LLM, SamplingParams
from penstock.cli.main import main

OPTIONS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 2100, "weight_cache_dir": "none"}
FLAGS = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("weights") / "old"
    save(Qwen3Config(**SMALL | {"max_position_embeddings": 32768}, head_dim=32, sliding_window=None), folder)
    return folder, perturbed(folder, folder.parent / "new")


class Oracle:
    """Reference engine: returns the greedy tokens of a new engine with the weights of a folder."""

    def __init__(self, folder: Path) -> None:
        self._llm = LLM(folder, **OPTIONS)
        self.version = self._llm.engine.info.weights_version

    def __call__(self, prompt: list[int], tokens: int) -> list[int]:
        if not tokens:
            return []
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return self._llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def oracles(folders: tuple[Path, Path]) -> tuple[Oracle, Oracle]:
    return Oracle(folders[0]), Oracle(folders[1])


@pytest.fixture(scope="module")
def served(folders: tuple[Path, Path]) -> Iterator[Served]:
    arguments = ("--model", str(folders[0]), "--server-dev-mode", "--api-server-count", "2", *FLAGS)
    with Served(*arguments, "--allowed-local-weights-path", str(folders[0].parent)) as served:
        yield served


class Client:
    """HTTP client of one server."""

    def __init__(self, served: Served) -> None:
        self._root = served.root
        self._http = httpx.Client(base_url=served.root, timeout=60)

    def post(self, url: str, /, **fields: Any) -> httpx.Response:
        return self._http.post(url, json=fields or None)

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def ask(self, url: str, /, **fields: Any) -> Any:
        response = self.post(url, **fields)
        assert response.status_code == 200, response.text
        return response.json() if response.content else None

    def fetch(self, path: str) -> Any:
        response = self.get(path)
        assert response.status_code == 200, response.text
        return response.json() if response.content else None

    def tokens(self, count: int) -> tuple[list[int], str]:
        """Generate ``count`` tokens; return their ids, and the version of the weights that computed them."""
        response = self.post("/v1/completions", **request(count))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"], response.headers["x-weights-version"]

    def wait_for_all(self, path: str, expected: Any) -> None:
        """Wait until eight responses in a row are ``expected``: connections are spread over all API processes."""
        deadline = time.monotonic() + 30
        matches = 0
        while matches < 8:
            answer = httpx.get(f"{self._root}{path}")
            matches = matches + 1 if answer.is_success and answer.json() == expected else 0
            assert time.monotonic() < deadline, answer.text

    def metric(self, name: str) -> list[str]:
        return [line for line in self.get("/metrics").text.splitlines() if line.startswith(name)]


def request(count: int) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def client(served: Served) -> Client:
    return Client(served)


class Stream(threading.Thread):
    """A streamed request that is read in a background thread."""

    def __init__(self, served: Served, count: int) -> None:
        super().__init__()
        self._url, self._count = f"{served.root}/v1/completions", count
        self.tokens: list[int] = []
        self.version = self.error = ""
        self._first_line = threading.Event()
        self.start()
        assert self._first_line.wait(60)

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=request(self._count) | {"stream": True}, timeout=60) as response:
            self.version = response.headers.get("x-weights-version", "")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    self.error = event.get("error", {}).get("message", "")
                    for choice in event.get("choices", ()):
                        self.tokens += choice["token_ids"] or []
                self._first_line.set()
        self._first_line.set()

    def ended(self) -> list[int]:
        self.join(60)
        return self.tokens


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start ``work`` in a thread; return a function that waits for its result."""
    return ThreadPoolExecutor(1).submit(work).result


@pytest.mark.slow
def test_weight_reload_during_streams_uses_expected_weights(
    served: Served, client: Client, folders: tuple[Path, Path], oracles: tuple[Oracle, Oracle]
) -> None:
    old, new = oracles
    state = {"model": served.name, "path": "", "updates": 0, "paused": False, "asleep": []}
    assert client.fetch("/v1/weights")["data"] == [state | {"version": old.version}]

    stream = Stream(served, 400)
    reloading = in_thread(lambda: client.ask("/v1/weights/reload", path=str(folders[1])))
    assert stream.ended() == old(PROMPT, 400)
    assert stream.version == old.version
    assert reloading() == state | {"version": new.version, "path": str(folders[1]), "updates": 1}
    assert client.tokens(20) == (new(PROMPT, 20), new.version)
    client.wait_for_all("/v1/weights", {"object": "list", "data": [reloading()]})
    assert client.fetch("/version")["weights"] == new.version
    assert f'version="{new.version}"' in client.metric("penstock:weights_info")[0]
    assert client.metric("penstock:weights_updates_total")[0].endswith(" 1.0")

    stream = Stream(served, 1200)
    client.ask("/pause?mode=keep")  # the stream has received only a part of its tokens
    client.ask("/v1/weights/reload", path=str(folders[0]), running="recompute")
    client.ask("/resume")
    tokens, before = stream.ended(), new(PROMPT, 1200)
    assert stream.version == new.version
    changed = next(i for i, (token, unchanged) in enumerate(zip(tokens, before, strict=True)) if token != unchanged)
    candidates = range(changed, changed - 3, -1)  # the first tokens after the change may be equal for both weights
    assert any(tokens[at:] == old(PROMPT + before[:at], 1200 - at) for at in candidates)
    assert client.tokens(20) == (old(PROMPT, 20), old.version)


def test_new_engine_process_loads_weights_while_old_one_finishes(
    served: Served, client: Client, folders: tuple[Path, Path], oracles: tuple[Oracle, Oracle]
) -> None:
    (pid,), stream = served.pids["engine"], Stream(served, 1500)
    described = client.ask("/v1/weights/reload", path=str(folders[1]), running="restart")
    assert (described["version"], described["path"]) == (oracles[1].version, str(folders[1]))
    assert stream.ended() == oracles[0](PROMPT, 1500)
    assert client.tokens(20) == (oracles[1](PROMPT, 20), oracles[1].version)
    (new,) = served.pids["engine"]
    assert new != pid
    os.kill(new, signal.SIGKILL)
    assert client.tokens(20) == (oracles[1](PROMPT, 20), oracles[1].version)

    client.ask("/pause?mode=keep")
    refused = client.post("/v1/restart")
    assert refused.status_code == 400 and "resume it" in refused.text
    client.ask("/resume")
    missing = client.post("/v1/weights/reload", path=str(folders[0].parent / "missing"), running="restart")
    assert missing.status_code == 400 and "is not a folder" in missing.text
    assert client.tokens(20) == (oracles[1](PROMPT, 20), oracles[1].version)
    client.ask("/v1/weights/reload", path=str(folders[0]), running="restart")
    assert client.ask("/v1/restart") == {"restarted": [served.name]}
    assert client.tokens(20) == (oracles[0](PROMPT, 20), oracles[0].version)


def test_refused_weight_update_keeps_weights(
    served: Served, client: Client, folders: tuple[Path, Path], oracles: tuple[Oracle, Oracle]
) -> None:
    broken = folders[0].parent / "broken"
    shutil.copytree(folders[1], broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    (folders[0].parent / "outside").symlink_to("/etc")
    before = client.fetch("/v1/weights")
    for fields, message in (
        ({"path": str(broken)}, "not finite"),
        ({"path": str(folders[0].parent / "missing")}, "is not a folder"),
        ({"path": "/etc"}, "allowed-local-weights-path"),
        ({"path": str(folders[0].parent / "outside")}, "allowed-local-weights-path"),
        ({"path": f"{folders[1]}/../../../etc"}, "allowed-local-weights-path"),
        ({"path": "new"}, "allowed-local-weights-path"),
        ({"path": "\0"}, "path"),
        ({"running": "abort"}, "running"),
        ({"model": "another"}, "another"),
    ):
        response = client.post("/v1/weights/reload", **fields)
        assert response.status_code in (400, 404), response.text
        assert re.search(message, response.json()["error"]["message"])
    refused = client.post("/update_weights_from_disk", model_path=str(broken))
    assert refused.status_code == 400 and refused.json()["success"] is False
    assert client.post("/update_weights_from_disk", model_path="/x", weight_version="7").status_code == 400
    for path in (
        "/sleep?level=3",
        "/sleep?mode=kill",
        "/wake_up?tags=kv",
        "/pause?mode=stop",
        "/v1/sleep?tags=weights",
    ):
        assert client.post(path).status_code == 400
    assert client.post("/v1/update_weights").status_code == 400  # generation is not paused
    assert client.fetch("/v1/weights") == before
    assert client.tokens(20) == (oracles[0](PROMPT, 20), oracles[0].version)


@pytest.mark.slow
@pytest.mark.row("vllm", "POST /sleep", "POST /wake_up", "GET /is_sleeping")
@pytest.mark.row("vllm", "POST /pause", "POST /resume", "GET /is_paused")
def test_vllm_routes_sleep_and_pause_engine(served: Served, client: Client, oracles: tuple[Oracle, Oracle]) -> None:
    old, _ = oracles
    stream = Stream(served, 20_000)
    assert client.ask("/pause") == {"status": "paused"}
    stream.ended()
    assert "paused" in stream.error
    client.wait_for_all("/is_paused", {"is_paused": True})
    waiting = in_thread(lambda: client.tokens(20))
    assert client.get("/health").status_code == 200
    assert client.get("/ready").status_code == 503
    assert client.ask("/resume") == {"status": "resumed"}
    assert waiting()[0] == old(PROMPT, 20)

    for level in (1, 2):
        stream = Stream(served, 300)
        client.ask(f"/sleep?level={level}&mode=keep")
        client.wait_for_all("/is_sleeping", {"is_sleeping": True})
        for path, field in (
            ("/v1/completions", "prompt"),
            ("/generate", "prompt"),
            ("/v2/models/ensemble/generate", "text_input"),
        ):
            refused = client.post(path, **{field: "x", "max_tokens": 1})
            assert refused.status_code == 503, refused.text
            assert refused.headers["retry-after"]
            assert "sleeps" in refused.text
        assert client.get("/health").status_code == client.get("/v2/health/live").status_code == 200
        assert client.get("/ready").status_code == client.get("/v2/health/ready").status_code == 503
        assert client.metric("penstock:engine_asleep{")[0].endswith(" 1.0")
        client.ask("/reset_prefix_cache")
        assert client.post("/resume").status_code == 503
        client.ask("/wake_up?tags=weights")
        client.wait_for_all("/is_sleeping", {"is_sleeping": True})
        client.ask("/wake_up")
        client.wait_for_all("/is_sleeping", {"is_sleeping": False})
        assert stream.ended() == old(PROMPT, 300)
    assert client.get("/ready").status_code == 200


@pytest.mark.slow
def test_sglang_routes_update_weights(
    client: Client, folders: tuple[Path, Path], oracles: tuple[Oracle, Oracle]
) -> None:
    old, new = oracles
    client.ask("/pause_generation", mode="retract")
    client.ask("/release_memory_occupation")
    assert client.fetch("/v1/weights")["data"][0]["asleep"] == ["kv_cache", "weights"]
    client.ask("/resume_memory_occupation", tags=["weights"])
    assert client.ask("/update_weights_from_disk", model_path=str(folders[1]), flush_cache=True)["success"] is True
    client.ask("/resume_memory_occupation", tags=["kv_cache"])
    client.ask("/continue_generation")
    assert client.tokens(20) == (new(PROMPT, 20), new.version)
    assert client.ask("/update_weights_from_disk", model_path=str(folders[0]), abort_all_requests=True)["success"]
    assert client.tokens(20) == (old(PROMPT, 20), old.version)


@pytest.mark.slow
@pytest.mark.row("fastdeploy", "/clear_load_weight", "/update_model_weight", "/v1/update_weights")
@pytest.mark.row("fastdeploy", "/v1/pause", "/v1/resume", "/v1/is_paused", "/v1/sleep", "/v1/wakeup")
def test_fastdeploy_routes_reload_weights(
    client: Client, folders: tuple[Path, Path], oracles: tuple[Oracle, Oracle]
) -> None:
    """The trainer overwrites the weights of the served folder, and the server loads them again."""
    old, new = oracles
    used = folders[0].parent / "used"
    shutil.copytree(folders[0], used)
    client.ask("/v1/weights/reload", path=str(used))

    def write(folder: Path) -> None:
        shutil.copy(folder / "model.safetensors", used / "written")
        os.replace(used / "written", used / "model.safetensors")

    assert client.get("/clear_load_weight").status_code == 200
    write(folders[1])
    assert client.get("/update_model_weight").status_code == 200
    assert client.tokens(20) == (new(PROMPT, 20), new.version)
    write(folders[0])
    assert client.get("/update_model_weight").status_code == 200
    assert client.tokens(20) == (old(PROMPT, 20), old.version)
    assert client.ask("/v1/pause")["status"] == "success"
    write(folders[1])
    assert client.ask("/v1/update_weights")["status"] == "success"
    assert client.fetch("/v1/is_paused") == {"is_paused": True}
    assert client.ask("/v1/resume")["status"] == "success"
    assert client.tokens(20) == (new(PROMPT, 20), new.version)
    assert client.ask("/v1/sleep?tags=weight,kv_cache")["status"] == "success"
    write(folders[0])
    assert client.ask("/v1/wakeup?tags=weight")["status"] == "success"
    assert client.ask("/v1/wakeup?tags=kv_cache")["status"] == "success"
    assert client.tokens(20) == (old(PROMPT, 20), old.version)


@pytest.mark.row("vllm", "--enable-sleep-mode", "VLLM_SERVER_DEV_MODE")
@pytest.mark.row("fastdeploy", "dynamic_load_weight")
def test_weight_routes_are_enabled_only_by_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def configured(*flags: str) -> tuple[bool, str]:
        result = run_in_process(main, "config", "--json", *flags)
        assert result.returncode == 0, result
        return json.loads(result.stdout)["server_dev_mode"]["value"], result.stderr

    assert not configured()[0]
    assert not configured("--compat", "fastdeploy", "--dynamic-load-weight", "0")[0]
    assert configured("--compat", "fastdeploy", "--dynamic-load-weight", "1")[0]
    allowed, log = configured("--compat", "vllm", "--enable-sleep-mode")
    assert not allowed and "--server-dev-mode" in log
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert configured("--compat", "vllm")[0]
    assert not configured()[0]
