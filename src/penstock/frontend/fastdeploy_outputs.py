"""Request outputs with FastDeploy's attributes."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

from penstock.text import ToolCall

from .outputs import CompletionOutput, PositionLogprobs, RequestOutput

OK, FAILED = 200, 500
"""Values of FastDeploy's ``error_code`` for a successful and a failed request."""


class SequenceOutputs(list[CompletionOutput]):
    """Sequences of a request. FastDeploy's attributes return values of the first sequence.

    FastDeploy's ``outputs`` is one sequence, and vLLM's is a list; this class can be used as either.
    """

    send_idx = decode_type = 0
    logprob = top_logprobs = draft_top_logprobs = draft_token_ids = None
    speculate_metrics = delta_message = multipart = num_image_tokens = None

    @property
    def index(self) -> int:  # type: ignore[override]
        return self[0].index

    @property
    def token_ids(self) -> list[int]:
        return self[0].token_ids

    @property
    def text(self) -> str:
        """Generated text; for a chat the content without reasoning and tool calls."""
        return self[0].message.content if self[0].message else self[0].text

    @property
    def reasoning_content(self) -> str | None:
        return (self[0].message.reasoning_content or None) if self[0].message else None

    @property
    def reasoning_token_num(self) -> int:
        return self[0].reasoning_tokens

    @property
    def tool_calls(self) -> list[ToolCall] | None:
        return (self[0].message.tool_calls or None) if self[0].message else None

    @property
    def completion_tokens(self) -> str:
        """Generated text, including reasoning and tool calls."""
        return self[0].text

    @property
    def logprobs(self) -> list[PositionLogprobs] | None:
        return self[0].logprobs


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request with FastDeploy's names: Unix timestamps and durations, both in seconds."""

    arrival_time: float
    inference_start_time: float
    """Unix timestamp of the first step."""
    first_token_time: float | None
    """Duration from the first step to the first token."""
    time_in_queue: float
    model_forward_time: float | None = None
    model_execute_time: float | None = None


class FastDeployOutput(RequestOutput):
    """``RequestOutput`` with FastDeploy's attributes."""

    num_input_image_tokens = num_input_video_tokens = 0

    @classmethod
    def of(cls, output: RequestOutput) -> FastDeployOutput:
        given = {field.name: getattr(output, field.name) for field in fields(output)}
        return cls(**given | {"outputs": SequenceOutputs(output.outputs)})

    @property
    def metrics(self) -> RequestMetrics:  # type: ignore[override]
        times, offset = self.times, time.time() - time.monotonic()
        begun = times.arrived + times.queued
        first = None if times.first_token is None else times.first_token - begun
        return RequestMetrics(times.arrived + offset, begun + offset, first, times.queued)

    @property
    def error_code(self) -> int:
        return FAILED if self.outputs[0].failure else OK

    @property
    def error_msg(self) -> str | None:
        return self.outputs[0].failure.message if self.outputs[0].failure else None
