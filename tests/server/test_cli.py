"""Commands of the command line, each run in a new process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import PenstockError
from penstock.cli.help_topics import TOPICS
from penstock.config.settings import settings
from penstock.frontend.hub import resolve
from penstock.version import __version__


def penstock(*arguments: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    return subprocess.run(command, input=stdin, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.slow
def test_generate_prints_answer() -> None:
    result = penstock("generate", "--chat", "--temperature", "0", "What is the capital of Canada?")
    assert result.returncode == 0, result.stderr
    assert "Ottawa" in result.stdout


@pytest.mark.slow
def test_generate_reads_standard_input() -> None:
    result = penstock("generate", "--chat", "--temperature", "0", "--max-tokens", "3", stdin="加拿大的首都是哪里?")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("加拿大")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_bench_prints_throughput(kind: str) -> None:
    number = ["--num-iters", "1"] if kind == "latency" else ["--num-prompts", "3"]
    sizes = [*number, "--input-len", "5", "--output-len", "4"]
    printed = penstock("bench", kind, *sizes, "--load-format", "dummy", "--json")
    assert printed.returncode == 0, printed.stderr
    figures = json.loads(printed.stdout)
    assert figures["decode_tokens_per_s" if kind == "latency" else "output_tokens_per_s"] > 0


@pytest.mark.slow
def test_version_prints_commit_and_kernels_without_torch() -> None:
    code = "import atexit, sys; from penstock.cli.main import main; "
    code += "atexit.register(lambda: print('torch' in sys.modules)); main(['--version'])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    version = re.fullmatch(r"(\S+) \((?:commit (\S+), )?kernels (\w+)\)\nFalse\n", output)
    assert version and version[1] == __version__
    assert version[3] == json.loads(penstock("doctor", "--json").stdout).get("isa", "reference").partition(" ")[0]


@pytest.mark.slow
@pytest.mark.row("vllm", "npu-smi info")
def test_doctor_reports_kernels_and_core_binding() -> None:
    report = json.loads(penstock("doctor", "--json").stdout)
    cores = len(os.sched_getaffinity(0))
    binding = report["2 ranks"].removesuffix(" (cpu_binding auto)")
    assert binding.count("|") == 1 if cores > 1 else binding == "not bound"
    assert report["numa nodes"].startswith("0: ")
    environment = {"PENSTOCK_CPU_BINDING": "0-2,5|7", "PENSTOCK_PIPELINE_PARALLEL_SIZE": "2"}
    assert json.loads(penstock("doctor", "--json", **environment).stdout)["2 ranks"].startswith("0-2,5|7 ")
    assert report["fingerprint"].startswith(report["kernels"])
    assert report["isa"].split()[0] in report["built"].split(", ")
    assert "portable" in report["machine"].split(", ")
    assert report["web page"].startswith(("with ", "plain text only"))
    assert re.fullmatch(r"\S+/penstock: \d+ files, \d+\.\d of at most \d+\.\d GiB", report["weights"])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "/nowhere", "?"], "/nowhere"),
        (["bench", "latency", "--max-model-len", "100000"], "context of 2048"),
        (["serve", "-m", "model.gguf"], "penstock serve: unknown argument -m"),
        (["serv"], "penstock: there is no command serv; did you mean serve?"),
        (["generate", "--model", "/nowhere", " "], "prompt: is empty"),  # reported before anything is loaded
    ],
)
def test_wrong_option_prints_one_sentence(arguments: list[str], message: str) -> None:
    result = penstock(*arguments)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


KINDS = {
    "model.gguf": "cannot be read",
    "alone/model.safetensors": "is a weights file without its config.json: give the folder",
    "notes.txt": "is a file, not a folder: give the folder of a Hugging Face checkpoint, a GGUF file, or a name",
    "lora/adapter_config.json/": "contains adapter_config.json: it is a LoRA adapter; give its base model",
    "meta/params.json/": "weights in their original format",
    "exported/model.onnx/": "the model was exported to ONNX",
    "models/chat/config.json/..": "contains several checkpoints: give one of them, chat",
    "empty/./": "is empty, so it is not a checkpoint",
    "other/readme.md/": "has no config.json, so it is not a checkpoint",
}
"""Message by file. The model is the file, its folder (``/`` at the end) or the folder's parent (``/..`` at the end)."""


@pytest.mark.parametrize("name", KINDS)
def test_path_without_checkpoint_is_refused_with_reason(name: str, tmp_path: Path) -> None:
    file = tmp_path / name.removesuffix("..")
    model = file.parent if name.endswith("/") else file.parent.parent if name.endswith("..") else file
    if name == "empty/./":
        model = file
        file.mkdir()
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    with pytest.raises(PenstockError, match=re.escape(f"{model} ")) as refused:
        resolve(str(model))
    assert KINDS[name] in str(refused.value)


def test_gguf_file_without_suffix_is_refused_with_advice(tmp_path: Path) -> None:
    """Ollama stores its models as such files."""
    (tmp_path / "sha256-1").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(PenstockError, match="is a GGUF file without its suffix: give a link"):
        resolve(str(tmp_path / "sha256-1"))


def test_serve_refuses_missing_model_and_warns_of_open_access(tmp_path: Path) -> None:
    """The warning about missing API keys is shown before the error, but only if the server listens on all addresses."""
    result = penstock("serve", "--compat", "fastdeploy", "--log-file", str(tmp_path / "log"), "--model", "model.gguf")
    assert result.returncode == 2 and "model.gguf does not exist: give the folder" in result.stderr
    assert (
        "anyone with network access to 0.0.0.0 on this machine can send requests: set --api-key or --host 127.0.0.1"
        in result.stderr
    )
    assert "anyone with network access" not in penstock("serve", "model.gguf").stderr


def test_help_and_config_show_weight_cache_folder() -> None:
    folder = os.environ["XDG_CACHE_HOME"] + "/penstock"
    assert f"default:{folder})" in re.sub(r"\s+", "", penstock("serve", "--help=all").stdout)
    assert re.search(rf"weight_cache_dir +{folder} +default", penstock("config").stdout)


def test_help_has_short_usage_and_one_spelling_per_flag() -> None:
    page = penstock("serve", "--help=all").stdout
    assert page.startswith("usage: penstock serve [MODEL] [options]\n")
    assert "--max-num-seqs INT" in page and "--max_num_seqs" not in page and "--no-trust-remote-code" not in page
    assert penstock("bench", "--help").stdout.startswith("usage: penstock bench [-h] KIND ...")


def test_help_without_topic_is_short_and_names_topics() -> None:
    assert penstock().stdout == penstock("--help").stdout
    page = penstock("serve", "--help", COLUMNS="80").stdout.splitlines()
    assert len(page) <= 60 and max(map(len, page)) <= 90
    assert any(line.startswith("  --max-model-len TOKENS ") for line in page)
    assert any(line.startswith("  kv-cache ") for line in page)


def test_help_shows_topics_and_searches() -> None:
    topic = penstock("serve", "--help=kv-cache").stdout
    assert "--kv-offloading-size GIB" in topic and "--max-num-seqs" not in topic
    assert "--kv-offloading-size GIB" in penstock("serve", "--help=offload").stdout
    assert "--disable-log-requests" in penstock("serve", "--help=compat").stdout
    wrong = penstock("serve", "--help=kvcach")
    assert wrong.returncode == 2 and "did you mean --help=kv-cache?" in wrong.stderr


def test_each_option_has_one_topic_of_the_help() -> None:
    named = [name for topic in TOPICS.values() for name in topic.names]
    assert sorted(named) == sorted(settings())


def test_help_loads_no_torch_and_names_units() -> None:
    code = "import sys\nfrom penstock.cli.main import main\ntry:\n main(['generate', '--help'])\nexcept SystemExit:\n"
    code += " sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--max-num-batched-tokens TOKENS" in result.stdout


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("penstock.serve.process.api_server", "torch numpy"),
        ("penstock.serve.process.supervisor", "torch starlette uvicorn"),
        ("penstock.cli.main", "torch starlette huggingface_hub asyncio prompt_toolkit"),
        ("penstock.engine.executor.node_process", "torch starlette uvicorn"),
        ("penstock.engine.service.server", "starlette uvicorn prometheus_client huggingface_hub tokenizers"),
        ("penstock.engine.engine", "starlette uvicorn prometheus_client tokenizers"),
    ],
)
def test_process_does_not_import_unneeded_modules(module: str, absent: str) -> None:
    code = f"import sys, {module}\nsys.exit(' '.join(sys.modules.keys() & set('{absent}'.split())))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.strip() == ""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("command", ["completion fish", "config", "doctor --json"])
def test_command_ends_quietly_if_reader_closes_pipe(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *command.split()], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (
        result.returncode == 128 + signal.SIGPIPE
        and "Traceback" not in result.stderr
        and "BrokenPipe" not in result.stderr
    )


# --- First steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--host", "nosuch.invalid", "--port", "0"], "host: nosuch.invalid cannot be resolved"),
        (["serve", "nothere"], "model: there is no file or folder nothere, and nothere from "),
        (["plan", "memory", "a", "--model", "b"], "model: is given twice, as a and --model b: remove one of them"),
        (["bench", "latency", "./nothere"], "nothere"),
        (["generate", "-m", "./nothere", "text"], "nothere"),
    ],
)
def test_wrong_first_steps_are_explained(arguments: list[str], message: str) -> None:
    result = penstock(*arguments, HF_ENDPOINT="http://127.0.0.1:9")
    assert result.returncode == 2 and message in result.stderr.splitlines()[-1]


def test_load_file_without_fields_is_explained(tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text("{}")
    result = penstock("plan", "experts", str(tmp_path / "load.json"), "--expert-parallel-size", "2")
    assert result.returncode == 2 and "save the response of GET /expert_load" in result.stderr


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["config", "doctor", "chat"])
def test_closed_standard_streams_end_without_traceback(command: str, redirection: str, tmp_path: Path) -> None:
    given = "" if "<&-" in redirection else "</dev/null"
    line = f"{sys.executable} -m penstock.cli.main {command} {redirection} {given}"
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # chat would use a running server
    result = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0 and "Traceback" not in result.stderr
