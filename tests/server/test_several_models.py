"""Several models in one server, each with an engine process. Models are loaded and unloaded while the server runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import tritonclient.grpc as triton
from prometheus_client.parser import text_string_to_metric_families
from serving import SERVE, Served, count_files_and_threads, usage_error
from tritonclient.utils import InferenceServerException

from penstock import LLM, SamplingParams, demo

pytestmark = pytest.mark.slow

PROMPT, TOKENS = "The story of a fox:", 14
BLOCKS = ("--num-gpu-blocks-override", "200")
FIRST = ("--model", str(demo.CHAT), "--served-model-name", "penstock-demo")
BROKEN = "/nowhere/at/all"
NAMES = ("penstock-demo", "small")
KSERVE = {"ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"}


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """Text that each model generates in a separate engine, by model name."""
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS)
    texts = {}
    for name, folder in zip(NAMES, (demo.CHAT, demo.DRAFT), strict=True):
        llm = LLM(model=str(folder), num_gpu_blocks_override=200)
        texts[name] = llm.generate([PROMPT], greedy)[0].outputs[0].text
    assert texts["small"] != texts["penstock-demo"]
    return texts


@pytest.fixture(scope="module")
def unreadable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint with an invalid tokenizer configuration."""
    folder = tmp_path_factory.mktemp("checkpoints") / "unreadable"
    shutil.copytree(demo.DRAFT, folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": 5}')
    return folder


@pytest.fixture(scope="module")
def oversized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint with a token id that would make its vocabulary take 8 GB."""
    folder = tmp_path_factory.mktemp("checkpoints") / "oversized"
    shutil.copytree(demo.DRAFT, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["another"] = 10**9
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def served(unreadable: Path, oversized: Path) -> Iterator[Served]:
    small = {"model": str(demo.DRAFT), "max-num-seqs": 8}
    models = json.dumps({"small": small, "broken": BROKEN, "un/readable": str(unreadable), "oversized": str(oversized)})
    control = ("--model-control-mode", "explicit", "--load-model", *NAMES)
    flags = ("--models", models, *control, "--api-server-count", "2", "--grpc-port", "0", "--drain-timeout", "60")
    with Served(*BLOCKS, *FIRST, *flags, "--no-template-text") as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="none")


@pytest.fixture(scope="module")
def repository(served: Served) -> Iterator[triton.InferenceServerClient]:
    address = served.find(r"gRPC at (\S+)")[1]
    with triton.InferenceServerClient(address) as client:
        yield client


def complete(client: openai.OpenAI, model: str, **fields: Any) -> str:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, **fields}
    return client.completions.create(model=model, **body).choices[0].text


def states(repository: triton.InferenceServerClient) -> dict[str, str]:
    return {model.name: model.state for model in repository.get_model_repository_index().models}


def metric_by_model(served: Served, name: str) -> dict[str, float]:
    """Return the values of a metric by model name."""
    page = httpx.get(f"{served.root}/metrics").text
    families = [family for family in text_string_to_metric_families(page) if family.name == name]
    return {
        sample.labels["model_name"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(name)
    }


def test_each_model_answers_as_in_separate_engine(served: Served, client: openai.OpenAI, alone: dict[str, str]) -> None:
    answers: dict[int, tuple[str, str]] = {}

    def ask(number: int) -> None:
        name = NAMES[number % 2]
        answers[number] = (name, complete(client, name))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 16
    assert {text for name, text in answers.values() if name == "small"} == {alone["small"]}
    assert {text for name, text in answers.values() if name == "penstock-demo"} == {alone["penstock-demo"]}
    assert complete(client, "default") == alone["penstock-demo"]


def test_every_dialect_selects_models_by_name(served: Served, client: openai.OpenAI, alone: dict[str, str]) -> None:
    with httpx.Client(base_url=served.root, timeout=60) as http:
        for name in NAMES:
            body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "model": name}
            generated = http.post("/generate", json=body).json()
            assert generated == {"text": [PROMPT + alone[name]], "finish_reason": ["length"]}
            blade = http.post("/v1/completions", json=body, headers={"Authorization": "TOKEN"}).json()
            assert blade["choices"][0]["text"] == alone[name]
            paddlenlp = {"text": PROMPT, "max_dec_len": TOKENS, "temperature": 0, "model": name}
            assert http.post("/v1/completions", json=paddlenlp).json()["result"] == alone[name]
            fields = {"text_input": PROMPT, "max_tokens": TOKENS, "exclude_input_in_output": True}
            assert http.post(f"/v2/models/{name}/generate", json=fields).json()["text_output"] == alone[name]
        unknown_model = {"text": PROMPT, "max_dec_len": TOKENS, "temperature": 0, "model": "whatever"}
        assert http.post("/v1/completions", json=unknown_model).json()["result"] == alone["penstock-demo"]
    question = [{"role": "user", "content": "What is the capital of Canada?"}]
    messages = anthropic.Anthropic(base_url=served.root, api_key="none").messages
    for name in NAMES:
        chat = {"model": name, "messages": question, "max_tokens": 8, "temperature": 0.0}
        expected = client.chat.completions.create(**chat)
        assert expected.model == name
        answer = messages.create(model=name, messages=question, max_tokens=8, extra_body={"temperature": 0})
        assert answer.model == name and answer.content[0].text == expected.choices[0].message.content
        response = client.responses.create(model=name, input=question, max_output_tokens=16, temperature=0)
        assert response.output_text.startswith(expected.choices[0].message.content)


def test_models_and_states_are_listed(
    served: Served, client: openai.OpenAI, repository: triton.InferenceServerClient
) -> None:
    assert [model.id for model in client.models.list()] == list(NAMES)
    assert client.models.retrieve("small").root == "small"
    with pytest.raises(openai.NotFoundError, match=r"'smal' does not exist; available: penstock-demo, small"):
        complete(client, "smal")
    with pytest.raises(openai.NotFoundError, match=r"'broken' is not served: not loaded; available:"):
        complete(client, "broken")
    ready = dict.fromkeys([*KSERVE, *NAMES, "model"], "READY")
    assert states(repository) == {
        **ready,
        "broken": "UNAVAILABLE",
        "un/readable": "UNAVAILABLE",
        "oversized": "UNAVAILABLE",
    }
    ready_models = httpx.post(f"{served.root}/v2/repository/index", json={"ready": True}).json()
    assert {model["name"] for model in ready_models} == ready.keys()
    deadline = time.monotonic() + 30
    while set(metric_by_model(served, "penstock:kv_blocks").values()) != {200}:  # engines report once a second
        assert time.monotonic() < deadline
    assert metric_by_model(served, "penstock:kv_blocks").keys() == set(NAMES)
    before = metric_by_model(served, "penstock:generation_tokens")
    complete(client, "small", max_tokens=5)
    after = metric_by_model(served, "penstock:generation_tokens")
    assert after["small"] - before.get("small", 0) == 5
    assert after["penstock-demo"] == before["penstock-demo"]


def test_unload_waits_for_requests_and_model_can_be_reloaded(
    served: Served, client: openai.OpenAI, repository: triton.InferenceServerClient, alone: dict[str, str]
) -> None:
    before = set(served.pids["engine"])
    long = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True}}
    expected = client.completions.create(model="small", **long).choices[0].text
    stream = client.completions.create(model="small", stream=True, **long)
    first = next(iter(stream)).choices[0].text
    choice_counts: list[int] = []  # the engine runs only some of the 80 prompts at a time

    def ask_many() -> None:
        body = {"model": "small", "prompt": [PROMPT] * 80, "max_tokens": 120, "extra_body": {"ignore_eos": True}}
        choice_counts.append(len(client.with_options(max_retries=0).completions.create(**body).choices))

    waiting = threading.Thread(target=ask_many)
    waiting.start()
    wait(lambda: metric_by_model(served, "penstock:num_requests_running").get("small", 0) > 4)
    unloading = threading.Thread(target=repository.unload_model, args=("small",))
    unloading.start()
    wait(lambda: states(repository)["small"] == "UNLOADING")
    assert httpx.get(f"{served.root}/ready").status_code == 200
    with pytest.raises(openai.NotFoundError, match="'small' is not served: it is being unloaded"):
        complete(client, "small")
    assert first + "".join(chunk.choices[0].text for chunk in stream) == expected
    waiting.join()
    assert choice_counts == [80]
    unloading.join()
    assert not served.pids["tokenizer"]
    assert len(set(served.pids["engine"])) == 1 and set(served.pids["engine"]) < before
    for _ in range(8):  # enough requests to reach both API processes
        with pytest.raises(openai.NotFoundError, match="'small' is not served: unloaded"):
            complete(client, "small")
        with pytest.raises(InferenceServerException, match="has no available versions: unloaded"):
            repository.get_model_metadata("small")
        assert complete(client, "penstock-demo") == alone["penstock-demo"]
        assert httpx.get(f"{served.root}/ready").status_code == 200
    assert states(repository)["small"] == "UNAVAILABLE" and not repository.is_model_ready("small")
    repository.load_model("small")
    assert len(served.pids["engine"]) == 2
    assert len(served.pids["tokenizer"]) == 2  # one tokenizer process per API process
    for _ in range(8):
        assert complete(client, "small") == alone["small"]
    repository.load_model("small")  # loading a loaded model has no effect
    assert states(repository)["small"] == "READY"


def test_failed_load_does_not_affect_other_models(
    served: Served, client: openai.OpenAI, repository: triton.InferenceServerClient, alone: dict[str, str]
) -> None:
    with pytest.raises(InferenceServerException, match=rf"failed to load 'broken': .*{BROKEN}"):
        repository.load_model("broken")
    with pytest.raises(InferenceServerException, match="failed to load 'brokn', failed to poll"):
        repository.load_model("brokn")
    with httpx.Client(base_url=f"{served.root}/v2/repository/models/", timeout=60) as http:
        refused = http.post("un/readable/load")
        assert (
            refused.status_code == 400
            and "a value of the wrong type" in refused.text
            and "eos_token must be a string" in refused.text
        )
        answer = http.post("oversized/load")
        assert answer.status_code == 400 and "has a token with id 1000000000" in answer.text
        for body in ({"parameters": 5}, {"parameters": [1]}, {"parameters": {"a parameter": 1}}):
            for action in ("load", "unload"):
                answer = http.post(f"small/{action}", json=body)
                assert answer.status_code == 400 and "parameter" in answer.text, answer.text
    assert states(repository)["broken"] == "UNAVAILABLE"
    assert complete(client, "small") == alone["small"]


def test_killed_engine_does_not_affect_other_models(
    served: Served, client: openai.OpenAI, alone: dict[str, str]
) -> None:
    newest = served.pids["engine"][-1]  # the engine of the last loaded model
    long = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True}}
    expected = client.completions.create(model="penstock-demo", **long).choices[0].text
    stream = client.completions.create(model="penstock-demo", stream=True, **long)
    first = next(iter(stream)).choices[0].text
    line_count = len(served.lines)
    os.kill(newest, signal.SIGKILL)
    assert first + "".join(chunk.choices[0].text for chunk in stream) == expected
    served.find(rf"the engine \(process {newest}\) ended: killed by SIGKILL", line_count)
    retrying_client = client.with_options(max_retries=20)
    assert complete(retrying_client, "small") == alone["small"]


def test_model_with_repeatedly_dying_engine_is_unloaded(
    served: Served, client: openai.OpenAI, repository: triton.InferenceServerClient, alone: dict[str, str]
) -> None:
    other_engine, line_count = served.pids["engine"][0], len(served.lines)

    def kill_until_given_up() -> bool:
        for pid in served.pids["engine"]:
            if pid != other_engine:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return any("small is no longer served" in line for line in served.lines[line_count:])

    wait(kill_until_given_up)
    wait(lambda: states(repository)["small"] == "UNAVAILABLE")
    with pytest.raises(openai.NotFoundError, match="'small' is not served: its engine has died too often"):
        complete(client, "small")
    assert complete(client, "penstock-demo") == alone["penstock-demo"]
    assert httpx.get(f"{served.root}/ready").status_code == 200
    repository.load_model("small")
    assert complete(client, "small") == alone["small"]


def wait(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds, for at most 120 seconds."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_unloading_engine_unloads_dependent_models(
    served: Served, client: openai.OpenAI, repository: triton.InferenceServerClient, alone: dict[str, str]
) -> None:
    with pytest.raises(InferenceServerException, match="uses the engine of tensorrt_llm; unload tensorrt_llm, or set"):
        repository.unload_model("preprocessing")
    repository.unload_model("ensemble", unload_dependents=True)
    assert states(repository) == {**dict.fromkeys([*KSERVE, "penstock-demo", *OTHERS], "UNAVAILABLE"), **LOADED}
    assert complete(client, "default") == alone["small"]
    repository.unload_model("small")
    assert client.models.list().data == []
    with pytest.raises(openai.InternalServerError, match="no model is loaded"):
        complete(client.with_options(max_retries=0), "default")
    assert httpx.get(f"{served.root}/ready").status_code == 200
    repository.load_model("tensorrt_llm")
    assert complete(client, "default") == alone["penstock-demo"]
    httpx.post(f"{served.root}/v2/repository/models/small/load", timeout=60).raise_for_status()
    assert states(repository)["ensemble"] == "READY"


OTHERS = ("broken", "un/readable", "oversized")
LOADED = {"small": "READY", "model": "READY"}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """Server that starts without a loaded model, and the folder of its temporary files."""
    folder = tmp_path_factory.mktemp("temporary")
    file = tmp_path_factory.mktemp("configuration") / "penstock.yaml"
    small = f"  small:\n    model: {demo.DRAFT}\n    max-num-seqs: 8\n"
    file.write_text(f"model_control_mode: explicit\nmodels:\n{small}  other: {demo.DRAFT}\n")
    flags = ("--config", str(file), "--drain-timeout", "1")
    with Served(*BLOCKS, *flags, environment={"TMPDIR": str(folder)}) as served:
        yield served, folder


def test_server_may_start_without_models(empty: tuple[Served, Path]) -> None:
    served, _ = empty
    assert re.search(r"ready: no model at", "\n".join(served.lines))
    assert not served.pids["engine"]
    answer = httpx.post(f"{served.root}/v2/repository/models/small/load", timeout=60)
    assert answer.status_code == 200, answer.text
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 3}
    httpx.post(f"{served.root}/v1/completions", json=body).raise_for_status()
    os.kill(served.pids["api"][0], signal.SIGKILL)
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=20)
    complete(client, "small")  # the restarted API process knows the loaded model


def test_waiting_request_gets_error_when_model_load_fails(empty: tuple[Served, Path]) -> None:
    served, folder = empty
    moved_folder = folder.with_name("away")
    model_url = f"{served.root}/v2/repository/models/other"
    responses: list[httpx.Response] = []

    def start_loading() -> tuple[threading.Thread, int]:
        """Start to load the model and stop its engine by SIGSTOP; return the waiting thread and the engine's pid."""
        waiting = threading.Thread(target=lambda: responses.append(httpx.post(f"{model_url}/load", timeout=60)))
        waiting.start()
        wait(lambda: len(served.pids["engine"]) == 2)
        engine = served.pids["engine"][-1]
        os.kill(engine, signal.SIGSTOP)
        return waiting, engine

    def open_files() -> list[int]:
        return [count_files_and_threads(pid)[0] for pid in (served.pid, *served.pids["api"])]

    counts = []
    for _ in range(2):
        for action in ("load", "unload"):
            httpx.post(f"{model_url}/{action}", timeout=60).raise_for_status()
        counts.append(open_files())
    # some files are closed after the response
    wait(lambda: all(now <= then for now, then in zip(open_files(), counts[0], strict=True)))
    folder.rename(moved_folder)
    assert "internal error" in httpx.post(f"{model_url}/load", timeout=60).json()["error"]
    moved_folder.rename(folder)
    while True:
        waiting, engine = start_loading()
        index = httpx.post(f"{served.root}/v2/repository/index").json()
        early = httpx.post(f"{served.url}/completions", json={"model": "other", "prompt": PROMPT})
        os.kill(engine, signal.SIGKILL)
        waiting.join()
        if (answer := responses.pop()).status_code != 200:
            break
        httpx.post(f"{model_url}/unload", timeout=60)  # the load was completed before SIGSTOP: unload and retry
    assert {"name": "other", "version": "1", "state": "LOADING", "reason": ""} in index
    assert early.status_code == 503 and "starting" in early.text
    assert "killed by SIGKILL" in answer.json()["error"]
    assert httpx.get(f"{served.root}/ready").status_code == 200
    waiting, _ = start_loading()
    served.terminate()
    waiting.join()
    assert "the server is stopping" in responses.pop().json()["error"]
    assert served.ended() == 0


def parameters(**values: str) -> str:
    return " ".join(f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in values.items())


def steps(*models: str) -> str:
    step_texts = " ".join(f'step [ {{ model_name: "{model}" model_version: -1 }} ]' for model in models)
    return f'platform: "ensemble" ensemble_scheduling {{ {step_texts} }}'


@pytest.fixture
def two_engines(tmp_path: Path) -> Path:
    """Model repository for ``--multi-model``: five models of TensorRT-LLM, and three models of a second engine."""
    tokenizer = parameters(tokenizer_dir=str(demo.CHAT))
    engine = 'backend: "tensorrtllm" model_transaction_policy { decoupled: true } max_batch_size: 8 '
    files = {
        "preprocessing": tokenizer,
        "postprocessing": tokenizer,
        "tensorrt_llm": engine + parameters(gpt_model_path=str(demo.CHAT), kv_cache_free_gpu_mem_fraction="0.2"),
        "ensemble": steps("preprocessing", "tensorrt_llm", "postprocessing"),
        "tensorrt_llm_bls": "",
        "small": engine + parameters(gpt_model_path=str(demo.DRAFT), kv_cache_free_gpu_mem_fraction="0.1"),
        "small_ensemble": steps("preprocessing", "small", "postprocessing"),
        "small_bls": parameters(tensorrt_llm_model_name="small", accumulate_tokens="false"),
    }
    for name, text in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(f'name: "{name}" {text}')
    return tmp_path


@pytest.mark.row("triton", "--multi-model", "--tensorrt_llm_model_name", "--load-model", "--model-control-mode")
@pytest.mark.row("triton", "folders whose models have other names")
def test_repository_may_have_several_engines(two_engines: Path, alone: dict[str, str]) -> None:
    """TensorRT-LLM's name for this is orchestrator mode: a front-end process, and workers for each model."""
    launcher_flags = ["--multi-model", "--tensorrt_llm_model_name=tensorrt_llm,small", "--model_repo", str(two_engines)]
    control = ["--model-control-mode=explicit", "--load-model=ensemble", "--load-model", "small_ensemble"]
    ports = ["--grpc-port", "0", "--metrics-port", "0", *BLOCKS]
    with Served("--compat", "triton", *launcher_flags, *control, *ports) as served:
        address = served.find(r"gRPC at (\S+)")[1]
        with triton.InferenceServerClient(address) as repository, httpx.Client(base_url=served.root) as http:
            names = KSERVE | {"small", "small_ensemble", "small_bls", "model"}
            assert states(repository) == dict.fromkeys(names, "READY")
            fields = {"text_input": PROMPT, "max_tokens": TOKENS, "exclude_input_in_output": True}
            engine_of = {"ensemble": "penstock-demo", "tensorrt_llm_bls": "penstock-demo"}
            engine_of |= {"small_ensemble": "small", "small_bls": "small"}
            for name, expected in engine_of.items():
                answer = http.post(f"/v2/models/{name}/generate", json=fields, timeout=60).json()
                assert answer["text_output"] == alone[expected] and answer["model_name"] == name
            repository.unload_model("small")
            unloaded = dict.fromkeys(("small", "small_ensemble", "small_bls"), "UNAVAILABLE")
            assert states(repository) == dict.fromkeys(names, "READY") | unloaded
            repository.load_model("small_bls")
            assert states(repository) == dict.fromkeys(names, "READY")


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({}, ["--tensorrt_llm_model_name=small,large"], "has no engine 'large', only small, tensorrt_llm"),
        (
            {"small_bls": parameters(tensorrt_llm_model_name="smal")},
            [],
            "uses smal, none of which is an engine; the engines are",
        ),
        ({"mine": ""}, [], "the model 'mine' is not a TensorRT-LLM model"),
        ({"small": 'backend: "tensorrtllm"'}, [], "must have gpt_model_path"),
        ({}, ["--load-model=small"], "requires --model-control-mode explicit"),
    ],
)
def test_invalid_repository_is_refused(
    two_engines: Path, change: dict[str, str], flags: list[str], message: str
) -> None:
    for name, text in change.items():
        (two_engines / name).mkdir(exist_ok=True)
        (two_engines / name / "config.pbtxt").write_text(f'name: "{name}" {text}')
    assert message in usage_error("--compat", "triton", "--model-repository", str(two_engines), *flags)


@pytest.mark.row("triton", "config.pbtxt")
def test_folder_of_checkpoints_is_a_model_repository(tmp_path: Path, alone: dict[str, str]) -> None:
    """Models can be unloaded only with ``--model-control-mode explicit``."""
    for name, folder in zip(NAMES, (demo.CHAT, demo.DRAFT), strict=True):
        (tmp_path / name).symlink_to(folder)
    with Served("--model-repository", str(tmp_path), *BLOCKS) as served:
        assert re.search(r"ready: penstock-demo, small at", "\n".join(served.lines))
        client = openai.OpenAI(base_url=served.url, api_key="none")
        assert {name: complete(client, name) for name in NAMES} == alone
        # Triton's own model names, such as tensorrt_llm, refer to the first model
        for path in ("small/unload", "tensorrt_llm/unload"):
            answer = httpx.post(f"{served.root}/v2/repository/models/{path}")
            assert answer.status_code == 400 and "--model-control-mode explicit" in answer.json()["error"]
        httpx.post(f"{served.root}/v2/repository/models/small/load").raise_for_status()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--models", "{"], "models: is not JSON"),
        (["--models", '["a"]'], "must be a JSON object of folders"),
        (["--models", '{"a": {"modle": "/b"}}'], "a: no such option 'modle'; did you mean model?"),
        (["--models", '{"a": {"max_num_seqs": 0, "model": "/b"}}'], "max_num_seqs"),
        (["--models", '{"a": {"max_num_seqs": 3}}'], '"model" is missing'),
        (["--models", '{"a": "/b"}', "--model", str(demo.CHAT), "--served-model-name", "a"], "name of two models"),
        (["--models", '{"default": "/b", "a": "/c"}'], "'default' is reserved for the first model"),
        (["--models", '{"": "/b"}'], "a model has an empty name"),
        (
            ["--models", '{"a": {"model": "/b", "lora_modules": ["x=/c"]}}', "--lora-modules", "x=/d", "--model", "/e"],
            "'x' is the name of a model, or of another adapter",
        ),
        (["--models", '{"a": "/b"}', "--load-model", "a"], "requires --model-control-mode explicit"),
        (
            ["--models", '{"alpha": "/b"}', "--model-control-mode", "explicit", "--load-model", "alpah"],
            "no model 'alpah'; did you mean alpha?",
        ),
    ],
)
def test_wrong_models_option_prints_one_sentence(flags: list[str], message: str) -> None:
    (sentence,) = usage_error(*flags).splitlines()
    assert message in sentence


def test_oversized_tokenizer_stops_start(oversized: Path) -> None:
    result = subprocess.run(
        [*SERVE, "--port", "0", "--model", str(oversized)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    assert "has a token with id 1000000000; the limit is 4194304" in result.stderr.strip().splitlines()[-1]
