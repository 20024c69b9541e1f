"""From what callers give to what the engine takes: text, messages and ids to requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from penstock import demo
from penstock.core import EngineRequest, PoolingParams, SamplingParams, Vocabulary
from penstock.core.errors import invalid
from penstock.text import Tokenizer

from .assembly import Assembler
from .defaults import read_defaults
from .pooling import read_pooling

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or either in a mapping: ``{"prompt": …}``, ``{"prompt_token_ids": …}``."""
Messages = Sequence[Mapping[str, Any]]
VOID = SamplingParams(max_tokens=1, detokenize=False)
"""Of requests that generate nothing."""


class Preparer:
    """A model's tokenizer, template and defaults at work.

    Args:
        model: folder of the checkpoint; nothing for the model in the box.
        tokenizer: another folder to take the tokenizer from.
        chat_template: a template to use instead of the checkpoint's, or a file that holds one.
        pooling_type: as the option.
    """

    def __init__(
        self,
        model: str | Path = "",
        tokenizer: str | Path = "",
        chat_template: str | None = None,
        pooling_type: str = "auto",
    ) -> None:
        self._folder = folder = Path(model) if model else demo.CHAT
        self._pooling_type = pooling_type
        self.tokenizer = Tokenizer(Path(tokenizer) if tokenizer else folder, _template(chat_template))
        self._defaults = read_defaults(folder, self.tokenizer)

    def default_sampling(self) -> SamplingParams:
        """How the model's makers sample."""
        return SamplingParams(**self._defaults.sampling)

    @cached_property
    def pooling(self) -> PoolingParams:
        """How embeddings are made of hidden states.

        Raises ``PenstockError`` where the checkpoint asks for a way that is not supported.
        """
        return read_pooling(self._folder, self._pooling_type)

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams | None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        pooling: PoolingParams | None = None,
    ) -> Assembler:
        """The request for the engine, in the assembler that will put its output together."""
        sampling = sampling or self.default_sampling()
        text, token_ids = self._prompt(prompt)
        words = [self.tokenizer.encode(form, False) for word in sampling.bad_words for form in (word, f" {word}")]
        if words:
            sampling = sampling.replace(bad_word_ids=sampling.bad_word_ids + tuple(map(tuple, words)))
        request = EngineRequest(
            request_id=request_id,
            prompt=token_ids,
            sampling=sampling,
            eos_token_ids=self._defaults.eos_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            pooling=pooling,
        )
        return Assembler(_checked(request), text, self.tokenizer if sampling.detokenize else None)

    def vocabulary(self) -> Vocabulary:
        """What guided decoding has to know of the tokens."""
        return Vocabulary(self.tokenizer.to_json(), list(self._defaults.eos_token_ids))

    def conversation(self, messages: Messages, **options: Any) -> Prompt:
        """A conversation as a prompt; ``options`` are those of ``ChatTemplate.render``."""
        text = self.render(messages, options)
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def render(self, messages: Messages, options: Mapping[str, Any]) -> str:
        """A conversation as text; ``options`` are those of ``ChatTemplate.render``."""
        if wrong := options.keys() & {"messages", "self"}:
            raise invalid("chat_template_kwargs", f"{wrong.pop()!r} cannot be given here")
        return self.tokenizer.render(messages, **options)

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt."""
        return self._prompt(prompt, add_special_tokens)[1]

    def _prompt(self, prompt: Prompt, add_special_tokens: bool = True) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        else:
            text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if token_ids is None and isinstance(text, str):
            token_ids = self.tokenizer.encode(text, add_special_tokens)
        if not isinstance(token_ids, Sequence):
            raise invalid("prompt", "must be text, token ids, or a mapping with prompt or prompt_token_ids")
        return text, list(token_ids)


def _template(given: str | None) -> str | None:
    """The template itself; a text with its marks is no file's name."""
    if not given or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as error:
        raise invalid("chat_template", f"{given} cannot be read: {error.strerror}") from error


def _checked(request: EngineRequest) -> EngineRequest:
    """The request as it comes out at the other end of a wire.

    Raises ``PenstockError`` (``invalid``) where a value is not of its field's type.
    """
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        field = str(error).rpartition("$.")[2].rstrip("`").rpartition(".")[2].partition("[")[0]
        raise invalid(field if "$." in str(error) else "request", str(error)) from error
