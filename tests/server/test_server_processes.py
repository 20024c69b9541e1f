"""Server processes, and the environment in which they start."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import httpx
import pytest
from serving import Served


def test_modules_of_the_working_directory_do_not_shadow_libraries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files such as ``http.py`` in the working directory are not imported instead of the standard library."""
    for name in ("http", "json", "random", "types"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError(__file__)\n")
    monkeypatch.chdir(tmp_path)
    program = Path(sys.executable).with_name("penstock")
    with Served("--tensor-parallel-size", "2", command=(str(program), "serve")) as server:
        grammar = {"structured_outputs": {"regex": "[ab]{3}"}, "model": server.name, "prompt": "a", "max_tokens": 8}
        response = httpx.post(f"{server.url}/completions", json=grammar)
        assert re.fullmatch("[ab]{3}", response.json()["choices"][0]["text"]), response.text
