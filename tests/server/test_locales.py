"""Commands with Chinese prompts, paths and names of models in the locales ``C`` and ``POSIX``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Served
from test_chat import Person
from wcwidth import wcswidth

from penstock import demo

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
QUESTION, ANSWER = "加拿大的首都是哪里?", "加拿大的首都是渥太华。"
ENGINE = ("--num-gpu-blocks-override", "200")


@pytest.fixture(params=["C", pytest.param("POSIX", marks=pytest.mark.thorough)])
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folder with the model ``模型`` and a hub cache ``缓存``; all processes are started in the locale."""
    for name in ("LANG", "LC_CTYPE", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONCOERCECLOCALE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LC_ALL", request.param)
    shutil.copytree(demo.CHAT, tmp_path / "模型")
    shutil.copytree(demo.CHAT, tmp_path / "缓存" / "models--组织--模型" / "snapshots" / ("0" * 40))
    return tmp_path


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with Served("--model", str(folder / "模型"), "--served-model-name", "模型", *ENGINE) as server:
        yield server


def run(folder: Path, *arguments: str, stdin: str = "", status: int = 0) -> str:
    """Run a command in ``folder``; return what it prints."""
    result = subprocess.run([*PENSTOCK, *arguments], input=stdin.encode(), capture_output=True, cwd=folder)
    output = (result.stdout + result.stderr).decode()
    assert result.returncode == status and "Traceback" not in output and "\\u" not in output, output
    return output


@pytest.mark.slow
def test_engine_commands_keep_chinese_text_in_ascii_locale(folder: Path) -> None:
    model = ("./模型", *ENGINE)
    assert ANSWER in run(folder, "generate", "-m", *model, "--chat", "--temperature", "0", QUESTION)
    assert ANSWER in run(folder, "generate", "-m", *model, "--chat", "--temperature", "0", stdin=QUESTION)
    assert ANSWER in run(folder, "chat", *model, "--temperature", "0", stdin=f"{QUESTION}\n/save 对话.json\n")
    assert json.loads((folder / "对话.json").read_text(encoding="utf-8"))[0]["content"] == QUESTION
    body = {"model": "模型", "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
    request = {"custom_id": "问题", "method": "POST", "url": "/v1/chat/completions", "body": body}
    bad = {**request, "custom_id": "错误", "body": {**body, "model": "别的"}}
    lines = [json.dumps(line, ensure_ascii=False) for line in (request, bad)]
    (folder / "请求.jsonl").write_text("\n".join(lines), encoding="utf-8")
    files = ("-i", "请求.jsonl", "-o", "结果.jsonl", "--served-model-name", "模型")
    assert "错误: " in run(folder, "run-batch", *files, "--model", *model, status=1)
    assert ANSWER in (folder / "结果.jsonl").read_text(encoding="utf-8")
    sizes = ("--num-prompts", "1", "--input-len", "5", "--output-len", "4")
    assert "throughput" in run(folder, "bench", "throughput", *model, *sizes)


@pytest.mark.slow
def test_client_commands_keep_chinese_text_in_ascii_locale(served: Served, folder: Path) -> None:
    assert "模型" in run(folder, "top", "--url", served.root, "--once", "--interval", "0.1")
    assert "模型" in run(folder, "ps")
    sizes = ("--num-prompts", "2", "--random-input-len", "5", "--random-output-len", "4")
    assert "requests" in run(folder, "bench", "serve", "--base-url", served.root, "--model", "模型", *sizes)
    assert ANSWER in run(folder, "chat", "--url", served.url, "--temperature", "0", stdin=QUESTION)
    with Person(folder, "--url", served.url, "--temperature", "0") as person:
        person.see("模型 at .*> ")
        person.type(f"{QUESTION}\r")
        person.see(f"> {re.escape(QUESTION)}\n{ANSWER}\n.*> ")
        person.type(f"/load {folder}/没有\t.json\r")
        person.see("没有.json cannot be read")


@pytest.mark.slow
def test_file_commands_and_errors_keep_chinese_text_in_ascii_locale(folder: Path) -> None:
    shutil.copytree(folder / "缓存" / "models--组织--模型", folder / "缓存" / "models--a--b")
    titles, *models = run(folder, "list", "--download-dir", "缓存").splitlines()
    positions = {wcswidth(line.partition(str(folder))[0]) for line in models}
    assert len(models) == 2 and positions == {titles.index("FOLDER")}, "Chinese characters take two columns"
    assert "转换" in run(folder, "convert", "./模型", "--output-dir", "转换")
    assert "模型" in run(folder, "plan", "memory", "./模型")
    assert "./模型" in run(folder, "config", "--model", "./模型")
    for command in (
        ["serve", "./没有"],
        ["generate", "-m", "./没有", "x"],
        ["chat", "./没有"],
        ["rm", "没有"],
        ["没有"],
    ):
        assert "没有" in run(folder, *command, status=2)
