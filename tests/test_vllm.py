"""vLLM as Ascend's document has it: ``/generate``, its rules of sampling, and the commands that start an instance."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Served

from penstock import demo
from penstock.cli.main import main

DEPLOY = Path(__file__).parents[1] / "deploy"
START = ("sh", str(DEPLOY / "llm_tools" / "PD_separate" / "start_servers.sh"))
FLAGS = f"--model={demo.CHAT} --tensor-parallel-size=1 --max-model-len=2048 --max-num-seqs=256"
FLAGS += " --max-num-batched-tokens=2048 --served-model-name qwen"
PROMPT = "What is the capital of Canada?"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    environment = {"PYTHON": sys.executable, "USE_OPENAI": "0"}
    flags = [*FLAGS.split(), "--num-gpu-blocks-override=300", "--trust-remote-code"]
    with Served(*flags, command=START, environment=environment) as served:
        yield served


def curl(url: str, body: dict[str, Any]) -> bytes:
    """As printed."""
    command = ["curl", "-sS", "-X", "POST", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout


def test_a_prompt_comes_back_with_its_output(served: Served) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 20, "top_k": -1, "top_p": 1, "temperature": 0, "ignore_eos": False}
    answer = json.loads(curl(f"{served.root}/generate", asked | {"stream": False}))
    assert list(answer) == ["text"]
    (text,) = answer["text"]
    client = openai.OpenAI(base_url=served.url, api_key="none")
    other = client.completions.create(model="qwen", prompt=PROMPT, max_tokens=20, temperature=0)
    assert text == PROMPT + other.choices[0].text
    assert len(json.loads(curl(f"{served.root}/generate", {"prompt": PROMPT}))["text"]) == 1


def test_a_stream_has_all_there_is_so_far_in_each_object(served: Served) -> None:
    """As vLLM 0.5's own client reads it."""
    asked = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "n": 1, "stream": True}
    with httpx.stream("POST", f"{served.root}/generate", json=asked) as stream:
        *objects, rest = stream.read().split(b"\0")
    assert not rest
    texts = [json.loads(found)["text"][0] for found in objects]
    assert len(texts) > 5
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before) and after != before
    whole = json.loads(curl(f"{served.root}/generate", asked | {"stream": False}))
    assert texts[-1] == whole["text"][0]


def test_several_sequences_and_beams(served: Served) -> None:
    sampled = {"prompt": PROMPT, "n": 3, "temperature": 1.0, "top_k": 50, "seed": 1}
    assert len(json.loads(curl(f"{served.root}/generate", sampled))["text"]) == 3
    beams = {"prompt": PROMPT, "n": 2, "use_beam_search": True, "best_of": 2, "length_penalty": 1.5, "top_k": -1}
    found = json.loads(curl(f"{served.root}/generate", beams | {"top_p": 1.0, "temperature": 0.0}))["text"]
    assert len(set(found)) == 2 and all(text.startswith(PROMPT) for text in found)


WRONG = [
    ({"n": 2, "temperature": 0}, "n"),
    ({"n": 2, "top_k": 1}, "n"),
    ({"use_beam_search": True, "temperature": 0.0}, "best_of"),
    ({"use_beam_search": True, "n": 2, "temperature": 0.5}, "temperature"),
    ({"use_beam_search": True, "n": 2, "temperature": 0.0, "top_p": 0.9}, "top_p"),
    ({"use_beam_search": True, "n": 2, "temperature": 0.0, "top_k": 5}, "top_k"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"top_q": 1}, "top_q"),
]


@pytest.mark.parametrize(("wrong", "field"), WRONG)
def test_what_the_table_forbids_is_refused_by_name(served: Served, wrong: dict[str, Any], field: str) -> None:
    for path in ("/generate", "/v1/completions"):
        if (path, field) == ("/v1/completions", "max_tokens"):
            continue  # which has another word for it
        answer = httpx.post(served.root + path, json={"prompt": PROMPT, **wrong})
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["param"] == field, path


def test_the_documents_request_and_its_schema(served: Served) -> None:
    asked = {"model": "qwen", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100, "top_k": -1}
    asked |= {"top_p": 1, "temperature": 0, "ignore_eos": False, "stream": False}
    answer = json.loads(curl(f"{served.url}/chat/completions", asked))
    assert answer["choices"][0]["message"]["content"]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 10}},
        "required": ["name"],
    }
    schema["additionalProperties"] = False
    guided = {"model": "qwen", "prompt": PROMPT, "max_tokens": 50, "temperature": 0, "guided_json": json.dumps(schema)}
    found = json.loads(curl(f"{served.url}/completions", guided))
    assert list(json.loads(found["choices"][0]["text"])) == ["name"]
    wrong = httpx.post(f"{served.url}/completions", json=guided | {"model": "another"})
    assert wrong.status_code == 404 and wrong.json()["error"]["param"] == "model"


def test_what_is_ignored_is_said_and_metrics_have_its_names(served: Served) -> None:
    assert any("--trust_remote_code has no meaning here and is ignored" in line for line in served.lines)
    page = httpx.get(f"{served.root}/metrics").text
    for name in ("num_requests_running", "gpu_cache_usage_perc", "prompt_tokens_total", "request_success_total"):
        assert f"\nvllm:{name}{{" in page, name
    assert "\nvllm:time_to_first_token_seconds_bucket{" in page
    ours = [line.split()[-1] for line in page.splitlines() if line.startswith("penstock:prompt_tokens_total")]
    theirs = [line.split()[-1] for line in page.splitlines() if line.startswith("vllm:prompt_tokens_total")]
    assert ours == theirs and float(ours[0]) > 0


def test_a_client_that_goes_cancels_its_request(served: Served) -> None:
    before = len(served.lines)
    asked = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.root}/generate", json=asked) as stream:
        pieces = stream.iter_raw()
        next(pieces)
    served.find("POST /generate.*error=cancelled", after=before)


def test_a_stream_that_fails_ends_in_an_object_that_says_so(served: Served) -> None:
    asked = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.root}/generate", json=asked, timeout=60) as stream:
        pieces = stream.iter_raw()
        first = next(pieces)
        os.kill(served.pids["engine"][0], signal.SIGKILL)
        *_, failed, end = b"".join([first, *pieces]).split(b"\0")
    assert not end and json.loads(failed)["error"]["code"] == 503


@pytest.mark.parametrize("module", ["vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"])
def test_its_modules_start_a_server_where_shims_are_asked_for(module: str) -> None:
    command = (sys.executable, "-m", module)
    flags = f"{FLAGS} --num-gpu-blocks-override 50 --dtype bfloat16 --enforce-eager --disable-log-requests"
    with Served(*flags.split(), command=command, environment={"PYTHONPATH": str(DEPLOY / "shims")}) as served:
        found = httpx.post(f"{served.root}/generate", json={"prompt": PROMPT, "max_tokens": 3, "stream": True})
        assert json.loads(found.content.split(b"\0")[0])["text"][0].startswith(PROMPT)


@pytest.mark.parametrize(
    ("environment", "flags", "words"),
    [
        ({"RANK_TABLE_FILE_PATH": "local_ranktable_10.0.0.1_45.json"}, "", "RANK_TABLE_FILE_PATH: "),
        ({"GLOBAL_RANK_TABLE_FILE_PATH": "global.json"}, "", "separate prefill and decode instances are not there"),
        ({"NODE_PORTS": "8088,8089"}, "", "NODE_PORTS: '8088,8089' is wrong: separate prefill and decode"),
        ({"USE_OPENAI": "2"}, "", "USE_OPENAI: '2' is wrong: it is none of 0, 1"),
        ({}, "--tensor-parallel-size=2", "--tensor_parallel_size: '2' is wrong: a model runs on one device here"),
        ({}, "--num-speculative-tokens 3", "--num_speculative_tokens: goes with --speculative-model only"),
        ({}, "--allowed-origins here", "--allowed_origins: 'here' is wrong"),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    flags: str,
    words: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["config", "--compat", "ascend-vllm", *flags.split()]) == 2
    assert words in capsys.readouterr().err


def test_flags_mean_what_they_mean_there(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--speculative-model [ngram] --num-speculative-tokens 3 --ngram-prompt-lookup-max 4 --dtype float"
    flags += " --swap-space 2 --guided-decoding-backend outlines --uvicorn-log-level warning --enable-prefix-caching"
    assert main(["config", "--json", "--compat", "ascend-vllm", *flags.split(), "--allowed-origins", '["a"]']) == 0
    found = {name: setting["value"] for name, setting in json.loads(capsys.readouterr().out).items()}
    guesses = {"num_speculative_tokens": 3, "prompt_lookup_max": 4, "method": "ngram"}
    assert json.loads(found["speculative_config"]) == guesses
    expected = {"dtype": "float32", "swap_space": 2.0, "guided_decoding_backend": "auto", "log_level": "warning"}
    assert found == found | expected | {"enable_prefix_caching": True, "allowed_origins": ["a"]}
