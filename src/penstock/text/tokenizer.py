"""A checkpoint's tokenizer: text to token ids and back (at once, or as a sequence grows), and its chat template."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock import demo
from penstock.core.errors import invalid

from . import tokenizer_files
from .breaking_tokenizer import find_control_tokens, with_breaks
from .chat_template import ChatTemplate
from .control_tokens import ControlTokens
from .encoding import Encoded, Texts, encode_texts
from .isolated_template import IsolatedTemplate, TemplatePool
from .side_files import CONFIG, DEFAULT, choose_template, read_side_files
from .vocabulary import token_bytes


class Detokenizer:
    """Decodes one sequence as it grows.

    Args:
        vocabulary: bytes of each token id (``vocabulary.token_bytes``).
        skipped: token ids that add no text, usually the special tokens.
    """

    def __init__(self, vocabulary: Sequence[bytes], skipped: Collection[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Iterable[int], last: bool = False) -> str:
        """Return the text that these tokens complete; with ``last`` an incomplete character becomes U+FFFD.

        Ids beyond the vocabulary, which models with padded embeddings can sample, add nothing.
        """
        size = len(self._vocabulary)
        new = b"".join(self._vocabulary[i] for i in token_ids if i < size and i not in self._skipped)
        return self._decoder.decode(new, last)


class Tokenizer:
    """A checkpoint's tokenizer, from ``tokenizer.json`` or another vocabulary file (``tokenizer_files``), and its chat
    templates.

    Args:
        folder: the checkpoint.
        chat_template: template used for all chats instead of the checkpoint's.

    Raises ``PenstockError`` (``invalid``) if a file is missing or cannot be read.
    """

    isolated = False
    """True if encoding runs in a child process."""

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        self._init_caches(folder, chat_template)
        try:
            side_files = read_side_files(folder)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            message = (
                f"{folder}: {CONFIG}, another file of the tokenizer, or a chat template has a value of the wrong type"
            )
            raise invalid("tokenizer", f"{message}: {error!r:.200}") from error
        self._tokenizer, self.special = tokenizer_files.load(folder, side_files)
        """Special tokens by role (``bos_token``, ...)."""
        self.templates = {DEFAULT: chat_template} if chat_template else side_files.templates
        """Chat templates by name."""
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.info = side_files.config | {"chat_template": self.template_source}
        """Content of ``tokenizer_config.json``, with the chat template in use."""

    def _init_caches(self, folder: Path, chat_template: str | None) -> None:
        self._decoded: dict[int, str] = {}
        self._trusted = not chat_template and folder in (demo.CHAT, demo.DRAFT)
        self._pool = TemplatePool()
        self._compiled: dict[bool, ChatTemplate | IsolatedTemplate] = {}
        """Chat templates in use, by whether the chat has tools."""

    def encode(self, text: str, add_special_tokens: bool = True, has_breaks: bool = False) -> list[int]:
        """Encode a text to token ids.

        Args:
            has_breaks: the text has breaks (``control_tokens.BREAK``), which are removed; no token is matched across
                them.

        Raises ``PenstockError`` (``invalid``) for text with unpaired surrogates.
        """
        if not isinstance(text, str):
            raise invalid("prompt", f"must be a string, is {type(text).__name__}")
        tokenizer = self._breaking if has_breaks else self._tokenizer
        try:  # encode_batch_fast releases the GIL, unlike encode
            return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise invalid("prompt", "is not valid text: it has an unpaired surrogate") from error

    def encode_texts(self, texts: Texts) -> Encoded:
        """Encode a text or pair of texts, with truncation. Raises ``PenstockError`` as ``encode`` does."""
        try:
            return encode_texts(self._breaking if texts.has_breaks else self._tokenizer, texts)
        except TypeError as error:
            raise invalid("prompt", "is not valid text: it has an unpaired surrogate") from error

    def close(self) -> None:
        """End the child processes that encode texts and render templates."""
        self._pool.close()

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decode a complete sequence. ``detokenizer`` decodes a growing sequence to the same text."""
        return self.detokenizer(skip_special_tokens).add(token_ids, last=True)

    def detokenizer(self, skip_special_tokens: bool = True, kept: Collection[str] = ()) -> Detokenizer:
        """Return a detokenizer for one sequence.

        Args:
            kept: special tokens that are not skipped.
        """
        if not skip_special_tokens:
            return Detokenizer(self.vocabulary)
        return Detokenizer(self.vocabulary, self.special_ids - {self.token_to_id(token) for token in kept})

    def to_json(self) -> str:
        """The content of a ``tokenizer.json`` for this tokenizer, also if it was read from another kind of file."""
        return str(self._tokenizer.to_str())

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str:
        """The token as written in the vocabulary; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    @cached_property
    def vocabulary(self) -> list[bytes]:
        """The bytes of each token id."""
        return token_bytes(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added tokens."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=False))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Tokens that are not matched in the content of messages."""
        return find_control_tokens(self._tokenizer, self._breaking)

    @cached_property
    def _breaking(self) -> Any:
        """The tokenizer for texts with breaks."""
        return with_breaks(self._tokenizer)

    @property
    def template_source(self) -> str | None:
        """Source of the chat template for chats without tools; None if absent."""
        return choose_template(self.templates, tools=False)

    @property
    def template(self) -> ChatTemplate | IsolatedTemplate:
        """The chat template for chats without tools. Raises ``PenstockError`` (``invalid``) if it is absent."""
        return self.template_for(tools=False)

    def template_for(self, tools: bool) -> ChatTemplate | IsolatedTemplate:
        """The chat template for chats with or without tools.

        Templates are rendered in a process with time and memory limits; those of built-in models in this process.

        Raises ``PenstockError`` (``invalid``) if the model has no chat template.
        """
        if tools in self._compiled:
            return self._compiled[tools]
        source = choose_template(self.templates, tools)
        if source is None:
            names = f" (only {', '.join(self.templates)})"[:200] if self.templates else ""
            message = f"this model has no default chat template{names}: pass chat_template, or use the completions API"
            raise invalid("chat_template", message)
        if (other := self._compiled.get(not tools)) and source == choose_template(self.templates, not tools):
            self._compiled[tools] = other
        elif self._trusted:
            self._compiled[tools] = ChatTemplate(source, self.special)
        else:
            self._compiled[tools] = IsolatedTemplate(source, self.special, self._pool)
        return self._compiled[tools]

    def decode_token(self, token_id: int) -> str:
        """The text of one token, with U+FFFD for incomplete characters; empty for an unknown id."""
        if (text := self._decoded.get(token_id)) is None:
            text = self.vocabulary[token_id].decode("utf-8", "replace") if token_id < len(self.vocabulary) else ""
            self._decoded[token_id] = text
        return text

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render a chat; see ``ChatTemplate.render``."""
        return self.template_for(tools=options.get("tools") is not None).render(messages, **options)
