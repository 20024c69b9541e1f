"""An OTLP collector: ``python tests/support/collector.py [discard]``.

Prints its gRPC and HTTP ports, then each request as a line of JSON unless called with ``discard``. ``run_collector``
runs ``otelcol`` or ``otelcol-contrib`` instead if one is installed.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CONFIGURATION = """
receivers: {{otlp: {{protocols: {{grpc: {{endpoint: "127.0.0.1:{grpc}"}}, http: {{endpoint: "127.0.0.1:{http}"}}}}}}}}
exporters: {{file: {{path: "{path}", flush_interval: 100ms}}}}
service: {{telemetry: {{metrics: {{level: none}}}}, pipelines: {{traces: {{receivers: [otlp], exporters: [file]}}}}}}
"""
TIMEOUT = 30.0


@dataclass
class ReceivedSpan:
    """Span received by a collector."""

    name: str
    trace: str
    span: str
    parent: str
    kind: str
    begun: int
    """Start time in nanoseconds since 1970."""
    ended: int
    status: str
    message: str
    attributes: dict[str, Any]
    events: list[str]
    resource: dict[str, Any] = field(default_factory=dict)

    @property
    def process(self) -> str:
        return str(self.resource["penstock.process"])


class Collector:
    """Client that reads the spans received by a collector process."""

    def __init__(self, process: subprocess.Popen[str], lines: Iterable[str], grpc: str, http: str) -> None:
        self.process = process
        self.grpc = grpc
        """OTLP endpoint for gRPC."""
        self.http = http
        """OTLP endpoint for HTTP."""
        self._spans: list[ReceivedSpan] = []
        self._more = threading.Condition()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def wait(self, enough: Callable[[list[ReceivedSpan]], bool], trace: str = "") -> list[ReceivedSpan]:
        """Wait until ``enough`` holds for the spans of a trace (or of all traces); return them by start time."""
        deadline = time.monotonic() + TIMEOUT
        with self._more:
            while not enough(found := [span for span in self._spans if trace in ("", span.trace)]):
                remaining = deadline - time.monotonic()
                assert remaining > 0, [(span.name, span.process, span.trace) for span in self._spans]
                self._more.wait(remaining)
        return sorted(found, key=lambda span: span.begun)

    def spans(self, trace: str, *names: str) -> dict[str, ReceivedSpan]:
        """Wait until a trace has spans with all these names; return its spans by name."""
        found = self.wait(lambda spans: set(names) <= {span.name for span in spans}, trace)
        return {span.name: span for span in found}

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            spans = list(_spans(json.loads(line)))
            with self._more:
                self._spans += spans
                self._more.notify_all()


def draw_trace(spans: list[ReceivedSpan], path: Path) -> None:
    """Draw a trace as an SVG: one bar per span, below its parent, on a common time axis."""
    first, last = min(span.begun for span in spans), max(span.ended for span in spans)
    known = {span.span for span in spans}

    def rows(parents: set[str], depth: int) -> Iterator[tuple[ReceivedSpan, int]]:
        for span in spans:
            if (span.parent if span.parent in known else "") in parents:
                yield span, depth
                yield from rows({span.span}, depth + 1)

    colours = {"api": "#4c78a8", "prefill-engine": "#54a24b", "decode-engine": "#f58518"}
    lines = []
    for row, (span, depth) in enumerate(rows({""}, 0)):
        x, y = 360 + 520 * (span.begun - first) / (last - first), 24 * row + 8
        width = max(520 * (span.ended - span.begun) / (last - first), 1.5)
        process = f"{span.process} {span.resource['process.pid']}"
        lines += [
            f'<text x="{8 + 14 * depth}" y="{y + 12}">{span.name}</text>',
            f'<text x="242" y="{y + 12}" fill="#888">{process}</text>',
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="16" fill="{colours[span.process]}"/>',
            f'<text x="890" y="{y + 12}" fill="#888">{(span.ended - span.begun) / 1e6:.1f} ms</text>',
        ]
    size = f'width="960" height="{24 * len(lines) // 4 + 16}"'
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}><rect {size} fill="white"/>'
    path.write_text("\n".join([head, *lines, "</svg>\n"]))


@contextmanager
def run_collector(folder: Path, discard: bool = False) -> Iterator[Collector]:
    """Run a collector process within the context.

    Args:
        folder: folder for the files of an installed collector.
        discard: run this module's collector, and discard all requests (lowest overhead).
    """
    if not discard and (command := shutil.which("otelcol") or shutil.which("otelcol-contrib")):
        ports, path = [_free_port(), _free_port()], folder / "spans.json"
        configuration = folder / "collector.yaml"
        configuration.write_text(CONFIGURATION.format(grpc=ports[0], http=ports[1], path=path))
        path.touch()
        process = subprocess.Popen([command, "--config", str(configuration)], text=True)
        tail = subprocess.Popen(["tail", "-n", "+1", "-F", str(path)], stdout=subprocess.PIPE, text=True)
        assert tail.stdout is not None
        _wait_for(ports[0])
        lines, processes = tail.stdout, [tail, process]
    else:
        process = subprocess.Popen(
            [sys.executable, __file__, *["discard"] * discard], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        ports = [int(port) for port in process.stdout.readline().split()]
        lines, processes = process.stdout, [process]
    try:
        yield Collector(process, lines, f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}/v1/traces")
    finally:
        for each in processes:
            each.kill()
            each.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _spans(request: dict[str, Any]) -> Iterator[ReceivedSpan]:
    """Spans of an export request in OTLP's JSON encoding."""
    for resource_spans in request.get("resourceSpans", []):
        resource = _attributes(resource_spans["resource"])
        for scope_spans in resource_spans["scopeSpans"]:
            for span in scope_spans["spans"]:
                status = span.get("status", {})
                yield ReceivedSpan(
                    name=span["name"],
                    trace=span["traceId"],
                    span=span["spanId"],
                    parent=span.get("parentSpanId", ""),
                    kind={1: "internal", 2: "server"}[span["kind"]],
                    begun=int(span["startTimeUnixNano"]),
                    ended=int(span["endTimeUnixNano"]),
                    status={0: "", 1: "ok", 2: "error"}[status.get("code", 0)],
                    message=status.get("message", ""),
                    attributes=_attributes(span),
                    events=[event["name"] for event in span.get("events", [])],
                    resource=resource,
                )


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {attribute["key"]: _value(attribute["value"]) for attribute in holder.get("attributes", [])}


def _value(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [_value(each) for each in content.get("values", [])]
    return int(content) if kind == "intValue" else content


def main() -> None:
    import grpc
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

    lock, discard = threading.Lock(), "discard" in sys.argv

    def receive(request: Any) -> Any:
        if discard:
            return messages.ExportTraceServiceResponse()
        document = MessageToDict(request, use_integers_for_enums=True)
        for resource_spans in document.get("resourceSpans", []):
            for scope_spans in resource_spans["scopeSpans"]:
                for span in scope_spans["spans"]:  # ids are hexadecimal in OTLP's JSON, base64 in protobuf's
                    for key in ("traceId", "spanId", "parentSpanId"):
                        if key in span:
                            span[key] = _hexadecimal(span[key])
        with lock:
            print(json.dumps(document), flush=True)
        return messages.ExportTraceServiceResponse()

    class Receiver(services.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            return receive(request)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            response = receive(messages.ExportTraceServiceRequest.FromString(body)).SerializeToString()
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(response)))
            self.end_headers()
            self.wfile.write(response)

        def log_message(self, *_: Any) -> None:
            pass

    server = grpc.server(ThreadPoolExecutor(4))
    services.add_TraceServiceServicer_to_server(Receiver(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(port, http_server.server_address[1], flush=True)
    http_server.serve_forever()


def _hexadecimal(text: str) -> str:
    from base64 import b64decode

    return b64decode(text).hex()


if __name__ == "__main__":
    main()
