"""The server, compared with its OpenAPI document and tested with arbitrary bytes.

No input causes an internal error, a hang or a delay of other clients, and all errors have the same shape.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scripted_engine import clear_registry
from serving import Served
from starlette.applications import Starlette
from starlette.testclient import TestClient

from penstock.config.options import ServerOptions
from penstock.serve.app import build
from penstock.serve.dialects.kserve import ModelRepository
from penstock.serve.metrics import Metrics
from penstock.serve.models.manager import ModelManager
from penstock.serve.models.served_models import ServedModels
from penstock.serve.web import PAGE_PATHS

EXAMPLES = int(os.environ.get("PENSTOCK_SCHEMA_EXAMPLES", "2"))
"""Number of random requests per operation of the document. ``make thorough`` adds Schemathesis' coverage phase."""
LIMIT = 60.0
"""Timeout of a request in seconds; a request that takes longer counts as lost."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Tell me", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 2},
    "/tokenize": {"prompt": "Tell me"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/embeddings": {"input": "Tell me"},
    "/v1/score": {"text_1": "Tell me", "text_2": ["Tell me", "More"]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
PATHS = st.sampled_from(sorted(GOOD))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    adapters = ("--enable-lora", "--allow-runtime-lora-updating")
    with Served("--num-gpu-blocks-override", "400", "--max-model-len", "64", *adapters) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.root, timeout=LIMIT) as http_client:
        yield http_client


def drawn(examples: int) -> Any:
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=quiet)


# --- The document ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["fuzzing", pytest.param("coverage", marks=pytest.mark.thorough)])
def test_responses_conform_to_document(server: Served, tmp_path: Path, phase: str) -> None:
    """Random requests get responses as documented. Invalid requests and undocumented methods are refused.

    Valid random requests may be refused as well, because the document cannot express all constraints, such as mutually
    exclusive fields. Left out: KServe's paths, whose tensors the document omits, and aliases of other paths.
    """
    checks = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "negative_data_rejection"]
    checks += ["response_headers_conformance", "response_schema_conformance", "unsupported_method"]
    checks += ["allow_header_conformance"]
    document = httpx.get(f"{server.root}/openapi.json").json()
    # drop the schemas of event streams: Schemathesis checks streams only with OpenAPI 3.2's itemSchema
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"]["200"].get("content", {}).get("text/event-stream", {}).pop("schema", None)
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--url", server.root, "--no-color"]
    command += ["--seed=1", "--generation-database=none", f"--request-timeout={LIMIT}", f"--checks={','.join(checks)}"]
    command += [f"--phases={phase}", f"--max-examples={EXAMPLES}"]
    command += ["--exclude-path-regex", "^/v2|^/ping|^/v1/score|completions/"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


LISTED = {
    *(
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/generate",
        "/score",
    ),
    *("/ping", "/load", "/server_info", "/tokenizer_info", "/reset_prefix_cache", "/abort_requests", "/metrics"),
    *("/v2", "/v2/health/live", "/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/generate_stream"),
    *("/v2/repository/index", "/v2/models/stats", "/score"),
}


def test_document_lists_known_paths_and_unique_operations(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert not LISTED - document["paths"].keys()
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references <= document["components"]["schemas"].keys()
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)
    tags = {path: operation["tags"] for path, item in document["paths"].items() for operation in item.values()}
    assert tags["/v1/chat/completions"] == ["openai"] and tags["/v1/messages"] == ["anthropic"]
    assert tags["/health"] == ["operations"]


def test_document_lists_every_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceptions: the route of the document, and the files of the web page."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    clear_registry()
    served_models = ServedModels(ServerOptions(allow_runtime_lora_updating=True, server_dev_mode=True), Metrics())
    app: Any = build(served_models, ModelRepository(served_models, ModelManager(served_models, io.BytesIO())))
    while not isinstance(app, Starlette):  # unwrap middleware
        app = app.app if hasattr(app, "app") else app._app
    document = TestClient(app).get("/openapi.json").json()
    listed = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
    routes = {(route.path_format, method) for route in app.routes for method in route.methods - {"HEAD"}}
    assert routes - listed == {("/openapi.json", "GET"), *((path, "GET") for path in PAGE_PATHS)}


# --- Any bytes ------------------------------------------------------------------------------------------------------


def check_response(response: httpx.Response) -> None:
    """Check that a response is a success, or an error of the common shape."""
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        assert response.headers["x-request-id"]


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
"""Strategy for values that Python's ``json`` can write, including NaN, infinities and lone surrogates."""


TEMPLATE_OPTIONS = (
    "messages tools system loop range namespace raise_exception strftime_now bos_token options context kwargs prompt "
    "enable_thinking add_generation_prompt continue_final_message chat_template documents work tokenize"
).split()


@given(PATHS, st.binary(max_size=200))
@example(CHAT, b"")
@example(CHAT, b"\xef\xbb\xbf{}")
@example(CHAT, b"\xff\xfe{\x00}\x00")
@example(CHAT, b"[" * 200_000)
@example(CHAT, b'{"a":' * 200_000)
@example(COMPLETIONS, b'{"prompt":' * 900 + b"1" + b"}" * 900)
@example(COMPLETIONS, b'{"prompt":"a","seed":' + b"9" * 100_000 + b"}")
@example(COMPLETIONS, b'{"prompt":"a","temperature":1e99999}')
@example(COMPLETIONS, b'{"prompt":"a","temperature":NaN}')
@example(COMPLETIONS, b'{"prompt":"\\ud800","max_tokens":1}')
@example(COMPLETIONS, b'{"prompt":"\xed\xa0\x80","max_tokens":1}')
@example(COMPLETIONS, b'{"\\ud800":1}')
@example(COMPLETIONS, b'{"":1}')
@drawn(60)
def test_any_bytes_cause_no_internal_error(client: httpx.Client, path: str, body: bytes) -> None:
    check_response(client.post(path, content=body))


@given(PATHS, st.data())
@drawn(60)
def test_mutated_request_causes_no_internal_error(client: httpx.Client, path: str, data: st.DataObject) -> None:
    body = json.dumps(GOOD[path]).encode()
    begin, end = (data.draw(st.integers(0, len(body))) for _ in range(2))
    check_response(client.post(path, content=body[:begin] + data.draw(st.binary(max_size=3)) + body[end:]))


@pytest.mark.slow
@given(PATHS, st.data())
@drawn(250)
def test_any_value_of_any_field_causes_no_internal_error(client: httpx.Client, path: str, data: st.DataObject) -> None:
    fields = data.draw(st.lists(st.sampled_from(fields_of(client, path)), min_size=1, max_size=3))
    body = GOOD[path] | {field: data.draw(VALUES, label=field) for field in fields}
    check_response(client.post(path, content=json.dumps(body).encode("utf-8", "surrogatepass")))


@given(
    st.lists(
        VALUES
        | st.fixed_dictionaries(
            {},
            optional={
                "role": st.sampled_from(["system", "user", "assistant", "tool"]),
                "content": VALUES,
                "tool_calls": VALUES,
                "name": VALUES,
            },
        ),
        min_size=1,
        max_size=3,
    )
)
@drawn(100)
def test_any_messages_cause_no_internal_error(client: httpx.Client, messages: list[Any]) -> None:
    body = {"messages": messages, "max_tokens": 1}
    check_response(client.post(CHAT, content=json.dumps(body).encode("utf-8", "surrogatepass")))


@given(st.text('abc{}[]":,\\ud8', max_size=40))
@example('{"a":' * 100_000)
@example('{"a":' + "9" * 5000 + "}")
@example('{"\\ud800": NaN}')
@drawn(40)
def test_any_tool_call_arguments_cause_no_internal_error(client: httpx.Client, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    check_response(client.post(CHAT, json={"messages": messages, "max_tokens": 1}))


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("name", ["self", "size"])
def test_template_option_may_have_name_of_internal_argument(client: httpx.Client, path: str, name: str) -> None:
    body = {"messages": GOOD[CHAT]["messages"], "chat_template_kwargs": {name: 1}}
    check_response(client.post(path, json=body | ({"max_tokens": 1} if path == CHAT else {})))


@given(st.dictionaries(st.sampled_from(TEMPLATE_OPTIONS), VALUES, max_size=4))
@drawn(60)
def test_any_template_options_cause_no_internal_error(client: httpx.Client, options: dict[str, Any]) -> None:
    body = GOOD[CHAT] | {"chat_template_kwargs": options}
    check_response(client.post(CHAT, content=json.dumps(body).encode("utf-8", "surrogatepass")))


@given(st.sampled_from(["GET", "POST", "DELETE"]), st.text(min_size=1, max_size=20))
@drawn(40)
def test_any_path_causes_no_internal_error(client: httpx.Client, method: str, path: str) -> None:
    check_response(client.request(method, httpx.URL(str(client.base_url)).copy_with(raw_path=b"/" + quoted(path))))


def quoted(path: str) -> bytes:
    return "".join(f"%{byte:02x}" for byte in path.encode("utf-8", "replace")).encode()


def fields_of(client: httpx.Client, path: str) -> list[str]:
    document = document_of(client)
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rpartition("/")[2]
    return sorted(document["components"]["schemas"][name]["properties"])


def document_of(client: httpx.Client, documents: dict[str, Any] = {}) -> dict[str, Any]:  # noqa: B006
    if str(client.base_url) not in documents:
        documents[str(client.base_url)] = client.get("/openapi.json").json()
    document: dict[str, Any] = documents[str(client.base_url)]
    return document


# --- No delay for others --------------------------------------------------------------------------------------------

BODY = 8 * 2**20
"""Size limit of bodies in bytes; equal to the default for a context of 131,072 tokens."""
FORCED = {"prompt": "x", "logit_bias": {"3583": 100}, "max_tokens": 200}
"""Request for which the model generates only </think>, because of the bias."""
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "a long prompt": (COMPLETIONS, {"prompt": "x" * 5_000_000}),
    "many token ids": (COMPLETIONS, {"prompt": [5] * 2_000_000}),
    "a long text without special tokens": (COMPLETIONS, {"prompt": "x" * 5_000_000, "add_special_tokens": False}),
    "a long message": (CHAT, {"messages": [{"role": "user", "content": "x" * 5_000_000}]}),
    "many messages": (CHAT, {"messages": [{"role": "user", "content": "x"}] * 100_000}),
    "a long text to tokenize": ("/tokenize", {"prompt": "x" * 5_000_000}),
    "many tokens to detokenize": ("/detokenize", {"tokens": [5] * 1_000_000}),
    "many prompts": (COMPLETIONS, {"prompt": ["x"] * 20_000}),
    "many long prompts": (COMPLETIONS, {"prompt": ["x" * 8000] * 800}),
    "many long texts to embed": ("/v1/embeddings", {"input": ["x" * 8000] * 800}),
    "many stop strings": (COMPLETIONS, {"prompt": "x", "stop": ["zq"] * 500_000}),
    "long stop strings": (COMPLETIONS, FORCED | {"stop": ["</think>" * 2000, *(f"{i:16000}" for i in range(127))]}),
    "many bad words": (COMPLETIONS, {"prompt": "x", "bad_words": ["zq"] * 300_000}),
    "long bad words": (COMPLETIONS, {"prompt": "x", "bad_words": ["zq" * 250_000] * 2}),
    "many allowed tokens": (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [5] * 2_500_000, "max_tokens": 4}),
    "many stop tokens": (COMPLETIONS, {"prompt": "x", "stop_token_ids": [5] * 2_000_000}),
    "a long model name": (COMPLETIONS, {"prompt": "x", "model": "x" * 5_000_000}),
    "a long salt": (COMPLETIONS, {"prompt": "x", "cache_salt": "x" * 5_000_000}),
}


@pytest.fixture(scope="module")
def roomy() -> Iterator[Served]:
    with Served("--num-gpu-blocks-override", "400", "--max-body-size", str(BODY)) as served:
        yield served


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("name", LARGE)
def test_large_request_does_not_delay_other_clients(roomy: Served, name: str) -> None:
    """Requests of other clients take little processor time of the server. Unlike wall-clock time, processor time does
    not depend on other programs."""
    path, body = LARGE[name]
    content = json.dumps(body).encode()
    busy_seconds: list[float] = []
    probed, ended = threading.Event(), threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=roomy.root, timeout=60) as other:
            while not ended.is_set():
                before = processor_time(roomy)
                answer = other.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 2, "temperature": 0})
                busy_seconds.append(processor_time(roomy) - before)
                probed.set()
                assert answer.status_code == 200, answer.text

    with httpx.Client(base_url=roomy.root, timeout=60) as client, ThreadPoolExecutor() as threads:
        probing = threads.submit(probe)
        try:
            assert probed.wait(60)
            check_response(client.post(path, content=content))
        finally:
            ended.set()
        probing.result()
    assert max(busy_seconds) < 1.5  # at most 0.3 s was measured


def processor_time(served: Served) -> float:
    """Return the processor time in seconds that the server's engine and API process have used so far."""
    ticks = 0
    for pid in (*served.pids["engine"], *served.pids["api"]):
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
