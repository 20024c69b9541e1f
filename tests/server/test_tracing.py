"""Traces of requests, received by a collector in another process."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
from collector import Collector, draw_trace, run_collector
from repository import TESTS
from scripted_model import scripted_model, tool_call
from serving import Served, usage_error
from test_router import PROMPT, Deployment, until
from tritonclient.utils import np_to_triton_dtype

from penstock.config.options import LogOptions
from penstock.tracing import start_tracer

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture(scope="module", autouse=True)
def spans_are_sent_soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        yield


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with run_collector(tmp_path_factory.mktemp("collector")) as collector:
        yield collector


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[Served]:
    flags = ("--otlp-traces-endpoint", collector.grpc, "--grpc-port", "0", "--log-format", "json")
    with Served(*flags) as server:
        yield server


def traceparent(trace: str, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{PARENT}-0{sampled:d}", "tracestate": "vendor=value"}


def test_tools_of_mcp_servers_have_spans(collector: Collector, tmp_path: Path) -> None:
    model = scripted_model(tmp_path / "model", tool_call("tools__add", a=2, b=3), tool_call("tools__fail"), "Done.")
    tools = {"command": sys.executable, "args": [str(TESTS / "support/mcp_tools.py"), "stdio", str(tmp_path)]}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"tools": tools}}))
    flags = ("--model", str(model), "--mcp-config", str(tmp_path / "mcp.json"), "--log-format", "json")
    trace = TRACE[::-1]
    with Served(*flags, "--otlp-traces-endpoint", collector.grpc) as served:
        tool = {"type": "mcp", "server_label": "tools", "require_approval": "never"}
        body = {"input": "Go!", "tools": [tool]}
        answer = httpx.post(f"{served.url}/responses", json=body, headers=traceparent(trace), timeout=60)
        assert answer.status_code == 200, answer.text
        spans = collector.spans(trace, "POST /v1/responses", "list_tools", "execute_tool add", "execute_tool fail")
        request = json.loads(served.find("POST /v1/responses").string)
    root, add, fail = (spans[name] for name in ("POST /v1/responses", "execute_tool add", "execute_tool fail"))
    assert {add.parent, fail.parent, spans["list_tools"].parent} == {root.span}
    assert (add.attributes["gen_ai.tool.name"], add.attributes["mcp.server"]) == ("add", "tools")
    assert (add.status, fail.status, fail.attributes["error.type"]) == ("", "error", "tool_error")
    assert request["tool_calls"] == 2


@pytest.mark.row("vllm", "--otlp-traces-endpoint")
def test_chat_has_span_for_each_stage_across_processes(server: Served, collector: Collector) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0.5, "seed": 1}
    answer = httpx.post(f"{server.url}/chat/completions", json=body, headers=traceparent(TRACE))
    usage = answer.json()["usage"]
    spans = collector.spans(TRACE, "POST /v1/chat/completions", "llm_request", "queue", "prefill", "decode")
    root, request = spans["POST /v1/chat/completions"], spans["llm_request"]
    assert (root.kind, root.parent, root.status) == ("server", PARENT, "")
    assert root.attributes["http.response.status_code"] == 200
    assert request.parent == root.span
    assert request.attributes["gen_ai.operation.name"] == "chat"
    assert request.attributes["gen_ai.request.id"] == answer.headers["x-request-id"]
    assert request.attributes["gen_ai.request.temperature"] == 0.5
    assert request.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert request.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert 0 < request.attributes["gen_ai.latency.time_to_first_token"] < request.attributes["gen_ai.latency.e2e"]
    assert {name: span.process for name, span in spans.items()} == {
        "POST /v1/chat/completions": "api",
        "llm_request": "api",
        "preprocess": "api",
        "queue": "engine",
        "prefill": "engine",
        "decode": "engine",
        "detokenize": "api",
    }
    parts = [spans[name] for name in ("preprocess", "queue", "prefill", "decode")]
    assert all(span.parent == request.span for span in [*parts, spans["detokenize"]])
    assert [span.begun for span in parts] == sorted(span.begun for span in parts)
    assert spans["queue"].ended == pytest.approx(spans["prefill"].begun, abs=1e6)
    assert spans["prefill"].ended == pytest.approx(spans["decode"].begun, abs=1e6)
    assert root.begun <= min(span.begun for span in parts)
    assert max(span.ended for span in parts) <= root.ended + 5e6  # 5 ms tolerance: the processes have separate clocks


@pytest.mark.parametrize(
    ("path", "body", "children"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, 2),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}, 1),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}, 1),
        ("/api/generate", {"prompt": "a", "options": {"num_predict": 2}}, 1),
        ("/completion", {"prompt": "a", "n_predict": 2}, 1),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 2}}, 1),
        ("/v1/embeddings", {"input": "a"}, 1),
    ],
)
def test_request_of_every_dialect_is_traced(
    server: Served, collector: Collector, path: str, body: dict[str, object], children: int
) -> None:
    trace = path.encode().hex().rjust(32, "1")[-32:]
    answer = httpx.post(f"{server.root}{path}", json={"model": server.name, **body}, headers=traceparent(trace))
    assert answer.status_code == 200, answer.text
    spans = collector.wait(
        lambda found: (
            [span.name for span in found].count("prefill") == children and any(span.kind == "server" for span in found)
        ),
        trace,
    )
    (root,) = [span for span in spans if span.kind == "server"]
    requests = [span for span in spans if span.name == "llm_request"]
    assert root.name == f"POST {path}"
    assert [span.parent for span in requests] == [root.span] * children
    assert {span.parent for span in spans if span.name == "prefill"} == {span.span for span in requests}


def test_grpc_request_takes_trace_context_from_metadata(server: Served, collector: Collector) -> None:
    trace = "2".rjust(32, "0")
    address = server.find(r"gRPC at ([\d.:]+)")[1]
    inputs = [("text_input", np.array([[b"a"]], np.object_)), ("max_tokens", np.array([[2]], np.int32))]
    tensors = []
    for name, value in inputs:
        tensors.append(tritonclient.grpc.InferInput(name, value.shape, np_to_triton_dtype(value.dtype)))
        tensors[-1].set_data_from_numpy(value)
    with tritonclient.grpc.InferenceServerClient(address) as client:
        client.infer("ensemble", tensors, headers=traceparent(trace))
    spans = collector.spans(trace, "inference.GRPCInferenceService/ModelInfer", "llm_request", "prefill", "decode")
    root = spans["inference.GRPCInferenceService/ModelInfer"]
    assert (root.kind, root.parent) == ("server", PARENT)
    assert root.attributes["rpc.grpc.status_code"] == grpc.StatusCode.OK.value[0]
    assert spans["llm_request"].parent == root.span


def test_log_lines_contain_trace_and_span_ids(server: Served) -> None:
    trace = "3".rjust(32, "0")
    httpx.post(f"{server.url}/completions", json={"prompt": "a", "max_tokens": 1}, headers=traceparent(trace))
    line = json.loads(server.find(rf".*{trace}.*")[0])
    assert line["trace_id"] == trace
    assert re.fullmatch("[0-9a-f]{16}", line["span_id"])
    assert line["message"] == "POST /v1/completions"


def test_disconnect_and_error_set_span_status(server: Served, collector: Collector) -> None:
    disconnected, refused = "4".rjust(32, "0"), "5".rjust(32, "0")
    body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/completions", json=body, headers=traceparent(disconnected)) as answer:
        next(answer.iter_lines())
    answer = httpx.post(f"{server.url}/completions", json={"prompt": 1.5}, headers=traceparent(refused))
    assert answer.status_code == 400
    spans = collector.spans(disconnected, "POST /v1/completions", "llm_request", "decode")
    for name in ("POST /v1/completions", "llm_request", "decode"):
        assert (spans[name].status, spans[name].attributes["error.type"]) == ("error", "cancelled"), name
    (root,) = collector.wait(len, refused)
    assert (root.status, root.attributes["error.type"]) == ("", "invalid")
    assert root.attributes["http.response.status_code"] == 400


def test_unsampled_trace_is_not_recorded(server: Served, collector: Collector) -> None:
    unsampled, sampled_later = "6".rjust(32, "0"), "7".rjust(32, "0")
    for trace, sampled in ((unsampled, False), (sampled_later, True)):
        headers = traceparent(trace, sampled)
        httpx.post(f"{server.url}/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    collector.spans(sampled_later, "POST /v1/completions", "prefill")
    assert not collector.wait(lambda _: True, unsampled)
    server.find(unsampled)  # the log contains the trace id even if it is not sampled


def test_health_checks_and_metrics_are_not_traced(server: Served, collector: Collector) -> None:
    trace = "8".rjust(32, "0")
    for path in ("/health", "/metrics", "/ready"):
        httpx.get(f"{server.root}{path}", headers=traceparent(trace))
    api, engine = r'\{outcome="exported"\} [1-9]', r'\{model_name="[^"]+",outcome="exported"\} [1-9]'
    until(lambda: re.search(f"penstock:trace_spans_total{api}", httpx.get(f"{server.root}/metrics").text) is not None)
    until(lambda: re.search(f"engine_trace_spans_total{engine}", httpx.get(f"{server.root}/metrics").text) is not None)
    assert not collector.wait(lambda _: True, trace)


@pytest.mark.slow
def test_dead_collector_loses_spans_but_no_requests(tmp_path: Path) -> None:
    with run_collector(tmp_path) as collector, Served("--otlp-endpoint", collector.http) as server:
        body = {"prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{server.url}/completions", json=body).status_code == 200
        collector.wait(lambda spans: {"POST /v1/completions", "prefill"} <= {span.name for span in spans})
        collector.process.kill()
        for _ in range(8):
            assert httpx.post(f"{server.url}/completions", json=body).status_code == 200
        server.find("api: WARNING the collector at .* does not accept spans")
        server.find("engine: WARNING the collector at .* does not accept spans")
        page = httpx.get(f"{server.root}/metrics").text
        assert re.search(r'penstock:trace_spans_total\{outcome="dropped"\} [1-9]', page)


@pytest.mark.slow
def test_silent_collector_drops_and_counts_spans() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the collector accepts connections but never responds
        tracer = start_tracer(LogOptions(otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}"), "test")
        assert tracer
        for _ in range(6000):
            tracer.server_span("GET", {}, time.monotonic(), {}).end()
        assert 6000 - 4096 - 512 <= tracer.counts.dropped < 6000
        tracer.close()
        assert tracer.counts.exported == 0


@pytest.mark.slow
def test_prefill_and_decode_instances_share_one_trace(collector: Collector, tmp_path: Path) -> None:
    trace, flags = "9".rjust(32, "0"), ("--otlp-endpoint", collector.grpc)
    with Deployment(tmp_path, "--pd-min-prefill-tokens", "100", *flags) as deployment:
        deployment.instances("prefill", "decode", flags=flags)
        until(lambda: deployment.has("prefill", "decode"))
        body = {"prompt": PROMPT, "max_tokens": 4}
        assert httpx.post(f"{deployment.router.url}/completions", json=body, headers=traceparent(trace)).is_success
        spans = collector.wait(lambda found: [span.name for span in found].count("prefill") == 2, trace)
    names = collector.spans(trace, "POST /v1/completions", "llm_request", "kv_transfer", "decode")
    transfer, request = names["kv_transfer"], names["llm_request"]
    assert transfer.parent == request.span
    assert transfer.attributes["penstock.kv_transfer.tokens"] > 100
    by_prefill, by_decode = sorted((span for span in spans if span.name == "prefill"), key=lambda span: span.begun)
    assert (by_prefill.parent, by_decode.parent) == (transfer.span, request.span)
    assert by_decode.attributes["penstock.kv_transfer.imported"]
    processes = [span.process for span in (request, by_prefill, by_decode)]
    assert processes == ["api", "prefill-engine", "decode-engine"]
    assert transfer.begun <= by_prefill.ended <= transfer.ended + 5e6  # tolerance of 5 ms between two clocks
    if picture := os.environ.get("PENSTOCK_TRACE_PICTURE"):  # draws docs/trace.svg
        draw_trace(collector.wait(lambda found: len(found) >= len(names) + 2, trace), Path(picture))


def test_otlp_endpoint_without_scheme_is_refused() -> None:
    assert "otlp_endpoint: must begin with http://" in usage_error("--otlp-endpoint", "localhost:4317")


@pytest.mark.slow
def test_opentelemetry_is_not_imported_without_tracing() -> None:
    with Served(environment={"PYTHONPROFILEIMPORTTIME": "1"}) as server:
        imported = "\n".join(server.lines)
    for module in ("penstock.engine.service.server", "penstock.serve.process.api_server", "penstock.tracing"):
        assert re.search(rf"\| +{module}$", imported, re.MULTILINE)
    assert not re.search(r"\| +opentelemetry", imported)
