"""Requests from the frontend to the engine. Encoded with msgspec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from .audio import AudioInput
from .errors import PenstockError, invalid
from .multimodal import ImageInput
from .pooling import PoolingParams
from .sampling import SamplingParams


class ReasoningSpan(msgspec.Struct, frozen=True, array_like=True):
    """Token ids that delimit a sequence's reasoning (``<think>…</think>``)."""

    begin: int
    """Start token."""
    end: int
    """End token."""
    answer: tuple[int, ...] = ()
    """Tokens forced after ``end`` if the answer is guided, or the reasoning has reached its maximum length."""
    begun: bool = False
    """True if the prompt ends inside the reasoning; otherwise the first generated token may be ``begin``."""
    opening: tuple[int, ...] = ()
    """Tokens forced at the start of the output, including ``begin``, unless ``begun``. Empty: the start is free."""


ISOLATED_DEATHS = 2
"""Number of engine deaths after which a request is suspected as their cause, and computed alone."""


NUM_CLEARING_TOKENS = 16
"""Number of tokens per sequence after which a request that another engine began is no longer suspected."""


class GeneratedSequence(msgspec.Struct, frozen=True, array_like=True):
    """Output so far of a sequence of a resumed request."""

    token_ids: list[int]
    """Generated tokens, without those of the prompt."""
    finished: bool = False
    """True if the sequence has ended, and is not to be continued."""


def trace_log_fields(trace: Mapping[str, str]) -> dict[str, str]:
    """Log field ``trace_id`` of a W3C trace context; empty without a context."""
    return {"trace_id": trace["traceparent"].split("-")[1]} if trace else {}


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to the engine."""

    request_id: str
    """Unique among the engine's unfinished requests."""
    prompt: list[int]
    """Token ids, at least one."""
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence unless ``ignore_eos`` is set."""
    priority: int = 0
    """Priority with ``scheduling_policy`` ``priority``; lower runs first."""
    deadline: float | None = None
    """Time after which the request fails with ``timeout``, in seconds on the monotonic clock."""
    pooling: PoolingParams | None = None
    """Parameters of a pooling request: nothing is generated, and ``sampling`` is ignored."""
    external_id: str = ""
    """Id given by the client, unique among open requests, with the tenant and a zero byte in front if there is a
    tenant. Empty: none."""
    second_text: int = 0
    """Index of the first token of the second text of a pair (BERT's token type 1); 0: a single text."""
    adapter: str = ""
    """Name of a loaded LoRA adapter; empty: base model."""
    cache_salt: str = ""
    """Cached prefixes are shared only among requests with the same salt."""
    reasoning: ReasoningSpan | None = None
    """Reasoning before the answer; set if guided decoding must not constrain it, or if its length is limited."""
    stage: Literal["before", "within", "after"] = "after"
    """Position of the output's beginning relative to the reasoning (``ToolCallParams.reasoning``)."""
    log_id: str = ""
    """Id of the request in the logs of server and engine; empty: ``request_id``."""
    prefill: tuple[str, ...] = ()
    """KV transfer addresses (host:port) of prefill instances that may compute the prompt, in order of preference."""
    images: tuple[ImageInput, ...] = ()
    """Images of the prompt, in the order of their placeholders."""

    audio: AudioInput | None = None
    """Audio input of a speech recognition model."""
    resumed: tuple[GeneratedSequence, ...] = ()
    """Output so far of each sequence of a request that another engine began, by index; empty for a new request. The
    engine computes prompt and output again, as after a preemption, and returns only the tokens that follow."""
    accepted: bool = False
    """True if another engine had accepted the request: it is not refused because of a full queue."""
    uid: int = 0
    """Random number that identifies the request in all engines that compute it; 0: none."""
    deaths: int = 0
    """Number of engines that died in a step with this request. After ``ISOLATED_DEATHS`` it is computed alone."""
    trace: dict[str, str] = {}
    """W3C trace context (``traceparent``, ``tracestate``) of the parent span; empty if the request is not traced."""

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of the request's log lines: ``trace_id`` if it is traced."""
        return trace_log_fields(self.trace)

    @property
    def is_sampled(self) -> bool:
        """True if spans are recorded for the request."""
        return bool(self.trace) and bool(int(self.trace["traceparent"][-2:], 16) & 1)

    @property
    def log_name(self) -> str:
        """Name of the request in logs."""
        return self.log_id or self.request_id


ENCODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, OverflowError)
"""Exceptions of encoding or decoding a request with values of wrong types."""


def invalid_request(request: EngineRequest, error: Exception) -> PenstockError:
    """Error (``invalid``) for a request that cannot be encoded or decoded; names the field.

    Args:
        error: one of ``ENCODE_ERRORS``.
    """
    if isinstance(error, UnicodeEncodeError):
        return invalid(_invalid_text_field(request), f"is not valid text: {error}")
    field = str(error).rpartition("$.")[2].rstrip("`").rpartition(".")[2].partition("[")[0]
    return invalid(field if "$." in str(error) else "request", readable(error))


def readable(error: Exception) -> str:
    """Message of a msgspec error, without the place: "must be int, has float"."""
    message = str(error).partition(" - at ")[0]
    types = re.match(r"Expected `([^`]*)`(?:, got `(.*)`)?(.*)", message)
    if not types:
        return message
    return f"must be {types[1]}{types[3]}" + (f", has {types[2]}" if types[2] else "")


def _invalid_text_field(request: EngineRequest) -> str:
    """Name of the first field with an unpaired surrogate; ``request`` if no field has one."""
    for part in (request, request.sampling):
        for name in part.__struct_fields__:
            try:
                msgspec.json.encode(getattr(part, name))
            except UnicodeEncodeError:
                if name != "sampling":
                    return name
    return "request"
