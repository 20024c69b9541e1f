"""Coding agents from npm complete a task against a server: one tool call, then a final answer.

The model is ``scripted_model``, so the tests check the protocol between agent and server: prompts, tools, streams,
tool calls and their results.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import repository
from scripted_model import scripted_model, tool_call
from serving import Served

PROGRAMS = repository.BUILD / "agents"
"""Folder of the installed agents, kept between runs."""
TASK, PROOF = "Write 4711 into proof.txt", "The file proof.txt has 4711 in it."
SHELL = "echo 4711 > proof.txt && cat proof.txt"


class Agent(NamedTuple):
    package: str
    command: list[str]
    call: str
    """The agent's tool call that runs the shell command ``SHELL``."""
    environment: Callable[[str], dict[str, str]] = lambda url: {}
    files: Callable[[str], dict[str, str]] = lambda url: {}
    """Files of the agent's home and working folder (content by path), as a function of the server's URL."""


CODEX = """model = "default"
model_provider = "penstock"
[model_providers.penstock]
name = "Penstock"
base_url = "{url}"
wire_api = "responses"
"""
CONTINUE: dict[str, Any] = {"name": "Penstock", "version": "1.0.0", "schema": "v1"}
OPENCODE: dict[str, Any] = {"model": "penstock/default", "small_model": "penstock/default", "autoupdate": False}
AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code",
        ["-p", TASK, "--dangerously-skip-permissions"],
        tool_call("Bash", command=SHELL, description="Write a file"),
        lambda url: {
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "default",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "default",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # otherwise the agent refuses to run commands as root
        },
    ),
    "codex": Agent(
        "@openai/codex",
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
        tool_call("exec_command", cmd=SHELL),
        files=lambda url: {".codex/config.toml": CODEX.format(url=url)},
    ),
    "cn": Agent(
        "@continuedev/cli",
        ["--config", "config.yaml", "--auto", "-p", TASK],
        tool_call("Bash", command=SHELL),
        lambda url: {"CONTINUE_TELEMETRY_ENABLED": "0"},
        lambda url: {
            "config.yaml": json.dumps(
                CONTINUE
                | {
                    "models": [
                        {
                            "name": "default",
                            "provider": "openai",
                            "model": "default",
                            "apiBase": url,
                            "apiKey": "none",
                            "roles": ["chat"],
                            "capabilities": ["tool_use"],
                        }
                    ]
                }
            )
        },
    ),
    "opencode": Agent(
        "opencode-ai",
        ["run", TASK],
        tool_call("bash", command=SHELL, description="Write a file"),
        files=lambda url: {
            "opencode.json": json.dumps(
                OPENCODE
                | {
                    "provider": {
                        "penstock": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": url, "apiKey": "none"},
                            "models": {"default": {"limit": {"context": 100000, "output": 8000}}},
                        }
                    }
                }
            )
        },
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", AGENTS)
def test_agent_calls_shell_tool_and_reads_its_result(name: str, tmp_path: Path) -> None:
    agent = AGENTS[name]
    model = scripted_model(tmp_path / "model", f"I write the file.\n{agent.call}", PROOF)
    folder = tmp_path / "home"
    folder.mkdir()
    strict = [] if name == "codex" else ["--strict-requests"]  # codex sends fields that OpenAI does not document
    with Served("--model", str(model), *strict) as served:
        url = f"{served.root}/v1"
        for path, text in agent.files(url).items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("ANTHROPIC_", "OPENAI_"))}
        ran = subprocess.run(
            [program(name, agent.package), *agent.command],
            cwd=folder,
            env=environment | {"HOME": str(folder), "PWD": str(folder)} | agent.environment(url),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert ran.returncode == 0 and PROOF in ran.stdout, ran.stdout + ran.stderr
    assert (folder / "proof.txt").read_text() == "4711\n"


def program(name: str, package: str) -> Path:
    """Return the path of the agent's command; install the agent if it is missing."""
    command = PROGRAMS / "node_modules" / ".bin" / name
    if not command.exists():
        if shutil.which("npm") is None:
            pytest.skip("needs npm (Debian: apt install npm)")
        PROGRAMS.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", PROGRAMS, package], check=True)
        for script in ("install.cjs", "postinstall.mjs"):  # these scripts link the program; npm may have skipped them
            if (PROGRAMS / "node_modules" / package / script).exists():
                subprocess.run(["node", script], cwd=PROGRAMS / "node_modules" / package, check=True)
    return command
