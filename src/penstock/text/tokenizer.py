"""A checkpoint's tokenizer: text to token ids and back, and its chat template."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.core.errors import invalid

from . import tokenizer_files as files
from .chat_template import ChatTemplate
from .detokenizer import Detokenizer
from .vocabulary import token_bytes

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """What ``tokenizer.json``, or a SentencePiece or tiktoken file in its place, and the files beside it say.

    Args:
        folder: the checkpoint.
        chat_template: a template to use instead of the checkpoint's.

    Raises ``PenstockError`` (``invalid``) where a file is missing or cannot be read.
    """

    isolated = False
    """Whether another process encodes, so that this one has to wait for it."""

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        config = _read_json(folder / files.CONFIG)
        self._tokenizer = files.load(folder, config)
        self._spelled: dict[int, str] = {}
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special = {name: _content(config[name]) for name in SPECIAL if config.get(name) is not None}
        """Special tokens by their role, ``bos_token`` and so on."""
        self.template_source = chat_template or _chat_template(folder, config)
        self.info = config | {"chat_template": self.template_source}
        """``tokenizer_config.json``, with the chat template that is used."""
        """The chat template as text; None where there is none."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ``PenstockError`` (``invalid``) for what is no text, as half a surrogate pair is none."""
        if not isinstance(text, str):
            raise invalid("prompt", f"is not valid text: {type(text).__name__}")
        try:  # the call for batches, unlike that for one text, lets Python's lock go
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise invalid("prompt", "is not valid text: it has half a surrogate pair") from error

    def close(self) -> None:
        """End what it needs besides this process; it encodes no more."""

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of whole sequences; ``detokenizer`` decodes growing ones, to the same text."""
        return self.detokenizer(skip_special_tokens).add(token_ids, last=True)

    def detokenizer(self, skip_special_tokens: bool = True, kept: Collection[str] = ()) -> Detokenizer:
        """For one growing sequence; ``kept`` are tokens that leave their text, be they special or not."""
        if not skip_special_tokens:
            return Detokenizer(self.vocabulary)
        return Detokenizer(self.vocabulary, self.special_ids - {self.id_of(token) for token in kept})

    def to_json(self) -> str:
        """As ``tokenizer.json`` has it, whatever file it came from."""
        return str(self._tokenizer.to_str())

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token(self, token_id: int) -> str:
        """The token as its file spells it; nothing for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    @cached_property
    def vocabulary(self) -> list[bytes]:
        """The bytes of each token id."""
        return token_bytes(self._tokenizer)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def template(self) -> ChatTemplate:
        """Raises ``PenstockError`` (``invalid``) where the checkpoint has none."""
        if self.template_source is None:
            raise invalid("chat_template", "this model has none: name one, or use plain completions")
        return ChatTemplate(self.template_source, self.special)

    def check_template(self) -> None:
        """Raises ``PenstockError`` (``invalid``) for a chat template that does not compile."""
        if self.template_source is not None:
            _ = self.template

    def spell(self, token_id: int) -> str:
        """The text of one token alone, with U+FFFD for parts of characters; nothing for an unknown id."""
        if (found := self._spelled.get(token_id)) is None:
            found = self.vocabulary[token_id].decode("utf-8", "replace") if token_id < len(self.vocabulary) else ""
            self._spelled[token_id] = found
        return found

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A conversation as text, see ``ChatTemplate.render``."""
        return self.template.render(messages, **options)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """From ``chat_template.jinja``, its older place in the configuration, or none."""
    path = folder / files.TEMPLATE
    if path.exists():
        return files.read(path).decode()
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(files.read(path))
    except (ValueError, RecursionError) as error:
        raise invalid("tokenizer", f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise invalid("tokenizer", f"{path} does not hold an object")
    return found
