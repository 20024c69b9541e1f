"""python run_llama_cpp.py SOURCE MODEL.gguf THREADS"""

import json
import subprocess
import sys
from pathlib import Path

from timing import answer


def main() -> None:
    source, model, threads = sys.argv[1:]

    def seconds(prompts: int, read: int, generated: int) -> float:
        sizes = ["-npp", str(read), "-ntg", str(generated), "-npl", str(prompts)]
        fixed = ["-m", model, "-t", threads, "-tb", threads, "-c", "16384", "-b", "2048", "-ub", "512"]
        program = str(Path(source) / "build/bin/llama-batched-bench")
        command = [program, *fixed, *sizes, "--output-format", "jsonl"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (told,) = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
        return float(told["t"])

    answer(seconds)


if __name__ == "__main__":
    main()
