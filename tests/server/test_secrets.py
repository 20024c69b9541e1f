"""Secrets in the configuration are masked in routes, logs, command lines and errors."""

from __future__ import annotations

import http.client
import json
import logging
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from serving import Served

from penstock import demo
from penstock.cli.main import main
from penstock.config import logs, secrets
from penstock.config.options import Configuration, LogOptions
from penstock.config.settings import Setting, settings
from penstock.core import Code, PenstockError
from penstock.core.errors import MAX_MESSAGE
from penstock.tracing import start_tracer

CANARY = "CaNaRy"
"""Text contained in every secret of these tests."""
URL = f"https://user-{CANARY}-1:pass-{CANARY}-2@host.example/path?sig={CANARY}-3&other=1#{CANARY}-4"
TEXTS = [setting for setting in settings().values() if setting.kind in (str, tuple) and not setting.choices]
"""Options that accept free text."""
HOLD_SECRETS = [setting.name for setting in TEXTS if setting.secret]


def configuration(setting: Setting, value: Any) -> Any:
    """Return a configuration as plain objects, with the given value of one option. The value is not validated."""
    result = msgspec.to_builtins(Configuration())
    result[setting.section][setting.name] = value
    return result


@pytest.mark.parametrize("setting", TEXTS, ids=lambda setting: setting.name)
def test_secret_in_any_option_is_masked(setting: Setting) -> None:
    """The secret is the whole value, part of a URL, or in JSON at any depth."""
    nested = {"a": {"hf_token": f"{CANARY}-5", "hf-token": f"{CANARY}-6"}, "b": [{"model": URL}], "api_key": [CANARY]}
    values = [URL, json.dumps(nested), f"two URLs: {URL}, {URL}", *([f"{CANARY}-7"] if setting.secret else [])]
    for value in values:
        shown = secrets.masked(configuration(setting, [value] if setting.kind is tuple else value))
        assert CANARY not in str(shown), value
    kept = secrets.masked(configuration(setting, '{"model": "org/name@main", "temperature": 0.6}'))
    assert setting.secret or "org/name@main" in str(kept)


def test_secret_options_are_keys_tokens_and_storage_url() -> None:
    assert HOLD_SECRETS == ["hf_token", "api_key", "admin_api_key", "storage_url"]


@pytest.mark.parametrize("form", [[], ["--json"], ["--yaml"]], ids=["table", "json", "yaml"])
def test_config_shows_no_secret(form: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = {
        "--model": URL,
        "--models": json.dumps({"b": {"model": URL, "hf_token": CANARY}}),
        "--otlp-endpoint": URL,
        "--storage-url": f"postgresql://user:{CANARY}/with-slash@host/db",
        "--api-key": f"{CANARY},b",
        "--hf-token": CANARY,
        "--router-address": URL,
        "--tokenizer": URL,
        "--speculative-config": json.dumps({"model": URL}),
    }
    assert main(["config", *form, *(part for pair in flags.items() for part in pair)]) == 0
    printed = capsys.readouterr()
    assert CANARY not in printed.out + printed.err
    if form == ["--yaml"]:
        (tmp_path / "options.yaml").write_text(printed.out)
        assert main(["config", "--config", str(tmp_path / "options.yaml")]) == 0, "the printed file must be readable"


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--otlp-endpoint", f"https://user:{CANARY}/1@host:4318"],
        ["serve", "--otlp-endpoint", f"ftp://user:{CANARY}@host:4318"],
        ["serve", "--storage-url", f"nosuch://user:{CANARY}@host/db", "--port", "0"],
        ["serve", "--root-path", URL],
        ["serve", "--model", f"http://user:{CANARY}@127.0.0.1:9/model?key={CANARY}"],
        ["serve", "--model", f"nosuch://user:{CANARY}@127.0.0.1:9/model?key={CANARY}"],
        ["serve", URL, "--model", "other"],
        ["serve", f"--hf-tokn={CANARY}"],
        ["serve", "--hf-token", f"{CANARY}\n{CANARY}", "--model", "org/name"],
        ["download", f"s3://user:{CANARY}@bucket/model"],
    ],
    ids=lambda arguments: arguments[1][:20],
)
def test_messages_of_commands_show_no_secret(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capfd.readouterr()
    assert printed.err and CANARY not in printed.out + printed.err


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_log_lines_show_no_secret(log_format: Any, capsys: pytest.CaptureFixture[str]) -> None:
    secret = f'{CANARY}"\\ä\n{CANARY}'
    secrets.register(
        configured("hf_token", secret),
        {"SOME_API_KEY": f"{CANARY}-environment"},
    )
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logs.set_up(LogOptions(log_format=log_format), "test")
        fields = {"reason": f"quoted {secret!r}", "url": URL, "n": 1}
        try:
            raise ValueError(f"the library says {secret} {json.dumps(secret)}")
        except ValueError:
            logging.getLogger("x").exception("%s and %s-environment", URL, CANARY, extra={"fields": fields})
        logging.getLogger("x").info("http://host/path and org/name@main stay")
    finally:
        logging.basicConfig(level=level, handlers=handlers, force=True)
    log = capsys.readouterr().err
    assert CANARY not in log
    assert "http://host/path and org/name@main stay" in log
    if log_format == "json":
        assert [json.loads(line)["level"] for line in log.splitlines()] == ["error", "info"]


def configured(name: str, value: str) -> Configuration:
    return msgspec.convert(configuration(settings()[name], value), Configuration)


def test_ordinary_words_are_not_masked() -> None:
    """Not masked: user names and ordinary query values in URLs, and environment variables of other programs."""
    url = "postgresql://penstock@db/penstock?sslmode=verify-full"
    environment = {
        "DATABASE_URL": "postgres://postgres:postgres@database/application?sslmode=no-verify",
        "PIP_INDEX_URL": "https://__token__@packages.example/simple?channel=nightly-builds&key=internal-key",
        "SHORT_TOKEN": "development",
    }
    secrets.register(configured("storage_url", url), environment)
    text = "penstock serve: postgres, postgresql, verify-full, no-verify, __token__, nightly-builds, development"
    assert secrets.mask(text) == text


def test_passwords_and_secret_query_values_are_masked() -> None:
    url = f"https://some-user:{CANARY}%2Fpass@host.example/?X-Amz-Signature={CANARY}-signature&sslpassword={CANARY}-ssl"
    secrets.register(configured("model", url), {"URL": f"x://me:{CANARY}-long-enough@h"})
    text = secrets.mask(f"{CANARY}%2Fpass {CANARY}/pass {CANARY}-signature {CANARY}-ssl {CANARY}-long-enough some-user")
    assert text == "*** *** *** *** *** some-user"


@pytest.mark.parametrize("before", range(300, 340, 5))
def test_secret_in_a_long_message_is_masked_before_the_message_is_cut(before: int) -> None:
    secret = f"{CANARY}-" + "s" * 60
    secrets.register(configured("hf_token", secret), {})
    message = PenstockError(Code.INVALID, "word " * (before // 5) + secret + " word" * 100).failure.message
    assert len(message) <= MAX_MESSAGE and CANARY not in message and "sss" not in message


# --- A server whose secrets all contain the canary -------------------------------------------------------------------


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Address (host:port) of a web server that serves the files of the built-in model."""
    handler = partial(QuietHandler, directory=str(demo.CHAT))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


KEY = f"key-{CANARY}-admin"


@pytest.fixture(scope="module")
def served(site: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("secrets")
    models = {
        "b": {"model": str(demo.CHAT), "hf_token": f"hf-{CANARY}-nested"},
        "missing": {"model": f"http://user:{CANARY}-p@127.0.0.1:9/x?token={CANARY}-q", "hf-token": f"{CANARY}-dash"},
    }
    arguments = {
        "--model": f"http://user:{CANARY}-model@{site}/?token={CANARY}-query",
        "--models": json.dumps(models),
        "--hf-token": f"hf-{CANARY}",
        "--api-key": f"key-{CANARY}-a,key-{CANARY}-b",
        "--admin-api-key": KEY,
        "--otlp-endpoint": f"http://user:{CANARY}-otlp@127.0.0.1:9/v1/traces?api-key={CANARY}-otlp-query",
        "--storage-url": f"sqlite:///file:{folder}/db?uri=true&token={CANARY}-storage",
        "--download-dir": str(folder / "downloads"),
        "--model-control-mode": "explicit",
        "--load-model": "b",
        "--num-gpu-blocks-override": "100",
        "--max-model-len": "512",
        "--log-level": "debug",
    }
    environment = {"OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {CANARY}-header", "HF_TOKEN": f"{CANARY}-env"}
    flags = [part for pair in arguments.items() for part in pair]
    with Served(*flags, "--server-dev-mode", environment=environment) as server:
        yield server


def all_responses(served: Served) -> Iterator[tuple[str, str]]:
    """Yield (path, headers and text of the response) for every GET route and for some requests about missing models."""
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=served.root, headers=headers, timeout=60) as client:
        paths = client.get("/openapi.json").json()["paths"]
        for path in [path for path, operations in paths.items() if "get" in operations]:
            for name in ("penstock-demo", "b", "missing", "ensemble"):
                if "{" not in path and name != "b":
                    continue
                query = "?config_format=json" if path == "/server_info" else ""
                with client.stream("GET", re.sub(r"\{\w+\}", name, path) + query) as answer:
                    text = (
                        next(answer.iter_text(), "")
                        if "event-stream" in str(answer.headers)
                        else answer.read().decode()
                    )
                    yield path, f"{answer.headers}{text}"
        for method, path, body in (
            ("POST", "/v2/repository/models/missing/load", {}),
            ("POST", "/v2/repository/index", {}),
            ("POST", "/v1/chat/completions", {"model": "missing", "messages": []}),
            ("GET", "/server_info", None),
        ):
            answer = client.request(method, path, json=body)
            yield path, f"{answer.headers}{answer.text}"


def test_routes_logs_and_command_lines_show_no_secret(served: Served) -> None:
    responses = dict(all_responses(served))
    assert len(responses) > 30 and "***" in responses["/server_info"]
    for path, text in responses.items():
        assert CANARY not in text, path
    served.find("the collector at .* does not accept spans")
    assert CANARY not in "\n".join(served.lines)
    assert CANARY.encode() not in b"".join(
        (Path("/proc") / str(pid) / "cmdline").read_bytes() for pids in served.pids.values() for pid in pids
    ), "command lines of child processes must not contain secrets"


def test_metrics_show_no_secret(served: Served) -> None:
    connection = http.client.HTTPConnection(served.root.rpartition("/")[2])
    connection.request("GET", "/metrics")
    assert CANARY not in connection.getresponse().read().decode()


# --- Collectors ------------------------------------------------------------------------------------------------------


class Hostile(SimpleHTTPRequestHandler):
    """Trace collector that responds with a redirect (3xx) or with an endless body (200)."""

    protocol_version = "HTTP/1.1"
    status = 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.status)
        self.send_header("location", "/elsewhere")
        if self.status == 200:
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            try:
                for _ in range(64):
                    self.wfile.write(b"100000\r\n" + bytes(2**20) + b"\r\n")
            except OSError:
                self.server.stopped_after.set()  # type: ignore[attr-defined]
        else:
            self.send_header("content-length", "0")
            self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("status", [200, 301, 302, 307, 308])
def test_redirecting_or_endless_collector_is_handled(status: int) -> None:
    """A redirect counts as a failed export. An endless response body is not read."""
    handler = type("Answering", (Hostile,), {"status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.stopped_after = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tracer = start_tracer(LogOptions(otlp_endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces"), "test")
        assert tracer
        tracer.server_span("GET", {}, 0.0, {}).end()
        tracer.close()
        assert (tracer.counts.exported, tracer.counts.dropped) == ((1, 0) if status == 200 else (0, 1))
        assert status != 200 or server.stopped_after.wait(30)  # type: ignore[attr-defined]
        server.shutdown()
