"""Systems that the benchmarks compare. Each is a process with a protocol of one JSON request and response per line."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

Work = tuple[int, int, int]
"""Number of prompts, tokens per prompt, and tokens to generate per prompt."""
WORKS: dict[Work, str] = {
    (1, 512, 1): "prefill 512",
    (1, 2048, 1): "prefill 2,048",
    (1, 16, 64): "decode, 1",
    (8, 16, 64): "decode, 8",
    (32, 16, 64): "decode, 32",
    (16, 512, 64): "16 × (512 → 64)",
}
NAMES = dict(zip(["prefill-512", "prefill-2048", "decode-1", "decode-8", "decode-32", "mixed"], WORKS, strict=True))


@dataclass(frozen=True)
class System:
    """Command that starts a system with a model in one format."""

    name: str
    format: str
    """Weight format: ``bf16``, ``int8`` or ``int4``, or the name of a quantization."""
    command: list[str]
    environment: dict[str, str]
    """Additional environment variables."""


class Running:
    """Running system. It handles one request at a time, and is idle between requests."""

    def __init__(self, system: System, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._system = system
        self._process = process
        self._errors = errors

    def seconds(self, work: Work) -> float:
        """Duration of a work in seconds."""
        return float(self._call("seconds", list(work)))

    def perplexity(self, text: Path, windows: int) -> float:
        """Perplexity of the first windows of a text (see ``windows.py``)."""
        return float(self._call("perplexity", [str(text), windows]))

    def wait_ready(self) -> None:
        self._receive("ready")

    def _call(self, method: str, arguments: list[Any]) -> Any:
        print(json.dumps({method: arguments}), file=self._process.stdin)
        return self._receive(method)

    def _receive(self, method: str) -> Any:
        for line in self._process.stdout or ():
            if line.startswith(f'{{"{method}"'):
                return json.loads(line)[method]
        self._errors.seek(0)
        sys.exit(f"{self._system.name} {self._system.format} failed:\n{self._errors.read()[-2000:]}")


@contextmanager
def running(system: System) -> Iterator[Running]:
    """Context with a system that is started and ready; stops the system at the end."""
    with TemporaryFile("w+") as errors:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            system.command,
            env=os.environ | system.environment,
            text=True,
            bufsize=1,
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
        )
        assert process.stdin
        result = Running(system, process, errors)
        result.wait_ready()
        try:
            yield result
        finally:
            process.stdin.close()
            process.wait()


def rate(work: Work, taken: list[float]) -> float:
    """Tokens per second, median over the rounds. Counts prompt tokens if one token is generated, generated tokens if
    prompts are shorter than outputs, otherwise both kinds."""
    prompts, read, generated = work
    tokens = prompts * (read if generated == 1 else generated if read < generated else read + generated)
    return statistics.median(tokens / seconds for seconds in taken)


def turns_of(work: Work) -> int:
    """Runs per round: three for short works, to reduce the effect of short disturbances."""
    prompts, read, generated = work
    return 3 if prompts * (read + generated) < 1000 else 1


def convert(target: Path, make: Callable[[], object]) -> None:
    """Create a converted checkpoint unless it exists."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        print(f"creating {target}", file=sys.stderr)
        make()


def export_openvino(python: Path, checkpoint: Path, weights: list[str], folder: Path) -> None:
    """Export a checkpoint for OpenVINO.

    Args:
        python: interpreter of an environment with ``optimum-intel``.
        weights: arguments after ``--weight-format``.
    """
    program = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(checkpoint)]
    task = ["--task", "text-generation-with-past", "--weight-format", *weights]
    subprocess.run([*program, *task, str(folder)], check=True, capture_output=True)


def convert_llama_cpp(source: Path, checkpoint: Path, file: Path) -> None:
    """Write a checkpoint as a GGUF file in bfloat16."""
    script = [sys.executable, str(source / "convert_hf_to_gguf.py"), str(checkpoint)]
    environment = os.environ | {"PYTHONPATH": str(source / "gguf-py")}
    outfile = ["--outtype", "bf16", "--outfile", str(file)]
    subprocess.run([*script, *outfile], check=True, env=environment, capture_output=True)


def quantize_llama_cpp(source: Path, whole: Path, file: Path, type: str) -> None:
    """Quantize a GGUF file to a type of ``llama-quantize``."""
    command = [str(source / "build/bin/llama-quantize"), str(whole), str(file), type]
    subprocess.run(command, check=True, capture_output=True)


def machine() -> str:
    """Number of cores and model of the processor."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{len(names)} cores of {names[0] if names else platform.machine()}"
