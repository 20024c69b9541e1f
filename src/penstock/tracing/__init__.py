"""Traces of requests, sent to an OpenTelemetry collector. OpenTelemetry is imported only if traces are on."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.config.options import LogOptions
from penstock.core.errors import invalid

if TYPE_CHECKING:
    from .tracer import Span, Tracer


def check(options: LogOptions) -> None:
    """Raise ``PenstockError`` (``invalid``) if ``otlp_endpoint`` is set and traces cannot be sent."""
    endpoint = options.otlp_endpoint
    if not endpoint:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise invalid("otlp_endpoint", "must begin with http:// or https://, such as http://localhost:4317")
    try:
        url = urlsplit(endpoint)
        valid = bool(url.hostname) and url.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise invalid("otlp_endpoint", "is not a URL such as http://localhost:4317 (write / in a password as %2F)")
    if find_spec("opentelemetry") is None or any(find_spec(f"opentelemetry.{name}") is None for name in MODULES):
        raise invalid("otlp_endpoint", "needs OpenTelemetry, which is not installed: pip install 'penstock-llm[otel]'")


MODULES = ("sdk", "exporter", "exporter.otlp", "exporter.otlp.proto", "exporter.otlp.proto.grpc")
"""Modules of the extra ``otel``. A package precedes its modules, because ``find_spec`` imports the package."""


def start_tracer(options: LogOptions, process: str) -> Tracer | None:
    """Start the tracer of a process; returns None if traces are off.

    Args:
        process: name of the process, as in the log.

    Raises ``PenstockError`` as ``check``.
    """
    if not options.otlp_endpoint:
        return None
    check(options)
    from .tracer import Tracer

    return Tracer(options, process)
