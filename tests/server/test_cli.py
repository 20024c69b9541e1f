"""The commands as people type them, each in a process of its own."""

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
from penstock.frontend.hub import resolve
from penstock.version import __version__


def penstock(*arguments: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    return subprocess.run(command, input=stdin, env=os.environ | environment, capture_output=True, text=True)


def test_generate_answers() -> None:
    said = penstock("generate", "--chat", "--temperature", "0", "What is the capital of Canada?")
    assert said.returncode == 0, said.stderr
    assert "Ottawa" in said.stdout


def test_generate_reads_standard_input() -> None:
    said = penstock("generate", "--chat", "--temperature", "0", "--max-tokens", "3", stdin="加拿大的首都是哪里?")
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("加拿大")


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_bench_measures(kind: str) -> None:
    sizes = ["--num-prompts", "3", "--num-iters", "1", "--input-len", "5", "--output-len", "4"]
    printed = penstock("bench", kind, *sizes, "--load-format", "dummy", "--json")
    assert printed.returncode == 0, printed.stderr
    figures = json.loads(printed.stdout)
    assert figures["decode_tokens_per_s" if kind == "latency" else "output_tokens_per_s"] > 0


def test_version_tells_commit_and_kernels_without_torch() -> None:
    code = "import atexit, sys; from penstock.cli.main import main; "
    code += "atexit.register(lambda: print('torch' in sys.modules)); main(['--version'])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    found = re.fullmatch(r"(\S+) \((?:commit (\S+), )?kernels (\w+)\)\nFalse\n", said)
    assert found and found[1] == __version__
    assert found[3] == json.loads(penstock("doctor", "--json").stdout).get("isa", "reference").partition(" ")[0]


@pytest.mark.row("vllm", "npu-smi info")
def test_doctor_tells_the_kernels() -> None:
    found = json.loads(penstock("doctor", "--json").stdout)
    cores = len(os.sched_getaffinity(0))
    placed = found["2 ranks"].removesuffix(" (cpu_binding auto)")
    assert placed.count("|") == 1 if cores > 1 else placed == "not bound"
    assert found["numa nodes"].startswith("0: ")
    asked = {"PENSTOCK_CPU_BINDING": "0-2,5|7", "PENSTOCK_PIPELINE_PARALLEL_SIZE": "2"}
    assert json.loads(penstock("doctor", "--json", **asked).stdout)["2 ranks"].startswith("0-2,5|7 ")
    assert found["fingerprint"].startswith(found["kernels"])
    assert found["isa"].split()[0] in found["built"].split(", ")
    assert "portable" in found["machine"].split(", ")
    assert re.fullmatch(r"\S+/penstock: \d+ files, \d+\.\d of at most \d+\.\d GiB", found["weights"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--model", "/nowhere", "?"], "/nowhere"),
        (["bench", "latency", "--max-model-len", "100000"], "context of 2048"),
        (["serv"], "penstock: there is no command serv; did you mean serve?"),
        (["generate", "--model", "/nowhere", " "], "prompt: is empty"),  # before anything is loaded
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], words: str) -> None:
    said = penstock(*arguments)
    assert said.returncode == 2
    assert words in said.stderr.splitlines()[-1]
    assert "Traceback" not in said.stderr


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
"""Files, of which the model is named (or their folder, or the one above), and what is said."""


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_checkpoint_says_what_it_is(name: str, tmp_path: Path) -> None:
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


def test_serve_says_it_too(tmp_path: Path) -> None:
    """And who may ask, where that is anybody."""
    said = penstock("serve", "--compat", "fastdeploy", "--log-file", str(tmp_path / "log"), "--model", "model.gguf")
    assert said.returncode == 2 and "model.gguf does not exist: give the folder" in said.stderr
    assert (
        "anyone with network access to 0.0.0.0 on this machine can send requests: set --api-key or --host 127.0.0.1"
        in said.stderr
    )
    assert "anybody" not in penstock("serve", "model.gguf").stderr


def test_the_weight_cache_s_folder_is_told() -> None:
    folder = os.environ["XDG_CACHE_HOME"] + "/penstock"
    assert f"default:{folder})" in re.sub(r"\s+", "", penstock("serve", "--help").stdout)
    assert re.search(rf"weight_cache_dir +{folder} +default", penstock("config").stdout)


def test_help_loads_no_torch_and_names_units() -> None:
    code = "import sys\nfrom penstock.cli.main import main\ntry:\n main(['generate', '--help'])\nexcept SystemExit:\n"
    code += " sys.exit('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "--max-num-batched-tokens TOKENS" in said.stdout


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("penstock.serve.process.api_server", "torch numpy"),
        ("penstock.serve.process.supervisor", "torch starlette uvicorn"),
        ("penstock.cli.main", "torch starlette huggingface_hub asyncio"),
        ("penstock.engine.executor.node_process", "torch starlette uvicorn"),
        ("penstock.engine.service.server", "starlette uvicorn prometheus_client huggingface_hub tokenizers"),
        ("penstock.engine.engine", "starlette uvicorn prometheus_client tokenizers"),
    ],
)
def test_a_process_loads_only_what_it_needs(module: str, absent: str) -> None:
    code = f"import sys, {module}\nsys.exit(' '.join(sys.modules.keys() & set('{absent}'.split())))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.stderr.strip() == ""


@pytest.mark.parametrize("command", ["completion fish", "config", "doctor --json"])
def test_who_reads_the_output_may_leave(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *command.split()], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert ran.returncode == 128 + signal.SIGPIPE and "Traceback" not in ran.stderr and "BrokenPipe" not in ran.stderr
