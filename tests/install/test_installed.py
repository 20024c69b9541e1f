"""The wheel in clean environments with only its dependencies and no test tools (``make test-install``).

One environment uses this Python; ``make thorough`` adds one with a newer Python if the machine has it. The environment
variable ``WHEEL`` names a wheel to test instead of building one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
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
pytestmark = pytest.mark.slow

TORCH = re.findall(r"torch==[\d.]+", (ROOT / "Makefile").read_text())[0]
ADDRESS = "http://127.0.0.1:8000"
SMALL = ("--num-gpu-blocks-override", "200")


def pip(*arguments: str | Path, python: Path | str = sys.executable, **environment: str) -> str:
    """Run pip of this environment for the environment of ``python``; return its output."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(python),
        *map(str, arguments),
    ]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def build(folder: Path, python: Path | str = sys.executable) -> Path:
    """Build a wheel. The build tools of this environment, if installed, reuse compiled kernels."""
    same = python == sys.executable
    tools = ["--no-build-isolation"] if same and find_spec("scikit_build_core") else []
    sets = "all" if same else "native"
    pip("wheel", "-q", "--no-deps", "--wheel-dir", folder, *tools, ROOT, python=python, PENSTOCK_SETS=sets)
    (built,) = folder.glob("*.whl")
    return built


def commit_of_checkout() -> str:
    """Commit that a wheel of this checkout contains; empty if this is not a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


@cache
def newer() -> Path | None:
    """The newest Python in ``PATH`` or of pyenv; None if it is not newer than this Python."""
    minors = range(sys.version_info.minor + 8, sys.version_info.minor, -1)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    for minor in minors:
        for python in (f"python3.{minor}", *pyenv.glob(f"3.{minor}.*/bin/python3.{minor}")):
            try:
                command = [python, "-c", "import sys; print(sys.executable)"]
                result = subprocess.run(command, capture_output=True, text=True)
            except OSError:
                continue
            if result.returncode == 0:
                return Path(result.stdout.strip())
    return None


class Clean:
    """A virtual environment with the package and its dependencies.

    Args:
        python: interpreter of the environment.
        wheel: wheel to install; None: build one with that interpreter.
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
        self.torch = self._finds_cpu_torch()
        if self.torch:
            self.install(wheel, TORCH)
        else:
            self.install(*[each for each in PROJECT["dependencies"] if distribution(each) != "torch"])
            self.install("--no-deps", wheel)

    def _finds_cpu_torch(self) -> bool:
        """True if pip would install a CPU build of torch, and not a build for CUDA of several GB."""
        report = pip("install", "-q", "--dry-run", "--no-deps", "--report", "-", TORCH, python=self.python)
        (found,) = json.loads(report)["install"]
        requirements = found["metadata"].get("requires_dist", [])
        return not any(name in requirement for requirement in requirements for name in ("nvidia-", "cuda-"))

    def install(self, *requirements: str | Path) -> None:
        pip("install", "-q", "--no-compile", *requirements, python=self.python)

    def run(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, arguments)),
            cwd=self.home,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=180,
        )

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command line of the documentation, with ``penstock`` of this environment."""
        return self.run("bash", "-c", command, PATH=f"{self.penstock.parent}:{os.environ['PATH']}")

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
    same = request.param == "this Python"
    python = Path(os.path.realpath(sys.executable)) if same else newer()
    if python is None:
        pytest.skip(f"this machine has no Python newer than {sys.version_info.major}.{sys.version_info.minor}")
    return Clean(tmp_path_factory.mktemp("clean"), python, wheel if same else None)


@pytest.fixture(scope="module")
def full(clean: Clean) -> Clean:
    """A clean environment with torch, which can run models."""
    if not clean.torch:
        pytest.skip(f"{clean.python}: pip finds no CPU build of {TORCH}, which is not installed")
    return clean


@pytest.fixture(scope="module")
def served(full: Clean) -> Iterator[Served]:
    with full.serve() as served:
        yield served


# --- The package ------------------------------------------------------------------------------------------------------


def test_wheel_installs_one_command_and_no_test_tools(clean: Clean) -> None:
    code = "import json, importlib.metadata as m; print(json.dumps([m.version('penstock-llm'), "
    code += "[str(f) for f in m.files('penstock-llm')], [d.name for d in m.distributions()]]))"
    version, files, installed = json.loads(clean.run(clean.python, "-c", code).stdout)
    kernels = "(?!reference)[a-z0-9]+"
    if clean.torch:
        kernels = json.loads(clean.run(clean.penstock, "doctor", "--json").stdout).get("isa", "reference")
    commit = "" if "WHEEL" in os.environ else commit_of_checkout()
    details = (f"commit {re.escape(commit)}, " if commit else ".*") + f"kernels {kernels}"
    output = clean.run(clean.penstock, "--version").stdout
    assert re.fullmatch(rf"{re.escape(version)} \({details}\)\n", output), output
    assert [file for file in files if "/bin/" in file] == ["../../../bin/penstock"]
    libraries = [file for file in files if file.startswith("penstock/serve/web/libraries/files/")]
    assert "WHEEL" in os.environ or bool(libraries) == bool(shutil.which("npm")), "the web page's libraries"
    assert not {distribution(name) for name in installed} & {"pytest", "httpx", "openai", "transformers", "grpcio"}


def test_every_command_prints_help(clean: Clean) -> None:
    output = clean.run(clean.penstock, "--help").stdout
    commands = [[name] for name in re.findall(r"^    ([a-z-]+)\s", output, re.MULTILINE)]
    assert len(commands) > 8
    for (name,) in list(commands):
        kinds = re.findall(r"^    ([a-z_-]+)\s", clean.run(clean.penstock, name, "--help").stdout, re.MULTILINE)
        commands += [[name, kind] for kind in kinds]
    assert ["bench", "serve"] in commands
    code = "import sys; from penstock.cli.main import main\n"
    code += "for command in sys.argv[1:]:\n try:\n  main([*command.split(), '--help'])\n except SystemExit as exit:\n"
    code += "  assert not exit.code, command\n"
    result = clean.run(clean.python, "-c", code, *map(" ".join, commands))
    assert result.returncode == 0, result.stderr
    for command in commands:
        assert f"usage: {' '.join(['penstock', *command])} " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["serve", "--grpc-port", "0"], "grpc"),
        (["serve", "--model-repository", "MODELS"], "grpc"),
        (["serve", "--otlp-endpoint", "http://127.0.0.1:4317"], "otel"),
        (["serve", "--mcp-config", "mcp.json"], "mcp"),
        (["download", "s3://bucket/model"], "s3"),
        (["bench", "serve"], "bench"),
        (["bench", "serve", "--picture", "load.png"], "bench"),
    ],
)
def test_command_without_its_extra_names_the_extra(clean: Clean, arguments: list[str], extra: str) -> None:
    (clean.home / "models" / "ensemble").mkdir(parents=True, exist_ok=True)
    (clean.home / "models" / "ensemble" / "config.pbtxt").write_text('name: "ensemble"\n')
    result = clean.run(clean.penstock, *[argument.replace("MODELS", "models") for argument in arguments])
    assert result.returncode == 2 and f"pip install 'penstock-llm[{extra}]'" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


def test_models_are_downloaded_from_a_hub(clean: Clean, tmp_path: Path) -> None:
    """The hub resets one of the connections during the download."""
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


def test_shims_of_other_systems_run(clean: Clean, tmp_path: Path) -> None:
    assert clean.run(clean.penstock, "shims", tmp_path).returncode == 0
    for command in (
        [tmp_path / "tritonserver"],
        [tmp_path / "quantize.py"],
        [sys.executable, tmp_path / "quantize.py"],
    ):
        result = clean.run(*command, "--help")
        assert result.returncode == 0 and result.stdout.startswith("usage: "), result.stderr
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--help"]
    assert "usage: penstock serve" in clean.run(*module, PYTHONPATH=str(tmp_path / "modules")).stdout


# --- A conversation ---------------------------------------------------------------------------------------------------


def test_chat_runs_a_model_in_a_terminal(full: Clean) -> None:
    with Person(full.home, *SMALL, "--temperature", "0", command=[str(full.penstock), "chat"]) as person:
        person.see("> ")
        person.type("What is the capital of Canada?\n")
        person.see("Ottawa", limit=60)


def test_chat_connects_to_a_server(clean: Clean) -> None:
    """The server runs in the environment of the tests, so that clean environments without torch are tested, too."""
    with Served(*SMALL) as server:
        command = [str(clean.penstock), "chat"]
        with Person(clean.home, "--url", server.url, "--temperature", "0", command=command) as person:
            person.see("> ")
            person.type("What is the capital of Canada?\n")
            person.see("Ottawa")
    refused = clean.run(clean.penstock, "chat", "--url", server.url)
    assert refused.returncode == 2 and "does not respond" in refused.stderr and "Traceback" not in refused.stderr


# --- README and docs/installation.md ----------------------------------------------------------------------------------


def snippets(language: str) -> list[str]:
    """Code blocks of README.md and docs/installation.md; ``tests/docs/test_rows.py`` checks that the Chinese pages have
    the same blocks."""
    text = "".join((ROOT / page).read_text() for page in ("README.md", "docs/installation.md"))
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_readme_python_runs(full: Clean, served: Served) -> None:
    programs = [code.replace(ADDRESS, served.root) for code in snippets("python")]
    assert len(programs) == 2
    for code in programs:
        client = "import OpenAI" in code
        result = full.run(sys.executable if client else full.python, "-c", code)
        assert result.returncode == 0 and len(result.stdout) > 20, result.stderr
        assert client or "渥太华" in result.stdout


def test_readme_commands_run(full: Clean, served: Served) -> None:
    """``MODEL`` is the built-in model. Installation and commands with separate tests (chat, bench, download, quantize,
    serve, top) do not run."""
    body = {
        "messages": [{"role": "user", "content": "What is the capital of Canada?"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (full.home / "requests.jsonl").write_text(json.dumps(line) + "\n")
    lines = [line for block in snippets("sh") for line in block.splitlines() if line.strip()]
    not_run = r"make |.*pip install|penstock (chat|bench|download|quantize|serve(?! --help)|top)\b"
    skipped = [line for line in lines if re.match(not_run, line)]
    run = [line for line in lines if line not in skipped]
    assert any(line.startswith("curl") for line in run) and any("penstock run-batch" in line for line in run)
    for line in run:
        command = line.replace(ADDRESS, served.root).replace(" MODEL ", f" {ROOT / 'src/penstock/demo/chat'} ")
        result = full.shell(command)
        assert result.returncode == 0, (line, result.stderr)
        assert "curl" not in line or "Ottawa" in result.stdout
    assert "Ottawa" in (full.home / "answers.jsonl").read_text()
    for line in skipped:
        if line.startswith("make "):
            subprocess.run(["bash", "-c", line.replace("make", "make --dry-run", 1)], cwd=ROOT, check=True)


# --- Extras: the tests below run with all extras installed ------------------------------------------------------------


@pytest.fixture(scope="module")
def extras(full: Clean) -> Clean:
    full.install(f"{full.wheel}[bench,grpc]")
    return full


def test_grpc_responds_with_its_extra(extras: Clean) -> None:
    with extras.serve("--grpc-port", "0") as served:
        address = served.find(r"gRPC at (\S+)")[1]
        with triton.InferenceServerClient(address) as client:
            assert client.is_server_ready() and client.is_model_ready("ensemble")


def test_bench_serve_runs_with_its_extra(extras: Clean, served: Served) -> None:
    (line,) = [line for block in snippets("sh") for line in block.splitlines() if "bench serve" in line]
    command = line.partition("#")[0].rstrip() + f" --base-url {served.root} --num-prompts 4 --random-output-len 8"
    result = extras.shell(command)
    assert result.returncode == 0, result.stderr
    assert (extras.home / "load.png").stat().st_size > 1000
