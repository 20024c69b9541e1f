"""``penstock bench serve``: workloads, arrival times, computed results, the HTTP client, and a run with Penstock."""

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


# --- Workloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0, math.inf])
def test_arrivals_have_configured_rate_and_burstiness(burstiness: float) -> None:
    times = workload.arrivals(5000, 20.0, burstiness, seed=3)
    assert times[-1] == pytest.approx(5000 / 20)
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1, abs=1e-6)  # gamma distribution


def test_arrivals_depend_on_seed() -> None:
    assert workload.arrivals(50, 2.0, 1.0, seed=1) == workload.arrivals(50, 2.0, 1.0, seed=1)
    assert workload.arrivals(50, 2.0, 1.0, seed=1) != workload.arrivals(50, 2.0, 1.0, seed=2)
    assert workload.arrivals(3, math.inf, 1.0, seed=1) == [0.0, 0.0, 0.0]


def test_random_prompts_have_given_lengths_and_share_only_prefix() -> None:
    first, second = workload.random_requests(2, 40, 7, prefix_len=25)
    assert (first.input_len, first.output_len) == (65, 7)
    one, other = (prompts.token_ids(request.parts, seed=0, vocab_size=3000) for request in (first, second))
    assert one[:25] == other[:25]
    assert one[25:] != other[25:]


def test_random_lengths_cover_configured_range() -> None:
    requests = workload.random_requests(500, 100, 10, range_ratio=0.3, seed=1)
    assert {request.output_len for request in requests} == set(range(7, 14))
    assert min(r.input_len for r in requests) in (70, 71)
    assert requests == workload.random_requests(500, 100, 10, range_ratio=0.3, seed=1)


def test_equal_mooncake_hash_ids_give_equal_text(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)
    requests = workload.read_trace(file, 10, speedup=2.0)
    assert [(r.at, r.input_len, r.output_len) for r in requests] == [(0.0, 1300, 5), (0.0, 1200, 900), (1.5, 600, 1)]
    one, other, third = (prompts.token_ids(r.parts, seed=5, vocab_size=3000) for r in requests)
    assert list(map(len, (one, other, third))) == [1300, 1200, 600]
    assert one[:1024] == other[:1024]
    assert one[1024:1200] != other[1024:]
    assert one[:512] != third[:512]
    text, other_text = (prompts.text(r.parts, seed=5).split() for r in requests[:2])
    assert (len(text), len(other_text)) == (1300, 1200)
    assert text[:1024] == other_text[:1024]


def test_clipped_trace_keeps_shared_prefixes(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)
    one, other = workload.read_trace(file, 2, max_input_len=700, max_output_len=64)
    assert one.parts == other.parts == ((7, 512), (8, 188))
    assert (one.output_len, other.output_len) == (5, 64)
    whole = workload.read_trace(file, 1)[0]
    assert prompts.token_ids(one.parts, 0, 3000) == prompts.token_ids(whole.parts, 0, 3000)[:700]


def test_azure_rows_share_no_prefix(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)
    first, second = workload.read_trace(file, 10)
    assert (first.at, first.input_len, first.output_len) == (0.0, 374, 44)
    assert (second.at, second.input_len, second.output_len) == (pytest.approx(4.25), 396, 109)
    assert prompts.token_ids(first.parts, 0, 3000)[:100] != prompts.token_ids(second.parts, 0, 3000)[:100]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "TIMESTAMP,ContextTokens\nyesterday,1\n"])
def test_file_of_unknown_format_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "notes.txt").write_text(text)
    with pytest.raises(PenstockError, match=r"notes\.txt"):
        workload.read_trace(file, 10)


def test_random_prompts_use_vocabulary_tokens_and_depend_on_seed() -> None:
    drawn = prompts.token_ids([(1, 20000)], seed=0, vocab_size=2500)
    assert (min(drawn), max(drawn)) == (1000, 2499)
    small = prompts.token_ids([(1, 5000)], seed=0, vocab_size=64)
    assert (min(small), max(small)) == (32, 63)
    assert drawn != prompts.token_ids([(1, 5000)], seed=1, vocab_size=2500)


# --- Results ----------------------------------------------------------------------------------------------------------


def sample(sent: float, chunks: list[float], output_tokens: int, **fields: object) -> Sample:
    result = Sample(10, sent, sent, sent, array("d", chunks), chunks[-1], output_tokens, 0, True, Outcome.OK)
    for name, value in fields.items():
        setattr(result, name, value)
    return result


SAMPLES = [
    sample(0.0, [0.1, 0.2, 0.4], 3),
    sample(0.3, [0.5, 1.3], 5, due=0.25, cached_tokens=8),  # the chunks have two or more tokens
    sample(1.5, [1.8], 1),
    Sample(10, due=1.6, sent=1.6, last=1.61, outcome=Outcome.REFUSED, reason="429 full"),
    Sample(10, due=1.7, sent=1.7, last=2.0, reason="500 broken"),
]


def test_results_match_hand_computed_values() -> None:
    results = report.compute_results(SAMPLES, [50, 99], ["ttft", "tpot", "itl", "e2el"], {})
    assert (results["completed"], results["failed"], results["refused"]) == (3, 2, 1)
    assert results["error_counts"] == {"429 full": 1, "500 broken": 1}
    assert (results["total_input_tokens"], results["total_cached_tokens"], results["total_output_tokens"]) == (30, 8, 9)
    assert results["duration"] == pytest.approx(2.0)
    assert results["request_throughput"] == pytest.approx(1.5)
    assert results["output_throughput"] == pytest.approx(4.5)
    assert results["total_token_throughput"] == pytest.approx(19.5)
    assert results["max_output_tokens_per_s"] == pytest.approx(3 + 2.5)  # half of the 5 tokens fall into each second
    assert results["max_concurrent_requests"] == 2
    assert results["p99_send_lag_ms"] == pytest.approx(48.0)  # percentile of 0, 0, 0, 0 and 50 ms
    assert (results["mean_ttft_ms"], results["median_ttft_ms"]) == (pytest.approx(200.0), pytest.approx(200.0))
    assert results["p99_ttft_ms"] == pytest.approx(298.0)  # percentile of 100, 200 and 300 ms
    assert results["mean_tpot_ms"] == pytest.approx((150 + 200) / 2)  # 0.3 s / 2 tokens, and 0.8 s / 4 tokens
    assert results["mean_itl_ms"] == pytest.approx((100 + 200 + 800) / 3)
    assert results["p50_e2el_ms"] == pytest.approx(400.0)  # median of 400, 1000 and 300 ms


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
def test_goodput_counts_requests_within_all_limits(limits: dict[str, float], kept: int) -> None:
    assert report.compute_results(SAMPLES, [], [], limits)["request_goodput"] == pytest.approx(kept / 2.0)


def test_table_shows_results_and_client_bottleneck() -> None:
    results = report.compute_results(SAMPLES[2:], [99.9], ["ttft", "itl"], {"ttft": 250})
    table = report.table(results | {"model_id": "m", "client_cpu": 0.95}, [99.9], ["ttft", "itl"])
    assert "1 ok, 2 failed (1 of them refused)" in table
    assert re.search(r"^TTFT +300.00 +300.00 +300.00$", table, re.MULTILINE)
    assert re.search(r"^ITL +– +– +–$", table, re.MULTILINE)
    assert "p99.9" in table
    assert "the client was a bottleneck" in table


def test_events_are_complete_at_any_chunk_boundaries() -> None:
    stream = b': hello\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream)):
        reader = EventReader()
        payloads = [payload for i in range(0, len(stream), size) for payload in reader.feed(stream[i : i + size])]
        assert payloads == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


@pytest.mark.parametrize(
    "body", [b'{"error": {"message": "no such"}}', b'{"message": "no such"}', b'{"detail": "no such"}', b" no\n such "]
)
def test_errors_of_every_shape_are_read(body: bytes) -> None:
    assert error_message(body) == "no such"


# --- The client, against a scripted peer ------------------------------------------------------------------------------


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(text: str = "", end: str | None = None, **fields: object) -> bytes:
    payload = {"choices": [{"text": text, "finish_reason": end}]} | fields
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def stream_chunks(*chunks: bytes, pause: float = 0.0) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await asyncio.sleep(pause)
            await response.write(chunk)
        return response

    return answer


def run_load(answer: Answer, requests: list[Request], concurrency: int = 0) -> list[Sample]:
    """Send requests to a test server with this handler; return the samples."""

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


def test_token_counts_come_from_server_usage() -> None:
    last = b"data: " + json.dumps({"choices": [], **USAGE}).encode() + b"\n\ndata: [DONE]\n\n"
    (sample,) = run_load(stream_chunks(event(), event("a"), event("b c"), event("", "length"), last, pause=0.02), [ONE])
    assert (sample.outcome, sample.input_tokens, sample.output_tokens, sample.cached_tokens) == (Outcome.OK, 21, 4, 16)
    assert len(sample.chunks) == 2  # the first and the last of the four chunks have no text and are not counted
    assert 0.04 <= sample.ttft < sample.e2el
    assert sample.e2el >= 0.08
    assert sample.tpot == pytest.approx((sample.e2el - sample.ttft) / 3)


def test_chunks_count_as_tokens_without_usage() -> None:
    (sample,) = run_load(stream_chunks(event("a"), event("b", "stop")), [ONE])
    assert (sample.outcome, sample.counted, sample.input_tokens, sample.output_tokens) == (Outcome.OK, False, 20, 2)


async def queue_full(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "the queue is full"}}, status=429)


async def close_connection(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "outcome", "reason"),
    [
        (queue_full, Outcome.REFUSED, "429 the queue is full"),
        (close_connection, Outcome.FAILED, "disconnected"),
        (stream_chunks(event("a")), Outcome.FAILED, "without a finish reason"),
        (stream_chunks(event("a"), b'data: {"error": {"message": "engine died"}}\n\n'), Outcome.FAILED, "engine died"),
        (stream_chunks(b"data: {nonsense\n\n"), Outcome.FAILED, "malformed"),
    ],
)
def test_failed_request_has_outcome_and_reason(answer: Answer, outcome: Outcome, reason: str) -> None:
    (sample,) = run_load(answer, [ONE])
    assert sample.outcome is outcome
    assert reason in sample.reason


def test_arrivals_do_not_wait_for_answers() -> None:
    """The server answers no request before it has received all of them."""
    requests = [Request(((i, 5),), 1, at=0.05 * i) for i in range(6)]
    all_arrived = asyncio.Barrier(len(requests))

    async def answer(request: web.Request) -> web.StreamResponse:
        await all_arrived.wait()
        return await stream_chunks(event("a", "stop"))(request)

    samples = run_load(answer, requests)
    assert [s.due for s in samples] == [r.at for r in requests]
    assert all(s.sent >= s.due for s in samples)
    assert report.running(samples)[1].max() == len(requests)


def test_max_concurrency_limits_running_requests() -> None:
    requests = [Request(((i, 5),), 1) for i in range(7)]
    start = time.perf_counter()
    samples = run_load(stream_chunks(event("a", "stop"), pause=0.05), requests, concurrency=2)
    assert time.perf_counter() - start >= 4 * 0.05
    assert report.running(samples)[1].max() == 2


# --- The command ------------------------------------------------------------------------------------------------------


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_help_imports_no_large_library() -> None:
    code = "import sys\nfrom penstock.cli.main import main\ntry:\n main(['bench', 'serve', '--help'])\n"
    code += "except SystemExit:\n sys.exit(bool({'torch', 'aiohttp', 'matplotlib', 'numpy'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--max-concurrency INT" in result.stdout


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--num-prompts", "0", "--num-prompts: '0' is wrong: it must be at least 1"),
        ("--goodput", "itl:5", "goodput: itl is not one of ttft, tpot, e2el"),
        ("--goodput", "ttft:0", "goodput: 0 is wrong"),
        ("--metric-percentiles", "90,101", "metric_percentiles: 101 is wrong"),
        ("--header", "name", "header: 'name' must contain '='"),
        ("--extra-body", "[]", "--extra-body: '[]' is wrong: it is not a JSON object"),
        ("--json", "/dev/null/file", "json: /dev/null/file cannot be written"),
        ("--picture", "load.gif", "picture: load.gif is not one of .png, .svg, .pdf"),
    ],
)
def test_wrong_option_is_refused_before_any_request(flag: str, value: str, message: str) -> None:
    result = bench(flag, value)
    assert result.returncode == 2
    assert result.stderr.startswith(f"penstock bench: {message}")
    assert result.stderr.count("\n") == 1


def test_unreachable_server_prints_one_sentence() -> None:
    result = bench("--base-url", "http://127.0.0.1:9", "--goodput", "ttft:500", "e2el:2000.5")
    assert result.returncode == 2
    assert result.stderr.startswith("penstock bench: http://127.0.0.1:9 does not respond")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_benchmark_of_penstock_server_completes_all_requests(tmp_path: Path) -> None:
    picture, sizes = tmp_path / "load.png", ["--num-prompts", "8", "--max-concurrency", "4", "--ignore-eos"]
    with (tmp_path / "log").open("w+b") as log, Server([], log) as server:
        server.wait_for(200)
        server_url = ["--base-url", f"http://127.0.0.1:{server.port}/v1"]
        printed = bench(*server_url, *sizes, "--random-output-len", "50", "--json", "-", "--picture", str(picture))
        (tmp_path / "trace.jsonl").write_text(MOONCAKE)
        trace = ["--dataset-path", str(tmp_path / "trace.jsonl"), "--trace-speedup", "10", "--max-output-len", "4"]
        replayed = bench(*server_url, *trace, "--endpoint", "/v1/chat/completions")
        unknown = bench(*server_url, "--model", "nobody")
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
