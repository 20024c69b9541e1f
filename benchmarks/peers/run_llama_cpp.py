"""Runner of llama.cpp: python run_llama_cpp.py SOURCE MODEL.gguf THREADS"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import answer
from windows import SIZE


def main() -> None:
    source, model, threads = sys.argv[1:]
    programs, model = Path(source).resolve() / "build/bin", str(Path(model).resolve())
    os.chdir(tempfile.mkdtemp())  # ik_llama.cpp writes llama.log

    def seconds(prompts: int, read: int, generated: int) -> float:
        sizes = ["-npp", str(read), "-ntg", str(generated), "-npl", str(prompts)]
        fixed = ["-m", model, "-t", threads, "-tb", threads, "-c", "16384", "-b", "2048", "-ub", "512"]
        command = [str(programs / "llama-batched-bench"), *fixed, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows = re.findall(r"^\| *\d.*\|$", done.stdout + done.stderr, re.MULTILINE)
        assert len(rows) == 1, f"llama-batched-bench printed {len(rows)} table rows instead of one"
        return float(rows[0].split("|")[9])  # column "T s": total time of prompts and generation

    def perplexity(text: str, count: int) -> float:
        fixed = ["-m", model, "-t", threads, "-f", text, "-c", str(SIZE), "-b", str(SIZE), "--chunks", str(count)]
        done = subprocess.run([str(programs / "llama-perplexity"), *fixed], capture_output=True, text=True, check=True)
        found = re.search(r"Final estimate: PPL.* = ([\d.]+)", done.stdout + done.stderr)
        assert found, "llama-perplexity printed no final estimate"
        return float(found[1])

    answer(seconds, perplexity)


if __name__ == "__main__":
    main()
