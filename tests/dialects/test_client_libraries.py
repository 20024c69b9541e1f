"""Third-party client libraries and tools against a server, installed from PyPI or npm outside the test environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import repository
from repository import SUPPORT
from scripted_model import scripted_model, tool_call
from serving import Served, Servers

pytestmark = pytest.mark.thorough

BUILD = repository.BUILD / "clients"
"""Folder of the installed packages, kept between runs."""
ANSWER, WEATHER = "The capital of Canada is Ottawa.", [["get_weather", {"city": "Paris"}]]
PACKAGES = {
    "llama_index": [
        "llama-index-llms-openai-like==0.8.1",
        "llama-index-llms-ollama==0.11.0",
        "llama-index-embeddings-openai-like==0.4.0",
    ],
    "llm": ["llm==0.32.1"],
    "pydantic_ai": ["pydantic-ai-slim[openai]==2.68.0"],
    "openai_agents": ["openai-agents==0.24.0"],
    "smolagents": ["smolagents[openai]==1.26.0"],
    "aider": ["aider-chat==0.86.2"],
}
WARM = "It is 21 degrees in Paris."
AI_SDK = ["ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "@ai-sdk/openai@3.0.141", "@ai-sdk/anthropic@3.0.140"]


def programs(name: str) -> Path:
    """Return the ``bin`` folder of a virtual environment with the packages ``PACKAGES[name]``; create it if missing."""
    folder = BUILD / name
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "-q", *PACKAGES[name]], check=True)
        (folder / "complete").touch()
    return folder / "bin"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a program with its working folder as home; return its standard output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    settings = inherited | {"HOME": str(cwd)} | environment
    ran = subprocess.run(
        command, cwd=cwd, env=settings, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_llama_index_chats_calls_tools_and_embeds(servers: Servers, tmp_path: Path) -> None:
    script = SUPPORT / "llama_index_client.py"
    document = json.loads(run(programs("llama_index") / "python", script, servers.get().root, cwd=tmp_path))
    for api in ("openai", "ollama"):
        assert (document[api]["answer"], document[api]["streamed"]) == (ANSWER, ANSWER) and document[api]["pieces"] > 1
        assert document[api]["calls"] == WEATHER and "21" in document[api]["agent"]
    assert document["index"] == ANSWER and document["dimensions"] == [256, 256]


def test_ai_sdk_generates_calls_tools_and_embeds(servers: Servers, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("needs npm (Debian: apt install npm)")
    folder = BUILD / "ai_sdk"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", folder, *AI_SDK], check=True)
        (folder / "complete").touch()
    shutil.copy(SUPPORT / "ai_sdk.mjs", folder)
    document: dict[str, Any] = json.loads(run("node", folder / "ai_sdk.mjs", servers.get().root, cwd=tmp_path))
    assert document["dimensions"] == [256, 256] and len(document["said"]) == 4
    for api, result in document["said"].items():
        assert result["answer"] == "".join(result["pieces"]) == ANSWER and len(result["pieces"]) > 1, api
        assert result["finish"] == ["stop", "stop"] and result["usage"] == [[20, 13], [20, 13]], api
        assert result["calls"] == [WEATHER, []] and "21" in result["agent"], api
        assert result["forced"] == ["get_weather"] and list(result["object"]) == ["n"], api
        assert result["unknown"][0] == 404 and "does not exist" in result["unknown"][1], api


def test_llm_chats_calls_tools_and_follows_schema(servers: Servers, tmp_path: Path) -> None:
    """The program is Simon Willison's ``llm``, which reads the model from its configuration file."""
    model = {"model_id": "penstock", "model_name": "default", "api_base": f"{servers.get().root}/v1"}
    model |= {"api_key_name": "penstock", "supports_tools": True, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))

    def ask(*arguments: str) -> str:
        command = [programs("llm") / "llm", "-m", "penstock", "--key", "none", "-o", "temperature", "0", *arguments]
        return run(*command, cwd=tmp_path, LLM_USER_PATH=str(tmp_path)).strip()

    question = "What is the capital of Canada?"
    assert ask(question) == ask("--no-stream", question) == ANSWER
    tool = "def get_weather(city: str) -> str:\n    'Get the weather of a city'\n    return '{\"temperature\": 21}'"
    assert "21" in ask("--functions", tool, "What is the weather in Paris?")
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    assert list(json.loads(ask("--schema", json.dumps(schema), question))) == ["n"]
    assert ask("-c", question) == ANSWER


def test_aider_edits_and_commits_file(tmp_path: Path) -> None:
    work, model = tmp_path / "work", tmp_path / "model"
    reply = 'I change the file.\n\nhello.py\n```\nprint("bye")\n```\n'
    work.mkdir()
    (work / "hello.py").write_text('print("hello")\n')
    run("git", "init", "-q", cwd=work)
    for name in ("user.name", "user.email"):
        run("git", "config", name, "someone@example.org", cwd=work)
    run("git", "add", "hello.py", cwd=work)
    run("git", "commit", "-q", "-m", "Hello", cwd=work)
    quiet = ["--no-show-model-warnings", "--analytics-disable", "--no-check-update", "--no-gitignore", "--yes-always"]
    with Served("--model", str(scripted_model(model, reply)), "--max-model-len", "16384") as served:
        task = ["--model", "openai/default", "--edit-format", "whole", "--message", "Print bye", "hello.py"]
        address = {"OPENAI_API_BASE": f"{served.root}/v1", "OPENAI_API_KEY": "none"}
        run(programs("aider") / "aider", *quiet, *task, cwd=work, **address)
    assert (work / "hello.py").read_text() == 'print("bye")\n'
    assert run("git", "log", "--oneline", cwd=work).count("\n") == 2


@pytest.mark.parametrize("loop", ["pydantic_ai", "openai_agents", "openai_agents_responses", "smolagents"])
def test_agent_loop_calls_tool_and_answers(loop: str, tmp_path: Path) -> None:
    final = tool_call("final_answer", answer=WARM) if loop == "smolagents" else WARM
    model = scripted_model(tmp_path / "model", tool_call("get_weather", city="Paris"), final)
    environment = programs(loop.removesuffix("_responses"))
    with Served("--model", str(model)) as served:
        printed = run(environment / "python", SUPPORT / "agent_loops.py", loop, served.root, cwd=tmp_path)
    assert printed.splitlines()[-1] == WARM
