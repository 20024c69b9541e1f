"""``penstock bench serve``: what is sent when, what is made of the answers, and our own server under it."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import sys
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer as Peer

from penstock.cli.bench import prompts, report, workload
from penstock.cli.bench.client import Client
from penstock.cli.bench.sample import Outcome, Sample
from penstock.cli.bench.sse import EventReader, error_message
from penstock.cli.bench.startup import Server
from penstock.cli.bench.workload import Request
from penstock.core import PenstockError

MOONCAKE = """\
{"timestamp": 2000, "input_length": 1300, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 2000, "input_length": 1200, "output_length": 900, "hash_ids": [7, 8, 10]}
{"timestamp": 5000, "input_length": 600, "output_length": 1, "hash_ids": [11, 12]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,396,109
"""


# What is sent when


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0, math.inf])
def test_arrivals_keep_their_rate_and_spread(burstiness: float) -> None:
    times = workload.arrivals(5000, 20.0, burstiness, seed=3)
    assert times[-1] == pytest.approx(5000 / 20)
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1, abs=1e-6)  # a gamma distribution's


def test_arrivals_follow_the_seed() -> None:
    assert workload.arrivals(50, 2.0, 1.0, seed=1) == workload.arrivals(50, 2.0, 1.0, seed=1)
    assert workload.arrivals(50, 2.0, 1.0, seed=1) != workload.arrivals(50, 2.0, 1.0, seed=2)
    assert workload.arrivals(3, math.inf, 1.0, seed=1) == [0.0, 0.0, 0.0]


def test_random_prompts_have_their_lengths_and_share_the_prefix_alone() -> None:
    first, second = workload.random_requests(2, 40, 7, prefix_len=25)
    assert (first.input_len, first.output_len) == (65, 7)
    one, other = (prompts.token_ids(request.parts, seed=0, vocab_size=3000) for request in (first, second))
    assert one[:25] == other[:25]
    assert one[25:] != other[25:]


def test_random_lengths_fill_their_range() -> None:
    requests = workload.random_requests(500, 100, 10, range_ratio=0.3, seed=1)
    assert {request.output_len for request in requests} == set(range(7, 14))
    assert min(r.input_len for r in requests) in (70, 71)
    assert requests == workload.random_requests(500, 100, 10, range_ratio=0.3, seed=1)


def test_mooncake_ids_become_equal_text(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)
    requests = workload.read_trace(file, 10, speedup=2.0)
    assert [(r.at, r.input_len, r.output_len) for r in requests] == [(0.0, 1300, 5), (0.0, 1200, 900), (1.5, 600, 1)]
    one, other, third = (prompts.token_ids(r.parts, seed=5, vocab_size=3000) for r in requests)
    assert list(map(len, (one, other, third))) == [1300, 1200, 600]
    assert one[:1024] == other[:1024]
    assert one[1024:1200] != other[1024:]
    assert one[:512] != third[:512]
    said, more = (prompts.text(r.parts, seed=5).split() for r in requests[:2])
    assert (len(said), len(more)) == (1300, 1200)
    assert said[:1024] == more[:1024]


def test_a_trace_is_clipped_without_losing_what_it_shares(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)
    one, other = workload.read_trace(file, 2, max_input_len=700, max_output_len=64)
    assert one.parts == other.parts == ((7, 512), (8, 188))
    assert (one.output_len, other.output_len) == (5, 64)
    whole = workload.read_trace(file, 1)[0]
    assert prompts.token_ids(one.parts, 0, 3000) == prompts.token_ids(whole.parts, 0, 3000)[:700]


def test_azure_rows_share_nothing(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)
    first, second = workload.read_trace(file, 10)
    assert (first.at, first.input_len, first.output_len) == (0.0, 374, 44)
    assert (second.at, second.input_len, second.output_len) == (pytest.approx(4.25), 396, 109)
    assert prompts.token_ids(first.parts, 0, 3000)[:100] != prompts.token_ids(second.parts, 0, 3000)[:100]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "TIMESTAMP,ContextTokens\nyesterday,1\n"])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "notes.txt").write_text(text)
    with pytest.raises(PenstockError, match=r"notes\.txt"):
        workload.read_trace(file, 10)


def test_prompts_stay_in_the_vocabulary_and_follow_the_seed() -> None:
    drawn = prompts.token_ids([(1, 20000)], seed=0, vocab_size=2500)
    assert (min(drawn), max(drawn)) == (1000, 2499)
    small = prompts.token_ids([(1, 5000)], seed=0, vocab_size=64)
    assert (min(small), max(small)) == (32, 63)
    assert drawn != prompts.token_ids([(1, 5000)], seed=1, vocab_size=2500)


# What is made of the answers


def sample(sent: float, chunks: list[float], output_tokens: int, **more: object) -> Sample:
    seen = Sample(10, sent, sent, array("d", chunks), chunks[-1], output_tokens, 0, True, Outcome.OK)
    for name, value in more.items():
        setattr(seen, name, value)
    return seen


SAMPLES = [
    sample(0.0, [0.1, 0.2, 0.4], 3),
    sample(0.3, [0.5, 1.3], 5, due=0.25, cached_tokens=8),  # two tokens a chunk and more
    sample(1.5, [1.8], 1),
    Sample(10, due=1.6, sent=1.6, last=1.61, outcome=Outcome.REFUSED, reason="429 full"),
    Sample(10, due=1.7, sent=1.7, last=2.0, reason="500 broken"),
]


def test_figures_are_those_of_hand() -> None:
    found = report.compute_results(SAMPLES, [50, 99], ["ttft", "tpot", "itl", "e2el"], {})
    assert (found["completed"], found["refused"], found["failed"]) == (3, 1, 1)
    assert found["errors"] == {"429 full": 1, "500 broken": 1}
    assert (found["total_input_tokens"], found["total_cached_tokens"], found["total_output_tokens"]) == (30, 8, 9)
    assert found["duration"] == pytest.approx(2.0)
    assert found["request_throughput"] == pytest.approx(1.5)
    assert found["output_throughput"] == pytest.approx(4.5)
    assert found["total_token_throughput"] == pytest.approx(19.5)
    assert found["max_output_tokens_per_s"] == pytest.approx(3 + 2.5)  # of the second request, half in each second
    assert found["max_concurrent_requests"] == 2
    assert found["p99_send_lag_ms"] == pytest.approx(48.0)  # 0, 0, 0, 0, 50: four hundredths below the greatest
    assert (found["mean_ttft_ms"], found["median_ttft_ms"]) == (pytest.approx(200.0), pytest.approx(200.0))
    assert found["p99_ttft_ms"] == pytest.approx(298.0)  # 100, 200, 300
    assert found["mean_tpot_ms"] == pytest.approx((150 + 200) / 2)  # 0.3 s for two tokens, 0.8 s for four
    assert found["mean_itl_ms"] == pytest.approx((100 + 200 + 800) / 3)
    assert found["p50_e2el_ms"] == pytest.approx(400.0)  # 400, 1000, 300


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"ttft": 250}, 2),
        ({"tpot": 150.001}, 2),
        ({"ttft": 250, "e2el": 500}, 1),
        ({"e2el": 5000}, 3),
        ({"ttft": 1}, 0),
    ],
)
def test_goodput_counts_what_keeps_every_limit(limits: dict[str, float], kept: int) -> None:
    assert report.compute_results(SAMPLES, [], [], limits)["request_goodput"] == pytest.approx(kept / 2.0)


def test_the_table_tells_figures_and_doubts() -> None:
    found = report.compute_results(SAMPLES[2:], [99.9], ["ttft", "itl"], {"ttft": 250})
    said = report.table(found | {"model_id": "m", "client_cpu": 0.95}, [99.9], ["ttft", "itl"])
    assert "1 ok, 1 refused, 1 failed" in said
    assert re.search(r"^TTFT +300.00 +300.00 +300.00$", said, re.MULTILINE)
    assert re.search(r"^ITL +– +– +–$", said, re.MULTILINE)
    assert "p99.9" in said
    assert "the client was a bottleneck" in said


def test_events_are_whole_wherever_the_network_cuts() -> None:
    stream = b': hello\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream)):
        reader = EventReader()
        cut = [payload for i in range(0, len(stream), size) for payload in reader.feed(stream[i : i + size])]
        assert cut == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


@pytest.mark.parametrize(
    "body", [b'{"error": {"message": "no such"}}', b'{"message": "no such"}', b'{"detail": "no such"}', b" no\n such "]
)
def test_errors_of_every_shape_are_read(body: bytes) -> None:
    assert error_message(body) == "no such"


# A peer that answers as it is told


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(text: str = "", end: str | None = None, **more: object) -> bytes:
    payload = {"choices": [{"text": text, "finish_reason": end}]} | more
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def streaming(*parts: bytes, pause: float = 0.0) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await asyncio.sleep(pause)
            await response.write(part)
        return response

    return answer


def measured(answer: Answer, requests: list[Request], concurrency: int = 0) -> list[Sample]:
    """Samples of a load on a peer that answers so."""

    async def load() -> list[Sample]:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        async with Peer(app) as peer, client_of(str(peer.make_url("")).rstrip("/")) as client:
            return await client.send_all(requests, concurrency)

    return asyncio.run(load())


def client_of(url: str) -> Client:
    return Client(url, "/v1/completions", {"model": "m"}, {}, seed=0, vocab_size=3000)


ONE = Request(((1, 20),), 4)
USAGE = {"usage": {"prompt_tokens": 21, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 16}}}


def test_the_servers_own_count_is_taken() -> None:
    last = b"data: " + json.dumps({"choices": [], **USAGE}).encode() + b"\n\ndata: [DONE]\n\n"
    (seen,) = measured(streaming(event(), event("a"), event("b c"), event("", "length"), last, pause=0.02), [ONE])
    assert (seen.outcome, seen.input_tokens, seen.output_tokens, seen.cached_tokens) == (Outcome.OK, 21, 4, 16)
    assert len(seen.chunks) == 2  # the first chunk, with no text, was no token, and the last was none either
    assert 0.04 <= seen.ttft < seen.e2el
    assert seen.e2el >= 0.08
    assert seen.tpot == pytest.approx((seen.e2el - seen.ttft) / 3)


def test_without_a_count_chunks_are_tokens() -> None:
    (seen,) = measured(streaming(event("a"), event("b", "stop")), [ONE])
    assert (seen.outcome, seen.counted, seen.input_tokens, seen.output_tokens) == (Outcome.OK, False, 20, 2)


async def full(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "the queue is full"}}, status=429)


async def gone(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "outcome", "reason"),
    [
        (full, Outcome.REFUSED, "429 the queue is full"),
        (gone, Outcome.FAILED, "disconnected"),
        (streaming(event("a")), Outcome.FAILED, "without a finish reason"),
        (streaming(event("a"), b'data: {"error": {"message": "engine died"}}\n\n'), Outcome.FAILED, "engine died"),
        (streaming(b"data: {nonsense\n\n"), Outcome.FAILED, "malformed"),
    ],
)
def test_what_is_no_answer_has_a_reason(answer: Answer, outcome: Outcome, reason: str) -> None:
    (seen,) = measured(answer, [ONE])
    assert seen.outcome is outcome
    assert reason in seen.reason


def test_arrivals_do_not_wait_for_answers() -> None:
    """Nobody is answered here before all have asked."""
    requests = [Request(((i, 5),), 1, at=0.05 * i) for i in range(6)]
    all_here = asyncio.Barrier(len(requests))

    async def answer(request: web.Request) -> web.StreamResponse:
        await all_here.wait()
        return await streaming(event("a", "stop"))(request)

    seen = measured(answer, requests)
    assert [s.due for s in seen] == [r.at for r in requests]
    assert all(s.sent >= s.due for s in seen)
    assert report.running(seen)[1].max() == len(requests)


def test_concurrency_is_a_limit() -> None:
    requests = [Request(((i, 5),), 1) for i in range(7)]
    begun = time.perf_counter()
    seen = measured(streaming(event("a", "stop"), pause=0.05), requests, concurrency=2)
    assert time.perf_counter() - begun >= 4 * 0.05
    assert report.running(seen)[1].max() == 2


# The command


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_help_waits_for_no_library() -> None:
    code = "import sys\nfrom penstock.cli.main import main\ntry:\n main(['bench', 'serve', '--help'])\n"
    code += "except SystemExit:\n sys.exit(bool({'torch', 'aiohttp', 'matplotlib', 'numpy'} & sys.modules.keys()))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "--max-concurrency INT" in said.stdout


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--num-prompts", "0", "num_prompts: 0 is wrong: it must be at least 1"),
        ("--goodput", "itl:5", "goodput: itl is not one of ttft, tpot, e2el"),
        ("--goodput", "ttft:0", "goodput: 0 is wrong"),
        ("--metric-percentiles", "90,101", "metric_percentiles: 101 is wrong"),
        ("--header", "name", "header: 'name' must contain '='"),
        ("--extra-body", "[]", "extra_body: must be a JSON object"),
        ("--json", "/nowhere/file", "json: /nowhere/file cannot be written"),
        ("--picture", "load.gif", "picture: load.gif is not one of .png, .svg, .pdf"),
    ],
)
def test_wrong_option_is_refused_before_any_request(flag: str, value: str, message: str) -> None:
    said = bench(flag, value)
    assert said.returncode == 2
    assert said.stderr.startswith(f"penstock bench: {message}")
    assert said.stderr.count("\n") == 1


def test_nobody_there_is_one_sentence() -> None:
    said = bench("--base-url", "http://127.0.0.1:9", "--goodput", "ttft:500", "e2el:2000.5")
    assert said.returncode == 2
    assert said.stderr.startswith("penstock bench: http://127.0.0.1:9 does not respond")
    assert said.stderr.count("\n") == 1


def test_our_server_under_load(tmp_path: Path) -> None:
    picture, sizes = tmp_path / "load.png", ["--num-prompts", "8", "--max-concurrency", "4", "--ignore-eos"]
    with (tmp_path / "log").open("w+b") as log, Server([], log) as server:
        server.wait_for(200)
        where = ["--base-url", f"http://127.0.0.1:{server.port}/v1"]
        printed = bench(*where, *sizes, "--random-output-len", "50", "--json", "-", "--picture", str(picture))
        (tmp_path / "trace.jsonl").write_text(MOONCAKE)
        trace = ["--dataset-path", str(tmp_path / "trace.jsonl"), "--trace-speedup", "10", "--max-output-len", "4"]
        replayed = bench(*where, *trace, "--endpoint", "/v1/chat/completions")
        unknown = bench(*where, "--model", "nobody")
    assert printed.returncode == 0, printed.stderr
    figures = json.loads(printed.stdout)
    assert (figures["completed"], figures["failed"], figures["without_usage"]) == (8, 0, 0)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (8 * 128, 8 * 50)
    assert 0 < figures["median_ttft_ms"] < figures["median_e2el_ms"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert replayed.returncode == 0, replayed.stderr
    assert "3 ok" in replayed.stdout
    assert unknown.returncode == 2
    assert "nobody" in unknown.stderr
