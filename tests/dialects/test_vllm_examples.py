"""vLLM's example clients, run unmodified against a server with the built-in model.

The test downloads vLLM's source distribution. The examples connect to port 8000.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Served

pytestmark = pytest.mark.thorough

VERSION = "0.11.0"
FLAGS = (
    "--port",
    "8000",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
    "--reasoning-parser",
    "deepseek_r1",
)
EXAMPLES = (
    "openai_chat_completion_with_reasoning.py",
    "openai_chat_completion_with_reasoning_streaming.py",
    "openai_chat_completion_client_with_tools_required.py",
    "openai_completion_client.py",
    "openai_completion_client.py --stream",
    "openai_chat_completion_client.py",
    "openai_chat_completion_client.py --stream",
    "openai_cross_encoder_score.py --model penstock-demo",
    "api_client.py --n 1",
    "api_client.py --n 1 --stream",
    "pooling/openai_embedding_client.py",
)
"""Examples that succeed with a small text model. The others need images or correct tool calls."""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    # pip fails to build the package's metadata after it has unpacked the files; --no-clean keeps them.
    options = ["--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--no-clean", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, f"vllm=={VERSION}"]
    ran = subprocess.run(command, env=os.environ | {"TMPDIR": str(folder)}, capture_output=True, text=True)
    found = [path for path in folder.rglob("examples/online_serving") if path.is_dir()]
    if not found:
        pytest.skip(f"no source distribution of vllm {VERSION} is available: {ran.stderr[-300:]}")
    return found[0]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with socket.socket() as probe:
        if not probe.connect_ex(("127.0.0.1", 8000)):
            pytest.skip("port 8000, to which the examples connect, is in use")
    with Served(*FLAGS) as server:
        yield server


@pytest.mark.parametrize("example", EXAMPLES)
def test_vllm_example_runs_unmodified(served: Served, examples: Path, example: str) -> None:
    file, *arguments = example.split()
    ran = subprocess.run([sys.executable, file, *arguments], cwd=examples, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not any(word in ran.stdout for word in ("Error code", "'error'", '"error"')), ran.stdout
