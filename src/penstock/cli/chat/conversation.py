"""The messages of a conversation, and its sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from penstock.config.settings import did_you_mean
from penstock.core import Code, PenstockError, SamplingParams
from penstock.core.errors import invalid

FIELDS = (
    "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed max_tokens min_tokens "
    "ignore_eos stop stop_token_ids include_stop_str_in_output logit_bias bad_words allowed_token_ids "
    "skip_special_tokens"
).split()
"""Sampling parameters that ``/set`` accepts."""
LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


class Conversation:
    """Messages of user and model, after an optional system prompt."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.sampling: dict[str, Any] = {}
        """Sampling parameters that differ from the model's defaults, as JSON values."""
        self._turns: list[Message] = []
        self._unanswered: str | None = None

    @property
    def messages(self) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self._turns

    def ask(self, question: str) -> list[Message]:
        """The messages with a new question, which becomes part of the conversation once it is answered."""
        self._unanswered = question
        return [*self.messages, {"role": "user", "content": question}]

    def answered(self, text: str) -> None:
        """Add the pending question with its answer, or the beginning of one."""
        assert self._unanswered is not None, "ask first"
        self._turns += [{"role": "user", "content": self._unanswered}, {"role": "assistant", "content": text}]
        self._unanswered = None

    def undo(self) -> str:
        """Remove the last question and its answer; returns the question. Raises ``PenstockError`` where there is
        none."""
        questions = [index for index, message in enumerate(self._turns) if message["role"] == "user"]
        if not questions:
            raise PenstockError(Code.NOT_FOUND, "nothing was said yet")
        question = self._turns[questions[-1]]["content"]
        del self._turns[questions[-1] :]
        return question

    def last_question(self) -> str:
        """The question to ask once more: one that got no answer, or else the last one, whose answer goes."""
        return self.undo() if self._unanswered is None else self._unanswered

    def clear(self) -> None:
        """Forget all but the system prompt."""
        self._turns, self._unanswered = [], None

    def set(self, name: str, value: Any) -> None:
        """Set a sampling parameter; None restores the model's default.

        Raises ``PenstockError`` (``invalid``) for an unknown field, with the nearest known one, or a wrong value.
        """
        if name not in FIELDS:
            raise invalid("set", f"no such field as {name}{did_you_mean(name, FIELDS)}")
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
            messages = msgspec.json.decode(path.read_bytes(), type=list[Message])
        except OSError as error:
            raise invalid("load", f"{path} cannot be read: {error.strerror}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise invalid("load", f"{path} holds no messages: {error}") from error
        self.clear()
        self.system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
        self._turns = messages


def to_sampling_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from their fields; raises ``PenstockError`` (``invalid``) for a value that cannot be."""
    try:
        return msgspec.convert({"max_tokens": None} | dict(sampling), SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise invalid(path.strip(".`") or "set", message) from error
