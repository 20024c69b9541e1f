"""vLLM 0.5 as described by Ascend's documentation: ``/generate``, sampling rules, and flags of start commands."""

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
import requests
from serving import Served

from penstock import demo
from penstock.cli.main import main

FLAGS = f"--model={demo.CHAT} --tensor-parallel-size=1 --max-model-len=2048 --max-num-seqs=256"
FLAGS += " --max-num-batched-tokens=2048 --served-model-name qwen"
PROMPT = "What is the capital of Canada?"


@pytest.fixture(scope="module")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shims")
    assert main(["shims", str(folder), "ascend-vllm"]) == 0
    return folder


def started(shims: Path, *flags: str) -> Served:
    start = ("sh", str(shims / "llm_tools" / "PD_separate" / "start_servers.sh"))
    return Served(*FLAGS.split(), *flags, command=start, environment={"USE_OPENAI": "0"})


@pytest.fixture(scope="module")
def served(shims: Path) -> Iterator[Served]:
    with started(shims, "--num-gpu-blocks-override=300", "--trust-remote-code") as served:
        yield served


def exit_status(*arguments: str) -> object:
    """Return the exit status of a command, also if argparse raises ``SystemExit``."""
    try:
        return main(list(arguments))
    except SystemExit as ended:
        return ended.code


def curl(url: str, body: dict[str, Any]) -> bytes:
    """Send a request with curl, as in the documentation."""
    command = ["curl", "-sS", "-X", "POST", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout


@pytest.mark.row("vllm", "POST /generate", "prompt", "USE_OPENAI=0")
def test_generate_returns_prompt_and_output(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "top_k": -1, "top_p": 1, "temperature": 0, "ignore_eos": False}
    answer = json.loads(curl(f"{served.root}/generate", body | {"stream": False}))
    assert list(answer) == ["text"]
    (text,) = answer["text"]
    client = openai.OpenAI(base_url=served.url, api_key="none")
    other = client.completions.create(model="qwen", prompt=PROMPT, max_tokens=20, temperature=0)
    assert text == PROMPT + other.choices[0].text
    assert len(json.loads(curl(f"{served.root}/generate", {"prompt": PROMPT}))["text"]) == 1


@pytest.mark.row("vllm", "stream")
def test_each_stream_object_has_whole_text_so_far(served: Served) -> None:
    """The test reads the stream with ``requests``, like vLLM 0.5's client."""
    body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "n": 1, "stream": True}
    body |= {"ignore_eos": True, "skip_special_tokens": False}
    answer = requests.post(f"{served.root}/generate", json=body, stream=True, timeout=60)
    chunks = answer.iter_lines(chunk_size=8192, decode_unicode=False, delimiter=b"\0")
    texts = [json.loads(chunk.decode("utf-8"))["text"][0] for chunk in chunks if chunk]
    assert len(texts) > 1  # a busy server puts several tokens in one object
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before) and after != before
    whole = json.loads(curl(f"{served.root}/generate", body | {"stream": False}))
    assert texts[-1] == whole["text"][0]


@pytest.mark.row("vllm", "n", "use_beam_search", "best_of", "length_penalty")
def test_n_sequences_and_beams_are_returned(served: Served) -> None:
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
    ({"top_p": -0.1}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
]


@pytest.mark.row("vllm", "presence_penalty", "frequency_penalty", "top_p", "max_tokens", "temperature", "top_k")
@pytest.mark.parametrize(("wrong", "field"), WRONG)
def test_invalid_sampling_field_is_rejected_by_name(served: Served, wrong: dict[str, Any], field: str) -> None:
    for path in ("/generate", "/v1/completions"):
        if (path, field) == ("/v1/completions", "max_tokens"):
            continue  # /v1/completions allows max_tokens=0, for use with echo
        answer = httpx.post(served.root + path, json={"prompt": PROMPT, **wrong})
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["param"] == field, path


@pytest.mark.row("vllm", "stop", "ignore_eos")
def test_stop_and_ignore_eos_set_end_of_output(served: Served) -> None:
    body: dict[str, Any] = {"prompt": "One two three four five", "temperature": 0, "max_tokens": 40}
    whole = json.loads(curl(f"{served.root}/generate", body | {"ignore_eos": True}))["text"][0]
    output = whole.removeprefix(body["prompt"])
    word = output.strip()[-1]
    for stop in (word, ["nothing of this", word]):
        for path, prefix in (("/generate", body["prompt"]), ("/v1/completions", "")):
            answer = json.loads(curl(f"{served.root}{path}", body | {"stop": stop, "ignore_eos": True}))
            text = answer["text"][0] if prefix else answer["choices"][0]["text"]
            assert text == prefix + output[: output.index(word)]
    chat = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 30}
    ended = json.loads(curl(f"{served.url}/chat/completions", chat))
    endless = json.loads(curl(f"{served.url}/chat/completions", chat | {"ignore_eos": True}))
    reasons = [answer["choices"][0]["finish_reason"] for answer in (ended, endless)]
    assert reasons == ["stop", "length"] and endless["usage"]["completion_tokens"] == 30


def test_documented_chat_and_guided_json_are_answered(served: Served) -> None:
    body = {"model": "qwen", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100, "top_k": -1}
    body |= {"top_p": 1, "temperature": 0, "ignore_eos": False, "stream": False}
    answer = json.loads(curl(f"{served.url}/chat/completions", body))
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


def test_ignored_flag_is_logged(served: Served) -> None:
    assert any("--trust_remote_code is ignored" in line for line in served.lines)


def test_disconnect_cancels_request(served: Served) -> None:
    before = len(served.lines)
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.root}/generate", json=body) as stream:
        chunks = stream.iter_raw()
        next(chunks)
    served.find("POST /generate.*error=cancelled", after=before)


def test_stream_of_dead_engine_ends_with_error_object_without_resume(shims: Path) -> None:
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with (
        started(shims, "--num-gpu-blocks-override=60", "--no-resume") as served,
        httpx.stream("POST", f"{served.root}/generate", json=body, timeout=60) as stream,
    ):
        chunks = stream.iter_raw()
        first = next(chunks)
        os.kill(served.pids["engine"][0], signal.SIGKILL)
        *_, failed, end = b"".join([first, *chunks]).split(b"\0")
    assert not end and json.loads(failed)["error"]["code"] == 503


@pytest.mark.slow
@pytest.mark.row("vllm", "python -m vllm.entrypoints.openai.api_server", "python -m vllm.entrypoints.api_server")
def test_vllm_modules_of_shims_start_server(shims: Path) -> None:
    environment = {"PYTHONPATH": str(shims / "modules")}
    flags = f"{FLAGS} --num-gpu-blocks-override 50 --dtype bfloat16 --enforce-eager --disable-log-requests"
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    with Served(*flags.split(), command=command, environment=environment) as served:
        found = httpx.post(f"{served.root}/generate", json={"prompt": PROMPT, "max_tokens": 3, "stream": True})
        assert json.loads(found.content.split(b"\0")[0])["text"][0].startswith(PROMPT)
    wrong_command = [sys.executable, "-m", "vllm.entrypoints.api_server", "--max-log-lens"]
    failed = subprocess.run(wrong_command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert failed.stderr == "penstock serve: unknown argument --max-log-lens; did you mean --max-log-len?\n"


@pytest.mark.row("vllm", "--tokenizer-mode", "--response-role")
@pytest.mark.row("vllm", "--quantization", "other flags", "--load-format", "--kv-cache-dtype")
@pytest.mark.parametrize(
    ("environment", "flags", "message"),
    [
        ({"USE_OPENAI": "2"}, "", "USE_OPENAI: '2' is wrong: it is not one of 0, 1"),
        ({}, "--tensor-parallel-size=0", "--tensor-parallel-size: '0' is wrong"),
        ({}, "--num-speculative-tokens 3", "--num_speculative_tokens: requires --speculative-model"),
        ({}, "--allowed-origins [here", "--allowed-origins: '[here' is wrong"),
        ({}, "--response-role user", "--response_role: 'user' is wrong: the role of responses cannot be changed"),
        ({}, "--quantization nvfp4", "--quantization: 'nvfp4' is wrong: it is not one of none, w8a8"),
        ({}, "--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype: 'fp8_e5m2' is wrong"),
        ({}, "--load-format tensorizer", "--load-format: 'tensorizer' is wrong: it is not one of"),
        ({}, "--max-num-seq 3", "unknown argument --max-num-seq; did you mean --max-num-seqs?"),
    ],
)
def test_unsupported_value_is_rejected_by_name(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    flags: str,
    message: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert exit_status("config", "--compat", "ascend-vllm", *flags.split()) == 2
    output = capsys.readouterr().err
    assert message in output and len(output.splitlines()) == 1


VALUES = {
    "--model": "/models/qwen",
    "--host": "127.0.0.1",
    "--port": 8088,
    "--served-model-name": ["qwen", "default"],
    "--max-model-len": 4096,
    "--max-num-seqs": 64,
    "--max-num-batched-tokens": 512,
    "--tokenizer": "/models/other",
    "--seed": 7,
    "--block-size": 16,
    "--swap-space": 2.5,
    "--gpu-memory-utilization": 0.8,
    "--chat-template": "/template.jinja",
    "--api-key": ["secret"],
    "--revision": "v1",
    "--download-dir": "/downloads",
    "--lora-modules": ["sailor=/sailor"],
    "--max-loras": 3,
    "--max-lora-rank": 8,
    "--ssl-keyfile": "/key.pem",
    "--ssl-certfile": "/cert.pem",
    "--load-format": "dummy",
    "--kv-cache-dtype": "int8",
    "--quantization": "w8a8",
}
"""Test values by flag, for flags that have the same name as an option of Penstock."""


@pytest.mark.row("vllm", "--model", "--host", "--port", "--max-model-len", "--max-num-seqs", "--tokenizer", "--seed")
@pytest.mark.row("vllm", "--block-size", "--swap-space", "--gpu-memory-utilization", "--chat-template", "--api-key")
@pytest.mark.row("vllm", "--revision", "--download-dir", "--lora-modules", "--max-loras", "--max-lora-rank")
@pytest.mark.row("vllm", "--ssl-keyfile", "--ssl-certfile", "--max-num-batched-tokens", "--enable-lora")
@pytest.mark.row("vllm", "--enable-prefix-caching")
def test_flags_of_same_name_set_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags are given as ``--name value`` and ``--name=value``; switches are given without a value."""
    for joined in (False, True):
        flags = ["--enable-lora", "--enable-prefix-caching"]
        for name, value in VALUES.items():
            arguments = [str(argument) for argument in (value if isinstance(value, list) else [value])]
            flags += [f"{name}={arguments[0]}"] if joined and len(arguments) == 1 else [name, *arguments]
        assert main(["config", "--json", "--compat", "ascend-vllm", *flags]) == 0
        found = json.loads(capsys.readouterr().out)
        for name, value in (VALUES | {"--enable-lora": True, "--enable-prefix-caching": True}).items():
            setting = found[name[2:].replace("-", "_")]
            assert setting["value"] == ("***" if name == "--api-key" else value), name
            assert setting["source"] == name
    assert main(["config", "--json", "--compat", "ascend-vllm"]) == 0
    assert json.loads(capsys.readouterr().out)["enable_prefix_caching"]["value"] is False


IGNORED = {
    "--trust-remote-code": "",
    "--max-seq-len-to-capture": "8192",
    "--max-context-len-to-capture": "8192",
    "--use-v2-block-manager": "",
    "--worker-use-ray": "",
    "--disable-custom-all-reduce": "",
    "--max-parallel-loading-workers": "2",
    "--disable-log-requests": "",
    "--disable-log-stats": "",
    "--max-log-len": "100",
}


@pytest.mark.row("vllm", "--trust-remote-code", "--max-seq-len-to-capture")
@pytest.mark.row("vllm", "--max-context-len-to-capture", "--use-v2-block-manager")
@pytest.mark.row("vllm", "--worker-use-ray", "--disable-custom-all-reduce", "--max-parallel-loading-workers")
@pytest.mark.row("vllm", "--disable-log-requests", "--disable-log-stats", "--max-log-len")
def test_ignored_flags_are_reported(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [argument for name, value in IGNORED.items() for argument in (name, value) if argument]
    assert main(["config", "--compat", "ascend-vllm", *flags]) == 0
    table = capsys.readouterr().out.partition("\nignored\n")[2]
    for name in IGNORED:
        reported = f"--{name[2:].replace('-', '_')}"
        assert f"{reported} is ignored: " in caplog.text and f"  {reported} " in table


@pytest.mark.row("vllm", "--distributed-executor-backend")
def test_distributed_executor_backend_is_translated(capsys: pytest.CaptureFixture[str]) -> None:
    for name, backend in {"ray": "ray", "external_launcher": "auto", "uni": "uni", "mp": "mp"}.items():
        assert main(["config", "--json", "--compat", "ascend-vllm", "--distributed-executor-backend", name]) == 0
        assert json.loads(capsys.readouterr().out)["distributed_executor_backend"]["value"] == backend


@pytest.mark.row("vllm", "--speculative-model", "--num-speculative-tokens", "--ngram-prompt-lookup-max", "--dtype")
@pytest.mark.row("vllm", "--ngram-prompt-lookup-min", "--guided-decoding-backend", "--uvicorn-log-level")
@pytest.mark.row("vllm", "--allowed-origins '[\"…\"]'")
def test_vllm_flags_are_translated(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--speculative-model [ngram] --num-speculative-tokens 3 --ngram-prompt-lookup-max 4"
    flags += " --ngram-prompt-lookup-min 3 --dtype float"
    flags += " --swap-space 2 --guided-decoding-backend outlines --uvicorn-log-level warning --enable-prefix-caching"
    assert main(["config", "--json", "--compat", "ascend-vllm", *flags.split(), "--allowed-origins", '["a"]']) == 0
    found = {name: setting["value"] for name, setting in json.loads(capsys.readouterr().out).items()}
    speculation = {"num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 3, "method": "ngram"}
    assert json.loads(found["speculative_config"]) == speculation
    expected = {"dtype": "float32", "swap_space": 2.0, "guided_decoding_backend": "outlines", "log_level": "warning"}
    assert found == found | expected | {"enable_prefix_caching": True, "allowed_origins": ["a"]}
