"""Faults of the machine: full disks, limits of processes, users without a home. Each is told in one sentence."""

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
LONGEST = 500


def started(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``penstock serve`` (``$SERVE`` in a shell's command), which is to end by itself."""
    given = {**os.environ, **environment, "SERVE": shlex.join([*SERVE, "--port", "0", *SMALL])}
    return subprocess.run(["bash", "-c", command], env=given, capture_output=True, text=True, timeout=120)


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
    os.setuid(12345)  # the limit does not count for root
print(failure_of(lambda: subprocess.run(["true"])))
"""


def test_eagain_is_a_full_process_table_only_where_a_process_is_started() -> None:
    done = subprocess.run([sys.executable, "-c", EXHAUSTED], capture_output=True, text=True, timeout=60)
    of_socket, of_process = done.stdout.splitlines()
    assert of_socket == "None", done.stderr
    assert "(ulimit -u)" in of_process


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "address space")) for name in STARTS]
)
def test_start_that_the_machine_does_not_let_happen_is_one_sentence(fault: str, tmp_path: Path) -> None:
    if fault == "no home" and not can_map_users():
        pytest.skip("user namespaces are not allowed here")
    command, words = STARTS[fault]
    said = started(command, LONG=str(tmp_path / ("x" * 120)), GONE=str(tmp_path / "gone"))
    assert said.returncode != 0
    assert "Traceback" not in said.stderr
    sentences = [line for line in said.stderr.splitlines() if line.startswith("penstock")]
    assert len(sentences) == 1 and len(sentences[0]) <= LONGEST, said.stderr
    assert re.search(words, sentences[0]), said.stderr


# --- Full disks -------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of this size at a folder."""
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Use all room that is left."""
    path = folder / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (2**16, 2**10, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return path


def test_upload_with_a_full_temporary_folder_is_unavailable(tmp_path: Path) -> None:
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
def test_full_storage_is_unavailable_and_batches_go_on_later(tmp_path: Path) -> None:
    with small_disk(tmp_path / "storage", "6m") as folder, ExitStack() as stack:
        server = stack.enter_context(Served("--storage-dir", str(folder), *SMALL))
        line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}
        file = "\n".join(json.dumps(line | {"custom_id": str(number)}) for number in range(20)).encode()
        uploaded = httpx.post(f"{server.url}/files", files={"file": file}, data={"purpose": "batch"}).json()
        filler = fill(folder)
        form: Any = {"files": {"file": b"x" * 2**20}, "data": {"purpose": "batch"}}
        kept = {"input": "Hello!", "store": True, "max_output_tokens": 1, "background": True}
        for answer in (
            httpx.post(f"{server.url}/files", **form),
            httpx.post(f"{server.url}/conversations", json={"items": [{"role": "user", "content": "x" * 2**17}]}),
            httpx.post(f"{server.url}/responses", json={**kept, "instructions": "x" * 4000}),
        ):
            if answer.status_code != 200:  # SQLite may have a page left
                assert (answer.status_code == 503 and "full" in answer.text) or "space" in answer.text, answer.text
        filler.unlink()
        asked = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = httpx.post(f"{server.url}/batches", json=asked).json()
        filler = fill(folder)
        filler.unlink()
        deadline = time.monotonic() + 60
        while (found := httpx.get(f"{server.url}/batches/{batch['id']}").json())["status"] != "completed":
            assert time.monotonic() < deadline and found["status"] != "failed", found
        assert found["request_counts"]["completed"] == 20
        assert "Traceback" not in "".join(server.lines)


def test_log_file_on_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    with small_disk(tmp_path / "log", "1m") as folder, ExitStack() as stack:
        server = stack.enter_context(Served("--log-file", str(folder / "server.log"), *SMALL))
        filler = fill(folder)
        for _ in range(30):
            httpx.post(f"{server.url}/completions", json={"prompt": "a", "max_tokens": 1, "user": "x" * 200})
        server.find(r"the log file \S+ cannot be written \(no space left on device\): \d+ lines lost")
        assert "Traceback" not in "".join(server.lines)
        assert len([line for line in server.lines if "cannot be written" in line]) <= 3  # one for each process
        filler.unlink()
        size = (folder / "server.log").stat().st_size
        for _ in range(2):  # the file has the first one's line before the second one is answered
            at = len(server.lines)
            httpx.post(f"{server.url}/completions", json={"prompt": "a", "max_tokens": 1})
            server.find("POST /v1/completions", after=at)
        assert (folder / "server.log").stat().st_size > size


# --- Descriptors and metrics ------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_missing_descriptors_are_logged(tmp_path: Path) -> None:
    limited = ["bash", "-c", 'ulimit -n 120; exec "$@"', "penstock", *SERVE]
    with Served(*SMALL, command=limited) as server, ExitStack() as stack:
        address = httpx.URL(server.url)
        for _ in range(150):
            stack.enter_context(socket.create_connection((address.host, address.port or 0)))
        server.find(r"\d+ of 120 file descriptors are open: further connections are closed; raise ulimit -n")


@pytest.mark.thorough
def test_metrics_go_on_in_the_files_of_a_dead_process(tmp_path: Path) -> None:
    def counted(server: Served) -> float:
        page = httpx.get(f"{server.root}/metrics").text
        return sum(
            float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.startswith("penstock:generation_tokens_total")
        )

    with Served(*SMALL, environment={"TMPDIR": str(tmp_path)}) as server:
        body = {"prompt": "One, two,", "max_tokens": 4, "ignore_eos": True}
        assert httpx.post(f"{server.url}/completions", json=body).status_code == 200
        assert counted(server) == 4
        (folder,) = tmp_path.glob("penstock-metrics-*")
        before = sorted(path.name for path in folder.glob("*.db"))
        os.kill(server.pids["api"][0], 9)
        server.find(r"API process 0 \(process \d+\) ended")
        server._welcome()
        assert httpx.post(f"{server.url}/completions", json=body).status_code == 200
        assert counted(server) == 8
        assert sorted(path.name for path in folder.glob("*.db")) == before
