"""``InputProcessor``: converts prompts to engine requests (tokenization, defaults, validation)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock import demo
from penstock.checkpoint.config_json import CONFIG, read_config_json
from penstock.checkpoint.speech import is_speech
from penstock.config.options import ModelOptions
from penstock.core import Code, EngineRequest, PenstockError, PoolingParams, ReasoningSpan, SamplingParams, Vocabulary
from penstock.core.errors import invalid
from penstock.core.json_files import read_text_file
from penstock.core.requests import ENCODE_ERRORS, invalid_request
from penstock.text import (
    ParserConfig,
    ReasoningStage,
    Tokenizer,
)
from penstock.text.encoding import Texts
from penstock.text.isolated_tokenizer import IsolatedTokenizer, check_tokenizer
from penstock.text.side_files import read_side_files

from .chat_renderer import ChatRenderer
from .generation_config import read_generation_config
from .multimodal import IMAGE
from .multimodal.prompt_media import PromptMedia
from .multimodal.python import python_sources
from .output_processor import OutputProcessor
from .pooling_config import PoolerConfig, read_pooler
from .prompts import Messages, Prompt, TokenizedPrompt, check_keys
from .tool_calls import ToolFunction, ToolStrictness, constrain_tool_calls, with_constrained_calls

if TYPE_CHECKING:  # the module imports NumPy
    from .speech.processor import SpeechProcessor

MAX_TOKENS = 16
"""OpenAI's default ``max_tokens`` of completions."""
NO_GENERATION = SamplingParams(max_tokens=1, detokenize=False)
"""Sampling parameters of pooling requests, which generate nothing."""
LOGPROB_FIELDS = ("logprobs", "prompt_logprobs", "return_context_logits", "return_generation_logits")
"""Fields that request logprobs or logits; rejected with ``enable_logprob`` false."""
REASONING_LIMITS = ("reasoning_max_tokens", "response_max_tokens")
"""Fields that limit the number of tokens of the reasoning, and of the answer after it."""

STAGES: dict[ReasoningStage, Literal["before", "within", "after"]] = {
    ReasoningStage.BEFORE: "before",
    ReasoningStage.WITHIN: "within",
    ReasoningStage.AFTER: "after",
}
"""``EngineRequest.stage`` by stage of the parser."""


class InputProcessor:
    """Tokenizer, chat renderer, media processors and default sampling parameters of a model.

    Args:
        model: folder of the checkpoint; empty for the built-in model.
        options: tokenizer, template and parser options.
        max_output_len: upper limit of ``max_tokens`` of a request; 0: no limit.
        isolated: run the tokenizer in another process, so that loading it does not block the event loop.
        check_types: check the types of each request's fields, for requests of the Python interface. HTTP requests
            have been checked by the parser.
    """

    def __init__(
        self,
        model: str | Path,
        options: ModelOptions,
        max_output_len: int = 0,
        isolated: bool = False,
        check_types: bool = False,
    ) -> None:
        self._folder = folder = Path(model) if model else demo.CHAT
        self._options = options
        self._check_types = check_types
        self.default_max_tokens = min(MAX_TOKENS, max_output_len or MAX_TOKENS)
        """Default of ``max_tokens`` of a completion request."""
        source = Path(options.tokenizer or folder)
        template = _template(options.chat_template, source)
        self.tokenizer: Tokenizer
        if isolated:
            self.tokenizer = IsolatedTokenizer(source, template)
        else:
            if source not in (demo.CHAT, demo.DRAFT):
                check_tokenizer(source, template)
            self.tokenizer = Tokenizer(source, template)
        other = None if options.generation_config in ("auto", "vllm") else Path(options.generation_config)
        self._defaults = read_generation_config(folder, self.tokenizer, other)
        self.media = PromptMedia(folder, self.tokenizer, options)
        self.chats = ChatRenderer(self.tokenizer, self.media, options)
        self.speech = self._read_speech_processor(folder)
        """Audio processor of a speech-to-text model; None for other models."""

    def close(self) -> None:
        """Stop the tokenizer and template processes."""
        self.chats.close()
        self.tokenizer.close()

    def _read_speech_processor(self, folder: Path) -> SpeechProcessor | None:
        if not (folder / CONFIG).is_file() or not is_speech(config := read_config_json(folder, weights=False)):
            return None
        from .speech.processor import read_speech_processor  # deferred: imports NumPy

        return read_speech_processor(folder, self.tokenizer, self._defaults.eos_token_ids[0], config, self._options)

    @property
    def allows_logprobs(self) -> bool:
        """True if requests may set ``logprobs`` (server option ``enable_logprob``)."""
        return self._options.enable_logprob

    @property
    def tool_strictness(self) -> ToolStrictness:
        """Constraint on the model's tool calls (server option ``tool_strictness``)."""
        return self._options.tool_strictness

    def chat_template(self, given: str | Path | None) -> str | None:
        """Text of a chat template of a call: its text, the path of a file, or a name of the checkpoint; None: None.

        Raises ``PenstockError`` (``invalid``) if it does not exist.
        """
        if not isinstance(given, str | Path | None):
            raise invalid("chat_template", f"must be a template's text or path, is {type(given).__name__}")
        return _template(None if given is None else str(given), Path(self._options.tokenizer or self._folder))

    def constrain_tool_calls(
        self, sampling: SamplingParams | None, tools: Sequence[Mapping[str, Any]], template: str | None = None
    ) -> SamplingParams:
        """Constrain the tool calls of a chat of the Python interface (option ``tool_strictness``).

        Args:
            tools: tools in OpenAI's format; tools in another form, which only the chat template reads, are not
                constrained.
            template: chat template of the call; None: the model's template.
        """
        sampling = sampling or self.default_sampling
        try:
            functions = msgspec.convert([tool["function"] for tool in tools], list[ToolFunction])
        except (msgspec.ValidationError, KeyError, TypeError):
            return sampling
        formats = self.chats.response_formats(template)
        return constrain_tool_calls(sampling, functions, formats, self.tool_strictness).sampling

    def check_chats(self) -> None:
        """Raise ``PenstockError`` (``unsupported``) if the model does not support chats."""
        if self.speech:
            message = "this speech-to-text model does not support chats: send an audio file to /v1/audio/transcriptions"
            raise PenstockError(Code.UNSUPPORTED, message)

    @cached_property
    def default_sampling(self) -> SamplingParams:
        """Sampling parameters of ``generation_config.json``, with ``override_generation_config`` applied."""
        checkpoint = {} if self._options.generation_config == "vllm" else self._defaults.sampling
        return SamplingParams(**{"max_tokens": self.default_max_tokens, **checkpoint, **self._options.sampling()})

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a sequence, at least one."""
        return self._defaults.eos_token_ids

    @cached_property
    def pooler(self) -> PoolerConfig:
        """Pooling of hidden states to embeddings, classes or scores.

        Raises ``PenstockError`` if the checkpoint's pooling is not supported.
        """
        return read_pooler(self._folder, self._options, self.tokenizer)

    def pair(self, first: str, second: str, template: str | None = None) -> Texts | Messages:
        """Format two texts as input of a cross-encoder: a pair, or, with ``template`` or the option ``chat_template``,
        messages with the roles ``query`` and ``document``."""
        first, second = self.pooler.normalize_case(first), self.pooler.normalize_case(second)
        if template or self._options.chat_template:
            return [{"role": "query", "content": first}, {"role": "document", "content": second}]
        return Texts(first + second) if self.pooler.concatenate_pairs else Texts(first, second)

    def encode_texts(self, texts: Texts) -> TokenizedPrompt:
        """Encode a pair of texts, or a text with a token limit."""
        token_ids, second_text, num_truncated = self.tokenizer.encode_texts(texts)
        has_types = second_text and self.pooler.token_types
        return TokenizedPrompt(token_ids, second_text=second_text if has_types else 0, num_truncated=num_truncated)

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Encode a prompt to token ids."""
        return self._text_and_tokens(prompt, add_special_tokens)[1]

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Encode a prompt of the Python interface, and load its images and videos. Raises ``PenstockError`` if it is
        invalid."""
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        text, token_ids = self._text_and_tokens(prompt)
        if not isinstance(prompt, Mapping) or not (data := prompt.get("multi_modal_data")):
            return TokenizedPrompt(token_ids, text)
        sources = python_sources(data)
        if not sources:
            return TokenizedPrompt(token_ids, text)
        self.media.check(sources)
        self.media.check_placeholders(token_ids, sources)
        num_images = sum(source.kind == IMAGE for source in sources)
        media = [self.media.load(source, prompt.get("mm_processor_kwargs"), num_images) for source in sources]
        known = text if prompt.get("prompt_token_ids") is None else None
        token_ids, images = self.media.place(token_ids, known, media, add_special_tokens=True)
        return TokenizedPrompt(token_ids, text, images)

    def _text_and_tokens(self, prompt: Prompt, add_special_tokens: bool = True) -> tuple[str | None, list[int]]:
        if isinstance(prompt, TokenizedPrompt):
            return prompt.text, prompt.token_ids
        if isinstance(prompt, Mapping):
            check_keys(prompt)
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        else:
            text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if token_ids is None and isinstance(text, str):
            token_ids = self.tokenizer.encode(text, add_special_tokens)
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
            message = "must be text, a list of token ids, or a dict with prompt or prompt_token_ids"
            raise invalid("prompt", f"{message}, is {type(prompt).__name__} {prompt!r:.60}")
        return text, list(token_ids)

    def create_output_processor(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        sampling: SamplingParams | None,
        pooling: PoolingParams | None = None,
        **fields: Any,
    ) -> OutputProcessor:
        """Create the output processor of a new request; the caller sends its ``request`` to the engine.

        Args:
            fields: other fields of ``EngineRequest``.

        Raises ``PenstockError`` if the request is invalid, or requests logprobs while they are disabled.
        """
        sampling = sampling or self.default_sampling
        for field in () if self._options.enable_logprob else LOGPROB_FIELDS:
            if (value := getattr(sampling, field)) is not None and value is not False:
                raise PenstockError(Code.UNSUPPORTED, f"{field}: is disabled on this server (enable_logprob)", field)
        for field in LOGPROB_FIELDS[:2]:
            if (value := getattr(sampling, field) or 0) > (maximum := self._options.max_logprobs):
                message = f"must be at most {maximum} on this server (max_logprobs), is {value}"
                raise invalid(field, message, maximum)
        bad_words = [self.tokenizer.encode(form, False) for word in sampling.bad_words for form in (word, f" {word}")]
        if bad_words:
            sampling = sampling.replace(bad_word_ids=sampling.bad_word_ids + tuple(map(tuple, bad_words)))
        internal_logprobs = sampling.num_returned > sampling.n and sampling.logprobs is None
        if internal_logprobs:
            sampling = sampling.replace(logprobs=0)  # best_of ranks sequences by their logprobs
        parser_config, stage = prompt.parser_config, STAGES[ReasoningStage.AFTER]
        if sampling.tool_calls and parser_config:
            stage = STAGES[parser_config.stage]
            parser_config = with_constrained_calls(parser_config, sampling.tool_calls)
        reasoning_span = self._reasoning_span(sampling, prompt.parser_config)
        if reasoning_span is None and (limit := sampling.response_max_tokens) is not None:
            sampling = sampling.replace(max_tokens=min(limit, sampling.max_tokens or limit))
        request = EngineRequest(
            request_id=request_id,
            prompt=prompt.token_ids,
            sampling=sampling,
            eos_token_ids=self._defaults.eos_token_ids,
            pooling=pooling,
            reasoning=reasoning_span,
            stage=stage,
            second_text=prompt.second_text,
            images=prompt.images,
            audio=prompt.audio,
            **fields,
        )
        return OutputProcessor(
            _checked(request) if self._check_types else request,
            prompt.text,
            self.tokenizer if sampling.detokenize else None,
            parser_config,
            with_logprobs=not internal_logprobs,
        )

    def vocabulary(self) -> Vocabulary:
        """Vocabulary for guided decoding."""
        return self._vocabulary

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer.to_json(), list(self._defaults.eos_token_ids))

    def _reasoning_span(self, sampling: SamplingParams, parser_config: ParserConfig | None) -> ReasoningSpan | None:
        """Reasoning span for the engine; None if neither a limit nor guided decoding depends on it.

        Raises ``PenstockError`` if a limit is set, and the request is no chat or no single token ends the reasoning.
        """
        limits = [name for name in REASONING_LIMITS if getattr(sampling, name) is not None]
        if limits and parser_config is None:
            raise invalid(limits[0], "is supported for chats only")
        if not limits and not sampling.guided_decoding:
            return None
        form = parser_config.reasoning if parser_config else None
        if form is None and limits == ["response_max_tokens"]:
            return None
        markers = (form.begin or form.start_marker, form.end or form.end_marker) if form else ("", "")
        begin, end = (self.tokenizer.token_to_id(marker) for marker in markers)
        if begin is None or end is None:
            if limits:
                message = "this model's reasoning cannot be limited, because no single token ends it"
                raise PenstockError(Code.UNSUPPORTED, f"{limits[0]}: {message}", limits[0])
            return None
        assert parser_config and form
        if parser_config.stage is ReasoningStage.AFTER:
            return None
        calls = sampling.guided_decoding is not None and sampling.guided_decoding.has_tools
        separator = form.before_call if calls else form.before_answer
        between = self.tokenizer.encode(f"{form.end_marker}{separator}", add_special_tokens=False)
        rest = f"{form.end_marker}{separator}".removeprefix(form.end or form.end_marker)
        whole = between[0] == end and self.tokenizer.decode(between[1:], skip_special_tokens=False) == rest
        answer = between[1:] if whole else []
        opening = self.tokenizer.encode(form.start_marker, add_special_tokens=False) if form.channels else []
        begun = parser_config.stage is ReasoningStage.WITHIN
        return ReasoningSpan(begin, end, tuple(answer), begun, tuple(opening))


def _template(given: str | None, folder: Path) -> str | None:
    """Text of a chat template. ``given`` is a template (it contains ``{``), the path of a file, or the name of one of
    the checkpoint's templates."""
    if not given or "{" in given:
        return given
    path = Path(given)
    if not path.exists() and (template := read_side_files(folder).templates.get(given)) is not None:
        return template
    return read_text_file(path, "chat_template")


def _checked(request: EngineRequest) -> EngineRequest:
    """Check the types of a request's fields with a round trip through MessagePack. Media are skipped, as they are
    created by this process.

    Raises ``PenstockError`` (``invalid``) if a value has the wrong type.
    """
    plain = msgspec.structs.replace(request, images=(), audio=None)
    try:
        checked = msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=EngineRequest)
    except ENCODE_ERRORS as error:
        raise invalid_request(request, error) from error
    return msgspec.structs.replace(checked, images=request.images, audio=request.audio)
