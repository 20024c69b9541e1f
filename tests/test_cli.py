"""The commands as people type them, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def penstock(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True)


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


@pytest.mark.row("vllm", "npu-smi info")
def test_doctor_tells_the_kernels() -> None:
    found = json.loads(penstock("doctor", "--json").stdout)
    assert found["fingerprint"].startswith(found["kernels"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--model", "/nowhere", "?"], "/nowhere"),
        (["bench", "latency", "--max-model-len", "100000"], "context of 2048"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], words: str) -> None:
    said = penstock(*arguments)
    assert said.returncode == 2
    assert words in said.stderr.splitlines()[-1]
    assert "Traceback" not in said.stderr


def test_help_loads_no_torch_and_names_units() -> None:
    code = "import sys\nfrom penstock.cli.main import main\ntry:\n main(['generate', '--help'])\nexcept SystemExit:\n"
    code += " sys.exit('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "--max-num-batched-tokens TOKENS" in said.stdout


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("penstock.serve.api", "torch"),
        ("penstock.serve.supervisor", "torch fastapi uvicorn"),
        ("penstock.cli.main", "torch fastapi huggingface_hub asyncio"),
        ("penstock.engine.process", "fastapi starlette uvicorn prometheus_client huggingface_hub tokenizers"),
        ("penstock.engine.engine", "fastapi starlette uvicorn prometheus_client tokenizers"),
    ],
)
def test_a_process_loads_only_what_it_needs(module: str, absent: str) -> None:
    code = f"import sys, {module}\nsys.exit(' '.join(sys.modules.keys() & set('{absent}'.split())))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.stderr.strip() == ""
