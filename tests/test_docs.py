"""The examples in ``docs/features.md`` print what stands below them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from serving import Served, Servers

FEATURES = (Path(__file__).parents[1] / "docs" / "features.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\s+```text\n(.*?)```", FEATURES, re.DOTALL)
ADDRESS = "http://127.0.0.1:8000/v1"


@pytest.fixture(scope="module")
def server(servers: Servers) -> Served:
    return servers.get("--num-gpu-blocks-override", "400")


@pytest.mark.parametrize(("code", "printed"), EXAMPLES)
def test_an_example_prints_what_it_says(server: Served, code: str, printed: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        program = compile(code.replace(ADDRESS, server.url), "features.md", "exec", dont_inherit=True)
        exec(program, {"__name__": "__main__"})
    assert said.getvalue() == printed


def test_every_example_is_run() -> None:
    assert len(EXAMPLES) == FEATURES.count("```python\n") > 0
