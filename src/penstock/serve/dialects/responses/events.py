"""Output items of a response, and events of a streamed response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.core import Code, PenstockError
from penstock.frontend.outputs import RequestOutput
from penstock.serve.chat.generation import CallDelta, Delta
from penstock.serve.http.reply import named_event
from penstock.text import TextPart

Item = dict[str, Any]
DIFFERENT = (
    "the process that computed the response has ended, and the engine that continues it computes other bits than the "
    "stored part of the stream (other kernels or weights): send the request again"
)


class Events:
    """Encoder of server-sent events with consecutive sequence numbers, from 0."""

    def __init__(self) -> None:
        self.last = -1
        """Sequence number of the last event."""

    def event(self, kind: str, **fields: Any) -> bytes:
        self.last += 1
        return named_event(kind, {"type": kind, "sequence_number": self.last, **fields})


class EventLog(Events):
    """Events of a streamed background response. They are the same in every process that computes the response: events
    that an earlier process has stored are not added again.

    Args:
        stored: events that earlier processes have stored.
    """

    def __init__(self, stored: Sequence[bytes] = ()) -> None:
        super().__init__()
        self._stored = stored
        self._new: list[bytes] = []
        """Events that are not stored yet, up to ``last``."""
        self.changed = asyncio.Event()
        """Set when events are stored, and when this process will store no more. Replaced each time."""

    def event(self, kind: str, **fields: Any) -> bytes:
        data = super().event(kind, **fields)
        if self.last >= len(self._stored):
            self._new.append(data)
        elif data != self._stored[self.last]:
            raise PenstockError(Code.UNAVAILABLE, DIFFERENT)
        return data

    def end(self, kind: str, **fields: Any) -> None:
        """Add a final event after all stored events."""
        self.last = max(self.last, len(self._stored) - 1)
        self.event(kind, **fields)

    @property
    def not_stored(self) -> tuple[int, bytes]:
        """Sequence number of the last event, and the events that are not stored yet."""
        return self.last, b"".join(self._new)

    def mark_stored(self, last: int) -> None:
        """Forget the events up to the sequence number ``last``, which are stored now, and wake the readers."""
        del self._new[: len(self._new) - (self.last - last)]
        self.wake_readers()

    def wake_readers(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class OutputItemStream:
    """Builder of the output items of a response (reasoning, message, function calls) and of their events.

    Args:
        name: id of the response; it is part of the ids of the items.
        event: encodes an event from its type and fields.
        namespaces: name in the prompt → namespace and name of the function, for functions in namespaces.
    """

    def __init__(
        self, name: str, event: Callable[..., bytes], namespaces: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        self.items: list[Item] = []
        """Output items; the last one may be in progress."""
        self._name = name
        self._event = event
        self._namespaces = namespaces or {}
        self._open = False
        """True if the last item is in progress."""

    def add(self, delta: Delta) -> bytes:
        """Add a delta to the items; returns the encoded events."""
        events = b""
        for part in delta:
            events += self._call(part) if isinstance(part, CallDelta) else self._text(part)
        return events

    def end(self, status: str = "completed") -> bytes:
        """End the item in progress; returns its final events, or nothing if no item is in progress."""
        if not self._open:
            return b""
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            fields = {"arguments": item["arguments"], "name": item["name"]}
            events = self._item_event("response.function_call_arguments.done", **fields)
        elif item["type"] == "reasoning":
            events = self._item_event("response.reasoning_text.done", content_index=0, text=self._content["text"])
        else:
            events = self._item_event(
                "response.output_text.done", content_index=0, text=self._content["text"], logprobs=[]
            )
            events += self._item_event("response.content_part.done", content_index=0, part=self._content)
        return events + self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    @property
    def _content(self) -> Item:
        result: Item = self.items[-1]["content"][0]
        return result

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """Encode an event of the last item."""
        return self._event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)

    def _text(self, part: TextPart) -> bytes:
        events = self._ensure_open("reasoning" if part.kind == "reasoning" else "message")
        self._content["text"] += part.text
        if part.kind == "reasoning":
            return events + self._item_event("response.reasoning_text.delta", content_index=0, delta=part.text)
        return events + self._item_event("response.output_text.delta", content_index=0, delta=part.text, logprobs=[])

    def _ensure_open(self, kind: str) -> bytes:
        """Begin an item of the type ``kind``, unless the item in progress has this type; returns the encoded events."""
        if self._open and self.items[-1]["type"] == kind:
            return b""
        if kind == "reasoning":
            return self._begin({"type": kind, "summary": []}, {"type": "reasoning_text", "text": ""})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events = self._begin({"type": kind, "role": "assistant"}, part)
        return events + self._item_event("response.content_part.added", content_index=0, part=part)

    def _begin(self, item: Item, part: Item | None = None) -> bytes:
        ended = self.end()
        name = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[item["type"]]
        self.items.append({"id": f"{name}_{self._name}_{len(self.items)}", **item, "status": "in_progress"})
        if part:
            self.items[-1]["content"] = []
        self._open = True
        events = self._event("response.output_item.added", output_index=len(self.items) - 1, item=self.items[-1])
        if part:
            self.items[-1]["content"].append(part)
        return ended + events

    def _call(self, part: CallDelta) -> bytes:
        events = b""
        if part.id:
            called = {"name": part.name}
            if part.name in self._namespaces:
                called = dict(zip(("namespace", "name"), self._namespaces[part.name], strict=True))
            events += self._begin({"type": "function_call", "call_id": part.id, **called, "arguments": ""})
        if not part.arguments:
            return events
        self.items[-1]["arguments"] += part.arguments
        return events + self._item_event("response.function_call_arguments.delta", delta=part.arguments)


def usage_of(output: RequestOutput) -> dict[str, Any]:
    prompt = len(output.prompt_token_ids)
    completion = sum(len(completion.token_ids) for completion in output.outputs) + output.num_discarded_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": sum(one.reasoning_tokens for one in output.outputs)},
        "total_tokens": prompt + completion,
    }
