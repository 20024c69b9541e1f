"""The code of the documents runs, and prints what stands below it.

- All Python runs, and in features.md and the cookbook commands (``sh``) with a ``text`` block right below do: that is
  what they print.
- http://127.0.0.1:8000 is a server with the flags of the last ``penstock serve`` above.
- A model of the hub, of a package or of /models is the built-in one, or one that sees colours or hears where a page
  has that.
- ``penstock``'s own parser reads every command of all documents, those too that cannot run here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import speech_checkpoints
from image_checkpoints import plain, save_colours
from repository import ROOT
from serving import Servers

from penstock.cli.flags import add_profile, configure
from penstock.cli.main import COMMANDS
from penstock.cli.parser import Parser

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"
MODELS = {"images_and_video.md": "colours", "multimodal.md": "colours", "audio.md": "speech"}
"""Fixtures of the models of pages whose model is not the built-in one."""
MODEL = re.compile(r"\bQwen/[\w.-]+|/models/[\w.-]+|\bpypi:[\w.+=-]+")
STORES = ("responses.md", "storage.md")
OURS = set(
    "--model --port --host --metrics-port --log-file --log-format --limit-mm-per-prompt --max-model-len --dtype "
    "--gpu-memory-utilization --enable-auto-tool-choice --storage-dir --storage-url --storage-quota --storage-limit "
    "--api-key --batch-concurrency --compat --engine-worker-queue-port --splitwise-role --innode-prefill-ports".split()
)
"""Flags of a page's servers that are the tests' own, or change nothing of what is asked."""


ASKED = [{"role": "user", "content": "What is the capital of Canada?"}]
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ASKED}}


class Example(NamedTuple):
    """A block of code that runs."""

    page: str
    language: str
    code: str
    printed: str | None
    flags: tuple[str, ...]
    """Of the server that it asks."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each, without their indentation."""
    return [
        (language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
        for indent, language, text in BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def commands(shell: str) -> Iterator[list[str]]:
    """The words of each command of ``penstock`` in a block, without those whose rest is left open (…)."""
    for line in shell.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        try:
            found = list(words)
        except ValueError:  # a line of a document or of quoted text
            continue
        while "penstock" in found:
            found = found[found.index("penstock") + 1 :]
            end = next((i for i, word in enumerate(found) if re.fullmatch(r"[|&;<>()]+", word)), len(found))
            if found[:1] and found[0] in COMMANDS and "…" not in found:
                yield found[:end]


def flags_of(command: list[str]) -> tuple[str, ...]:
    """Those of a ``penstock serve`` that decide what a server answers."""
    flags: list[str] = []
    for word in command[1:]:
        if word.startswith("-") or flags:
            flags.append(word)
    groups = re.findall(r"(?:^|\0)(--[^\0]+(?:\0(?!-)[^\0]+)*)", "\0".join(flags))
    return tuple(word for group in groups if group.split("\0")[0] not in OURS for word in group.split("\0"))


def examples(page: Path) -> list[Example]:
    found, flags = [], ()
    commands_run = page.name == "features.md" or page.parent.name == "cookbook"
    for (language, code), (below, printed) in pairwise([*blocks(page), ("", "")]):
        if language == "sh":
            flags = next((flags_of(one) for one in commands(code) if one[0] == "serve"), flags)
        if language == "python" or (below == "text" and language == "sh" and commands_run):
            found.append(Example(page.name, language, code, printed if below == "text" else None, flags))
    return found


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "zh" not in page.parts]
EXAMPLES = [example for page in PAGES for example in examples(page)]


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("colours")
    save_colours(folder, latest=True)
    return str(folder)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("speech")
    speech_checkpoints.save_random(folder)
    return str(folder)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return ("--storage-dir", str(tmp_path_factory.mktemp("storage")))


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{example.page}-{i}" for i, example in enumerate(EXAMPLES)])
def test_example_prints_documented_output(
    example: Example,
    servers: Servers,
    storage: tuple[str, str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = request.getfixturevalue(MODELS[example.page]) if example.page in MODELS else ""
    code = example.code
    if ADDRESS in code:
        flags = ("--model", model) if model else ()
        stored = storage if example.page in STORES else ()
        blocks = "100" if model else "400"
        server = servers.get(*flags, "--num-gpu-blocks-override", blocks, *stored, *example.flags)
        code = code.replace(ADDRESS, server.root)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.jsonl").write_text(json.dumps(LINE) + "\n")
    (tmp_path / "talk.mp3").write_bytes(speech_checkpoints.wav(speech_checkpoints.sound(2)))
    plain("red").save(tmp_path / "photo.jpg")
    if example.language == "python":
        said = run_python(MODEL.sub(model, code), example.page)
    else:
        said = run_shell(MODEL.sub(model or "''", code), tmp_path)
    assert example.printed in (said, None)


def run_python(code: str, name: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, name, "exec", dont_inherit=True), {"__name__": "__main__"})
    return said.getvalue()


def run_shell(code: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", code]
    ran = subprocess.run(command, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("page", sorted(path.name for path in (DOCS / "cookbook").glob("*.md")))
def test_chinese_cookbook_has_same_code(page: str) -> None:
    """So that it has run, too, and can be copied from either."""
    english, chinese = DOCS / "cookbook" / page, DOCS / "zh/cookbook" / page
    assert blocks(chinese) == blocks(english)
    assert f"](../zh/cookbook/{page})" in english.read_text() and f"](../../cookbook/{page})" in chinese.read_text()


def test_chinese_pages_have_same_python() -> None:
    for page in DOCS.glob("zh/**/*.md"):
        english = DOCS / page.relative_to(DOCS / "zh")
        assert [b for b in blocks(page) if b[0] == "python"] == [b for b in blocks(english) if b[0] == "python"], page


def test_code_blocks_are_in_tested_languages() -> None:
    """Which are looked at here; configuration has none to run."""
    found = {language for page in DOCS.rglob("*.md") for language, _ in blocks(page)}
    assert found <= {"python", "sh", "text", "json", "yaml", "toml"}
    assert len(EXAMPLES) > 20


WRITTEN = [
    (page.relative_to(DOCS).as_posix(), command)
    for page in sorted(DOCS.rglob("*.md"))
    for language, text in blocks(page)
    if language == "sh"
    for command in commands(text)
]


@pytest.mark.parametrize("page", sorted({page for page, _ in WRITTEN}))
def test_documented_commands_are_parsed(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in WRITTEN:
        if name == page:
            if page.endswith("triton.md") and "--model-repository" in command:
                continue  # whose options are those of the folder
            try:
                read(command)
            except SystemExit:
                pytest.fail(f"{page}: penstock {' '.join(command)}: {capsys.readouterr().err}")


def read(command: list[str]) -> None:
    """Parse a command as ``penstock`` does, and its options' values."""
    module = import_module(f"penstock.cli.{command[0].replace('-', '_')}")
    parser = Parser(prog=f"penstock {command[0]}", allow_abbrev=False, conflict_handler="resolve")
    module.add_arguments(parser)
    words = getattr(module, "expand_arguments", list)(command[1:])
    add_profile(parser, words)
    args, unknown = parser.parse_known_args(words)
    assert unknown == [], command
    if hasattr(args, "options") and not args.config:
        configure(argparse.Namespace(**vars(args) | {"model": ""}))
