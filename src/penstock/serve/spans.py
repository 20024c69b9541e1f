"""OpenTelemetry spans of requests in all dialects: one span per request, with a child span per prompt.

Attributes follow OpenTelemetry's semantic conventions for HTTP, RPC and generative AI, and vLLM's spans.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.config.logs import TRACE
from penstock.core import Failure, PenstockError, SamplingParams
from penstock.core.errors import CANCELLED, INTERNAL
from penstock.frontend.outputs import RequestOutput, Resume

if TYPE_CHECKING:
    from penstock.tracing import Span

REQUEST = "llm_request"
"""Name of a prompt's span (as in vLLM)."""


@contextmanager
def log_trace(span: Span) -> Iterator[None]:
    """Add trace and span id to the log lines written within the block."""
    token = TRACE.set(span.log_fields)
    try:
        yield
    finally:
        TRACE.reset(token)


def end_http(span: Span, method: str, route: str, status: int, failure: Failure | None) -> None:
    """End the span of an HTTP request.

    As in OpenTelemetry's conventions, a 4xx status is not an error of the server. A stream that fails after its status
    was sent, or that the client closes, is an error.

    Args:
        status: HTTP status; 0: no response was sent.
    """
    if span.sampled:
        span.rename(f"{method} {route}")
        span.set({"http.route": route, "http.response.status_code": status or None})
        if failure and (status < 400 or status >= 500):
            span.fail(failure.code.value, failure.message)
        elif failure:
            span.set({"error.type": failure.code.value})
    span.end()


def end_rpc(span: Span, status: int, failure: Failure | None) -> None:
    """End the span of a gRPC request. ``status`` is the gRPC status code."""
    span.set({"rpc.grpc.status_code": status})
    if failure:
        span.fail(failure.code.value, failure.message)
    span.end()


class GenerationSpan:
    """The span of one prompt. Use it as a context manager: the span ends at the end of the block at the latest."""

    def __init__(self, parent: Span, begun: float, model: str, request_id: str, sampling: SamplingParams) -> None:
        self._begun = begun
        self._span = parent.child(REQUEST, begun)
        self._span.set(
            {
                "gen_ai.provider.name": "penstock",
                "gen_ai.request.model": model,
                "gen_ai.request.id": request_id,
                "gen_ai.request.n": sampling.n,
                "gen_ai.request.choice.count": sampling.n,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.seed": sampling.seed,
            }
        )

    @property
    def context(self) -> dict[str, str]:
        """W3C trace context for the engine."""
        return self._span.context

    def resume(self, resume: Resume) -> None:
        """Record the pause between the loss of an engine and the next output."""
        span = self._span.child("resume", resume.lost, {"penstock.reason": resume.reason})
        span.set({"penstock.recomputed_tokens": resume.num_tokens})
        span.end(resume.continued)

    def finish(self, output: RequestOutput) -> None:
        """Set the attributes of the finished request, and end the span."""
        span, times = self._span, output.times
        tokens = sum(len(completion.token_ids) for completion in output.outputs)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "embeddings" if output.embedding else "text_completion",
            "gen_ai.response.id": output.request_id,
            "gen_ai.response.finish_reasons": [str(each.finish_reason) for each in output.outputs],
            "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.output_tokens": tokens,
            "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": tokens,
            "gen_ai.usage.num_sequences": len(output.outputs),
        }
        if any(each.message for each in output.outputs):
            attributes["gen_ai.operation.name"] = "chat"
        if times.sent is not None:
            span.child("preprocess", self._begun).end(times.sent)
        if times.sent is not None and times.first_token is not None and times.last_token is not None:
            scheduled = times.sent + times.queued
            attributes |= {
                "gen_ai.latency.time_in_queue": times.queued,
                "gen_ai.latency.time_to_first_token": times.first_token - times.arrived,
                "gen_ai.latency.e2e": times.last_token - times.arrived,
                "gen_ai.latency.time_in_model_prefill": max(times.first_token - scheduled, 0.0),
                "gen_ai.latency.time_in_model_decode": times.last_token - times.first_token,
                "gen_ai.latency.time_in_model_inference": max(times.last_token - scheduled, 0.0),
            }
            if tokens:
                detokenize = span.child("detokenize", times.first_token, {"penstock.busy_seconds": times.detokenizing})
                detokenize.end()
        span.set(attributes)
        span.end()

    def __enter__(self) -> GenerationSpan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._span.ended:
            return
        if isinstance(error, PenstockError):
            failure = error.failure
        else:
            failure = INTERNAL if isinstance(error, Exception) else CANCELLED
        self._span.fail(failure.code.value, failure.message)
        self._span.end(time.monotonic())
