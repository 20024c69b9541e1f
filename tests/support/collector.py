"""A collector for OTLP: ``python tests/support/collector.py``. Prints its ports for gRPC and HTTP, then each request
as a line of JSON, but with ``discard``.

Where ``otelcol`` or ``otelcol-contrib`` is installed, ``Collector`` runs that in its place. Else the receivers are the
services of OpenTelemetry's own protocol, over gRPC and HTTP.
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
PATIENCE = 30.0


@dataclass
class ReceivedSpan:
    """A span that a collector has got."""

    name: str
    trace: str
    span: str
    parent: str
    kind: str
    begun: int
    """Nanoseconds since 1970."""
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
    """A collector in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], lines: Iterable[str], grpc: str, http: str) -> None:
        self.process = process
        self.grpc = grpc
        """Endpoint for gRPC."""
        self.http = http
        """Endpoint for HTTP."""
        self._spans: list[ReceivedSpan] = []
        self._more = threading.Condition()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def wait(self, enough: Callable[[list[ReceivedSpan]], bool], trace: str = "") -> list[ReceivedSpan]:
        """The spans of a trace, or all, once there are ``enough``."""
        deadline = time.monotonic() + PATIENCE
        with self._more:
            while not enough(found := [span for span in self._spans if trace in ("", span.trace)]):
                left = deadline - time.monotonic()
                assert left > 0, [(span.name, span.process, span.trace) for span in self._spans]
                self._more.wait(left)
        return sorted(found, key=lambda span: span.begun)

    def spans(self, trace: str, *names: str) -> dict[str, ReceivedSpan]:
        """The spans of a trace by their names, once there are all of these."""
        found = self.wait(lambda spans: set(names) <= {span.name for span in spans}, trace)
        return {span.name: span for span in found}

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            spans = list(_spans(json.loads(line)))
            with self._more:
                self._spans += spans
                self._more.notify_all()


def draw_trace(spans: list[ReceivedSpan], path: Path) -> None:
    """Draw a trace as an SVG: a bar for each span, below its parent, on one scale of time."""
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
    """A collector.

    Args:
        folder: where an installed one writes.
        discard: let our own forget what it gets, which takes the least time.
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
        lines, ended = tail.stdout, [tail, process]
    else:
        process = subprocess.Popen(
            [sys.executable, __file__, *["discard"] * discard], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        ports = [int(port) for port in process.stdout.readline().split()]
        lines, ended = process.stdout, [process]
    try:
        yield Collector(process, lines, f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}/v1/traces")
    finally:
        for one in ended:
            one.kill()
            one.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def _spans(request: dict[str, Any]) -> Iterator[ReceivedSpan]:
    """The spans of an export request, in OTLP's JSON."""
    for of_resource in request.get("resourceSpans", []):
        resource = _attributes(of_resource["resource"])
        for of_scope in of_resource["scopeSpans"]:
            for span in of_scope["spans"]:
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
    return {one["key"]: _value(one["value"]) for one in holder.get("attributes", [])}


def _value(value: dict[str, Any]) -> Any:
    ((kind, given),) = value.items()
    if kind == "arrayValue":
        return [_value(each) for each in given.get("values", [])]
    return int(given) if kind == "intValue" else given


def main() -> None:
    import grpc
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

    lock, discard = threading.Lock(), "discard" in sys.argv

    def take(request: Any) -> Any:
        if discard:
            return messages.ExportTraceServiceResponse()
        document = MessageToDict(request, use_integers_for_enums=True)
        for of_resource in document.get("resourceSpans", []):
            for of_scope in of_resource["scopeSpans"]:
                for span in of_scope["spans"]:  # OTLP's JSON has hexadecimal ids, protobuf's base64
                    for key in ("traceId", "spanId", "parentSpanId"):
                        if key in span:
                            span[key] = _hexadecimal(span[key])
        with lock:
            print(json.dumps(document), flush=True)
        return messages.ExportTraceServiceResponse()

    class Receiver(services.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            return take(request)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            answer = take(messages.ExportTraceServiceRequest.FromString(body)).SerializeToString()
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = grpc.server(ThreadPoolExecutor(4))
    services.add_TraceServiceServicer_to_server(Receiver(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    over_http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(port, over_http.server_address[1], flush=True)
    over_http.serve_forever()


def _hexadecimal(text: str) -> str:
    from base64 import b64decode

    return b64decode(text).hex()


if __name__ == "__main__":
    main()
