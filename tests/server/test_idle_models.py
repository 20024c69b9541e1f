"""Models that are unloaded while they are idle, and loaded again by the next request."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from serving import Served, usage_error
from test_lora import demo_adapters as demo_adapters  # imported so that pytest finds the fixture

from penstock import PenstockError, demo
from penstock.serve.dialects.ollama.keep_alive import seconds_of

NAMES = ("first", "small")
NAME = ("--served-model-name", "first")
MODELS = ("--model", str(demo.CHAT), *NAME, "--models", json.dumps({"small": str(demo.DRAFT)}))
BLOCKS = ("--num-gpu-blocks-override", "200")
PROMPT = "The story of a fox:"
QUESTION = [{"role": "user", "content": "What is the capital of Canada?"}]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def complete(served: Served, model: str = "first", **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 1, **fields}
    return httpx.post(f"{served.url}/completions", json=body, timeout=60)


def choices(served: Served, model: str = "first", **fields: Any) -> Any:
    answer = complete(served, model, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def until_unloaded(served: Served, engines: int = 0) -> None:
    """Wait until only ``engines`` engine processes run."""
    until(lambda: len(served.pids["engine"]) == engines)


def unload(served: Served, model: str = "first") -> None:
    ollama.Client(served.root).generate(model, "", keep_alive=0)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *[("5m", 300), ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25), ("0", 0), (0, 0), ("90", 90), (2.5, 2.5)],
        *[(-1, None), ("-1", None), ("-1m", None), ("876000h", None), (1e300, None)],
    ],
)
def test_keep_alive_is_a_duration_of_go_or_seconds(given: str | float, seconds: float | None) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "5d", "m", "5m!", "--1", "1" * 41])
def test_malformed_keep_alive_is_refused(given: str) -> None:
    with pytest.raises(PenstockError, match=r"keep_alive: .* is not a duration"):
        seconds_of(given)


def test_long_keep_alive_is_refused_without_backtracking() -> None:
    """A pattern that splits the digits in every possible way does not end."""
    with pytest.raises(PenstockError, match=r"keep_alive: '1{40}' is not a duration"):
        seconds_of("1" * 1_000_000 + "x")


def test_idle_timeout_is_refused_for_instances_and_routers() -> None:
    message = usage_error("--model-idle-timeout", "5", "--role", "decode", "--router-address", "127.0.0.1:9")
    assert "model_idle_timeout: routers, their instances" in message


@pytest.fixture(scope="module")
def idle() -> Iterator[Served]:
    """Server with two models that are unloaded after half a second, and two API processes."""
    flags = ("--model-idle-timeout", "0.5", "--api-server-count", "2")
    with Served(*MODELS, *BLOCKS, *flags) as served:
        yield served


@pytest.mark.slow
@pytest.mark.row("ollama", "any request, of any dialect, for an unloaded model")
def test_idle_models_are_unloaded_and_next_request_of_any_dialect_loads_them(idle: Served) -> None:
    def anthropics() -> str:
        messages = anthropic.Anthropic(base_url=idle.root, api_key="none").messages
        with messages.stream(model="first", messages=QUESTION, max_tokens=9, extra_body={"temperature": 0}) as stream:
            return "".join(stream.text_stream)

    def kserve() -> str:
        body = {"text_input": PROMPT, "max_tokens": 9, "exclude_input_in_output": True}
        answer = httpx.post(f"{idle.root}/v2/models/small/generate", json=body, timeout=60)
        return str(answer.json()["text_output"])

    def tgi() -> str:
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 9}}
        return str(httpx.post(f"{idle.root}/generate", json=body, timeout=60).json()["generated_text"])

    dialects = (anthropics, kserve, tgi)
    expected_answers = [ask() for ask in dialects]
    expected = {name: choices(idle, name) for name in NAMES}
    until_unloaded(idle)
    assert idle.find("which was idle")
    for path in ("ready", "health", "v2/models/first/ready"):
        assert httpx.get(f"{idle.root}/{path}").status_code == 200
    metrics = httpx.get(f"{idle.root}/metrics").text
    for name in NAMES:
        assert f'penstock:engine_asleep{{model_name="{name}"}} 1.0' in metrics
    assert [model.id for model in openai.OpenAI(base_url=idle.url, api_key="none").models.list()] == [*NAMES]
    client = ollama.Client(idle.root)
    assert client.ps().models == []
    assert len(client.list().models) == 2
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda n=n: answers.append((n, choices(idle, n)))) for n in NAMES * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8 and all(answer == expected[name] for name, answer in answers), "equal bits after a reload"

    for ask, answer in zip(dialects, expected_answers, strict=True):
        until_unloaded(idle)
        assert answer and ask() == answer


@pytest.mark.slow
def test_open_requests_keep_an_idle_model_loaded(idle: Served) -> None:
    """The stream runs longer than the timeout, at one API process; the other one is idle."""
    expected = choices(idle, max_tokens=900, ignore_eos=True)[0]["text"]
    until(lambda: "unloaded first" in ["", *(line for line in idle.lines if "loaded first" in line)][-1])
    client, lines = openai.OpenAI(base_url=idle.url, api_key="none"), len(idle.lines)
    body = {"prompt": PROMPT, "max_tokens": 900, "temperature": 0, "extra_body": {"ignore_eos": True}}
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(model="first", stream=True, **body))
    assert text == expected
    assert not [line for line in idle.lines[lines:] if "unloaded first" in line]
    until_unloaded(idle)


@pytest.fixture(scope="module")
def movable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "small"
    shutil.copytree(demo.DRAFT, folder)
    return folder


@pytest.fixture(scope="module")
def served(movable: Path) -> Iterator[Served]:
    """Server whose models stay loaded by default."""
    models = ("--model", str(demo.CHAT), *NAME, "--models", json.dumps({"small": str(movable)}))
    flags = ("--model-control-mode", "explicit", "--load-model", "*", "--server-dev-mode", "--weight-cache-dir", "none")
    with Served(*models, *BLOCKS, *flags, "--enable-lora", "--allow-runtime-lora-updating") as served:
        yield served


def expirations(served: Served) -> dict[str, timedelta]:
    """Time until each loaded model is unloaded, by name, from Ollama's list of loaded models."""
    models = ollama.Client(served.root).ps().models
    return {model.model: model.expires_at - datetime.now(UTC) for model in models}


@pytest.mark.slow
@pytest.mark.row("ollama", "keep_alive", "no messages, an empty prompt")
def test_keep_alive_of_ollama_sets_expiration_and_unloads(served: Served) -> None:
    client = ollama.Client(served.root)
    never = timedelta(days=365 * 100)
    assert all(left > never for left in expirations(served).values()) and len(expirations(served)) == 2
    alone = client.chat("first", QUESTION, options={"temperature": 0}).message.content
    client.chat("first", QUESTION, keep_alive="10m")
    until(lambda: timedelta(minutes=9) < expirations(served)["first"] <= timedelta(minutes=10))
    client.embed("first", "text", keep_alive=3600)
    until(lambda: timedelta(minutes=59) < expirations(served)["first"] <= timedelta(hours=1))
    client.generate("first", "Hi", options={"num_predict": 1})
    assert expirations(served)["first"] <= timedelta(hours=1), "requests without keep_alive do not change it"
    client.generate("first", "", keep_alive=-1)
    assert expirations(served)["first"] > never
    lines = client.generate("first", "Hi", keep_alive=0, stream=True, options={"num_predict": 3})
    assert [*lines][-1].done
    until_unloaded(served, 1)
    assert expirations(served).keys() == {"small"}
    assert client.chat("first", QUESTION, options={"temperature": 0}).message.content == alone
    assert expirations(served)["first"] > never, "a loaded model has the default time"
    assert client.generate("first", "", keep_alive=0).done_reason == "unload"
    until_unloaded(served, 1)
    assert client.chat("first", []).done_reason == "load"
    assert len(served.pids["engine"]) == 2 and len(expirations(served)) == 2
    with pytest.raises(ollama.ResponseError, match="keep_alive: 'soon' is not a duration") as refused:
        client.generate("first", "Hi", keep_alive="soon")
    assert refused.value.status_code == 400


@pytest.mark.slow
def test_unload_request_waits_for_running_stream(served: Served) -> None:
    body = {"max_tokens": 500, "ignore_eos": True}
    expected = choices(served, **body)[0]["text"]
    client = openai.OpenAI(base_url=served.url, api_key="none")
    fields = {"prompt": PROMPT, "max_tokens": 500, "temperature": 0, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(model="first", stream=True, **fields)
    text = next(iter(stream)).choices[0].text
    unload(served)
    assert text + "".join(chunk.choices[0].text for chunk in stream) == expected
    until_unloaded(served, 1)
    assert choices(served, **body)[0]["text"] == expected


@pytest.mark.slow
def test_failed_load_fails_its_requests_and_health_until_a_load_succeeds(served: Served, movable: Path) -> None:
    expected = choices(served, "small")
    unload(served, "small")
    until_unloaded(served, 1)
    away = movable.rename(movable.with_name("away"))
    answer = complete(served, "small")
    assert answer.status_code == 503 and "the model 'small' could not be loaded" in answer.text
    served.find(f"small could not be loaded for a request: .*{movable}")
    checks = ("health", "ready", "ping", "v2/health/ready")
    assert [httpx.get(f"{served.root}/{path}").status_code for path in checks] == [503] * 4
    assert "the model 'small' could not be loaded" in httpx.get(f"{served.root}/health").text
    away.rename(movable)
    assert choices(served, "small") == expected
    assert [httpx.get(f"{served.root}/{path}").status_code for path in checks] == [200] * 4


@pytest.mark.slow
def test_unloaded_model_is_loaded_for_actions_and_paused_model_stays_loaded(served: Served) -> None:
    expected = choices(served)
    unload(served)
    until_unloaded(served, 1)
    httpx.post(f"{served.root}/sleep?model=first", timeout=60).raise_for_status()
    assert len(served.pids["engine"]) == 2
    unload(served)
    httpx.post(f"{served.root}/wake_up?model=first", timeout=60).raise_for_status()
    assert choices(served) == expected
    until_unloaded(served, 1)


@pytest.mark.slow
def test_unload_request_for_unloaded_model_does_not_apply_to_next_load(served: Served) -> None:
    for _ in range(2):
        unload(served)
        until_unloaded(served, 1)
    choices(served)
    assert expirations(served)["first"] > timedelta(days=365 * 100)


@pytest.mark.slow
def test_unloaded_model_can_be_unloaded_and_loaded_explicitly(served: Served) -> None:
    expected = choices(served)
    unload(served)
    until_unloaded(served, 1)
    repository = f"{served.root}/v2/repository/models/first"
    httpx.post(f"{repository}/load", timeout=60).raise_for_status()
    assert len(served.pids["engine"]) == 2
    unload(served)
    until_unloaded(served, 1)
    httpx.post(f"{repository}/unload", timeout=60).raise_for_status()
    assert complete(served).status_code == 404
    httpx.post(f"{repository}/load", timeout=60).raise_for_status()
    assert choices(served) == expected


@pytest.mark.slow
def test_adapters_loaded_at_run_time_are_loaded_again(served: Served, demo_adapters: Path) -> None:
    unload(served)
    until_unloaded(served, 1)
    adapter = {"lora_name": "a", "lora_path": str(demo_adapters / "a"), "base_model_name": "first"}
    httpx.post(f"{served.url}/load_lora_adapter", json=adapter, timeout=60).raise_for_status()
    expected = choices(served, "a")
    assert expected != choices(served)
    unload(served)
    until_unloaded(served, 1)
    assert choices(served, "a") == expected


@pytest.mark.slow
def test_killed_engine_of_reloaded_model_is_restarted(served: Served) -> None:
    expected = choices(served)
    unload(served)
    until_unloaded(served, 1)
    assert choices(served) == expected
    os.kill(served.pids["engine"][-1], signal.SIGKILL)
    assert choices(served) == expected


@pytest.mark.slow
def test_restarted_api_process_loads_unloaded_model(served: Served) -> None:
    expected = choices(served)
    unload(served)
    until_unloaded(served, 1)
    os.kill(served.pids["api"][0], signal.SIGKILL)
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=20)
    answer = client.completions.create(model="first", prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text == expected[0]["text"]
