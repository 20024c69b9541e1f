"""The wheel in clean environments, which have its own dependencies and no test tools (``make test-install``).

One environment is made with this Python; ``make thorough`` makes another with a newer one where the machine has it.
``WHEEL`` names a wheel to look at in place of building one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from repository import ROOT
from serving import Served
from test_chat import Person
from test_hub import WANTED, Client, Hub, contents
from test_packaging import distribution

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TORCH = re.findall(r"torch==[\d.]+", (ROOT / "Makefile").read_text())[0]
ADDRESS = "http://127.0.0.1:8000"
SMALL = ("--num-gpu-blocks-override", "200")


def pip(*arguments: str | Path, python: Path | str = sys.executable, **environment: str) -> str:
    """Of this environment, for another one; what it prints."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(python),
        *map(str, arguments),
    ]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def build(folder: Path, python: Path | str = sys.executable) -> Path:
    """A wheel. With build tools in this environment, kernels that they have compiled are not compiled again."""
    own = python == sys.executable
    tools = ["--no-build-isolation"] if own and find_spec("scikit_build_core") else []
    sets = "all" if own else "native"
    pip("wheel", "-q", "--no-deps", "--wheel-dir", folder, *tools, ROOT, python=python, PENSTOCK_SETS=sets)
    (built,) = folder.glob("*.whl")
    return built


def commit_of_checkout() -> str:
    """Which a wheel of it names; empty where this is none."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


@cache
def newer() -> Path | None:
    """A Python that is newer than this one: the newest on the search path, or of pyenv."""
    minors = range(sys.version_info.minor + 8, sys.version_info.minor, -1)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    for minor in minors:
        for python in (f"python3.{minor}", *pyenv.glob(f"3.{minor}.*/bin/python3.{minor}")):
            try:
                ran = subprocess.run(
                    [python, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True
                )
            except OSError:
                continue
            if ran.returncode == 0:
                return Path(ran.stdout.strip())
    return None


class Clean:
    """An environment with the package and what it needs.

    Args:
        python: to make it with.
        wheel: None builds one with that Python.
    """

    def __init__(self, folder: Path, python: Path, wheel: Path | None) -> None:
        self.folder = folder / ".venv"
        self.home = folder
        subprocess.run([python, "-m", "venv", "--without-pip", self.folder], check=True)
        self.python = self.folder / "bin" / "python"
        self.penstock = self.folder / "bin" / "penstock"
        if wheel is None:
            wheel = build(folder, python)
        self.wheel = wheel
        self.torch = self._has_a_torch_for_processors()
        if self.torch:
            self.install(wheel, TORCH)
        else:
            needs = [need for need in PROJECT["dependencies"] if distribution(need) != "torch"]
            self.install(*needs)
            self.install("--no-deps", wheel)

    def _has_a_torch_for_processors(self) -> bool:
        """Whether what pip takes is no build for CUDA, of some gigabytes."""
        report = pip("install", "-q", "--dry-run", "--no-deps", "--report", "-", TORCH, python=self.python)
        (found,) = json.loads(report)["install"]
        needs = found["metadata"].get("requires_dist", [])
        return not any(word in need for need in needs for word in ("nvidia-", "cuda-"))

    def install(self, *what: str | Path) -> None:
        pip("install", "-q", "--no-compile", *what, python=self.python)

    def run(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, arguments)),
            cwd=self.home,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=180,
        )

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return inherited | {"XDG_CACHE_HOME": str(self.home / "cache"), "XDG_STATE_HOME": str(self.home / "state")}

    def serve(self, *flags: str) -> Served:
        return Served(*SMALL, *flags, command=[str(self.penstock), "serve"], environment=self.environment)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if named := os.environ.get("WHEEL"):
        return Path(named)
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module", params=["this Python", pytest.param("a newer Python", marks=pytest.mark.thorough)])
def clean(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Clean:
    own = request.param == "this Python"
    python = Path(os.path.realpath(sys.executable)) if own else newer()
    if python is None:
        pytest.skip(f"this machine has no Python newer than {sys.version_info.major}.{sys.version_info.minor}")
    return Clean(tmp_path_factory.mktemp("clean"), python, wheel if own else None)


@pytest.fixture(scope="module")
def full(clean: Clean) -> Clean:
    """One that can run models."""
    if not clean.torch:
        pytest.skip(f"{clean.python}: {TORCH} has no build for processors alone here, and is left out")
    return clean


@pytest.fixture(scope="module")
def served(full: Clean) -> Iterator[Served]:
    with full.serve() as served:
        yield served


# --- The package ------------------------------------------------------------------------------------------------------


def test_it_brings_one_command_and_no_test_tool(clean: Clean) -> None:
    code = "import json, importlib.metadata as m; print(json.dumps([m.version('penstock-llm'), "
    code += "[str(f) for f in m.files('penstock-llm')], [d.name for d in m.distributions()]]))"
    version, files, installed = json.loads(clean.run(clean.python, "-c", code).stdout)
    kernels = "(?!reference)[a-z0-9]+"
    if clean.torch:
        kernels = json.loads(clean.run(clean.penstock, "doctor", "--json").stdout).get("isa", "reference")
    commit = "" if "WHEEL" in os.environ else commit_of_checkout()
    facts = (f"commit {re.escape(commit)}, " if commit else ".*") + f"kernels {kernels}"
    said = clean.run(clean.penstock, "--version").stdout
    assert re.fullmatch(rf"{re.escape(version)} \({facts}\)\n", said), said
    assert [file for file in files if "/bin/" in file] == ["../../../bin/penstock"]
    assert not {distribution(name) for name in installed} & {"pytest", "httpx", "openai", "transformers", "grpcio"}


def test_every_command_has_its_help(clean: Clean) -> None:
    said = clean.run(clean.penstock, "--help").stdout
    commands = [[name] for name in re.findall(r"^    ([a-z-]+)\s", said, re.MULTILINE)]
    assert len(commands) > 8
    for (name,) in list(commands):
        kinds = re.findall(r"^    ([a-z_-]+)\s", clean.run(clean.penstock, name, "--help").stdout, re.MULTILINE)
        commands += [[name, kind] for kind in kinds]
    assert ["bench", "serve"] in commands
    code = "import sys; from penstock.cli.main import main\n"
    code += "for command in sys.argv[1:]:\n try:\n  main([*command.split(), '--help'])\n except SystemExit as exit:\n"
    code += "  assert not exit.code, command\n"
    ran = clean.run(clean.python, "-c", code, *map(" ".join, commands))
    assert ran.returncode == 0, ran.stderr
    for command in commands:
        assert f"usage: {' '.join(['penstock', *command])} " in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["serve", "--grpc-port", "0"], "grpc"),
        (["serve", "--model-repository", "MODELS"], "grpc"),
        (["serve", "--otlp-endpoint", "http://127.0.0.1:4317"], "otel"),
        (["download", "s3://bucket/model"], "s3"),
        (["bench", "serve"], "bench"),
        (["bench", "serve", "--picture", "load.png"], "bench"),
    ],
)
def test_what_an_extra_is_needed_for_names_it(clean: Clean, arguments: list[str], extra: str) -> None:
    (clean.home / "models" / "ensemble").mkdir(parents=True, exist_ok=True)
    (clean.home / "models" / "ensemble" / "config.pbtxt").write_text('name: "ensemble"\n')
    ran = clean.run(clean.penstock, *[word.replace("MODELS", "models") for word in arguments])
    assert ran.returncode == 2 and f"pip install 'penstock-llm[{extra}]'" in ran.stderr, ran.stderr
    assert "Traceback" not in ran.stderr


def test_models_come_from_a_hub(clean: Clean, tmp_path: Path) -> None:
    """Also over a connection that is reset on the way."""
    hub = Hub()
    try:
        client = Client(hub.url, tmp_path, clean.python)
        hub.breaks = [(100_000, "reset")]
        assert contents(client.resolve()) == WANTED
        assert len(hub.ranges) == 2 and "reset" in client.stderr
        assert client.ask("org/nothing")["code"] == "not_found"
        assert "gated" in client.ask("org/gated")["message"]
        hub.stop()
        assert client.ask(revision="v1")["code"] == "unavailable"
    finally:
        hub.stop()


def test_other_systems_commands_are_written(clean: Clean, tmp_path: Path) -> None:
    assert clean.run(clean.penstock, "shims", tmp_path).returncode == 0
    for command in (
        [tmp_path / "tritonserver"],
        [tmp_path / "quantize.py"],
        [sys.executable, tmp_path / "quantize.py"],
    ):
        ran = clean.run(*command, "--help")
        assert ran.returncode == 0 and ran.stdout.startswith("usage: "), ran.stderr
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--help"]
    assert "usage: penstock serve" in clean.run(*module, PYTHONPATH=str(tmp_path / "modules")).stdout


# --- A conversation ---------------------------------------------------------------------------------------------------


def test_it_chats_in_a_terminal(full: Clean) -> None:
    with Person(full.home, *SMALL, "--temperature", "0", command=[str(full.penstock), "chat"]) as person:
        person.see("> ")
        person.type("What is the capital of Canada?\n")
        person.see("Ottawa", limit=60)


def test_it_chats_with_a_server(clean: Clean) -> None:
    """Of this environment, so that a Python that runs no model can talk, too."""
    with Served(*SMALL) as server:
        command = [str(clean.penstock), "chat"]
        with Person(clean.home, "--url", server.url, "--temperature", "0", command=command) as person:
            person.see("> ")
            person.type("What is the capital of Canada?\n")
            person.see("Ottawa")
    refused = clean.run(clean.penstock, "chat", "--url", server.url)
    assert refused.returncode == 2 and "does not respond" in refused.stderr and "Traceback" not in refused.stderr


# --- The README, which prints the same in both languages --------------------------------------------------------------


def snippets(language: str) -> list[str]:
    """``tests/docs/test_rows.py`` has both pages print the same ones."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def test_programs_run_as_printed(full: Clean, served: Served) -> None:
    programs = [code.replace(ADDRESS, served.root) for code in snippets("python")]
    assert len(programs) == 2
    for code in programs:
        client = "import OpenAI" in code
        ran = full.run(sys.executable if client else full.python, "-c", code)
        assert ran.returncode == 0 and len(ran.stdout) > 20, ran.stderr
        assert client or "渥太华" in ran.stdout


def test_commands_run_as_printed(full: Clean, served: Served) -> None:
    """In a folder with the environment where ``make`` puts it. Installing is not repeated; talking, watching,
    downloading and calibrating have tests. ``MODEL`` is the built-in one."""
    asked = {
        "messages": [{"role": "user", "content": "What is the capital of Canada?"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    (full.home / "requests.jsonl").write_text(json.dumps(line) + "\n")
    lines = [line for block in snippets("sh") for line in block.splitlines() if line.strip()]
    elsewhere = r"make |.*pip install|\.venv/bin/penstock (chat|bench|download|quantize|top|serve pypi:) ?"
    skipped = [line for line in lines if re.match(elsewhere, line)]
    run = [line for line in lines if line not in skipped]
    assert any(line.startswith("curl") for line in run) and any("penstock run-batch" in line for line in run)
    for line in run:
        command = line.replace(ADDRESS, served.root).replace(" MODEL ", f" {ROOT / 'src/penstock/demo/chat'} ")
        ran = full.run("bash", "-c", command)
        assert ran.returncode == 0, (line, ran.stderr)
        assert "curl" not in line or "Ottawa" in ran.stdout
    assert "Ottawa" in (full.home / "answers.jsonl").read_text()
    for line in skipped:
        if line.startswith("make "):
            subprocess.run(["bash", "-c", line.replace("make", "make --dry-run", 1)], cwd=ROOT, check=True)


# --- Extras, which are installed from here on -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def extras(full: Clean) -> Clean:
    full.install(f"{full.wheel}[bench,grpc]")
    return full


def test_grpc_answers_with_its_extra(extras: Clean) -> None:
    with extras.serve("--grpc-port", "0") as served:
        address = served.find(r"gRPC at (\S+)")[1]
        with triton.InferenceServerClient(address) as client:
            assert client.is_server_ready() and client.is_model_ready("ensemble")


def test_a_load_is_measured_with_its_extra(extras: Clean, served: Served) -> None:
    (line,) = [line for block in snippets("sh") for line in block.splitlines() if "bench serve" in line]
    command = line.partition("#")[0].rstrip() + f" --base-url {served.root} --num-prompts 4 --random-output-len 8"
    ran = extras.run("bash", "-c", command)
    assert ran.returncode == 0, ran.stderr
    assert (extras.home / "load.png").stat().st_size > 1000
