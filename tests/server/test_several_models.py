"""Several models in one server: each its own engine process, asked for by name, loaded and unloaded while it runs."""

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

PROMPT, TOKENS = "The story of a fox:", 14
BLOCKS = ("--num-gpu-blocks-override", "200")
FIRST = ("--model", str(demo.CHAT), "--served-model-name", "penstock-demo")
BROKEN = "/nowhere/at/all"
NAMES = ("penstock-demo", "small")
KSERVE = {"ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"}


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """What each says where there is no other."""
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS)
    found = {}
    for name, folder in zip(NAMES, (demo.CHAT, demo.DRAFT), strict=True):
        llm = LLM(model=str(folder), num_gpu_blocks_override=200)
        found[name] = llm.generate([PROMPT], greedy)[0].outputs[0].text
    assert found["small"] != found["penstock-demo"]
    return found


@pytest.fixture(scope="module")
def unreadable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose text cannot be read."""
    folder = tmp_path_factory.mktemp("checkpoints") / "unreadable"
    shutil.copytree(demo.DRAFT, folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": 5}')
    return folder


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose vocabulary would take 8 GB."""
    folder = tmp_path_factory.mktemp("checkpoints") / "greedy"
    shutil.copytree(demo.DRAFT, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["another"] = 10**9
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def served(unreadable: Path, greedy: Path) -> Iterator[Served]:
    small = {"model": str(demo.DRAFT), "max-num-seqs": 8}
    models = json.dumps({"small": small, "broken": BROKEN, "un/readable": str(unreadable), "greedy": str(greedy)})
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


def said(client: openai.OpenAI, model: str, **more: Any) -> str:
    asked = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, **more}
    return client.completions.create(model=model, **asked).choices[0].text


def states(repository: triton.InferenceServerClient) -> dict[str, str]:
    return {model.name: model.state for model in repository.get_model_repository_index().models}


def figures(served: Served, name: str) -> dict[str, float]:
    """By model."""
    page = httpx.get(f"{served.root}/metrics").text
    families = [family for family in text_string_to_metric_families(page) if family.name == name]
    return {s.labels["model_name"]: s.value for family in families for s in family.samples if s.name.startswith(name)}


def test_each_answers_as_if_it_were_alone(served: Served, client: openai.OpenAI, alone: dict[str, str]) -> None:
    found: dict[int, tuple[str, str]] = {}

    def ask(number: int) -> None:
        name = NAMES[number % 2]
        found[number] = (name, said(client, name))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert {text for name, text in found.values() if name == "small"} == {alone["small"]}
    assert {text for name, text in found.values() if name == "penstock-demo"} == {alone["penstock-demo"]}
    assert said(client, "default") == alone["penstock-demo"]


def test_every_dialect_finds_them(served: Served, client: openai.OpenAI, alone: dict[str, str]) -> None:
    with httpx.Client(base_url=served.root, timeout=60) as http:
        for name in NAMES:
            asked = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "model": name}
            generated = http.post("/generate", json=asked).json()
            assert generated == {"text": [PROMPT + alone[name]]}
            blade = http.post("/v1/completions", json=asked, headers={"Authorization": "TOKEN"}).json()
            assert blade["choices"][0]["text"] == alone[name]
            own = {"text": PROMPT, "max_dec_len": TOKENS, "temperature": 0, "model": name}
            assert http.post("/v1/completions", json=own).json()["result"] == alone[name]
            fields = {"text_input": PROMPT, "max_tokens": TOKENS, "exclude_input_in_output": True}
            assert http.post(f"/v2/models/{name}/generate", json=fields).json()["text_output"] == alone[name]
        anywhere = {"text": PROMPT, "max_dec_len": TOKENS, "temperature": 0, "model": "whatever"}
        assert http.post("/v1/completions", json=anywhere).json()["result"] == alone["penstock-demo"]
    question = [{"role": "user", "content": "What is the capital of Canada?"}]
    messages = anthropic.Anthropic(base_url=served.root, api_key="none").messages
    for name in NAMES:
        chat = {"model": name, "messages": question, "max_tokens": 8, "temperature": 0.0}
        wanted = client.chat.completions.create(**chat)
        assert wanted.model == name
        answer = messages.create(model=name, messages=question, max_tokens=8, extra_body={"temperature": 0})
        assert answer.model == name and answer.content[0].text == wanted.choices[0].message.content
        response = client.responses.create(model=name, input=question, max_output_tokens=16, temperature=0)
        assert response.output_text.startswith(wanted.choices[0].message.content)


def test_what_there_is_is_told(served: Served, client: openai.OpenAI, repository: triton.InferenceServerClient) -> None:
    assert [model.id for model in client.models.list()] == list(NAMES)
    assert client.models.retrieve("small").root == "small"
    with pytest.raises(openai.NotFoundError, match=r"'smal' does not exist; available: penstock-demo, small"):
        said(client, "smal")
    with pytest.raises(openai.NotFoundError, match=r"'broken' is not served: not loaded; available:"):
        said(client, "broken")
    ready = dict.fromkeys([*KSERVE, *NAMES, "model"], "READY")
    assert states(repository) == {
        **ready,
        "broken": "UNAVAILABLE",
        "un/readable": "UNAVAILABLE",
        "greedy": "UNAVAILABLE",
    }
    can = httpx.post(f"{served.root}/v2/repository/index", json={"ready": True}).json()
    assert {each["name"] for each in can} == ready.keys()
    deadline = time.monotonic() + 30
    while set(figures(served, "penstock:kv_blocks").values()) != {200}:  # engines tell once a second
        assert time.monotonic() < deadline
    assert figures(served, "penstock:kv_blocks").keys() == set(NAMES)
    before = figures(served, "penstock:generation_tokens")
    said(client, "small", max_tokens=5)
    after = figures(served, "penstock:generation_tokens")
    assert after["small"] - before.get("small", 0) == 5
    assert after["penstock-demo"] == before["penstock-demo"]


def test_one_leaves_once_its_answers_have_ended_and_comes_back(
    served: Served, client: openai.OpenAI, repository: triton.InferenceServerClient, alone: dict[str, str]
) -> None:
    before = set(served.pids["engine"])
    long = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(model="small", **long).choices[0].text
    stream = client.completions.create(model="small", stream=True, **long)
    first = next(iter(stream)).choices[0].text
    many: list[int] = []  # prompts, of which the engine has a part at a time

    def ask_many() -> None:
        asked = {"model": "small", "prompt": [PROMPT] * 80, "max_tokens": 120, "extra_body": {"ignore_eos": True}}
        many.append(len(client.with_options(max_retries=0).completions.create(**asked).choices))

    asking = threading.Thread(target=ask_many)
    asking.start()
    wait(lambda: figures(served, "penstock:num_requests_running").get("small", 0) > 4)
    leaving = threading.Thread(target=repository.unload_model, args=("small",))
    leaving.start()
    wait(lambda: states(repository)["small"] == "UNLOADING")
    assert httpx.get(f"{served.root}/ready").status_code == 200
    with pytest.raises(openai.NotFoundError, match="'small' is not served: it is being unloaded"):
        said(client, "small")
    assert first + "".join(chunk.choices[0].text for chunk in stream) == whole
    asking.join()
    assert many == [80]
    leaving.join()
    assert not served.pids["tokenizer"]
    assert len(set(served.pids["engine"])) == 1 and set(served.pids["engine"]) < before
    for _ in range(8):  # whichever process hears it
        with pytest.raises(openai.NotFoundError, match="'small' is not served: unloaded"):
            said(client, "small")
        with pytest.raises(InferenceServerException, match="has no available versions: unloaded"):
            repository.get_model_metadata("small")
        assert said(client, "penstock-demo") == alone["penstock-demo"]
        assert httpx.get(f"{served.root}/ready").status_code == 200
    assert states(repository)["small"] == "UNAVAILABLE" and not repository.is_model_ready("small")
    repository.load_model("small")
    assert len(served.pids["engine"]) == 2
    assert len(served.pids["tokenizer"]) == 2  # so that no stream waits for it: one for each API process
    for _ in range(8):
        assert said(client, "small") == alone["small"]
    repository.load_model("small")  # loaded already
    assert states(repository)["small"] == "READY"


def test_one_that_cannot_be_loaded_disturbs_nobody(
    served: Served, client: openai.OpenAI, repository: triton.InferenceServerClient, alone: dict[str, str]
) -> None:
    with pytest.raises(InferenceServerException, match=rf"failed to load 'broken': .*{BROKEN}"):
        repository.load_model("broken")
    with pytest.raises(InferenceServerException, match="failed to load 'brokn', failed to poll"):
        repository.load_model("brokn")
    with httpx.Client(base_url=f"{served.root}/v2/repository/models/", timeout=60) as http:
        unread = http.post("un/readable/load")
        assert (
            unread.status_code == 400
            and "a value of the wrong type" in unread.text
            and "eos_token must be a string" in unread.text
        )
        answer = http.post("greedy/load")
        assert answer.status_code == 400 and "has a token with id 1000000000" in answer.text
        for wish in ({"parameters": 5}, {"parameters": [1]}, {"parameters": {"a parameter": 1}}):
            for what in ("load", "unload"):
                answer = http.post(f"small/{what}", json=wish)
                assert answer.status_code == 400 and "parameter" in answer.text, answer.text
    assert states(repository)["broken"] == "UNAVAILABLE"
    assert said(client, "small") == alone["small"]


def test_the_death_of_one_engine_is_not_the_other_s(
    served: Served, client: openai.OpenAI, alone: dict[str, str]
) -> None:
    newest = served.pids["engine"][-1]  # that of the model that was loaded last
    long = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(model="penstock-demo", **long).choices[0].text
    stream = client.completions.create(model="penstock-demo", stream=True, **long)
    first = next(iter(stream)).choices[0].text
    seen = len(served.lines)
    os.kill(newest, signal.SIGKILL)
    assert first + "".join(chunk.choices[0].text for chunk in stream) == whole
    served.find(rf"the engine \(process {newest}\) ended: killed by SIGKILL", seen)
    patient = client.with_options(max_retries=20)
    assert said(patient, "small") == alone["small"]


def test_one_that_cannot_live_is_not_served_and_the_other_is(
    served: Served, client: openai.OpenAI, repository: triton.InferenceServerClient, alone: dict[str, str]
) -> None:
    stays, seen = served.pids["engine"][0], len(served.lines)

    def gone() -> bool:
        for pid in served.pids["engine"]:
            if pid != stays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return any("small is no longer served" in line for line in served.lines[seen:])

    wait(gone)
    wait(lambda: states(repository)["small"] == "UNAVAILABLE")
    with pytest.raises(openai.NotFoundError, match="'small' is not served: its engine has died too often"):
        said(client, "small")
    assert said(client, "penstock-demo") == alone["penstock-demo"]
    assert httpx.get(f"{served.root}/ready").status_code == 200
    repository.load_model("small")
    assert said(client, "small") == alone["small"]


def wait(condition: Callable[[], bool]) -> None:
    """For what nobody tells of."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_is_over_an_engine_goes_with_it(
    served: Served, client: openai.OpenAI, repository: triton.InferenceServerClient, alone: dict[str, str]
) -> None:
    with pytest.raises(InferenceServerException, match="uses the engine of tensorrt_llm; unload that, or set"):
        repository.unload_model("preprocessing")
    repository.unload_model("ensemble", unload_dependents=True)
    assert states(repository) == {**dict.fromkeys([*KSERVE, "penstock-demo", *OTHERS], "UNAVAILABLE"), **HERE}
    assert said(client, "default") == alone["small"]
    repository.unload_model("small")
    assert client.models.list().data == []
    with pytest.raises(openai.InternalServerError, match="no model is loaded"):
        said(client.with_options(max_retries=0), "default")
    assert httpx.get(f"{served.root}/ready").status_code == 200
    repository.load_model("tensorrt_llm")
    assert said(client, "default") == alone["penstock-demo"]
    httpx.post(f"{served.root}/v2/repository/models/small/load", timeout=60).raise_for_status()
    assert states(repository)["ensemble"] == "READY"


OTHERS = ("broken", "un/readable", "greedy")
HERE = {"small": "READY", "model": "READY"}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server that begins with nothing, and the folder of its files."""
    folder = tmp_path_factory.mktemp("temporary")
    file = tmp_path_factory.mktemp("configuration") / "penstock.yaml"
    small = f"  small:\n    model: {demo.DRAFT}\n    max-num-seqs: 8\n"
    file.write_text(f"model_control_mode: explicit\nmodels:\n{small}  other: {demo.DRAFT}\n")
    flags = ("--config", str(file), "--drain-timeout", "1")
    with Served(*BLOCKS, *flags, environment={"TMPDIR": str(folder)}) as served:
        yield served, folder


def test_a_server_may_begin_with_nothing(empty: tuple[Served, Path]) -> None:
    served, _ = empty
    assert re.search(r"ready: no model at", "\n".join(served.lines))
    assert not served.pids["engine"]
    answer = httpx.post(f"{served.root}/v2/repository/models/small/load", timeout=60)
    assert answer.status_code == 200, answer.text
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 3}
    httpx.post(f"{served.root}/v1/completions", json=asked).raise_for_status()
    os.kill(served.pids["api"][0], signal.SIGKILL)
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=20)
    said(client, "small")  # which another process knows as soon as it is there


def test_who_waits_for_a_model_hears_what_became_of_it(empty: tuple[Served, Path]) -> None:
    served, folder = empty
    away = folder.with_name("away")
    wish = f"{served.root}/v2/repository/models/other"
    told: list[httpx.Response] = []

    def begin() -> tuple[threading.Thread, int]:
        """Loading it, which comes to no end."""
        asking = threading.Thread(target=lambda: told.append(httpx.post(f"{wish}/load", timeout=60)))
        asking.start()
        wait(lambda: len(served.pids["engine"]) == 2)
        loading = served.pids["engine"][-1]
        os.kill(loading, signal.SIGSTOP)
        return asking, loading

    def files() -> list[int]:
        return [count_files_and_threads(pid)[0] for pid in (served.pid, *served.pids["api"])]

    counts = []
    for _ in range(2):
        for what in ("load", "unload"):
            httpx.post(f"{wish}/{what}", timeout=60).raise_for_status()
        counts.append(files())
    wait(
        lambda: all(now <= then for now, then in zip(files(), counts[0], strict=True))
    )  # some are closed a moment later
    folder.rename(away)
    assert "internal error" in httpx.post(f"{wish}/load", timeout=60).json()["error"]
    away.rename(folder)
    while True:
        asking, loading = begin()
        index = httpx.post(f"{served.root}/v2/repository/index").json()
        early = httpx.post(f"{served.url}/completions", json={"model": "other", "prompt": PROMPT})
        os.kill(loading, signal.SIGKILL)
        asking.join()
        if (answer := told.pop()).status_code != 200:
            break
        httpx.post(f"{wish}/unload", timeout=60)  # it had loaded before it was stopped
    assert {"name": "other", "version": "1", "state": "LOADING", "reason": ""} in index
    assert early.status_code == 503 and "starting" in early.text
    assert "killed by SIGKILL" in answer.json()["error"]
    assert httpx.get(f"{served.root}/ready").status_code == 200
    asking, _ = begin()
    served.terminate()
    asking.join()
    assert "the server is stopping" in told.pop().json()["error"]
    assert served.ended() == 0


def parameters(**values: str) -> str:
    return " ".join(f'parameters {{ key: "{key}" value {{ string_value: "{v}" }} }}' for key, v in values.items())


def steps(*models: str) -> str:
    each = " ".join(f'step [ {{ model_name: "{model}" model_version: -1 }} ]' for model in models)
    return f'platform: "ensemble" ensemble_scheduling {{ {each} }}'


@pytest.fixture
def two_engines(tmp_path: Path) -> Path:
    """A repository for ``--multi-model``: TensorRT-LLM's five models, and copies of three over another engine."""
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
def test_a_repository_may_have_several_engines(two_engines: Path, alone: dict[str, str]) -> None:
    """TensorRT-LLM calls this the orchestrator mode: a front process, and workers for each model."""
    launched = ["--multi-model", "--tensorrt_llm_model_name=tensorrt_llm,small", "--model_repo", str(two_engines)]
    control = ["--model-control-mode=explicit", "--load-model=ensemble", "--load-model", "small_ensemble"]
    ports = ["--grpc-port", "0", "--metrics-port", "0", *BLOCKS]
    with Served("--compat", "triton", *launched, *control, *ports) as served:
        address = served.find(r"gRPC at (\S+)")[1]
        with triton.InferenceServerClient(address) as repository, httpx.Client(base_url=served.root) as http:
            names = KSERVE | {"small", "small_ensemble", "small_bls", "model"}
            assert states(repository) == dict.fromkeys(names, "READY")
            fields = {"text_input": PROMPT, "max_tokens": TOKENS, "exclude_input_in_output": True}
            over = {"ensemble": "penstock-demo", "tensorrt_llm_bls": "penstock-demo"}
            over |= {"small_ensemble": "small", "small_bls": "small"}
            for name, wanted in over.items():
                answer = http.post(f"/v2/models/{name}/generate", json=fields, timeout=60).json()
                assert answer["text_output"] == alone[wanted] and answer["model_name"] == name
            repository.unload_model("small")
            gone = dict.fromkeys(("small", "small_ensemble", "small_bls"), "UNAVAILABLE")
            assert states(repository) == dict.fromkeys(names, "READY") | gone
            repository.load_model("small_bls")
            assert states(repository) == dict.fromkeys(names, "READY")


@pytest.mark.parametrize(
    ("change", "flags", "words"),
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
def test_a_repository_that_cannot_be_is_refused(
    two_engines: Path, change: dict[str, str], flags: list[str], words: str
) -> None:
    for name, text in change.items():
        (two_engines / name).mkdir(exist_ok=True)
        (two_engines / name / "config.pbtxt").write_text(f'name: "{name}" {text}')
    assert words in usage_error("--compat", "triton", "--model-repository", str(two_engines), *flags)


@pytest.mark.row("triton", "config.pbtxt")
def test_a_folder_of_checkpoints_is_a_repository(tmp_path: Path, alone: dict[str, str]) -> None:
    """Of which nobody loads or unloads any without leave."""
    for name, folder in zip(NAMES, (demo.CHAT, demo.DRAFT), strict=True):
        (tmp_path / name).symlink_to(folder)
    with Served("--model-repository", str(tmp_path), *BLOCKS) as served:
        assert re.search(r"ready: penstock-demo, small at", "\n".join(served.lines))
        client = openai.OpenAI(base_url=served.url, api_key="none")
        assert {name: said(client, name) for name in NAMES} == alone
        for what in ("small/unload", "tensorrt_llm/unload"):  # the first model, whatever it is, has Triton's names
            answer = httpx.post(f"{served.root}/v2/repository/models/{what}")
            assert answer.status_code == 400 and "--model-control-mode explicit" in answer.json()["error"]
        httpx.post(f"{served.root}/v2/repository/models/small/load").raise_for_status()


@pytest.mark.parametrize(
    ("flags", "words"),
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
            ["--models", '{"a": "/b"}', "--model-control-mode", "explicit", "--load-model", "aa"],
            "no model 'aa'; did you mean a?",
        ),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(flags: list[str], words: str) -> None:
    (sentence,) = usage_error(*flags).splitlines()
    assert words in sentence


def test_a_tokenizer_that_asks_for_too_much_stops_the_start(greedy: Path) -> None:
    done = subprocess.run([*SERVE, "--port", "0", "--model", str(greedy)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "has a token with id 1000000000; the limit is 4194304" in done.stderr.strip().splitlines()[-1]
