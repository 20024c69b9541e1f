"""Requests that fail before their body is parsed: the path, headers or profile determine the format of the error."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest
from serving import Served

KEY = {"authorization": "Bearer key"}
LIMIT = 20_000
FLAGS = ("--num-gpu-blocks-override", "200", "--max-body-size", str(LIMIT), "--max-header-size", "4000")
BY_BODY = ("/generate", "/tokenize")
"""Paths shared by several dialects, distinguished by the body. Until the body is read, errors have vLLM's format."""
WRONG = {"max_tokens": "many", "stream": "maybe", "messages": 5, "inputs": 5, "input": 5, "prompt": 5}
"""Body that every dialect rejects."""


class Case(NamedTuple):
    """Request of a dialect with a wrong value, and the path of a member that only this dialect's errors have."""

    path: str
    body: dict[str, Any]
    member: str
    headers: Mapping[str, str] = MappingProxyType({})


CASES = {
    "openai": Case("/v1/chat/completions", {"messages": 5}, "error.message"),
    "responses": Case("/v1/responses", {"input": 5}, "error.message"),
    "anthropic": Case("/v1/messages", {"messages": 5}, "error.type"),
    "paddlenlp": Case("/v1/chat/completions", {"text": "a", "max_dec_len": "many"}, "error_msg"),
    "bladellm": Case("/v1/chat/completions", {"messages": 5}, "error_info.message", {"authorization": "TOKEN"}),
    "tgi": Case("/generate", {"inputs": "a", "parameters": {"max_new_tokens": "many"}}, "error_type"),
    "tgi stream": Case("/generate_stream", {"inputs": 5}, "error_type"),
    "tgi compat": Case("/", {"inputs": 5}, "error_type"),
    "kserve": Case("/v2/models/ensemble/generate", {"text_input": 5}, "error"),
    "ollama": Case("/api/chat", {"model": "penstock-demo", "messages": 5}, "error"),
    "cohere": Case("/v1/embed", {"texts": 5}, "message"),
    "llama-server": Case("/completion", {"prompt": {}}, "error.message"),
    "vllm": Case("/generate", {"prompt": 5}, "error.message"),
}


def served_with(*flags: str) -> Served:
    return Served(*FLAGS, *flags)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with served_with("--api-key", "key,TOKEN") as server:
        yield server


def shape(document: Any) -> Any:
    """Return the structure of an error document: its keys and types of values, without optional keys."""
    if isinstance(document, dict):
        return {key: shape(value) for key, value in document.items() if key not in ("param", "code", "created", "id")}
    return type(document).__name__ if isinstance(document, str) else "value"


def has(document: Any, member: str) -> bool:
    for name in member.split("."):
        if not isinstance(document, dict) or name not in document:
            return False
        document = document[name]
    return True


def raw(served: Served, path: str, *lines: str, body: str = "") -> httpx.Response:
    """Send a malformed POST request, which HTTP client libraries would refuse to send."""
    host, _, port = served.root.rpartition("/")[2].partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join([f"POST {path} HTTP/1.1", *lines, "connection: close", "", body]).encode())
        received = b""
        while more := connection.recv(2**16):
            received += more
    head, _, content = received.partition(b"\r\n\r\n")
    return httpx.Response(int(head.split()[1]), content=content)


def early_failures(served: Served, client: httpx.Client, path: str, key: dict[str, str]) -> dict[str, httpx.Response]:
    """Return the responses to requests that fail before their body is parsed, by kind of failure."""
    line = [f"{name}: {value}" for name, value in key.items()]
    failures = {
        "wrong method": client.put(path, json={}, headers=key),
        "too large": client.post(path, content=b" " * (LIMIT + 1), headers=key),
        "too large, in chunks": client.post(path, content=iter([b" " * (LIMIT + 1)]), headers=key),
        "not JSON": client.post(path, content=b"{", headers=key),
        "no Host": raw(served, path, *line, "content-length: 2", body="{}"),
        "large head": raw(served, path, "host: x", *line, "x: " + "y" * 4000),
        "gzip": raw(served, path, "host: x", *line, "transfer-encoding: gzip, chunked"),
        "wrong chunk": raw(served, path, "host: x", *line, "transfer-encoding: chunked", body="x\r\n"),
    }
    if key:
        failures["no key"] = client.post(path, json={})
    return failures


@pytest.mark.slow
def test_early_failures_of_each_route_have_its_error_format(served: Served) -> None:
    """The expected format is that of an error found after the body was parsed."""
    compared = 0
    with httpx.Client(base_url=served.root, timeout=60) as client:
        paths = client.get("/openapi.json", headers=KEY).json()["paths"]
        for path in [re.sub(r"\{\w+\}", "ensemble", path) for path, found in paths.items() if "post" in found]:
            late = client.post(path, json=WRONG, headers=KEY)
            if late.status_code < 400 or path in BY_BODY or path.startswith("/v1/audio"):
                continue
            for name, answer in early_failures(served, client, path, KEY).items():
                if path.endswith(("register", "unregister", "/logging", "/setting")) and answer.status_code == 200:
                    continue  # these routes answer without reading the body
                assert answer.status_code >= 400, (path, name)
                assert shape(answer.json()) == shape(late.json()), (path, name, answer.text, late.text)
                compared += 1
    assert compared > 200


@pytest.mark.parametrize("name", CASES)
def test_errors_have_distinguishing_member_of_dialect(served: Served, name: str) -> None:
    """Each dialect's errors have the member by which these tests recognize the dialect."""
    case = CASES[name]
    answer = httpx.post(served.root + case.path, json=case.body, headers={**KEY, **case.headers})
    assert has(answer.json(), case.member), answer.text


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["paddlenlp", "bladellm"])
def test_early_failures_have_error_format_of_profile(profile: str) -> None:
    with served_with("--compat", profile, "--model", "", "--host", "127.0.0.1") as server:
        case = CASES[profile]
        late = httpx.post(server.root + case.path, json=case.body)
        assert has(late.json(), case.member), late.text
        with httpx.Client(base_url=server.root, timeout=60) as client:
            for name, answer in early_failures(server, client, case.path, {}).items():
                assert shape(answer.json()) == shape(late.json()), (name, answer.text)
            refused = client.post("/v1/messages", content=b"{")
            assert has(refused.json(), CASES["anthropic"].member), "other paths must keep their format"


@pytest.mark.slow
def test_errors_after_engine_death_have_format_of_dialect() -> None:
    """``--max-body-size`` is not set: its default is computed from the engine's context length."""
    flags = ("--num-gpu-blocks-override", "200", "--no-resume")
    with Served(*flags) as server, httpx.Client(base_url=server.root, timeout=60) as client:
        good = {
            "paddlenlp": {"text": "a", "max_dec_len": 1},
            "tgi": {"inputs": "a", "parameters": {"max_new_tokens": 1}},
            "tgi compat": {"inputs": "a", "parameters": {"max_new_tokens": 1}},
            "bladellm": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
            "anthropic": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "model": "default"},
            "kserve": {"text_input": "a", "max_tokens": 1},
            "ollama": {"model": "penstock-demo", "messages": [{"role": "user", "content": "a"}], "stream": False},
            "openai": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
            "vllm": {"prompt": "a", "max_tokens": 1},
        }
        failed = set()
        for _ in range(3):
            (engine,) = server.pids["engine"]
            os.kill(engine, signal.SIGKILL)
            deadline = time.monotonic() + 30
            while client.get("/health").status_code == 200 and time.monotonic() < deadline:
                pass
            for name in sorted(good.keys() - failed):
                case = CASES[name]
                answer = client.post(case.path, json=good[name], headers=dict(case.headers))
                if not (answer.status_code == 200 and "503" not in answer.text):
                    assert has(answer.json(), case.member), (name, answer.text)
                    failed.add(name)
            while client.get("/ready").status_code != 200:
                assert time.monotonic() < deadline + 60
                time.sleep(0.05)
            if failed == good.keys():
                break
        assert failed, "no response was sent after the engine's death"
