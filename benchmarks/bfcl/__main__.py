"""Berkeley Function Calling Leaderboard: share of well-formed tool calls, and scores, with and without constrained
calls.

python benchmarks/bfcl                # all 1,390 questions of the categories that are not live
python benchmarks/bfcl --sample 50    # 50 of each category

Installs ``bfcl-eval`` from PyPI in a separate environment (build/bfcl/environment; Python 3.10 to 3.12, 570 MB), with
its data, its handler of Chat Completions in function-calling mode, and its checkers. Each server is started with the
built-in model; decoding is greedy. Questions whose prompt leaves fewer than 512 tokens of the context are left out and
counted.

A call is well-formed if it is parsed, names a tool of the question, and has arguments that are valid against the
tool's schema. Calls that the context limit ends (``finish_reason`` ``length``) are counted separately. BFCL's checker
counts both as no call, which is the right answer in the category irrelevance; the last column leaves out such points.

The exit status is 1 if the last server's answers contain an error or a malformed call, or if another server than the
first has a lower score (of the last column), or changes an answer without a call, or without tools.

Answers are kept in build/bfcl/servers, one folder per server: an interrupted run resumes. They are discarded when the
server's command, the sources or the temperature change. Each answer is in answers.json of the server's folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from judging import Run, comparison, faults, judge, regressions, table
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests/support"))

from repository import ROOT
from serving import SERVE, Served

BUILD = ROOT / "build/bfcl"
DRIVER = Path(__file__).with_name("driver.py")
"""Program in the environment of ``bfcl-eval``."""
BFCL = "bfcl-eval==2026.3.23"
UNUSED = ("sentence-transformers", "faiss-cpu")
"""Requirements of ``bfcl-eval`` for other categories, with gigabytes of dependencies."""
UNDECLARED = ("soundfile",)
"""Packages that ``bfcl-eval`` imports and does not require."""
CATEGORIES = ("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple")
CATEGORIES += ("irrelevance",)
SERVERS = {"unconstrained": [*SERVE, "--tool-strictness", "off"], "constrained": [*SERVE]}
"""Default servers: command by name."""
ROOM = 512
"""Tokens of the context that a prompt must leave for the answer."""
PLAIN_TOKENS = 128
"""Maximum number of tokens of an answer without tools."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--category", nargs="+", choices=CATEGORIES, default=CATEGORIES, help="default: all")
    parser.add_argument("--sample", type=int, metavar="N", help="questions per category (default: all)")
    parser.add_argument("--plain", type=int, default=50, metavar="N", help="questions without tools (default: 50)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="of questions with tools; servers are compared at 0 (default: 0)"
    )
    parser.add_argument("--threads", type=int, default=16, help="concurrent requests (default: 16)")
    parser.add_argument(
        "--server",
        action="append",
        metavar="NAME=COMMAND",
        help="server to measure, as a command that accepts --host and --port; repeatable (default: this version with "
        "--tool-strictness off, and without options)",
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment (default: this one)")
    parser.add_argument("--fresh", action="store_true", help="discard earlier answers")
    args = parser.parse_args()
    servers = SERVERS
    if args.server:
        pairs = [entry.partition("=") for entry in args.server]
        servers = {name: shlex.split(command) for name, _, command in pairs}
        if not all(servers.values()):
            parser.error("--server must have the form NAME=COMMAND")
    python = environment(args.python)
    asked = select(json.loads(drive(python, BUILD, "questions")), args.category, args.sample)
    runs = [measure(name, command, python, asked, args) for name, command in servers.items()]
    for run in runs:
        print(f"\n{run.name}: outcomes of {len(run.answers)} questions\n\n{table(run)}")
    problems = [*faults(runs[-1])]
    if args.temperature == 0:
        for run in runs[1:]:
            print(f"\n{run.name} compared with {runs[0].name}\n\n{comparison(runs[0], run)}")
            problems += regressions(runs[0], run)
    print("", *problems, sep="\n")
    return 1 if problems else 0


def environment(interpreter: str) -> Path:
    """Return the ``python`` of the environment with ``BFCL``; create it if missing."""
    folder, complete = BUILD / "environment", BUILD / "environment/complete"
    if not complete.exists() or complete.read_text() != BFCL:
        print("installing", BFCL, file=sys.stderr)
        subprocess.run([interpreter, "-m", "venv", "--clear", folder], check=True)
        install = [folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check"]
        execute(*install, "--no-deps", BFCL)
        (installed,) = importlib.metadata.distributions(
            name="bfcl-eval", path=[str(path) for path in folder.glob("lib/python*/site-packages")]
        )
        needed = [line for line in installed.requires or () if "extra ==" not in line and not line.startswith(UNUSED)]
        execute(*install, *needed, *UNDECLARED)
        complete.write_text(BFCL)
    return folder / "bin/python"


def drive(python: Path, folder: Path, *arguments: str) -> str:
    """Run the driver with ``folder`` for its files, and return its standard output."""
    return execute(python, DRIVER, *arguments, variables=variables(folder))


def variables(folder: Path, url: str = "http://localhost/v1") -> dict[str, str]:
    """Environment of the driver: folder of its files, and URL of the server."""
    return os.environ | {"BFCL_PROJECT_ROOT": str(folder), "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": url}


def execute(*command: str | Path, variables: dict[str, str] | None = None) -> str:
    """Run a program and return its standard output; its error output is printed only if it fails."""
    ran = subprocess.run(command, env=variables, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{shlex.join(map(str, command))}:\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def select(questions: list[dict[str, Any]], categories: Sequence[str], sample: int | None) -> list[dict[str, Any]]:
    """Questions of the categories, at most ``sample`` of each."""
    groups = [[question for question in questions if question["category"] == category] for category in categories]
    return [question for group in groups for question in evenly(group, sample or len(group))]


def evenly(questions: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """At most ``count`` questions at equal distances."""
    count = min(count, len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


def measure(name: str, command: list[str], python: Path, asked: list[dict[str, Any]], args: argparse.Namespace) -> Run:
    """Start a server, ask it the questions that have no answer from an earlier run, and evaluate all answers."""
    folder = BUILD / "servers" / name
    state = json.dumps([command, BFCL, sources(), args.temperature])
    if args.fresh or not (folder / "state.json").exists() or (folder / "state.json").read_text() != state:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(state)
    with Served(command=command) as served, httpx.Client(base_url=served.root, timeout=600) as client:
        fitting = [question for question in tqdm(asked, f"{name}: prompt lengths") if fits(client, question)]
        ids = {category: [q["id"] for q in fitting if q["category"] == category] for category in args.category}
        (folder / "test_case_ids_to_generate.json").write_text(json.dumps(ids))
        discard_errors(folder)
        program = [python, DRIVER, "answer", str(args.threads), str(args.temperature)]  # with BFCL's progress bar
        subprocess.run(program, env=variables(folder, served.url), stdout=subprocess.DEVNULL, check=True)
        results = {entry["id"]: entry for path in folder.glob("result/**/*.json") for entry in lines(path)}
        texts = {
            question["id"]: generated_text(client, results[question["id"]])
            for question in tqdm(fitting, f"{name}: texts")
        }
        plain = {
            question["id"]: answer_without_tools(client, question)
            for question in tqdm(evenly(fitting, args.plain), f"{name}: answers without tools")
        }
    drive(python, folder, "evaluate", *args.category)
    scores = [line for path in folder.glob("score/**/*_score.json") for line in lines(path)]
    wrong = {line["id"] for line in scores if "id" in line}
    left_out = {question["id"] for question in asked} - texts.keys()
    run = Run(
        name=name,
        answers=[judge(q, results[q["id"]], texts[q["id"]], q["id"] not in wrong) for q in fitting],
        too_long=Counter(question["category"] for question in asked if question["id"] in left_out),
        plain=plain,
    )
    (folder / "answers.json").write_text(json.dumps(asdict(run), ensure_ascii=False, indent=1))
    return run


def sources() -> str:
    """Hash of the sources that answers depend on."""
    files = [path for folder in ("src", "csrc") for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    total = hashlib.sha256()
    for path in files:
        if path.suffix != ".pyc":
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def fits(client: httpx.Client, question: dict[str, Any]) -> bool:
    """Return True if the prompt leaves ``ROOM`` tokens of the context for the answer."""
    answer = post(client, "/tokenize", messages=question["messages"], tools=question["tools"])
    return bool(answer["count"] + ROOM <= answer["max_model_len"])


def generated_text(client: httpx.Client, result: dict[str, Any]) -> str:
    """Text of a result's token ids, with the markers of calls; empty after an error."""
    if "choice" not in result:
        return ""
    return str(post(client, "/detokenize", tokens=result["choice"]["token_ids"])["prompt"])


def answer_without_tools(client: httpx.Client, question: dict[str, Any]) -> str:
    """Greedy answer to a question without its tools."""
    options = {"temperature": 0, "max_tokens": PLAIN_TOKENS}
    answer = post(client, "/v1/chat/completions", messages=question["messages"], **options)
    return str(answer["choices"][0]["message"]["content"])


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json={"model": "default"} | body)
    if response.is_error:
        sys.exit(f"{path}: {response.text}")
    return dict(response.json())


def discard_errors(folder: Path) -> None:
    """Remove results that are errors, which BFCL would keep."""
    for path in folder.glob("result/**/*.json"):
        path.write_text("".join(json.dumps(entry) + "\n" for entry in lines(path) if "choice" in entry))


def lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
