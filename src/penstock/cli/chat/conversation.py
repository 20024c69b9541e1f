"""Messages, tools and sampling parameters of a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from penstock.core import Code, PenstockError, SamplingParams
from penstock.core.errors import invalid
from penstock.core.json_files import read_json_file
from penstock.core.spelling import did_you_mean

from .tools import ToolCall

FIELDS = (
    "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed max_tokens min_tokens "
    "ignore_eos stop stop_token_ids include_stop_str_in_output logit_bias bad_words allowed_token_ids "
    "skip_special_tokens chat_template_kwargs"
).split()
"""Parameters that ``/set`` accepts."""
LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
TEMPLATE_KWARGS = "chat_template_kwargs"
"""Variables of the chat template, such as ``{"enable_thinking": true}``; the only entry of ``FIELDS`` that is not a
sampling parameter."""


class Message(TypedDict):
    """A message in OpenAI's format; content with images is a list of parts."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]


class Conversation:
    """System prompt, and messages of user, model and tools."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.sampling: dict[str, Any] = {}
        """Parameters that differ from the model's defaults, as JSON values."""
        self.tools: list[dict[str, Any]] = []
        """Tools that the model may call, in OpenAI's format."""
        self.images: list[str] = []
        """URLs of images to send with the next message."""
        self._turns: list[Message] = []
        self._unanswered: Message | None = None

    @property
    def messages(self) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self._turns

    def ask(self, question: str) -> list[Message]:
        """Return the messages including a new question, which is added to the conversation by ``answered``."""
        content: str | list[dict[str, Any]] = question
        if self.images:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            content = [*parts, {"type": "text", "text": question}]
        self.images = []
        self._unanswered = {"role": "user", "content": content}
        return [*self.messages, self._unanswered]

    def ask_again(self) -> list[Message]:
        """Return the messages up to the last question, without its answer, to ask it again. Raises
        ``PenstockError`` if there is no question."""
        if self._unanswered is None:
            self._unanswered = self._drop_turn()
        return [*self.messages, self._unanswered]

    def answered(self, text: str, calls: Sequence[ToolCall] = ()) -> None:
        """Add an answer, which may be incomplete, and the question if it is pending (not after tool results)."""
        answer: Message = {"role": "assistant", "content": text}
        if calls:
            answer = {"role": "assistant", "content": text or None, "tool_calls": [call.as_dict() for call in calls]}
        self._turns += [answer] if self._unanswered is None else [self._unanswered, answer]
        self._unanswered = None

    def add_result(self, call: ToolCall, result: str) -> None:
        """Add the result of a tool call in the last answer."""
        self._turns.append({"role": "tool", "content": result, "tool_call_id": call.id})

    def undo(self) -> str:
        """Remove the last question and all later messages; returns the question's text. Raises ``PenstockError`` if
        there is no question."""
        content = self._drop_turn()["content"]
        if isinstance(content, list):
            return " ".join(part["text"] for part in content if part["type"] == "text")
        return content or ""

    def clear(self) -> None:
        """Remove all messages; keep the system prompt and the tools."""
        self._turns, self._unanswered, self.images = [], None, []

    def set(self, name: str, value: Any) -> None:
        """Set a parameter; None resets it to the model's default.

        Raises ``PenstockError`` (``invalid``) for an unknown parameter (with the nearest known one) or invalid value.
        """
        if name not in FIELDS:
            raise invalid("set", f"there is no parameter {name}{did_you_mean(name, FIELDS)}")
        if name == TEMPLATE_KWARGS and not isinstance(value, dict | None):
            raise invalid(name, f'must be a JSON object such as {{"enable_thinking": true}}, is {value!r}')
        rest = {other: kept for other, kept in self.sampling.items() if other != name}
        value = [value] if name in LISTS and not isinstance(value, list | None) else value
        changed = rest if value is None else rest | {name: value}
        to_sampling_params(changed)
        self.sampling = changed

    def save(self, path: Path) -> None:
        """Save all messages as JSON. Raises ``PenstockError`` (``invalid``) if the file cannot be written."""
        text = json.dumps(self.messages, ensure_ascii=False, indent=1)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise invalid("save", f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Load saved messages. Raises ``PenstockError`` (``invalid``) if the file is not a list of messages."""
        try:
            messages = msgspec.convert(read_json_file(path, "load"), list[Message])
        except msgspec.ValidationError as error:
            raise invalid("load", f"{path} is not a list of messages: {error}") from error
        self.clear()
        first = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        self.system = first if isinstance(first, str) else ""
        self._turns = messages[1:] if isinstance(first, str) else messages

    def _drop_turn(self) -> Message:
        """Remove the last question and all later messages; returns the question."""
        questions = [index for index, message in enumerate(self._turns) if message["role"] == "user"]
        if not questions:
            raise PenstockError(Code.NOT_FOUND, "there is no message yet: send one first")
        question = self._turns[questions[-1]]
        del self._turns[questions[-1] :]
        return question


def to_sampling_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """Convert JSON values to sampling parameters. Raises ``PenstockError`` (``invalid``) for an invalid value."""
    fields = {name: value for name, value in sampling.items() if name != TEMPLATE_KWARGS}
    try:
        return msgspec.convert({"max_tokens": None} | fields, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise invalid(path.strip(".`") or "set", message) from error
