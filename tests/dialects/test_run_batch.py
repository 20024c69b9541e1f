"""``penstock run-batch``: results equal to ``LLM``, errors of single lines, and continuation of interrupted runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTIONS = ["What is the capital of Canada?", "加拿大的首都是哪里?", "Tell me a story."]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 30}


def command(folder: Path, *arguments: str) -> list[str]:
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    return [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "run-batch",
        *files,
        "--num-gpu-blocks-override",
        "200",
        *arguments,
    ]


def run_batch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *arguments), capture_output=True, text=True)


def request(custom_id: str, body: dict[str, Any], url: str = CHAT) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, content: str, **fields: Any) -> dict[str, Any]:
    return request(custom_id, {"messages": [{"role": "user", "content": content}], **fields})


def write(folder: Path, lines: list[dict[str, Any] | str]) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    (folder / "in.jsonl").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]


def summary(ran: subprocess.CompletedProcess[str]) -> str:
    return ran.stderr.splitlines()[-1]


def test_results_equal_llm(tmp_path: Path) -> None:
    lines = [chat(str(i), question, **GREEDY) for i, question in enumerate(QUESTIONS)]
    several = request("both", {"prompt": ["Once upon a time", "The"], "model": "mine", **GREEDY}, COMPLETIONS)
    vectors = request("vectors", {"input": QUESTIONS, "encoding_format": "float"}, "/v1/embeddings")
    write(tmp_path, [*lines, "", several, vectors])
    ran = run_batch(tmp_path, "--served-model-name", "mine", "--max-concurrency", "2")
    assert ran.returncode == 0, ran.stderr
    assert "5 answered, 0 failed, 0 skipped" in summary(ran)
    answers = {result["custom_id"]: result["response"]["body"] for result in results(tmp_path)}
    llm, params = LLM(num_gpu_blocks_override=200), SamplingParams(**GREEDY)
    chats = llm.chat([[{"role": "user", "content": q}] for q in QUESTIONS], params, use_tqdm=False)
    for i, output in enumerate(chats):
        (choice,) = answers[str(i)]["choices"]
        assert choice["message"]["content"] == output.outputs[0].text
        assert choice["finish_reason"] == output.outputs[0].finish_reason
        assert answers[str(i)]["usage"]["completion_tokens"] == len(output.outputs[0].token_ids)
    texts = [output.outputs[0].text for output in llm.generate(["Once upon a time", "The"], params, use_tqdm=False)]
    assert [choice["text"] for choice in answers["both"]["choices"]] == texts
    assert answers["both"]["model"] == "mine"
    embedded = [output.outputs.embedding for output in llm.embed(QUESTIONS, use_tqdm=False)]
    assert [entry["embedding"] for entry in answers["vectors"]["data"]] == embedded


def test_failed_lines_are_explained_and_not_retried(tmp_path: Path) -> None:
    bad = {
        "stream": (chat("stream", "Hi", stream=True), 400, "stream"),
        "type": (chat("type", "Hi", temperature="hot"), 400, "temperature"),
        "model": (chat("model", "Hi", model="other"), 404, "model"),
        "url": (request("url", {"input": "Hi"}, "/v1/responses"), 404, "url"),
        "long": (request("long", {"prompt": "word " * 4000}, COMPLETIONS), 400, "prompt"),
        "body": ({**chat("body", "Hi"), "body": 5}, 400, "body"),
    }
    unreadable = ['{"custom_id": "torn", "meth', json.dumps(chat("good", "Again")), json.dumps({"custom_id": "empty"})]
    good = chat("good", QUESTIONS[0], **GREEDY)
    write(tmp_path, [good, *(line for line, _, _ in bad.values()), *unreadable])
    ran = run_batch(tmp_path)
    assert ran.returncode == 1
    assert "1 answered, 9 failed, 0 skipped" in summary(ran)
    found = results(tmp_path)
    responses = {result["custom_id"]: result["response"] for result in found if result["response"]}
    for custom_id, (_, status, param) in bad.items():
        response = responses[custom_id]
        assert (response["status_code"], response["body"]["error"]["param"]) == (status, param)
        assert param in response["body"]["error"]["message"]
    assert responses["good"]["status_code"] == 200
    errors = {result["error"]["line"]: result["error"]["code"] for result in found if result["error"]}
    assert errors == {8: "invalid_line", 9: "duplicate_custom_id", 10: "invalid_line"}
    assert all(result["custom_id"] is None for result in found if result["error"])

    write(tmp_path, [good, *(line for line, _, _ in bad.values()), chat("mended", QUESTIONS[0]), *unreadable[1:]])
    ran = run_batch(tmp_path)
    assert ran.returncode == 1
    assert "1 answered, 0 failed, 9 skipped (8 of them failed earlier)" in summary(ran)
    assert results(tmp_path)[:-1] == found
    assert results(tmp_path)[-1]["custom_id"] == "mended"


def test_killed_run_is_continued(tmp_path: Path) -> None:
    long = {"max_tokens": 60, "ignore_eos": True}  # long enough to be running when the process is killed
    write(tmp_path, [chat(f"question {i}", "Tell me a story.", seed=i, **long) for i in range(30)])
    process = subprocess.Popen(command(tmp_path, "--max-concurrency", "4"), stderr=subprocess.DEVNULL)
    wait_for(lambda: len(lines_of(tmp_path)) >= 5, process)
    process.send_signal(signal.SIGSTOP)
    refused = run_batch(tmp_path)
    assert refused.returncode == 2
    assert "is being written by another run" in refused.stderr
    process.kill()
    process.wait()
    before = [line for line in lines_of(tmp_path) if line.endswith(b"\n")]
    assert 5 <= len(before) < 30
    with (tmp_path / "out.jsonl").open("wb") as file:
        file.write(b"".join(before) + before[0][:100])  # a partial last line, as left by a power failure

    ran = run_batch(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert f"{30 - len(before)} answered, 0 failed, {len(before)} skipped" in summary(ran)
    assert lines_of(tmp_path)[: len(before)] == before
    assert sorted(result["custom_id"] for result in results(tmp_path)) == sorted(f"question {i}" for i in range(30))

    again = run_batch(tmp_path)
    assert again.returncode == 0
    assert "all 30 lines already have a result" in again.stderr


def test_engine_crash_or_full_queue_loses_no_result(tmp_path: Path) -> None:
    """More sequences are submitted than may run or wait, and the engine is killed while it computes them."""
    write(tmp_path, [chat(str(i), "Tell me a story.", n=4, max_tokens=30, ignore_eos=True, seed=i) for i in range(14)])
    narrow = ("--max-num-seqs", "4", "--max-waiting", "1", "--max-concurrency", "12")
    process = subprocess.Popen(command(tmp_path, *narrow), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(lines_of(tmp_path)) >= 1, process)
    for pid in children(process.pid):
        os.kill(pid, signal.SIGKILL)
    _, log = process.communicate()
    assert process.returncode == 0, log
    assert "killed by SIGKILL" in log
    assert {result["custom_id"] for result in results(tmp_path)} == set(map(str, range(14)))
    assert all(len(result["response"]["body"]["choices"]) == 4 for result in results(tmp_path))


def test_ctrl_c_leaves_resumable_results(tmp_path: Path) -> None:
    write(tmp_path, [chat(str(i), "Tell me a story.", seed=i) for i in range(60)])
    process = subprocess.Popen(
        command(tmp_path, "--max-concurrency", "2"), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: len(lines_of(tmp_path)) >= 1, process)
    os.killpg(process.pid, signal.SIGINT)
    _, log = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "left: run the same command to continue" in log
    assert "Traceback" not in log
    assert results(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("notes of mine\n", "line 1"), ("notes", "not a file of batch results"), (json.dumps({"a": 1}), "not a file")],
)
def test_foreign_output_file_is_not_overwritten(tmp_path: Path, content: str, message: str) -> None:
    write(tmp_path, [chat("a", "Hi")])
    (tmp_path / "out.jsonl").write_text(content)
    ran = run_batch(tmp_path)
    assert ran.returncode == 2
    assert message in ran.stderr
    assert (tmp_path / "out.jsonl").read_text() == content


def lines_of(folder: Path) -> list[bytes]:
    path = folder / "out.jsonl"
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def children(pid: int) -> Iterator[int]:
    yield from map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[Any], limit: float = 60.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert process.poll() is None, "the process ended before the condition held"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_line_with_temporary_error_is_retried(tmp_path: Path) -> None:
    """The last result of a line replaces the earlier ones."""
    write(tmp_path, [chat("again", QUESTIONS[0], **GREEDY)])
    late = {"status_code": 503, "request_id": "1", "body": {"error": {"message": "stopping"}}}
    earlier = {"id": "batch_req_1", "custom_id": "again", "response": late, "error": None}
    (tmp_path / "out.jsonl").write_text(json.dumps(earlier, separators=(",", ":")) + "\n")
    ran = run_batch(tmp_path)
    assert ran.returncode == 0 and "1 answered, 0 failed, 0 skipped" in ran.stderr
    assert [result["response"]["status_code"] for result in results(tmp_path)] == [503, 200]
