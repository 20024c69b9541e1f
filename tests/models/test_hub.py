"""Models by name, from a hub on this machine.

Each scenario runs in a subprocess, because ``huggingface_hub`` reads its environment only once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from penstock import demo
from penstock.core import Code, PenstockError
from penstock.frontend.hub import resolve

OLD, NEW = "1" * 40, "2" * 40
REVISIONS = {"main": NEW, "v1": OLD, OLD: OLD, NEW: NEW}
WEIGHTS = "model.safetensors"
WANTED = {
    "config.json": b'{"model_type": "qwen3"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer.model": b"\x0a\x0b",
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b\n",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
    "2_Dense/pytorch_model.bin": b"dense",
    WEIGHTS: os.urandom(200_000),
}
UNWANTED = {
    "pytorch_model.bin": b"pickle",
    "model.pt": b"pickle",
    "modeling_custom.py": b"raise SystemExit('run')",
    "README.md": b"# A model",
    "consolidated.safetensors": b"again",
    "original/params.json": b"{}",
    "1bit/model.safetensors": b"again",
}
RUN = """
import json, sys
from penstock.core import PenstockError
from penstock.frontend.hub import resolve
try:
    print(json.dumps({"folder": str(resolve(**json.loads(sys.argv[1])))}))
except PenstockError as error:
    print(json.dumps({"code": error.failure.code, "field": error.failure.field, "message": str(error)}))
"""


class Hub(ThreadingHTTPServer):
    """A hub with the model ``org/chat``, and the model ``org/gated``, which needs the token ``opens``.

    ``breaks`` lists the failures of the next transfers of weights: the number of bytes sent before the failure, and
    "reset", "close", "stall", "garble" (wrong bytes), "more" (excess bytes), or a status with the value of
    ``Retry-After``. ``fills`` is a file that is written until its disk is full, before weights are sent.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {OLD: WANTED | UNWANTED | {"config.json": b'{"model_type": "qwen2"}'}, NEW: WANTED | UNWANTED}
        self.breaks: list[tuple[int, str]] = []
        self.fills: Path | None = None
        self.stalled = threading.Event()
        self.ranges: list[str | None] = []
        self.tokens: set[str | None] = set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self) -> None:
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a download uses."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        name, kind, revision, path = "/".join(parts[:2]), "".join(parts[2:3]), "".join(parts[3:4]), "/".join(parts[4:])
        token = self.headers.get("Authorization")
        self.server.tokens.add(token)
        if name not in ("org/chat", "org/gated"):
            return self._refuse(404, "RepoNotFound")
        commit = REVISIONS.get(revision or "main")
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        files = self.server.files[commit]
        if is_api and kind == "tree":
            return self._send(json.dumps([_listed(path, data) for path, data in files.items()]).encode())
        if is_api:
            siblings = [_sibling(path, data) for path, data in files.items()]
            return self._send(json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode())
        if name == "org/gated" and token != "Bearer opens":
            return self._refuse(403 if token else 401, "GatedRepo")
        self._send_file(path, files[path], commit)

    def _send_file(self, path: str, data: bytes, commit: str) -> None:
        headers = {"ETag": f'"{_listed(path, data)["oid"]}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if path != WEIGHTS or self.command == "HEAD":
            return self._send(data, headers)
        requested = self.headers.get("Range")
        self.server.ranges.append(requested)
        first, _, last = requested.removeprefix("bytes=").partition("-") if requested else ("0", "", "")
        start, end = int(first), int(last) + 1 if last else len(data)
        if requested:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        until, how = self.server.breaks.pop(0) if self.server.breaks else (len(data), "")
        if self.server.fills:
            _fill(self.server.fills)
        if how[:1].isdigit():
            status, _, after = how.partition(" ")
            return self._send(b"", {"Retry-After": after}, int(status))
        if how in ("garble", "more"):
            return self._send(os.urandom(end - start) if how == "garble" else data[start:end] + b"more", headers, 206)
        self._send(data[start:end], headers, 206 if requested else 200, max(until - start, 0))
        if how:
            self._break(how)

    def _send(self, data: bytes, headers: dict[str, str] | None = None, status: int = 200, until: int = -1) -> None:
        self.send_response(status)
        for header, value in (headers or {}).items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data if until < 0 else data[:until])

    def _break(self, how: str) -> None:
        self.close_connection = True
        if how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
        elif how == "stall":
            self.server.stalled.set()
            with contextlib.suppress(OSError):
                self.rfile.read(1)  # returns when the client disconnects

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"", {"X-Error-Code": code}, status)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _listed(path: str, data: bytes) -> dict[str, Any]:
    """A file as the hub lists it: small files with their git hash, weights with their SHA-256."""
    git = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    listed = {"type": "file", "path": path, "size": len(data), "oid": git}
    if path.endswith((".safetensors", ".bin", ".pt")):
        sha256 = hashlib.sha256(data).hexdigest()
        listed |= {"oid": sha256, "lfs": {"oid": sha256, "size": len(data), "pointerSize": 130}}
    return listed


def _sibling(path: str, data: bytes) -> dict[str, Any]:
    """A file as the hub describes it in the information on a model."""
    listed = _listed(path, data)
    lfs = {"sha256": listed["oid"], "size": len(data), "pointerSize": 130} if "lfs" in listed else None
    return {"rfilename": path, "size": len(data), "blobId": listed["oid"], "lfs": lfs}


class Client:
    """Resolves models in subprocesses that share a cache.

    Args:
        python: interpreter of the subprocesses.
    """

    def __init__(self, url: str, home: Path, python: Path | str = sys.executable) -> None:
        self.python = str(python)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
        self.environment = inherited | {"HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        self.stderr = ""
        """Standard error of the last subprocess."""

    def start(
        self, model: str = "org/chat", env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.python, "-c", RUN, json.dumps({"model": model, **options})],
            env=self.environment | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, *args: Any, **options: Any) -> dict[str, str]:
        """Call ``resolve`` in a subprocess; returns the folder, or code, field and message of the error."""
        process = self.start(*args, **options)
        answer, self.stderr = process.communicate(timeout=60)
        assert process.returncode == 0, self.stderr
        found: dict[str, str] = json.loads(answer)
        return found

    def resolve(self, *args: Any, **options: Any) -> Path:
        answer = self.ask(*args, **options)
        assert "folder" in answer, answer["message"]
        return Path(answer["folder"])


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.stop()


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    return Client(hub.url, tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OFFLINE = {"HF_HUB_OFFLINE": "1"}


def test_local_path_or_empty_name_does_not_use_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org" / "chat"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve("") == demo.CHAT
    assert resolve("penstock-demo") == demo.CHAT
    assert resolve(folder) == resolve(str(folder)) == resolve("~/org/chat") == folder
    assert resolve("org/chat").resolve() == folder
    code = "import sys\nfrom penstock.frontend.hub import resolve\nresolve(''), resolve('org/chat')\n"
    code += "sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "model", ["/nowhere/chat", "./nowhere", "../nowhere", "~/nowhere", Path("org/nowhere"), "a b/c"]
)
def test_missing_path_is_refused(model: str | Path) -> None:
    with pytest.raises(PenstockError, match=r"^model: .* a name on the hub \(org/name\)$") as raised:
        resolve(model)
    assert raised.value.failure.code is Code.INVALID


@pytest.mark.slow
def test_files_of_a_checkpoint_are_fetched_once(hub: Hub, client: Client) -> None:
    folder = client.resolve()
    assert contents(folder) == WANTED
    assert client.stderr == "", "no progress bar in the first two seconds"
    assert client.resolve(progress=False) == folder
    assert len(hub.ranges) == 1
    assert client.stderr == ""
    hub.stop()
    assert client.resolve(env=OFFLINE) == folder
    assert client.resolve(revision=NEW, progress=False) == folder
    assert client.stderr == ""
    assert client.resolve() == folder
    assert "using the cached files of" in client.stderr and hub.url in client.stderr


@pytest.mark.slow
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_cache_is_shared_with_huggingface_hub(hub: Hub, client: Client, first: str) -> None:
    """Either program fetches the model first; both programs then use it online and offline."""
    code = "import sys; from huggingface_hub import snapshot_download\n"
    code += f"print(snapshot_download('org/chat', allow_patterns={sorted(WANTED)}))"

    def theirs(**env: str) -> Path:
        ran = subprocess.run([sys.executable, "-c", code], env=client.environment | env, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return Path(ran.stdout.strip())

    folder = theirs() if first == "theirs" else client.resolve()
    assert contents(folder) == WANTED
    assert theirs() == theirs(**OFFLINE) == client.resolve() == client.resolve(env=OFFLINE) == folder
    assert client.stderr == ""
    assert len(hub.ranges) == 1
    (folder / WEIGHTS).unlink()  # removes a symbolic link; its target remains
    assert client.resolve(env=OFFLINE) == folder
    assert theirs(**OFFLINE) == folder


@pytest.mark.slow
def test_cache_dir_is_used(client: Client, tmp_path: Path) -> None:
    assert client.resolve(cache_dir=str(tmp_path / "other")).is_relative_to(tmp_path / "other")


@pytest.mark.slow
def test_revision_is_found_by_name_and_by_commit(client: Client) -> None:
    main, tagged = client.resolve(), client.resolve(revision="v1")
    assert (main / "config.json").read_bytes() == WANTED["config.json"]
    assert b"qwen2" in (tagged / "config.json").read_bytes()
    assert client.resolve(revision=OLD) == tagged
    answer = client.ask(revision="v2")
    assert (answer["code"], answer["field"]) == ("not_found", "revision")
    assert "org/chat" in answer["message"] and "no 'v2'" in answer["message"]


@pytest.mark.slow
def test_download_resumes_after_closed_connection(hub: Hub, client: Client) -> None:
    weights = os.urandom(12_000_000)
    hub.files[NEW][WEIGHTS] = weights
    hub.breaks = [(11_000_000, "close")]
    assert (client.resolve() / WEIGHTS).read_bytes() == weights
    first, again = hub.ranges
    assert first == "bytes=0-11999999" and again is not None
    assert int(again.removeprefix("bytes=").partition("-")[0]) >= 10_000_000


@pytest.mark.slow
def test_download_is_retried_after_connection_reset(hub: Hub, client: Client) -> None:
    hub.breaks = [(100_000, "reset")]
    assert contents(client.resolve()) == WANTED
    assert len(hub.ranges) == 2
    assert "reset" in client.stderr


@pytest.mark.slow
def test_repeated_connection_resets_fail_the_download(hub: Hub, client: Client) -> None:
    hub.breaks = [(100_000, "reset")] * 100
    answer = client.ask()
    assert answer["code"] == "unavailable"
    assert client.ask(env=OFFLINE)["code"] == "not_found"
    hub.breaks = []
    assert contents(client.resolve()) == WANTED


@pytest.mark.slow
def test_partial_file_is_not_used_offline(hub: Hub, client: Client) -> None:
    hub.breaks = [(100_000, "stall")]
    process = client.start()
    assert hub.stalled.wait(20)
    process.kill()
    process.communicate()
    answer = client.ask(env=OFFLINE)
    assert answer["code"] == "not_found" and "org/chat is not completely cached" in answer["message"]
    assert contents(client.resolve()) == WANTED


@pytest.mark.slow
def test_gated_model_needs_a_valid_token(hub: Hub, client: Client) -> None:
    for options in ({}, {"token": "wrong"}):
        answer = client.ask("org/gated", **options)
        assert answer["code"] == "invalid"
        assert "gated" in answer["message"] and "HF_TOKEN or --hf-token" in answer["message"]
        assert "wrong" not in answer["message"]
    assert contents(client.resolve("org/gated", token="opens")) == WANTED
    assert hub.tokens == {None, "Bearer wrong", "Bearer opens"}


@pytest.mark.slow
def test_token_of_the_environment_is_used(client: Client) -> None:
    assert contents(client.resolve("org/gated", env={"HF_TOKEN": "opens"})) == WANTED


def test_invalid_token_is_not_in_the_error() -> None:
    with pytest.raises(PenstockError, match="hf_token") as raised:
        resolve("org/chat", token="secret\nsecret")
    assert "secret" not in str(raised.value)


def test_unknown_model_is_not_found(client: Client) -> None:
    answer = client.ask("org/nothing")
    assert answer["code"] == "not_found"
    assert "no public model org/nothing" in answer["message"] and "check the name" in answer["message"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("revision", ["", NEW])
def test_unreachable_hub_without_cache_fails_without_retries(hub: Hub, client: Client, revision: str) -> None:
    hub.stop()
    answer = client.ask(revision=revision)
    assert answer["code"] == "unavailable"
    assert hub.url in answer["message"] and "check the network and HF_ENDPOINT" in answer["message"]
    assert "Retrying" not in client.stderr
    answer = client.ask(revision=revision, env=OFFLINE)
    assert answer["code"] == "not_found"
    assert "HF_HUB_OFFLINE is set" in answer["message"]


@pytest.mark.slow
def test_unwritable_cache_is_reported(client: Client, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = client.ask(cache_dir=str(tmp_path / "file" / "cache"))
    assert (answer["code"], answer["field"]) == ("invalid", "download_dir")
    assert str(tmp_path / "file") in answer["message"]
