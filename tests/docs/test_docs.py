"""The code in the documentation runs, and prints the documented output.

- All Python blocks run. In README.md, features.md and the cookbook, shell blocks (``sh``) followed by a ``text`` block
  run, too; the ``text`` block is the expected output.
- http://127.0.0.1 with the port of the last ``penstock serve`` above, by default 8000, is a server with its options.
- Models of the hub, of packages or of /models are replaced by the built-in model, or on some pages by a vision or
  speech model of tests/support.
- The parser of ``penstock`` parses all commands, also commands that cannot run in a test.
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
from repository import ROOT, TESTS
from scripted_model import scripted_model, tool_call
from serving import Servers

from penstock.cli.flags import add_profile, configure
from penstock.cli.main import COMMANDS
from penstock.cli.parser import Parser

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1"
MODELS = {"images_and_video.md": "colours", "multimodal.md": "colours", "audio.md": "speech", "mcp.md": "caller"}
"""Fixture of the model by page; pages that are not listed use the built-in model."""
MODEL = re.compile(r"\bQwen/[\w.-]+|/models/[\w.-]+|\bpypi:[\w.+=-]+")
STORES = ("responses.md", "storage.md")
IGNORED_OPTIONS = set(
    "--model --port --host --metrics-port --log-file --log-format --limit-mm-per-prompt --max-model-len --dtype "
    "--gpu-memory-utilization --enable-auto-tool-choice --storage-dir --storage-url --storage-quota --storage-limit "
    "--api-key --batch-concurrency --compat --engine-worker-queue-port --splitwise-role --innode-prefill-ports".split()
)
"""Options of documented servers that the tests set to other values, or that do not change the responses."""


MESSAGES = [{"role": "user", "content": "What is the capital of Canada?"}]
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}}


class Example(NamedTuple):
    """A code block to run."""

    page: str
    language: str
    code: str
    output: str | None
    """Documented output; None: not checked."""
    flags: tuple[str, ...]
    """Options of the server that the block uses."""
    port: str
    """Port of this server."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each code block of a page, without indentation."""
    return [
        (language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
        for indent, language, text in BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def commands(shell: str) -> Iterator[list[str]]:
    """Arguments of each ``penstock`` command in a block, without incomplete commands (…)."""
    for line in shell.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            found = list(lexer)
        except ValueError:  # the line is part of a here-document or of quoted text
            continue
        while "penstock" in found:
            found = found[found.index("penstock") + 1 :]
            end = next((i for i, token in enumerate(found) if re.fullmatch(r"[|&;<>()]+", token)), len(found))
            if found[:1] and found[0] in COMMANDS and "…" not in found:
                yield found[:end]


def flags_of(command: list[str]) -> tuple[str, ...]:
    """Options of a ``penstock serve`` command that can change the responses."""
    flags: list[str] = []
    for argument in command[1:]:
        if argument.startswith("-") or flags:
            flags.append(argument)
    groups = re.findall(r"(?:^|\0)(--[^\0]+(?:\0(?!-)[^\0]+)*)", "\0".join(flags))
    options = (group.split("\0") for group in groups)
    return tuple(argument for option in options if option[0] not in IGNORED_OPTIONS for argument in option)


def port_of(command: list[str]) -> str:
    """Port of a ``penstock serve`` command."""
    return command[command.index("--port") + 1] if "--port" in command else "8000"


def examples(page: Path) -> list[Example]:
    found, flags, port = [], (), "8000"
    runs_shell = page.name in ("README.md", "features.md") or page.parent.name == "cookbook"
    for (language, code), (next_language, next_text) in pairwise([*blocks(page), ("", "")]):
        served = [command for command in commands(code) if command[0] == "serve"] if language == "sh" else []
        if served:
            flags, port = flags_of(served[0]), port_of(served[0])
        if language == "python" or (next_language == "text" and language == "sh" and runs_shell):
            output = next_text if next_language == "text" else None
            found.append(Example(page.name, language, code, output, flags, port))
    return found


PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if "zh" not in page.relative_to(DOCS).parts)]
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
def caller(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that calls a tool of an MCP server."""
    replies = tool_call("files__add", a=2, b=3), "5"
    return str(scripted_model(tmp_path_factory.mktemp("caller"), *replies, max_model_len=6000))


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return ("--storage-dir", str(tmp_path_factory.mktemp("storage")))


@pytest.fixture(scope="module")
def mcp_config(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Configuration file of MCP servers that replaces mcp.json."""
    folder = tmp_path_factory.mktemp("mcp")
    tools = {"command": sys.executable, "args": [str(TESTS / "support/mcp_tools.py"), "stdio", str(folder)]}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"files": tools}}))
    return str(folder / "mcp.json")


def test_clients_use_port_of_documented_server() -> None:
    assert not [one for one in EXAMPLES if set(re.findall(rf"{ADDRESS}:(\d+)", one.code)) - {one.port}]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{example.page}-{i}" for i, example in enumerate(EXAMPLES)])
def test_example_prints_documented_output(
    example: Example,
    servers: Servers,
    storage: tuple[str, str],
    mcp_config: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = request.getfixturevalue(MODELS[example.page]) if example.page in MODELS else ""
    code, address = example.code, f"{ADDRESS}:{example.port}"
    if address in code:
        flags = ("--model", model) if model else ()
        stored = storage if example.page in STORES else ()
        blocks = "100" if model else "400"
        options = [mcp_config if flag == "mcp.json" else flag for flag in example.flags]
        server = servers.get(*flags, "--num-gpu-blocks-override", blocks, *stored, *options)
        code = code.replace(address, server.root)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.jsonl").write_text(json.dumps(LINE) + "\n")
    (tmp_path / "talk.mp3").write_bytes(speech_checkpoints.wav(speech_checkpoints.sound(2)))
    plain("red").save(tmp_path / "photo.jpg")
    if example.language == "python":
        output = run_python(MODEL.sub(model, code), example.page)
    else:
        output = run_shell(MODEL.sub(model or "''", code), tmp_path)
    assert example.output in (output, None)


def run_python(code: str, name: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, name, "exec", dont_inherit=True), {"__name__": "__main__"})
    return output.getvalue()


def run_shell(code: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", code]
    result = subprocess.run(command, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("page", sorted(path.name for path in (DOCS / "cookbook").glob("*.md")))
def test_chinese_cookbook_has_same_code(page: str) -> None:
    english, chinese = DOCS / "cookbook" / page, DOCS / "zh/cookbook" / page
    assert blocks(chinese) == blocks(english)
    assert f"](../zh/cookbook/{page})" in english.read_text() and f"](../../cookbook/{page})" in chinese.read_text()


@pytest.mark.parametrize("page", [page.relative_to(DOCS / "zh").as_posix() for page in sorted(DOCS.glob("zh/**/*.md"))])
def test_translated_pages_link_to_each_other(page: str) -> None:
    english, chinese = DOCS / page, DOCS / "zh" / page
    assert f"[中文]({os.path.relpath(chinese, english.parent)})" in english.read_text()
    assert f"[English]({os.path.relpath(english, chinese.parent)})" in chinese.read_text()


def test_chinese_pages_link_to_chinese_pages() -> None:
    """Except the link to their own English page."""
    for page in [ROOT / "README.zh-CN.md", *DOCS.glob("zh/**/*.md")]:
        for name, target in re.findall(r"\[([^]]*)\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            linked = (page.parent / target).resolve()
            if name != "English" and linked.is_relative_to(DOCS) and not linked.is_relative_to(DOCS / "zh"):
                assert not (DOCS / "zh" / linked.relative_to(DOCS)).exists(), (page, target)


def test_chinese_pages_have_same_python() -> None:
    for page in DOCS.glob("zh/**/*.md"):
        english = DOCS / page.relative_to(DOCS / "zh")
        assert [b for b in blocks(page) if b[0] == "python"] == [b for b in blocks(english) if b[0] == "python"], page


def test_code_blocks_are_in_tested_languages() -> None:
    """Configuration files (json, yaml, toml) do not run."""
    found = {language for page in DOCS.rglob("*.md") for language, _ in blocks(page)}
    assert found <= {"python", "sh", "text", "json", "yaml", "toml"}
    assert len(EXAMPLES) > 20


DOCUMENTED_COMMANDS = [
    (page.relative_to(ROOT).as_posix(), command)
    for page in sorted([*ROOT.glob("README*.md"), *DOCS.rglob("*.md")])
    for language, text in blocks(page)
    if language == "sh"
    for command in commands(text)
]


@pytest.mark.parametrize("page", sorted({page for page, _ in DOCUMENTED_COMMANDS}))
def test_documented_commands_are_parsed(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in DOCUMENTED_COMMANDS:
        if name == page:
            if page.endswith("triton.md") and "--model-repository" in command:
                continue  # its options depend on the folder
            try:
                parse(command)
            except SystemExit as result:
                if result.code == 0:  # --help exits with status 0
                    continue
                pytest.fail(f"{page}: penstock {' '.join(command)}: {capsys.readouterr().err}")


def parse(command: list[str]) -> None:
    """Parse a command and the values of its options as ``penstock`` does."""
    module = import_module(f"penstock.cli.{command[0].replace('-', '_')}")
    parser = Parser(prog=f"penstock {command[0]}", allow_abbrev=False)
    module.add_arguments(parser)
    arguments = getattr(module, "expand_arguments", list)(command[1:])
    add_profile(parser, arguments)
    args, unknown = parser.parse_known_args(arguments)
    assert unknown == [], command
    if hasattr(args, "options") and not args.config:
        configure(argparse.Namespace(**vars(args) | {"model": "", "model_tag": None}))
