"""Limits of the machine: full disks, process limits, users without a home folder. Errors are a single sentence."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import SERVE, Served

SMALL = ("--num-gpu-blocks-override", "50")
MAX_LENGTH = 500


def run_serve(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command with ``$SERVE`` (``penstock serve``), which must fail to start; return its result."""
    variables = {**os.environ, **environment, "SERVE": shlex.join([*SERVE, "--port", "0", *SMALL])}
    return subprocess.run(["bash", "-c", command], env=variables, capture_output=True, text=True, timeout=120)


def can_map_users() -> bool:
    command = ["unshare", "--user", "--map-user=12345", "true"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


WITHOUT_HOME = "unshare --user --map-user=12345 env -u HOME -u XDG_CACHE_HOME $SERVE"
STARTS = {
    "long temporary folder": ('mkdir -p "$LONG"; TMPDIR="$LONG" $SERVE', "TMPDIR: .* must have at most 80 bytes"),
    "address space": ("ulimit -v 1000000; $SERVE", r"\(ulimit -[vu]\)"),
    "little address space": ("ulimit -v 200000; $SERVE", r"not enough memory \(ulimit -v\)"),
    "file descriptors": ("ulimit -n 12; $SERVE", r"no file descriptors left \(ulimit -n\)"),
    "file size": ("ulimit -f 0; $SERVE", "temporary folder cannot be written"),
    "deleted folder": ('mkdir "$GONE"; cd "$GONE"; rmdir "$GONE"; $SERVE', "working directory has been deleted"),
    "no home": (WITHOUT_HOME, "user 12345 has no home folder: set HOME"),
}


EXHAUSTED = """
import os, resource, socket, subprocess
from penstock.core.machine_errors import exhausted

def failure_of(action):
    try:
        action()
    except OSError as error:
        return getattr(exhausted(error), "message", None)
    return "no error"

left, right = socket.socketpair()
left.setblocking(False)
print(failure_of(lambda: left.recv(1)))
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
if os.getuid() == 0:
    os.setuid(12345)  # the limit does not apply to root
print(failure_of(lambda: subprocess.run(["true"])))
"""


def test_eagain_means_process_limit_only_for_process_creation() -> None:
    result = subprocess.run([sys.executable, "-c", EXHAUSTED], capture_output=True, text=True, timeout=60)
    socket_error, process_error = result.stdout.splitlines()
    assert socket_error == "None", result.stderr
    assert "(ulimit -u)" in process_error


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "address space")) for name in STARTS]
)
def test_failed_start_prints_one_sentence(fault: str, tmp_path: Path) -> None:
    if fault == "no home" and not can_map_users():
        pytest.skip("user namespaces are not allowed here")
    command, message = STARTS[fault]
    result = run_serve(command, LONG=str(tmp_path / ("x" * 120)), GONE=str(tmp_path / "gone"))
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    sentences = [line for line in result.stderr.splitlines() if line.startswith("penstock")]
    assert len(sentences) == 1 and len(sentences[0]) <= MAX_LENGTH, result.stderr
    assert re.search(message, sentences[0]), result.stderr


# --- Full disks -------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of the given size at a folder."""
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill the file system of a folder completely; return the file that takes the space."""
    path = folder / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (2**16, 2**10, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return path


def test_upload_with_full_temporary_folder_returns_503(tmp_path: Path) -> None:
    with small_disk(tmp_path / "tmp", "20m") as folder, ExitStack() as stack:
        flags = ("--storage-dir", str(tmp_path / "storage"), *SMALL)
        server = stack.enter_context(Served(*flags, environment={"TMPDIR": str(folder)}))
        form: Any = {"files": {"file": ("a.jsonl", b"x" * 2**22)}, "data": {"purpose": "batch"}}
        assert httpx.post(f"{server.url}/files", **form).status_code == 200
        filler = fill(folder)
        answer = httpx.post(f"{server.url}/files", **form)
        assert answer.status_code == 503 and "a disk is full" in answer.text, answer.text
        assert "Traceback" not in "".join(server.lines)
        filler.unlink()
        assert httpx.post(f"{server.url}/files", **form).status_code == 200


@pytest.mark.thorough
def test_full_storage_returns_503_and_batches_continue_later(tmp_path: Path) -> None:
    with small_disk(tmp_path / "storage", "6m") as folder, ExitStack() as stack:
        server = stack.enter_context(Served("--storage-dir", str(folder), *SMALL))
        line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}
        file = "\n".join(json.dumps(line | {"custom_id": str(number)}) for number in range(20)).encode()
        uploaded = httpx.post(f"{server.url}/files", files={"file": file}, data={"purpose": "batch"}).json()
        filler = fill(folder)
        form: Any = {"files": {"file": b"x" * 2**20}, "data": {"purpose": "batch"}}
        background = {"input": "Hello!", "store": True, "max_output_tokens": 1, "background": True}
        for answer in (
            httpx.post(f"{server.url}/files", **form),
            httpx.post(f"{server.url}/conversations", json={"items": [{"role": "user", "content": "x" * 2**17}]}),
            httpx.post(f"{server.url}/responses", json={**background, "instructions": "x" * 4000}),
        ):
            if answer.status_code != 200:  # may succeed: SQLite can have a free page left
                assert (answer.status_code == 503 and "full" in answer.text) or "space" in answer.text, answer.text
        filler.unlink()
        request = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = httpx.post(f"{server.url}/batches", json=request).json()
        filler = fill(folder)
        filler.unlink()
        deadline = time.monotonic() + 60
        while (current := httpx.get(f"{server.url}/batches/{batch['id']}").json())["status"] != "completed":
            assert time.monotonic() < deadline and current["status"] != "failed", current
        assert current["request_counts"]["completed"] == 20
        assert "Traceback" not in "".join(server.lines)


def test_full_disk_of_log_file_is_reported_once(tmp_path: Path) -> None:
    with small_disk(tmp_path / "log", "1m") as folder, ExitStack() as stack:
        server = stack.enter_context(Served("--log-file", str(folder / "server.log"), *SMALL))
        filler = fill(folder)
        for _ in range(30):
            httpx.post(f"{server.url}/completions", json={"prompt": "a", "max_tokens": 1, "user": "x" * 200})
        server.find(r"the log file \S+ cannot be written \(no space left on device\): \d+ lines lost")
        assert "Traceback" not in "".join(server.lines)
        assert len([line for line in server.lines if "cannot be written" in line]) <= 3  # one line per server process
        filler.unlink()
        size = (folder / "server.log").stat().st_size
        for _ in range(2):  # the log line of the first request is written before the second is answered
            line_count = len(server.lines)
            httpx.post(f"{server.url}/completions", json={"prompt": "a", "max_tokens": 1})
            server.find("POST /v1/completions", after=line_count)
        assert (folder / "server.log").stat().st_size > size


# --- Descriptors and metrics ------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_file_descriptor_exhaustion_is_logged(tmp_path: Path) -> None:
    limited = ["bash", "-c", 'ulimit -n 120; exec "$@"', "penstock", *SERVE]
    with Served(*SMALL, command=limited) as server, ExitStack() as stack:
        address = httpx.URL(server.url)
        for _ in range(150):
            stack.enter_context(socket.create_connection((address.host, address.port or 0)))
        server.find(r"\d+ of 120 file descriptors are open: further connections are closed; raise ulimit -n")


@pytest.mark.thorough
def test_restarted_process_continues_metrics_of_killed_process(tmp_path: Path) -> None:
    def generated_tokens(server: Served) -> float:
        page = httpx.get(f"{server.root}/metrics").text
        return sum(
            float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.startswith("penstock:generation_tokens_total")
        )

    with Served(*SMALL, environment={"TMPDIR": str(tmp_path)}) as server:
        body = {"prompt": "One, two,", "max_tokens": 4, "ignore_eos": True}
        assert httpx.post(f"{server.url}/completions", json=body).status_code == 200
        assert generated_tokens(server) == 4
        (folder,) = tmp_path.glob("penstock-metrics-*")
        before = sorted(path.name for path in folder.glob("*.db"))
        os.kill(server.pids["api"][0], 9)
        server.find(r"API process 0 \(process \d+\) ended")
        server._wait_ready()
        assert httpx.post(f"{server.url}/completions", json=body).status_code == 200
        assert generated_tokens(server) == 8
        assert sorted(path.name for path in folder.glob("*.db")) == before
