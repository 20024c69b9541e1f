"""The command ``vllm`` of ``penstock shims``: ``bench``, ``chat``, ``complete``, ``collect-env``, ``run-batch``."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import vllm_commands as published
from serving import Served

from penstock import demo
from penstock.cli.bench.offline import add_arguments
from penstock.cli.bench.offline_options import LatencyOptions, ThroughputOptions
from penstock.cli.bench.serve_options import ServeOptions
from penstock.cli.bench.workload import read_trace
from penstock.cli.compat import vllm
from penstock.cli.flags import add_fields, add_profile, configure, read_fields
from penstock.cli.main import main
from penstock.cli.parser import Parser
from penstock.cli.spelling import expand_spellings
from penstock.config.options import EngineOptions
from penstock.core import PenstockError

CONVERSATION = {
    "conversations": [{"value": "What is the capital of Canada?"}, {"value": "The capital of Canada is Ottawa."}]
}
QUESTION = "What is the capital of Canada?"
ANSWER = "The capital of Canada is Ottawa.\n"


@cache
def parser_of(compat: str) -> Parser:
    parser = Parser(prog="penstock bench serve", allow_abbrev=False, exit_on_error=False)
    add_fields(parser, ServeOptions, profiles=True)
    assert add_profile(parser, [], {"PENSTOCK_COMPAT": compat})
    return parser


def options(*arguments: str, compat: str = "vllm") -> ServeOptions:
    """Options of ``vllm bench serve``. Raises ``PenstockError`` for refused flags; fails for unknown ones."""
    parser = parser_of(compat)
    args, unknown = parser.parse_known_args(expand_spellings(parser, [*arguments]))
    assert not unknown
    return read_fields(args, ServeOptions)


# --- Flags of vllm bench serve ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compat", ["", "vllm"])
@pytest.mark.row(
    "vllm",
    "--header",
    "--insecure",
    "--endpoint-type",
    "--lora-assignment",
    "--no-oversample",
    "--disable-shuffle",
    "--burstiness",
    "--num-warmups",
    "--ready-check-timeout-sec",
    "--min-p",
    "--…-penalty",
    "--metric-percentiles",
    "--profile",
    "--plot-timeline",
    "--plot-dataset-stats",
    "--use-beam-search",
    "--probe-request-rate",
)
def test_every_bench_serve_flag_is_accepted_or_refused_by_name(compat: str) -> None:
    for flag, value in published.ACCEPTED.items():
        options(f"--{flag}", value, compat=compat)
    for flag in published.ACCEPTED_SWITCHES:
        options(f"--{flag}", compat=compat)
    refused = [[f"--{flag}", value] for flag, value in published.REFUSED.items()]
    for arguments in [*refused, *([f"--{flag}"] for flag in published.REFUSED_SWITCHES)]:
        with pytest.raises(PenstockError, match=rf"^{arguments[0]}: \S+"):
            options(*arguments, compat=compat)


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ([], "num_prompts", 1000),
        ([], "lengths", (1024, 128, 0)),
        ([], "ignore_eos", True),
        ([], "num_warmups", 0),
        ([], "temperature", None),
        ([], "json", ""),
        (["--host", "::1", "--port", "9"], "base_url", "http://[::1]:9"),
        (["--port", "9", "--base-url", "http://a"], "base_url", "http://a"),
        (["--backend", "openai-chat"], "api", "/v1/chat/completions"),
        (["--backend", "vllm"], "kind", "openai"),
        (["--backend", "openai-embeddings"], "metrics", ["e2el"]),
        (["--random-input-len", "7", "--random-prefix-len", "3", "--output-len", "5"], "lengths", (7, 5, 3)),
        (["--random-input-len", "7", "--input-len", "8"], "lengths", (8, 128, 0)),
        (["--random-range-ratio", '{"input": 0.2, "output": 0.2}'], "range_ratio", 0.2),
        (["--dataset-name", "sonnet", "--sonnet-input-len", "9"], "lengths", (9, 150, 200)),
        (["--dataset-name", "custom"], "output_len", 256),
        (["--dataset-name", "custom"], "chat_template", True),
        (["--dataset-name", "custom", "--skip-chat-template"], "chat_template", False),
        (["--dataset-name", "custom", "--custom-output-len", "-1"], "output_len", 0),
        (["--dataset-name", "sharegpt", "--custom-output-len", "5"], "output_len", 0),
        (["--dataset-name", "timed_trace", "--request-rate", "3"], "request_rate", 0.0),
        (["--dataset-name", "timed_trace", "--request-rate", "3", "--no-self-timed"], "request_rate", 3.0),
        (["--dataset-name", "timed_trace"], "trace_block_size", 16),
        (
            ["--top-k", "5", "--temperature", "0", "--extra-body", '{"top_k": 6}'],
            "body",
            {"top_k": 6, "temperature": 0},
        ),
        (["--logprobs", "2", "--backend", "openai-chat"], "body", {"logprobs": True, "top_logprobs": 2}),
        (["--extra-body.a.b", "2"], "body", {"a": {"b": 2}}),
        (["--save-result", "--request-rate", "4"], "json", "openai-4.0qps-{model}-{date}.json"),
        (["--save-result", "--label", "x", "--result-dir", "r"], "json", "r/x-infqps-{model}-{date}.json"),
        (["--append-result", "--result-filename", "f"], "json", "f"),
        (["--save-result", "--max-concurrency", "8"], "json", "openai-infqps-concurrency8-{model}-{date}.json"),
    ],
)
@pytest.mark.row(
    "vllm",
    "--base-url",
    "--endpoint",
    "--backend",
    "--input-len",
    "--output-len",
    "--num-prompts",
    "--ignore-eos",
    "--request-rate",
    "--temperature",
    "--top-p",
    "--top-k",
    "--logprobs",
    "--extra-body",
    "--append-result",
    "--result-dir",
    "--label",
)
def test_bench_serve_flag_sets_option(arguments: list[str], field: str, value: Any) -> None:
    assert getattr(options(*arguments), field) == value


def test_without_profile_bench_serve_keeps_penstocks_defaults() -> None:
    given = options("--random-input-len", "9", compat="")
    assert given.lengths == (9, 64, 0)
    assert (given.num_prompts, given.temperature, given.ignore_eos) == (100, 0.0, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--self-timed"], "--self-timed: requires --dataset-name timed_trace"),
        (["--num-prompts", "-1"], "--num-prompts: -1 is all rows of a file, but random has no file"),
        (["--random-range-ratio", '{"input": 0.2, "output": 0.3}'], "only one ratio"),
        (["--temperature", "hot"], "--temperature: 'hot' is not a number"),
        (["--dataset-name", "hf"], "datasets are not downloaded from a hub: write its prompts to a JSONL file"),
    ],
)
@pytest.mark.row("vllm", "--dataset-name hf")
def test_contradictory_bench_serve_flags_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(PenstockError, match=re.escape(message)):
        options(*arguments)


@pytest.mark.row("vllm", "spec_bench", "speed_bench", "random-mm", "custom_image", "custom_audio", "random-rerank")
@pytest.mark.parametrize(
    "dataset", ["spec_bench", "speed_bench", "random-mm", "custom_image", "custom_audio", "random-rerank"]
)
def test_dataset_without_local_text_is_refused_by_name(dataset: str) -> None:
    with pytest.raises(PenstockError, match=f"^--dataset-name: '{dataset}' is wrong: "):
        options("--dataset-name", dataset)


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ("burstgpt", "Model,Request tokens,Response tokens\nGPT-4\n"),
        ("burstgpt", "Model,Request tokens,Response tokens\n" + "4" * 200_000),
    ],
)
def test_malformed_csv_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str], dataset: str, text: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    given = ["--dataset-name", dataset, "--dataset-path", str(tmp_path / "rows.csv")]
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *given]) == 2
    assert "rows.csv is not CSV" in capfd.readouterr().err


def test_malformed_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600\n")
    with pytest.raises(PenstockError, match=r"trace\.csv is neither"):
        read_trace(tmp_path / "trace.csv", 1)


# --- Flags of vllm bench throughput and latency -----------------------------------------------------------------------


def offline(kind: str, *arguments: str) -> tuple[ThroughputOptions | LatencyOptions, EngineOptions]:
    """Options of ``vllm bench throughput|latency``."""
    parser = Parser(prog=f"penstock bench {kind}", allow_abbrev=False, exit_on_error=False)
    add_arguments(parser)
    assert add_profile(parser, [], {"PENSTOCK_COMPAT": "vllm"})
    args, unknown = parser.parse_known_args(expand_spellings(parser, [*arguments]))
    assert not unknown
    options = read_fields(args, LatencyOptions) if kind == "latency" else read_fields(args, ThroughputOptions)
    return options, configure(args).configuration.engine


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("latency", "input_len", 32),
        ("latency", "num_iters_warmup", 10),
        ("latency --disable-detokenize", "detokenize", False),
        ("latency --n 3 --use-beam-search", "n", 3),
        ("throughput", "num_prompts", 1000),
        ("throughput --input-len 9 --output-len 5", "lengths", (9, 5, 0)),
        ("throughput --dataset file", "dataset", "sharegpt"),
        ("throughput --dataset-path file --output-len 5", "lengths", (0, 5, 0)),
        ("throughput --dataset-name sonnet --dataset-path f --prefix-len 7", "lengths", (550, 150, 7)),
        ("throughput --random-range-ratio 0.5 --async-engine --backend vllm", "range_ratio", 0.5),
    ],
)
def test_offline_flag_sets_option(arguments: str, field: str, value: Any) -> None:
    options, engine = offline(*arguments.split(), "--max-model-len", "1k", "-tp", "2", "--trust-remote-code")
    assert getattr(options, field) == value
    assert (engine.max_model_len, engine.tensor_parallel_size) == (1000, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        "latency --profile",
        "throughput --profile",
        "throughput --lora-path a",
        "throughput --backend hf",
        "throughput --hf-max-batch-size 1",
        "throughput --dataset-name hf",
    ],
)
def test_unsupported_offline_flag_is_refused_by_name(arguments: str) -> None:
    with pytest.raises(PenstockError, match=rf"^{arguments.split()[1]}: "):
        offline(*arguments.split())


# --- Other commands ---------------------------------------------------------------------------------------------------


def test_overview_lists_commands_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm.run(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"    {name} " in output for name in ("serve", "chat", "complete", "bench", "run-batch", "collect-env"))


@pytest.mark.parametrize("command", ["launch render m", "bench sweep serve", "bench mm-processor --model m"])
@pytest.mark.row("vllm", "vllm launch render", "vllm bench sweep", "vllm bench mm-processor")
def test_unsupported_command_is_refused_by_name(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert vllm.run(command.split()) == 2
    name = " ".join(command.split()[: 1 if command.startswith("launch") else 2])
    assert re.fullmatch(rf"vllm {name} is not supported: .+\n", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.row("vllm", "vllm collect-env")
def test_collect_env_shows_versions_and_masks_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer hidden_one")
    monkeypatch.setenv("HTTPS_PROXY", "someone:hidden_two@proxy:3128")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert vllm.run(["collect-env"]) in (0, 1)
    output = capsys.readouterr().out
    for name in ("python", "torch", "kernels", "gpus", "system", "commit", "cuda"):
        assert re.search(rf"^{name} ", output, re.MULTILINE), name
    assert re.search(r"^packages +msgspec \d", output, re.MULTILINE)
    assert re.search(r"^environment +OMP_NUM_THREADS=2$", output, re.MULTILINE)
    assert re.search(r"^environment +HTTPS_PROXY=\*\*\*@proxy:3128$", output, re.MULTILINE)
    assert not re.search("hf_secret|hidden_one|hidden_two", output)


# --- With a server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--num-gpu-blocks-override", "400") as server:
        yield server


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shims")
    assert main(["shims", str(folder), "vllm"]) == 0
    return folder / "vllm"


def run(command: Path, *arguments: str, folder: Path | None = None, stdin: str = "") -> str:
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    ran = subprocess.run(
        [command, *arguments], input=stdin, capture_output=True, text=True, cwd=folder, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.row(
    "vllm",
    "vllm bench serve",
    "--dataset-name random",
    "--save-result",
    "--save-detailed",
    "--metadata",
    "--goodput",
    "--percentile-metrics",
    "--max-concurrency",
)
def test_save_result_writes_vllms_keys_and_right_counts(command: Path, served: Served, tmp_path: Path) -> None:
    arguments = "--num-prompts 6 --random-input-len 50 --random-output-len 9 --max-concurrency 3 --request-rate 50"
    files = "--save-result --save-detailed --metadata tp=1 --goodput ttft:60000 --percentile-metrics ttft,tpot,itl,e2el"
    port = served.root.rpartition(":")[2]
    before = usage(served)
    output = run(command, *f"bench serve --port {port} {arguments} {files}".split(), folder=tmp_path)
    after = usage(served)
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(rf"openai-50\.0qps-concurrency3-{served.name}-\d{{8}}-\d{{6}}\.json", file.name)
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"], result["backend"], result["tp"]) == (6, 0, "openai", "1")
    counted = (result["total_input_tokens"], result["total_output_tokens"])
    assert counted == (6 * 50, 6 * 9) == tuple(b - a for a, b in zip(before, after, strict=True))
    assert (result["input_lens"], result["output_lens"]) == ([50] * 6, [9] * 6)
    assert len(result["ttfts"]) == len(result["itls"]) == len(result["generated_texts"]) == 6
    assert result["request_goodput"] == result["request_throughput"] == pytest.approx(6 / result["duration"])
    assert result["output_throughput"] == pytest.approx(54 / result["duration"])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p99")} <= result.keys()
    assert all(name in output for name in ("TTFT", "TPOT", "ITL", "E2EL", "goodput", "peak concurrency"))


def usage(served: Served) -> tuple[int, int]:
    """Prompt and generated tokens that the server has counted."""
    text = httpx.get(f"{served.root}/metrics").text
    found = [
        re.search(rf"^vllm:{name}_tokens_total\S* ([\d.e+]+)$", text, re.MULTILINE) for name in ("prompt", "generation")
    ]
    return int(float(found[0][1])), int(float(found[1][1])) if found[1] else 0  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.row("vllm", "--dataset-name sharegpt", "custom", "sonnet", "--dataset-path FILE", "--result-filename")
def test_datasets_of_files_are_sent(command: Path, served: Served, tmp_path: Path) -> None:
    (tmp_path / "custom.jsonl").write_text(json.dumps({"prompt": QUESTION}) + "\n")
    (tmp_path / "sharegpt.json").write_text(json.dumps([CONVERSATION, {"id": 1}]))
    (tmp_path / "sonnet.txt").write_text("\n".join(f"Line {i} of a poem about the sea" for i in range(40)))
    results = []
    for dataset, more in (
        ("custom.jsonl", "--custom-output-len 20 --temperature 0"),
        ("sharegpt.json", "--ignore-eos"),
        ("sonnet.txt", "--sonnet-input-len 150 --sonnet-prefix-len 60 --sonnet-output-len 3 --skip-chat-template"),
    ):
        name = dataset.partition(".")[0]
        arguments = (
            f"--dataset-name {name} --dataset-path {dataset} --num-prompts 2 {more} --append-result --save-detailed"
        )
        run(
            command, *f"bench serve --base-url {served.root} --result-filename out {arguments}".split(), folder=tmp_path
        )
        results.append(json.loads((tmp_path / "out").read_text().splitlines()[-1]))
    custom, sharegpt, sonnet = results
    assert custom["generated_texts"] == [ANSWER.strip()] * 2
    answer = CONVERSATION["conversations"][1]["value"]
    tokens = httpx.post(f"{served.root}/tokenize", json={"prompt": answer, "add_special_tokens": False}).json()
    assert sharegpt["output_lens"] == [tokens["count"]] * 2
    assert sonnet["output_lens"] == [3, 3]
    assert all(100 < length <= 150 for length in sonnet["input_lens"])


@pytest.mark.slow
@pytest.mark.row("vllm", "burstgpt", "timed_trace", "--dataset-name prefix_repetition", "--ramp-up-…")
def test_datasets_of_lengths_are_sent(command: Path, served: Served, tmp_path: Path) -> None:
    (tmp_path / "burst.csv").write_text("Model,Request tokens,Response tokens\nChatGPT,9,9\nGPT-4,12,3\n")
    row = {"timestamp": 0.1, "input_length": 20, "output_length": 4, "hash_ids": [1, 2]}
    (tmp_path / "trace.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row | {'timestamp': 0.3})}\n")
    prefixes = "--prefix-repetition-prefix-len 8 --prefix-repetition-suffix-len 4 --prefix-repetition-output-len 2"
    for arguments, lengths in (
        ("--dataset-name burstgpt --dataset-path burst.csv --ignore-eos", (12, 3)),
        ("--dataset-name timed_trace --dataset-path trace.jsonl", (20, 4)),
        (f"--dataset-name prefix_repetition --ignore-eos {prefixes}", (12, 2)),
        (
            "--random-input-len 7 --random-output-len 2 --ramp-up-strategy linear --ramp-up-start-rps 20 "
            "--ramp-up-end-rps 40",
            (7, 2),
        ),
    ):
        files = "--num-prompts 2 --save-result --save-detailed --result-filename out"
        run(command, *f"bench serve --base-url {served.root} {arguments} {files}".split(), folder=tmp_path)
        result = json.loads((tmp_path / "out").read_text())
        assert (result["input_lens"], result["output_lens"]) == ([lengths[0]] * 2, [lengths[1]] * 2), arguments


@pytest.mark.slow
@pytest.mark.row("vllm", "vllm run-batch -i FILE -o FILE --model MODEL")
def test_run_batch_answers_requests_with_vllms_flags(command: Path, tmp_path: Path) -> None:
    body = {"model": "qwen", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in").write_text(json.dumps(line) + "\n")
    flags = f"--model {demo.CHAT} --served-model-name qwen --max-model-len 1k -tp 1 --num-gpu-blocks-override 100"
    run(command, *f"run-batch -i in -o out {flags}".split(), folder=tmp_path)
    (answer,) = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == ANSWER.strip()


@pytest.mark.slow
@pytest.mark.row("vllm", "vllm chat", "vllm complete", "-q TEXT")
def test_chat_and_complete_use_server(command: Path, served: Served) -> None:
    server = ["--url", served.url]
    assert run(command, "chat", *server, "-q", QUESTION) == ANSWER
    assert run(command, "chat", *server, "--system-prompt", "Be brief.", stdin=f"{QUESTION}\n").startswith(
        "The capital"
    )
    body = {"model": served.name, "prompt": "The capital of", "max_tokens": 5, "seed": 1}
    expected = httpx.post(f"{served.url}/completions", json=body | {"temperature": 0}).json()["choices"][0]["text"]
    generated = ["generate", *server, "--max-tokens", "5", "--temperature", "0", "The capital of"]
    assert run(command, *generated) == f"{expected}\n"
    lines = run(command, "complete", *server, "--max-tokens", "1", stdin="The\nOne two\n").splitlines()
    assert len(lines) >= 2


def test_run_batch_refuses_metrics_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "in").write_text("{}\n")
    assert vllm.run(["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--enable-metrics"]) == 2
    assert "--enable_metrics: 'true' is wrong: run-batch prints tokens per second" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.row("vllm", "vllm bench throughput", "vllm bench latency")
def test_offline_benchmarks_write_vllms_keys(command: Path, tmp_path: Path) -> None:
    (tmp_path / "sharegpt.json").write_text(json.dumps([CONVERSATION]))
    blocks = "--num-gpu-blocks-override 300"
    dataset = "--dataset-path sharegpt.json --num-prompts 3 --output-len 6"
    run(command, *f"bench throughput {dataset} --output-json t.json {blocks}".split(), folder=tmp_path)
    sizes = "--input-len 16 --output-len 4 --batch-size 2 --num-iters 3 --num-iters-warmup 1"
    run(command, *f"bench latency {sizes} --output-json l.json {blocks}".split(), folder=tmp_path)
    throughput, latency = (json.loads((tmp_path / name).read_text()) for name in ("t.json", "l.json"))
    assert throughput["num_requests"] == 3
    assert throughput["total_num_tokens"] == throughput["input_tokens"] + 3 * 6
    assert throughput["tokens_per_second"] * throughput["elapsed_time"] == pytest.approx(throughput["total_num_tokens"])
    assert len(latency["latencies"]) == 3
    assert set(latency["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert latency["percentiles"]["50"] <= latency["percentiles"]["99"] <= max(latency["latencies"])


@pytest.mark.slow
@pytest.mark.row("vllm", "vllm bench startup")
def test_startup_benchmark_measures_cold_and_warm_starts(command: Path, tmp_path: Path) -> None:
    starts = "--num-iters-cold 1 --num-iters-warmup 0 --num-iters-warm 1"
    engine = "--num-gpu-blocks-override 200 --max-model-len 1k --trust-remote-code"
    run(command, *f"bench startup {starts} {engine} --output-json s.json".split(), folder=tmp_path)
    result = json.loads((tmp_path / "s.json").read_text())
    assert result["cold_startup_times"] == [result["avg_cold_startup_time"]] == [result["cold_s"][0]["ready"]]
    assert len(result["warm_startup_times"]) == 1


def test_help_describes_every_flag_of_bench_serve(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_COMPAT", "vllm")
    with pytest.raises(SystemExit):
        vllm.run(["bench", "serve", "--help"])
    output = capsys.readouterr().out
    missing = [flag for flag in (*published.ACCEPTED, *published.REFUSED) if f"--{flag} " not in output]
    assert missing == []
    assert "see docs/dialects" not in output
    assert re.search(r"--num-prompts INT.*\n(?: {20}.*\n)+? .*\(default: 1000\)", output)
