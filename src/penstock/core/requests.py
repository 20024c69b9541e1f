"""Requests: what the frontend sends to the engine. Encoded with msgspec."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .audio import AudioInput
from .errors import PenstockError, invalid
from .multimodal import ImageInput
from .pooling import PoolingParams
from .sampling import SamplingParams


class ReasoningSpan(msgspec.Struct, frozen=True, array_like=True):
    """The token ids around a sequence's reasoning (``<think>…</think>``)."""

    begin: int
    """Start token."""
    end: int
    """End token."""
    answer: tuple[int, ...] = ()
    """Tokens forced after ``end`` where the answer is guided, or the reasoning was cut off."""
    begun: bool = False
    """Whether the prompt ends within the reasoning; otherwise the first generated token may be ``begin``."""
    opening: tuple[int, ...] = ()
    """Tokens forced first, of which ``begin`` is one, unless the reasoning has begun; otherwise none are."""


def trace_facts(trace: Mapping[str, str]) -> dict[str, str]:
    """The ``trace_id`` of a W3C trace context, for lines of the log; nothing where there is none."""
    return {"trace_id": trace["traceparent"].split("-")[1]} if trace else {}


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to the engine."""

    request_id: str
    prompt: list[int]
    """Token ids, at least one."""
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence unless ``ignore_eos`` is set."""
    priority: int = 0
    """Lower runs first under ``scheduling_policy`` ``priority``."""
    deadline: float | None = None
    """Seconds on the monotonic clock; after it the request fails with ``timeout``."""
    pooling: PoolingParams | None = None
    """Embeds the prompt; nothing is generated, and ``sampling`` is ignored."""
    external_id: str = ""
    """The client's id, which must be unique among open requests, perhaps after its tenant and a zero byte; empty for
    none."""
    second_text: int = 0
    """Of a pair of texts, index of the second one's first token (BERT's token type 1); 0 for a single text."""
    adapter: str = ""
    """Name of a loaded LoRA adapter; empty for the base model."""
    cache_salt: str = ""
    """Cached prefixes are shared only among requests of the same salt."""
    reasoning: ReasoningSpan | None = None
    """Reasoning before the output, which guided decoding exempts, or whose length is limited."""
    log_id: str = ""
    """The request's id in the server's log, which engines' logs name, too; empty for ``request_id``."""
    prefill: tuple[str, ...] = ()
    """KV transfer addresses (host:port) of prefill instances that may compute the prompt, the preferred one first."""
    images: tuple[ImageInput, ...] = ()
    """Images of the prompt, in the order of their placeholders."""

    audio: AudioInput | None = None
    """Of models that transcribe audio, what they hear."""
    trace: dict[str, str] = {}
    """W3C trace context (``traceparent``, ``tracestate``) of the span that it belongs to; empty without traces."""

    @property
    def log_facts(self) -> dict[str, str]:
        """What lines of the log about it name: ``trace_id``, of a traced request."""
        return trace_facts(self.trace)

    @property
    def is_sampled(self) -> bool:
        """Whether spans are to be recorded for it."""
        return bool(self.trace) and bool(int(self.trace["traceparent"][-2:], 16) & 1)

    @property
    def log_name(self) -> str:
        """What logs call it."""
        return self.log_id or self.request_id


ENCODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, OverflowError)
"""Exceptions of encoding or decoding a request whose values are not of their fields' types."""


def invalid_request(request: EngineRequest, error: Exception) -> PenstockError:
    """The error (``invalid``) for a request that cannot be encoded or decoded, with the field's name.

    Args:
        error: one of ``ENCODE_ERRORS``.
    """
    if isinstance(error, UnicodeEncodeError):
        return invalid(_invalid_text_field(request), f"is not valid text: {error}")
    field = str(error).rpartition("$.")[2].rstrip("`").rpartition(".")[2].partition("[")[0]
    return invalid(field if "$." in str(error) else "request", str(error))


def _invalid_text_field(request: EngineRequest) -> str:
    """The field that has an unpaired surrogate."""
    for part in (request, request.sampling):
        for name in part.__struct_fields__:
            try:
                msgspec.json.encode(getattr(part, name))
            except UnicodeEncodeError:
                if name != "sampling":
                    return name
    return "request"
