"""Middleware: request ids, request log and fair scheduling; API keys; health-only ports; root path."""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.cluster.http import INSTANCE_PATH, REGISTER_PATH
from penstock.frontend.fair_queue import FairQueue
from penstock.version import __version__

from ..metrics import Metrics
from ..spans import end_http, log_trace
from .reply import refuse
from .request_record import REFUSED, RequestRecord, record_of
from .routes import ErrorFormats
from .status import STATUS
from .unexpected import unexpected
from .unknown_fields import HEADER, UnknownFieldLog, UnknownFields

if TYPE_CHECKING:
    from penstock.tracing import Span, Tracer

logger = logging.getLogger("penstock.requests")

SIGNED_PATHS = frozenset((INSTANCE_PATH, REGISTER_PATH))
"""Paths that require the cluster's signature instead of an API key; logged like ``PUBLIC_PATHS``."""
PUBLIC_PATHS = frozenset(
    ("/health", "/ready", "/live", "/v2/health/live", "/v2/health/ready", "/version", "/metrics", "/ping")
)
"""Paths that require no API key and are logged at level debug unless they fail."""
SERVER = (b"server", f"penstock/{__version__}".encode())
"""Header of every response. It identifies Penstock, because Triton's clients expect the name ``triton`` in metadata."""
WEB_PREFIX = "/web/"
"""Prefix of the web page's paths other than ``/``; logged like ``PUBLIC_PATHS``."""
HEALTH_PATHS = PUBLIC_PATHS | {"/config-info"}
"""Paths served on ``health_port`` and ``metrics_port``."""
WEIGHTS_HEADER = "x-weights-version"
"""Header of generated answers: version of the model's weights."""
TRUNCATED_HEADER = "x-penstock-truncated"
"""Header with the number of prompt tokens that were removed to fit a limit."""
FINGERPRINT_HEADER = "x-penstock-fingerprint-mismatch"
"""Header of all answers if the fingerprints of instances differ."""
TOOLS_HEADER = "x-penstock-tool-strictness"
"""Header of answers with tools whose calls are less constrained than requested: ``name=level``, or ``*=level`` for all
tools, optionally followed by ``;`` and the field that is the reason."""
MAX_TOOLS = 32
"""Maximum number of tools in the header."""
RESUMED_HEADER = "x-penstock-resumed-across"
"""Header of an answer that another engine has continued, although its results may differ: kernels and weights of that
engine. A stream that has begun gets a comment instead."""
Refuse = Callable[[Scope, Send], Awaitable[None]]
QUIET_STATUSES = (200, 304, 503)
"""Statuses of ``PUBLIC_PATHS`` that are logged at level debug."""
MAX_USER_AGENT = 200
"""Maximum number of characters of a user agent in the log."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""Valid ``X-Request-Id``. An invalid id is replaced by a new id."""


def levels_header(levels: Mapping[str, str]) -> str:
    """Value of ``TOOLS_HEADER``."""
    shown = [f"{name}={level}" for name, level in levels.items()][:MAX_TOOLS]
    return ", ".join([*shown, "..."] if len(levels) > MAX_TOOLS else shown)


class RequestLogMiddleware:
    """Assigns the request id (``X-Request-Id``), and logs each request at its end.

    Starts one request per iteration of the event loop, clients round-robin, so that a burst of cheap requests does not
    delay streams.

    Unknown fields of a request are listed in a response header, and logged once per client. An unexpected exception
    becomes a response 500, and its traceback is logged.

    Args:
        strict: reject requests with unknown fields.
        tracer: creates spans of requests other than health checks and the web page; None: tracing is off.
        fingerprints: returns the fingerprints of all instances, which are sent in a header if they differ; None if they
            cannot differ.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        error_formats: ErrorFormats,
        strict: bool = False,
        tracer: Tracer | None = None,
        fingerprints: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self._app = app
        self._tracer = tracer
        self._fingerprints = fingerprints
        self._fair_queue = FairQueue()
        self._metrics = metrics
        self._error_formats = error_formats
        self._strict = strict
        self._unknown_field_log = UnknownFieldLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get("x-request-id", "")
        request_id = client_id if REQUEST_ID.fullmatch(client_id) else uuid4().hex
        address = (scope.get("client") or ("",))[0]
        record = RequestRecord(request_id, scope["path"], address=address, unknown=UnknownFields(self._strict))
        scope["penstock.record"] = record
        record.span = self._span(scope, record)
        started, status = time.monotonic(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", record.request_id.encode()), SERVER]
                if record.weights_version:
                    added.append((WEIGHTS_HEADER.encode(), record.weights_version.encode()))
                if names := record.unknown.header:
                    added.append((HEADER.encode(), names.encode()))
                if levels := record.tool_levels:
                    added.append((TOOLS_HEADER.encode(), levels_header(levels).encode()))
                if record.num_truncated:
                    added.append((TRUNCATED_HEADER.encode(), str(record.num_truncated).encode()))
                if record.changed_engines:
                    added.append((RESUMED_HEADER.encode(), "; ".join(record.changed_engines).encode()))
                if self._fingerprints and len(several := self._fingerprints()) > 1:
                    added.append((FINGERPRINT_HEADER.encode(), ", ".join(several).encode()))
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        with log_trace(record.span) if record.span else nullcontext():
            try:
                if refused := scope.get(REFUSED):
                    record.failure = refused.failure
                    status_line = refused.status if refused.status != STATUS[refused.failure.code] else None
                    await refuse(send_with_headers, refused.failure, self._error_formats.of(scope), status_line)
                else:
                    await self._fair_queue.wait_turn(record.address)
                    await self._app(scope, receive, send_with_headers)
            except Exception as error:
                record.failure = unexpected(error, record.request_id)
                if not status:
                    await refuse(send_with_headers, record.failure, self._error_formats.of(scope))
            finally:
                record.release_memory()
                self._log(scope, record, status, time.monotonic() - started)
                if record.span:
                    route = getattr(scope.get("route"), "path", "other")
                    end_http(record.span, scope["method"], route, status, record.failure)

    def _span(self, scope: Scope, record: RequestRecord) -> Span | None:
        path = scope["path"]
        if self._tracer is None or path in PUBLIC_PATHS | SIGNED_PATHS or path == "/" or path.startswith(WEB_PREFIX):
            return None
        attributes = {
            "http.request.method": scope["method"],
            "url.path": path,
            "url.scheme": scope.get("scheme", "http"),
            "network.protocol.version": scope.get("http_version", "1.1"),
            "client.address": (scope.get("client") or ("",))[0],
            "user_agent.original": (headers := Headers(scope=scope)).get("user-agent", ""),
            "penstock.request_id": record.request_id,
        }
        return self._tracer.server_span(scope["method"], headers, record.arrived, attributes)

    def _log(self, scope: Scope, record: RequestRecord, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.http_responses.labels(path=route, status=str(status or 499)).inc()
        fields = {"id": record.request_id, "status": status, "seconds": seconds}
        fields["client"] = (scope.get("client") or ("",))[0]
        if route not in PUBLIC_PATHS:
            fields["dialect"] = self._error_formats.of(scope).dialect
        fields |= record.log_fields
        if record.unknown.places and not record.failure:
            self._unknown_field_log.log(record.request_id, _client(scope), record.unknown)
        failed = STATUS[record.failure.code] if record.failure else status  # a failed stream has status 200
        level = logging.ERROR if failed >= 500 else logging.INFO
        is_quiet = route in PUBLIC_PATHS | SIGNED_PATHS or route == "/" or route.startswith(WEB_PREFIX)
        if is_quiet and status in QUIET_STATUSES:
            level = logging.DEBUG  # health probes and the live view send requests every second
        if record.failure and route not in PUBLIC_PATHS:
            self._metrics.record_failure(record.failure)
        if record.failure:
            fields |= {"error": record.failure.code.value, "reason": record.failure.message}
        logger.log(level, "%s %s", scope["method"], quote(scope["path"][:200]), extra={"fields": fields})


def _client(scope: Scope) -> str:
    """Address and user agent of the client."""
    agent = Headers(scope=scope).get("user-agent", "")
    return f"{(scope.get('client') or ('', 0))[0]} {agent[:MAX_USER_AGENT]}".strip()


class RootPathMiddleware:
    """Removes ``root_path`` from paths. Paths without it are also served: a proxy may have removed it.

    Args:
        prefix: the root path, with a leading and without a trailing slash.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix) or "/"}
        await self._app(scope, receive, send)


class HealthPortMiddleware:
    """Serves only ``HEALTH_PATHS`` on the given ports."""

    def __init__(self, app: ASGIApp, ports: frozenset[int], refuse: Refuse) -> None:
        self._app = app
        self._ports = ports
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["server"][1] in self._ports and scope["path"] not in HEALTH_PATHS:
            await self._refuse(scope, send)
        else:
            await self._app(scope, receive, send)


class ApiKeyMiddleware:
    """Requires an API key: ``Authorization: Bearer KEY``, ``Authorization: KEY`` or ``x-api-key: KEY``.

    If only admin keys are set, requests without a key are accepted, too.

    Args:
        public: further paths that can be read without a key.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, refuse: Refuse, public: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._public = PUBLIC_PATHS | SIGNED_PATHS
        self._public_to_read = public
        self._keys = keys
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._public:
            await self._app(scope, receive, send)
            return
        if scope["path"] in self._public_to_read and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("authorization") or headers.get("x-api-key") or ""
        client = self._keys.client_of(given.encode("latin-1"))  # headers were decoded as latin-1
        if client is None:
            await self._refuse(scope, send)
            return
        client.enter(record_of(scope))
        await self._app(scope, receive, send)


class Client(NamedTuple):
    """Permissions of an API key."""

    tenant: str = ""
    """Name derived from the key; empty unless the server has several API keys."""
    has_key: bool = False
    may_control: bool = True
    """True if the client may change the server for all clients."""

    def enter(self, record: RequestRecord) -> None:
        """Set the permissions of a request of this client."""
        record.tenant, record.has_key, record.may_control = self


def tenant_of(key: bytes) -> str:
    """Derive the owner name of the data stored with a key. Do not publish it: short keys can be guessed from it."""
    return sha256(key).hexdigest()[:16]


class ApiKeys:
    """API keys of a server. Without keys, every request is authorized.

    Args:
        keys: keys of ``--api-key``.
        admin_keys: keys of ``--admin-api-key``. Only these keys may change the server for all clients. Without admin
            keys, a single key may do so, but none of several keys.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self._keys = [key.encode() for key in keys]
        self._admin_keys = [key.encode() for key in admin_keys]
        self._several = len(set(self._keys)) > 1

    def client_of(self, given: bytes) -> Client | None:
        """Return the client for a value of ``Authorization``; None if the key is invalid. Compares in constant time."""
        given = given.strip()
        scheme, _, rest = given.partition(b" ")
        key = rest.strip() if scheme.lower() == b"bearer" else given
        is_key = any([hmac.compare_digest(key, known) for known in self._keys])
        is_admin = any([hmac.compare_digest(key, known) for known in self._admin_keys])
        if not is_key and not is_admin:
            return None if self._keys else Client(may_control=not self._admin_keys)
        tenant = tenant_of(key) if self._several else ""
        return Client(tenant, True, is_admin or not (self._several or self._admin_keys))
