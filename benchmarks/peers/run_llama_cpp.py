"""python run_llama_cpp.py SOURCE MODEL.gguf THREADS WORKS"""

import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    source, model, threads, works = sys.argv[1:]
    for prompts, read, generated in json.loads(works):
        sizes = ["-npp", str(read), "-ntg", str(generated), "-npl", str(prompts)]
        fixed = ["-m", model, "-t", threads, "-tb", threads, "-c", "16384", "-b", "2048", "-ub", "512"]
        program = str(Path(source) / "build/bin/llama-batched-bench")
        command = [program, *fixed, *sizes, "--output-format", "jsonl"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (told,) = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
        print(json.dumps({"work": [prompts, read, generated], "seconds": told["t"]}), flush=True)


if __name__ == "__main__":
    main()
