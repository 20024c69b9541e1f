"""From what callers give to what the engine takes: text, messages and ids to requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock import demo
from penstock.config.options import ModelOptions
from penstock.core import Code, EngineRequest, PenstockError, PoolingParams, ReasoningSpan, SamplingParams, Vocabulary
from penstock.core.errors import invalid
from penstock.text import (
    ParserConfig,
    ReasoningFormat,
    Stage,
    Tokenizer,
    ToolCallFormat,
    initial_stage,
    reasoning_format,
    tool_call_format,
)
from penstock.text.isolated_tokenizer import IsolatedTokenizer, check

from .generation_config import read_generation_config
from .output_processor import OutputProcessor
from .pooling_config import read_pooling

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or either in a mapping: ``{"prompt": …}``, ``{"prompt_token_ids": …}``. That of a chat has
``parser_config``, too: how its answer is read."""
BETWEEN = "\n\n"
"""What models write between thought and answer."""
Messages = Sequence[Mapping[str, Any]]
MAX_TOKENS = 16
"""OpenAI's default for completions."""
NO_GENERATION = SamplingParams(max_tokens=1, detokenize=False)
"""Of requests that generate nothing."""


class ResponseFormats(NamedTuple):
    """How a model writes what is not content; None where it does not, or in no way that is known."""

    tools: ToolCallFormat | None
    thought: ReasoningFormat | None


SCORES = ("logprobs", "prompt_logprobs", "return_context_logits", "return_generation_logits")
"""What a request may ask to be told besides its tokens."""
LIMITS = ("reasoning_max_tokens", "response_max_tokens")
"""Of thoughts, and of the answers after them."""


@lru_cache(16)
def _forms(options: ModelOptions, template: str) -> ResponseFormats:
    reads_tools = re.search(r"\btools\b", template) is not None  # else they would be ignored without a word
    tools = tool_call_format(options.tool_call_parser, template) if reads_tools else None
    return ResponseFormats(tools, reasoning_format(options.reasoning_parser, template))


class InputProcessor:
    """A model's tokenizer, template and defaults at work.

    Args:
        model: folder of the checkpoint; nothing for the model in the box.
        options: how its text is read.
        max_output_len: tokens a request may ask for; 0 is any.
        isolated: leave the tokenizer in another process, so that reading it does not hold up the streams of this one.
    """

    def __init__(
        self, model: str | Path, options: ModelOptions, max_output_len: int = 0, isolated: bool = False
    ) -> None:
        self._folder = folder = Path(model) if model else demo.CHAT
        self._options = options
        self.default_max_tokens = min(MAX_TOKENS, max_output_len or MAX_TOKENS)
        """Tokens of a completion that does not say how many."""
        source, template = Path(options.tokenizer or folder), _template(options.chat_template)
        self.tokenizer: Tokenizer
        if isolated:
            self.tokenizer = IsolatedTokenizer(source, template)
        else:
            if source not in (demo.CHAT, demo.DRAFT):
                check(source, template)
            self.tokenizer = Tokenizer(source, template)
        other = None if options.generation_config in ("auto", "vllm") else Path(options.generation_config)
        self._defaults = read_generation_config(folder, self.tokenizer, other)

    def response_formats(self, template: str | None = None) -> ResponseFormats:
        """How calls and thoughts are written where a chat template is used; None is the model's own."""
        return _forms(self._options, self.tokenizer.template_source or "" if template is None else template)

    def default_sampling(self) -> SamplingParams:
        """How the model's makers sample, unless the options say otherwise."""
        makers = {} if self._options.generation_config == "vllm" else self._defaults.sampling
        return SamplingParams(**{"max_tokens": self.default_max_tokens, **makers, **self._options.sampling()})

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, at least one."""
        return self._defaults.eos_token_ids

    @cached_property
    def pooling(self) -> PoolingParams:
        """How embeddings are made of hidden states.

        Raises ``PenstockError`` where the checkpoint asks for a way that is not supported.
        """
        return read_pooling(self._folder, self._options.pooling_type)

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams | None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        pooling: PoolingParams | None = None,
    ) -> OutputProcessor:
        """The request for the engine, in the assembler that will put its output together.

        Raises ``PenstockError`` where it can never run, or asks for log probabilities where none are given.
        """
        sampling = sampling or self.default_sampling()
        for field in () if self._options.enable_logprob else SCORES:
            if (asked := getattr(sampling, field)) is not None and asked is not False:
                raise PenstockError(Code.UNSUPPORTED, f"{field}: none are given here (enable_logprob)", field)
        for field in SCORES[:2]:
            if (getattr(sampling, field) or 0) > (most := self._options.max_logprobs):
                raise invalid(field, f"must be at most {most} here (max_logprobs)", most)
        text, token_ids = self._prompt(prompt)
        parser_config = prompt.get("parser_config") if isinstance(prompt, Mapping) else None
        words = [self.tokenizer.encode(form, False) for word in sampling.bad_words for form in (word, f" {word}")]
        if words:
            sampling = sampling.replace(bad_word_ids=sampling.bad_word_ids + tuple(map(tuple, words)))
        unasked = sampling.told > sampling.n and sampling.logprobs is None
        if unasked:
            sampling = sampling.replace(logprobs=0)  # by which the best are chosen
        thought = self._thought(sampling, parser_config)
        if thought is None and (limit := sampling.response_max_tokens) is not None:  # all of it is the answer
            sampling = sampling.replace(max_tokens=min(limit, sampling.max_tokens or limit))
        request = EngineRequest(
            request_id=request_id,
            prompt=token_ids,
            sampling=sampling,
            eos_token_ids=self._defaults.eos_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            thought=thought,
            adapter=adapter,
            pooling=pooling,
        )
        return OutputProcessor(
            _checked(request),
            text,
            self.tokenizer if sampling.detokenize else None,
            parser_config,
            with_logprobs=not unasked,
        )

    def vocabulary(self) -> Vocabulary:
        """What guided decoding has to know of the tokens."""
        return self._vocabulary

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer.to_json(), list(self._defaults.eos_token_ids))

    def conversation(self, messages: Messages, **options: Any) -> Prompt:
        """A conversation as a prompt; ``options`` are those of ``ChatTemplate.render``."""
        text = self.render(messages, options)
        return {
            "prompt": text,
            "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False),
            "parser_config": self.parser_config(text, messages, options, bool(options.get("tools"))),
        }

    def parser_config(
        self, prompt: str, messages: Messages, options: Mapping[str, Any], calls: bool, template: str | None = None
    ) -> ParserConfig:
        """How the answer to a prompt is read.

        Args:
            prompt: at least its end.
            messages, options: what it was rendered from.
            calls: whether tools may be called.
            template: the one that was used; None is the model's own.
        """
        tools, thought = self.response_formats(template)
        stage, continued = Stage.AFTER, bool(options.get("continue_final_message"))
        if thought:
            stage = initial_stage(thought, prompt, str(messages[-1]["content"]) if continued else "")
        return ParserConfig(thought, stage, continued, tools if calls else None)

    def render(self, messages: Messages, options: Mapping[str, Any]) -> str:
        """A conversation as text; ``options`` are those of ``ChatTemplate.render``."""
        if wrong := options.keys() & {"messages", "self"}:
            raise invalid("chat_template_kwargs", f"{wrong.pop()!r} cannot be given here")
        return self.tokenizer.render(messages, **options)

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt."""
        return self._prompt(prompt, add_special_tokens)[1]

    def _thought(self, sampling: SamplingParams, parser_config: ParserConfig | None) -> ReasoningSpan | None:
        """What the engine has to know of a thought that comes first, which it does not where no token depends on it.

        Raises ``PenstockError`` where a thought is to be limited that cannot be.
        """
        limits = [name for name in LIMITS if getattr(sampling, name) is not None]
        if limits and parser_config is None:
            raise invalid(limits[0], "goes with chats only")
        if not limits and not sampling.guided_decoding:
            return None
        form = parser_config.thought if parser_config else None
        if form is None and limits == ["response_max_tokens"]:
            return None
        begin, end = (self.tokenizer.id_of(mark) for mark in (form.opened, form.closed)) if form else (None, None)
        if begin is None or end is None:
            if limits:
                words = "this model's thoughts cannot be limited: there is no token that ends them"
                raise PenstockError(Code.UNSUPPORTED, f"{limits[0]}: {words}", limits[0])
            return None
        assert parser_config and form
        if parser_config.stage is Stage.AFTER:
            return None
        between = self.tokenizer.encode(f"{form.closed}{BETWEEN}", add_special_tokens=False)
        answer = between[1:] if between[0] == end and self.tokenizer.decode(between[1:]) == BETWEEN else []
        return ReasoningSpan(begin, end, tuple(answer), parser_config.stage is Stage.WITHIN)

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
    except UnicodeEncodeError as error:
        raise invalid(_no_text(request), f"is not valid text: {error}") from error
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        field = str(error).rpartition("$.")[2].rstrip("`").rpartition(".")[2].partition("[")[0]
        raise invalid(field if "$." in str(error) else "request", str(error)) from error


def _no_text(request: EngineRequest) -> str:
    """The field that has a character which no encoding has: half of a pair of surrogates."""
    for part in (request, request.sampling):
        for name in part.__struct_fields__:
            try:
                msgspec.json.encode(getattr(part, name))
            except UnicodeEncodeError:
                if name != "sampling":
                    return name
    return "request"
