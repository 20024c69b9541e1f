"""The messages of a conversation, its tools, and its sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from penstock.config.settings import did_you_mean
from penstock.core import Code, PenstockError, SamplingParams
from penstock.core.errors import invalid
from penstock.core.json_files import read_json_file

from .tools import ToolCall

FIELDS = (
    "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed max_tokens min_tokens "
    "ignore_eos stop stop_token_ids include_stop_str_in_output logit_bias bad_words allowed_token_ids "
    "skip_special_tokens chat_template_kwargs"
).split()
"""Parameters of requests that ``/set`` accepts."""
LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
TEMPLATE_KWARGS = "chat_template_kwargs"
"""The parameter that is no sampling parameter: variables of the chat template, as ``{"enable_thinking": true}``."""


class Message(TypedDict):
    """A message in OpenAI's form; a content with images is a list of parts."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]


class Conversation:
    """Messages of user, model and tools, after an optional system prompt."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.sampling: dict[str, Any] = {}
        """Parameters that differ from the model's defaults, as JSON values."""
        self.tools: list[dict[str, Any]] = []
        """Tools that the model may call, as a request has them."""
        self.images: list[str] = []
        """URLs of the images that go with the next question."""
        self._turns: list[Message] = []
        self._unanswered: Message | None = None

    @property
    def messages(self) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self._turns

    def ask(self, question: str) -> list[Message]:
        """The messages with a new question, which becomes part of the conversation once it is answered."""
        content: str | list[dict[str, Any]] = question
        if self.images:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            content = [*parts, {"type": "text", "text": question}]
        self.images = []
        self._unanswered = {"role": "user", "content": content}
        return [*self.messages, self._unanswered]

    def ask_again(self) -> list[Message]:
        """The messages with a question that got no answer, or else the last one, whose answer goes. Raises
        ``PenstockError`` where there is none."""
        if self._unanswered is None:
            self._unanswered = self._drop_turn()
        return [*self.messages, self._unanswered]

    def answered(self, text: str, calls: Sequence[ToolCall] = ()) -> None:
        """Add the pending question, if there is one, with its answer, or the beginning of one."""
        answer: Message = {"role": "assistant", "content": text}
        if calls:
            answer = {"role": "assistant", "content": text or None, "tool_calls": [call.as_dict() for call in calls]}
        self._turns += [answer] if self._unanswered is None else [self._unanswered, answer]
        self._unanswered = None

    def add_result(self, call: ToolCall, result: str) -> None:
        """Add the result of a call of the last answer."""
        self._turns.append({"role": "tool", "content": result, "tool_call_id": call.id})

    def undo(self) -> str:
        """Remove the last question and all that came after it; returns the question. Raises ``PenstockError`` where
        there is none."""
        content = self._drop_turn()["content"]
        if isinstance(content, list):
            return " ".join(part["text"] for part in content if part["type"] == "text")
        return content or ""

    def clear(self) -> None:
        """Forget all but the system prompt and the tools."""
        self._turns, self._unanswered, self.images = [], None, []

    def set(self, name: str, value: Any) -> None:
        """Set a parameter; None restores the model's default.

        Raises ``PenstockError`` (``invalid``) for an unknown field, with the nearest known one, or a wrong value.
        """
        if name not in FIELDS:
            raise invalid("set", f"no such field as {name}{did_you_mean(name, FIELDS)}")
        if name == TEMPLATE_KWARGS and not isinstance(value, dict | None):
            raise invalid(name, 'must be a JSON object, as {"enable_thinking": true}')
        rest = {other: kept for other, kept in self.sampling.items() if other != name}
        value = [value] if name in LISTS and not isinstance(value, list | None) else value
        changed = rest if value is None else rest | {name: value}
        to_sampling_params(changed)
        self.sampling = changed

    def save(self, path: Path) -> None:
        """Write all messages as JSON; raises ``PenstockError`` (``invalid``) where that is impossible."""
        text = json.dumps(self.messages, ensure_ascii=False, indent=1)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise invalid("save", f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Go on with saved messages; raises ``PenstockError`` (``invalid``) where there are none."""
        try:
            messages = msgspec.convert(read_json_file(path, "load"), list[Message])
        except msgspec.ValidationError as error:
            raise invalid("load", f"{path} holds no messages: {error}") from error
        self.clear()
        first = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        self.system = first if isinstance(first, str) else ""
        self._turns = messages[1:] if isinstance(first, str) else messages

    def _drop_turn(self) -> Message:
        """Remove the last question and all that came after it; returns the question."""
        questions = [index for index, message in enumerate(self._turns) if message["role"] == "user"]
        if not questions:
            raise PenstockError(Code.NOT_FOUND, "nothing was said yet")
        question = self._turns[questions[-1]]
        del self._turns[questions[-1] :]
        return question


def to_sampling_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from their fields; raises ``PenstockError`` (``invalid``) for a value that cannot be."""
    fields = {name: value for name, value in sampling.items() if name != TEMPLATE_KWARGS}
    try:
        return msgspec.convert({"max_tokens": None} | fields, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise invalid(path.strip(".`") or "set", message) from error
