"""Access to routes: cross-site requests, DNS rebinding, admin API keys, and separate data per API key."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from conftest import Servers
from serving import Served
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from penstock.config.options import ServerOptions
from penstock.core import PenstockError
from penstock.serve.http.access import Access, OriginPolicy, origins_of
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.process.api_server import log_access

BROWSER = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
OPEN = {
    *("/health", "/ready", "/live", "/version", "/metrics", "/ping", "/v2/health/live", "/v2/health/ready"),
    *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/completions"),
    *("/v1/chat/completions/chat/completions", "/v1/models", "/v1/models/{name}", "/v1/messages"),
    *("/v1/messages/count_tokens", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/embeddings"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/pooling", "/tokenize"),
    *("/detokenize", "/v1/embed", "/v2/embed", "/generate", "/generate_stream", "/info"),
    *("/completion", "/completions", "/infill", "/embedding", "/apply-template", "GET /props", "/slots", "POST /"),
    *("POST /props", "/api/create", "/api/copy", "/api/delete", "/api/push"),
    *(f"/api/{name}" for name in "chat generate embed embeddings show pull tags ps version".split()),
    *("/v1/is_paused", "/load", "/tokenizer_info", "/v1/weights", "/expert_load", "/is_sleeping", "/is_paused"),
    *("/v2", "/v2/models/stats", "/v2/repository/index", "/web/models", "/web/live"),
    *(
        f"/v2/models/{{name}}{version}{rest}"
        for version in ("", "/versions/{version}")
        for rest in ("", "/config", "/ready", "/stats", "/infer", "/generate", "/generate_stream")
    ),
}
"""Paths that pages of other sites may call. All other paths are private or change the server."""


@pytest.fixture(scope="module")
def served(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Server with all optional routes and without API keys."""
    folder = str(tmp_path_factory.mktemp("kept"))
    flags = ("--server-dev-mode", "--allow-runtime-lora-updating", "--enable-lora", "--storage-dir", folder)
    return servers.get("--num-gpu-blocks-override", "200", *flags, "--allowed-origins", "*,https://friend.example")


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.root, timeout=60) as http_client:
        yield http_client


@pytest.fixture(scope="module")
def operations(client: httpx.Client) -> list[tuple[str, str]]:
    paths = client.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


def ask(client: httpx.Client, method: str, path: str, **headers: str) -> httpx.Response:
    """Send a request that a web page can send without a CORS preflight request."""
    with client.stream(
        method,
        re.sub(r"\{\w+\}", "nothing", path),
        content=b"!" if method == "POST" else b"",
        headers={"content-type": "text/plain", **{name.replace("_", "-"): value for name, value in headers.items()}},
    ) as answer:
        if "event-stream" not in answer.headers.get("content-type", ""):
            answer.read()
    return answer


def is_refused(answer: httpx.Response) -> bool:
    return answer.status_code == 401


FOREIGN: dict[str, dict[str, str]] = {
    "another origin": {"origin": "https://evil.example"},
    "an opaque origin": {"origin": "null"},
    "an origin that is not a URL": {"origin": "http://[127.0.0.1:PORT"},
    "another port": {"origin": "http://127.0.0.1:1"},
    "an origin with the same prefix": {"origin": "http://127.0.0.1:PORT.evil.example"},
    "a form on another site": {"sec_fetch_site": "cross-site", "user_agent": BROWSER},
    "a page on another port": {"sec_fetch_site": "same-site", "user_agent": BROWSER},
    "a rebound name": {"host": "evil.example:PORT", "origin": "http://evil.example:PORT"},
    "a rebound name without an origin": {"host": "evil.example:PORT", "user_agent": BROWSER},
    "a rebound name with digits": {"host": "127.0.0.1.evil.example:PORT", "user_agent": BROWSER},
    "no name": {"host": "", "user_agent": BROWSER},
}
ALLOWED: dict[str, dict[str, str]] = {
    "not a browser": {},
    "the server's page": {"origin": "http://127.0.0.1:PORT", "user_agent": BROWSER, "sec_fetch_site": "same-origin"},
    "the server's page by name": {"host": "localhost:PORT", "origin": "http://localhost:PORT", "user_agent": BROWSER},
    "an allowed origin": {"origin": "https://friend.example", "user_agent": BROWSER, "sec_fetch_site": "cross-site"},
    "an allowed origin's proxy": {"host": "friend.example", "origin": "https://friend.example"},
    "a typed address": {"sec_fetch_site": "none", "user_agent": BROWSER},
}


def test_open_paths_are_in_openapi_document(operations: list[tuple[str, str]]) -> None:
    known = {path for _, path in operations} | {f"{method} {path}" for method, path in operations}
    assert known >= OPEN
    assert len(operations) > 110


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_page_cannot_call_private_routes(
    served: Served, client: httpx.Client, operations: list[tuple[str, str]], name: str
) -> None:
    port = served.root.rpartition(":")[2]
    headers = {key: value.replace("PORT", port) for key, value in FOREIGN[name].items()}
    for method, path in operations:
        answer = ask(client, method, path, **headers)
        expected = path not in OPEN and f"{method} {path}" not in OPEN
        assert is_refused(answer) == expected, (method, path, answer.status_code)


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_pages_and_programs_call_private_routes(
    served: Served, client: httpx.Client, operations: list[tuple[str, str]], name: str
) -> None:
    """The requests are limited to routes that change nothing here or that reject the body."""
    port = served.root.rpartition(":")[2]
    headers = {key: value.replace("PORT", port) for key, value in ALLOWED[name].items()}
    names = ("abort", "shared", "files", "batches", "conversations", "lora", "logging", "info")
    for method, path in operations:
        if any(part in path for part in names):
            assert not is_refused(ask(client, method, path, **headers)), (method, path)


@pytest.mark.parametrize("path", ["/clear_load_weight", "/update_model_weight"])
def test_image_request_of_foreign_page_is_refused(client: httpx.Client, path: str) -> None:
    """Over plain HTTP, browsers load images without Origin and Sec-Fetch-Site. These GET routes change the server."""
    for headers in ({"user_agent": BROWSER}, {"user_agent": BROWSER, "referer": "http://evil.example/"}):
        assert is_refused(ask(client, "GET", path, **headers)), headers
        assert is_refused(ask(client, "HEAD", path, **headers)), headers


@pytest.fixture(scope="module")
def everywhere() -> Iterator[Served]:
    """Server that listens on all addresses."""
    origins = "*,http://ui.example.com:3000,https://tls.example.com:443/,null,https://*.example.com"
    flags = ("--num-gpu-blocks-override", "100", "--server-dev-mode", "--allowed-origins", origins)
    with Served(*flags, "--host", "0.0.0.0") as server:
        yield server


@pytest.fixture(scope="module")
def program(everywhere: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{everywhere.root.rpartition(':')[2]}", timeout=60) as client:
        yield client


def test_server_on_all_addresses_accepts_its_host_names(program: httpx.Client) -> None:
    """Programs may use any host name, browsers only names that another site cannot resolve to this server."""
    port = program.base_url.port
    for host in ("gpu.cluster.example", "llm", "10.0.0.1", f"[::1]:{port}"):
        assert not is_refused(ask(program, "GET", "/server_info", host=host)), host
    machine = socket.gethostname().partition(".")[0]
    known = ("llm", f"gpu-box:{port}", "10.0.0.1", "localhost", f"[::1]:{port}")
    for host in (*known, f"{machine}.local:{port}", "host.docker.internal", "ui.example.com:8000"):
        headers = {"host": host, "user_agent": BROWSER, "origin": f"http://{host}"}
        assert not is_refused(ask(program, "GET", "/server_info", **headers)), host
    headers = {"host": "evil.example", "origin": "http://evil.example", "user_agent": BROWSER}
    assert is_refused(ask(program, "GET", "/server_info", **headers))
    assert not is_refused(ask(program, "POST", "/v1/completions", **headers))
    assert not is_refused(ask(program, "GET", "/web/live", **headers)), "the web page must work under any host name"


@pytest.mark.parametrize("origin", ["http://ui.example.com:3000", "https://tls.example.com"])
def test_allowed_origin_may_use_any_host_name(program: httpx.Client, origin: str) -> None:
    headers = {"host": "gpu.example.com:8000", "origin": origin, "user_agent": BROWSER}
    assert not is_refused(ask(program, "GET", "/server_info", **headers))
    assert not is_refused(ask(program, "GET", "/clear_load_weight", **headers))


@pytest.mark.parametrize(
    ("origin", "host", "is_own"),
    [
        ("http://llm", "llm:80", True),
        ("https://llm", "llm:443", True),
        ("https://llm", "llm", True),
        ("http://llm", "llm:443", False),
        ("https://llm:80", "llm", False),
    ],
)
def test_default_port_depends_on_scheme(program: httpx.Client, origin: str, host: str, is_own: bool) -> None:
    assert is_refused(ask(program, "GET", "/server_info", origin=origin, host=host)) != is_own


def test_allowed_origins_matching_no_page_are_logged(everywhere: Served) -> None:
    for entry in ("null", r"https://\*\.example\.com"):
        everywhere.find(f"--allowed-origins: '{entry}' matches no page")
    assert sum("matches no page" in line for line in everywhere.lines) == 2


def test_allowed_origins_are_normalized_as_in_browsers() -> None:
    origins = [
        "*",
        "HTTPS://UI.example.com:443/",
        "http://[::1]:80/app",
        "app://local",
        "null",
        "ui.example.com",
        "http://",
    ]
    assert origins_of(origins) == ["*", "https://ui.example.com", "http://[::1]", "app://local"]


def test_page_with_user_agent_of_program_is_refused(program: httpx.Client) -> None:
    """A page can set User-Agent and Accept-Language but cannot omit Accept-Language. Node.js sends both, too."""
    page = {"host": "evil.example:8000", "user_agent": "curl/8", "accept_language": ""}
    assert is_refused(ask(program, "GET", "/server_info", **page))
    node = {"host": "gpu.example.com:8000", "user_agent": "node", "accept_language": "*", "sec_fetch_mode": "cors"}
    assert not is_refused(ask(program, "GET", "/server_info", **node))
    assert is_refused(ask(program, "GET", "/clear_load_weight", host="gpu.example.com"))
    assert not is_refused(ask(program, "GET", "/clear_load_weight", host="llm"))


def test_refusal_names_option_to_allow_origin(program: httpx.Client) -> None:
    answer = ask(program, "GET", "/server_info", host="llm.example.com:8000", user_agent=BROWSER)
    assert "llm.example.com:8000" in answer.text
    assert (
        "--allowed-origins '*,http://ui.example.com:3000,https://tls.example.com,http://llm.example.com:8000'"
        in answer.text
    )
    answer = ask(program, "GET", "/server_info", origin="https://new.example.com")
    assert (
        "--allowed-origins '*,http://ui.example.com:3000,https://tls.example.com,https://new.example.com'"
        in answer.text
    )
    answer = ask(program, "GET", "/server_info", host=f"{'a' * 3000}.example.com", user_agent=BROWSER)
    assert is_refused(answer) and len(answer.text) < 1000 and "set --api-key" in answer.text


def test_origin_policy_does_not_wait_for_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getfqdn", lambda: str(released.wait()))
    headers = [(b"host", b"gpu.example.com"), (b"origin", b"http://gpu.example.com")]
    scope = {"type": "http", "method": "GET", "headers": headers, "penstock.record": RequestRecord("a")}
    try:
        with pytest.raises(PenstockError, match="--allowed-origins"):
            OriginPolicy((), "0.0.0.0").check(scope, Access.PRIVATE)
    finally:
        released.set()


def test_start_logs_routes_without_key(caplog: pytest.LogCaptureFixture) -> None:
    for keys, expected in (((), True), (("key-a",), False)):
        caplog.clear()
        log_access(ServerOptions(api_key=keys, admin_api_key=("key-admin",)))
        assert ("only routes that change the server require a key" in caplog.text) == expected


# --- API keys --------------------------------------------------------------------------------------------------------

A, B, ADMIN = ({"authorization": f"Bearer key-{name}"} for name in ("a", "b", "admin"))
CHANGES: list[tuple[str, Any]] = [
    ("/v2/logging", {"log_info": False}),
    ("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
    ("/v2/models/ensemble/trace/setting", {"trace_level": ["TIMESTAMPS"]}),
    ("/reset_prefix_cache", None),
    ("/v2/repository/models/penstock-demo/unload", {}),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """Server with two client keys and an admin key."""
    keys = ("--api-key", "key-a,key-b", "--admin-api-key", "key-admin", "--grpc-port", "0")
    with Served("--num-gpu-blocks-override", "200", *keys) as server:
        yield server


@pytest.fixture
def stub(shared: Served) -> Iterator[Any]:
    with grpc.insecure_channel(shared.find(r"gRPC at (\S+)")[1]) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.mark.parametrize(("path", "body"), CHANGES, ids=lambda value: str(value)[:40])
def test_client_key_cannot_change_server_settings(shared: Served, path: str, body: Any) -> None:
    refused = httpx.post(shared.root + path, json=body, headers=B)
    assert refused.status_code == 401 and "--admin-api-key" in refused.text
    assert httpx.post(shared.root + path, json=body, headers=ADMIN).status_code in (200, 400)
    if path == "/v2/logging":
        assert httpx.get(shared.root + path, headers=B).json()["log_info"] is False, "client keys may read the settings"
        httpx.post(shared.root + path, json={"log_info": True}, headers=ADMIN)


def test_client_key_cannot_change_server_settings_over_grpc(stub: Any) -> None:
    changed = pb.LogSettingsRequest()
    changed.settings["log_info"].bool_param = False
    traced = pb.TraceSettingRequest()
    traced.settings["trace_rate"].value.append("5")
    calls = [
        (stub.LogSettings, changed),
        (stub.TraceSetting, traced),
        (stub.RepositoryModelLoad, pb.RepositoryModelLoadRequest(model_name="penstock-demo")),
        (stub.RepositoryModelUnload, pb.RepositoryModelUnloadRequest(model_name="penstock-demo")),
    ]
    for call, request in calls:
        with pytest.raises(grpc.RpcError) as raised:
            call(request, metadata=[*B.items()])
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED, request
    assert stub.LogSettings(pb.LogSettingsRequest(), metadata=[*B.items()]).settings["log_info"].bool_param
    changed.settings["log_info"].bool_param = True
    stub.LogSettings(changed, metadata=[*ADMIN.items()])


@pytest.mark.parametrize(
    ("flags", "headers", "allowed"),
    [
        ((), {}, True),
        (("--api-key", "key-a"), A, True),
        (("--api-key", "key-a,key-b"), A, False),
        (("--api-key", "key-a", "--admin-api-key", "key-admin"), A, False),
        (("--api-key", "key-a", "--admin-api-key", "key-admin"), ADMIN, True),
        (("--admin-api-key", "key-admin"), {}, False),
        (("--admin-api-key", "key-admin"), A, False),
        (("--admin-api-key", "key-admin"), ADMIN, True),
    ],
)
def test_admin_or_single_key_may_change_server(flags: tuple[str, ...], headers: dict[str, str], allowed: bool) -> None:
    from penstock.serve.http.middleware import ApiKeys

    options = dict(zip(flags[::2], flags[1::2], strict=True))
    keys = ApiKeys(
        *(options.get(name, "").split(",") if name in options else () for name in ("--api-key", "--admin-api-key"))
    )
    client = keys.client_of(headers.get("authorization", "").encode())
    assert client is not None and client.may_control == allowed


def test_shared_memory_is_accessible_to_its_key_only(shared: Served, stub: Any) -> None:
    place = "/v2/systemsharedmemory"
    memory = SharedMemory("test-access-region", create=True, size=64)
    try:
        memory.buf[:5] = b"of A!"
        url = f"{shared.root}{place}/region/mine/register"
        body = {"key": "/test-access-region", "byte_size": 64}
        assert httpx.post(url, json=body, headers=A).status_code == 200
        assert httpx.get(f"{shared.root}{place}/status", headers=B).json() == []
        assert httpx.get(f"{shared.root}{place}/region/mine/status", headers=B).status_code == 404
        assert not stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(), metadata=[*B.items()]).regions
        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1]}
        tensor["parameters"] = {"shared_memory_region": "mine", "shared_memory_byte_size": 9}
        output = {"name": "text_output", "parameters": {"shared_memory_region": "mine", "shared_memory_byte_size": 64}}
        text = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}
        count = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [1]}
        for infer in ({"inputs": [tensor, count]}, {"inputs": [text, count], "outputs": [output]}):
            answer = httpx.post(f"{shared.root}/v2/models/ensemble/infer", json=infer, headers=B, timeout=60)
            assert answer.status_code == 400 and "Unable to find shared memory region" in answer.text
        assert bytes(memory.buf[:5]) == b"of A!"
        again = httpx.post(f"{shared.root}{place}/region/other/register", json=body, headers=B)
        assert again.status_code == 400 and "another API key" in again.text
        assert httpx.post(f"{shared.root}{place}/unregister", headers=B).status_code == 200
        assert [each["name"] for each in httpx.get(f"{shared.root}{place}/status", headers=A).json()] == ["mine"]
        allowed = httpx.post(
            f"{shared.root}/v2/models/ensemble/infer",
            json={"inputs": [text, count], "outputs": [output]},
            headers=A,
            timeout=60,
        )
        assert allowed.status_code == 200 and bytes(memory.buf[:5]) != b"of A!"
        assert httpx.post(f"{shared.root}{place}/region/mine/unregister", headers=A).status_code == 200
        assert httpx.get(f"{shared.root}{place}/status", headers=A).json() == []
    finally:
        memory.close()
        memory.unlink()


def test_foreign_page_cannot_use_shared_memory(client: httpx.Client) -> None:
    place = {"shared_memory_region": "any", "shared_memory_byte_size": 9}
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "parameters": place}
    body = json.dumps({"inputs": [tensor]})
    for headers, status in (({}, 400), ({"origin": "https://evil.example"}, 401)):
        answer = client.post("/v2/models/ensemble/infer", content=body, headers=headers)
        assert answer.status_code == status, answer.text


def test_tenant_names_in_metrics_are_stable_and_no_key_hashes(tmp_path: Path) -> None:
    """Tenant names are equal in all API processes and after a restart, and stored files keep their owner."""
    from hashlib import sha256

    flags = ("--api-key", "a,b", "--storage-dir", str(tmp_path), "--num-gpu-blocks-override", "100")
    pattern = r'penstock:storage_files\{tenant="([^"]*)"\} 1'
    headers = {"authorization": "Bearer a"}
    names = []
    for processes in ("2", "1"):
        with Served(*flags, "--api-server-count", processes) as server:
            if not names:
                upload = {"file": ("a", b"x")}
                created = httpx.post(f"{server.url}/files", files=upload, data={"purpose": "batch"}, headers=headers)
                assert created.status_code == 200, created.text
            pages = [httpx.get(f"{server.root}/metrics").text for _ in range(6)]
            names += [name for page in pages for name in re.findall(pattern, page)]
            hashes = [sha256(key).hexdigest() for key in (b"a", b"b")]
            assert not [name for page in pages for name in hashes if name[:16] in page]
            listed = httpx.get(f"{server.url}/files", headers=headers).json()["data"]
            assert [each["filename"] for each in listed] == ["a"], "a stored file must keep its owner"
    assert len(set(names)) == 1 and names[0]
