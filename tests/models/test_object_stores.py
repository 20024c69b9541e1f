"""Downloads from an S3-compatible server (moto).

moto and s3fs are installed in separate environments, as they need other versions of botocore than the tests'
environment has.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
import repository
from test_downloads import Command, downloaded, has_recorded_ranges, partial_files
from test_hub import UNWANTED, WANTED, WEIGHTS

pytestmark = pytest.mark.thorough

BUILD = repository.BUILD / "object_stores"
PUT = """
import boto3, pathlib, sys
client = boto3.client("s3")
if sys.argv[2] == "new":
    client.create_bucket(Bucket="models")
folder = pathlib.Path(sys.argv[1])
for path in folder.rglob("*"):
    if path.is_file():
        client.upload_file(str(path), "models", f"org/chat/{path.relative_to(folder)}")
"""


@pytest.fixture(scope="module")
def server_python() -> Path:
    """Python interpreter of an environment with moto's server."""
    python = BUILD / "server" / "bin" / "python"
    if not python.exists():
        venv.create(BUILD / "server", with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "moto[server]>=5"], check=True)
    return python


@pytest.fixture(scope="module")
def s3fs() -> Path:
    """Folder with s3fs and its dependencies, for ``PYTHONPATH``."""
    folder = BUILD / "client"
    if not (folder / "s3fs").exists():
        install = [sys.executable, "-m", "pip", "install", "-q", "--target", folder, "s3fs"]
        subprocess.run(install, check=True)
    return folder


class Store:
    """A running server, and the environment variables with which clients connect to it."""

    def __init__(self, python: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._python = python
        self.environment = {
            "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [python, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while True:
            try:
                urllib.request.urlopen(self.url).close()
                return
            except OSError:
                assert self.process.poll() is None
                time.sleep(0.05)

    def put(self, folder: Path, bucket: str = "new") -> None:
        """Upload a folder as ``s3://models/org/chat``."""
        upload = [self._python, "-c", PUT, folder, bucket]
        subprocess.run(upload, check=True, env=os.environ | self.environment)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def store(server_python: Path) -> Iterator[Store]:
    store = Store(server_python)
    yield store
    store.stop()


@pytest.fixture
def command(store: Store, s3fs: Path, tmp_path: Path) -> Command:
    command = Command(tmp_path)
    command.environment |= store.environment | {"PYTHONPATH": str(s3fs)}
    return command


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_bucket_folder_is_downloaded_and_updated(store: Store, command: Command) -> None:
    files = WANTED | {WEIGHTS: os.urandom(20_000_000)}
    store.put(write(command.home / "files", files | UNWANTED))
    folder = command.download("s3://models/org/chat/")
    assert folder.is_relative_to(command.home / "cache")
    assert downloaded(folder) == files
    before = (folder / WEIGHTS).stat().st_mtime_ns
    assert command.download("s3://models/org/chat", "--endpoint", store.url) == folder
    assert (folder / WEIGHTS).stat().st_mtime_ns == before
    store.put(write(command.home / "newer", {"config.json": b'{"model_type": "qwen2"}'}), "old")
    assert (command.download("s3://models/org/chat/") / "config.json").read_bytes() == b'{"model_type": "qwen2"}'
    assert (folder / WEIGHTS).stat().st_mtime_ns == before


def test_gguf_file_in_a_bucket_is_downloaded(store: Store, command: Command) -> None:
    store.put(write(command.home / "files", {"chat-Q8_0.gguf": os.urandom(5000)}))
    file = command.download("s3://models/org/chat/chat-Q8_0.gguf")
    assert file.read_bytes() == (command.home / "files" / "chat-Q8_0.gguf").read_bytes()


def test_missing_folder_and_missing_credentials_are_reported(store: Store, command: Command) -> None:
    assert "s3://models/org/chat does not exist" in command.refused("s3://models/org/chat")
    store.put(write(command.home / "files", WANTED))
    assert "s3://models/org/none does not exist" in command.refused("s3://models/org/none")
    without = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
    assert "set AWS_ACCESS_KEY_ID and" in command.refused("s3://models/org/chat", **without)


def test_killed_download_resumes_and_cache_works_without_server(store: Store, command: Command) -> None:
    files = WANTED | {WEIGHTS: os.urandom(150_000_000)}
    store.put(write(command.home / "files", files))
    process = command.start("s3://models/org/chat", "--dir", "here", "--max-workers", "2")
    while not has_recorded_ranges(command.home, 2):
        assert process.poll() is None
    process.kill()
    process.communicate()
    assert not (command.home / "here" / WEIGHTS).exists()
    assert downloaded(command.download("s3://models/org/chat", "--dir", "here")) == files
    assert not partial_files(command.home)
    folder = command.download("s3://models/org/chat")
    store.stop()
    assert "cannot be fetched" in command.refused("s3://models/org/chat")
    assert command.download("s3://models/org/chat", HF_HUB_OFFLINE="1") == folder
    assert downloaded(folder) == files
    assert "HF_HUB_OFFLINE is set" in command.refused("s3://models/org/none", HF_HUB_OFFLINE="1")
