"""From prompts (text, chats, token ids) to engine requests: templates, encoding, defaults, checks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock import demo
from penstock.config.options import ModelOptions
from penstock.core import Code, EngineRequest, PenstockError, PoolingParams, ReasoningSpan, SamplingParams, Vocabulary
from penstock.core.errors import invalid
from penstock.core.json_files import read_text_file
from penstock.core.multimodal import ImageInput
from penstock.planning.config_json import CONFIG, read_config_json
from penstock.planning.speech import is_speech
from penstock.text import (
    ChatTemplate,
    ParserConfig,
    ReasoningFormat,
    ReasoningStage,
    Tokenizer,
    ToolCallFormat,
    continued_text,
    initial_stage,
    reasoning_format,
    tool_call_format,
)
from penstock.text.encoding import Texts
from penstock.text.isolated_template import IsolatedTemplate
from penstock.text.isolated_tokenizer import IsolatedTokenizer, check_tokenizer
from penstock.text.side_files import choose_template, read_side_files

from .generation_config import read_generation_config
from .multimodal import IMAGE, VIDEO, Media, MediaLoader, MediaSource, move_tool_media, split_media
from .multimodal.kwargs import image_kwargs, merge_media_kwargs, video_kwargs
from .multimodal.processors import read_image_processor
from .multimodal.prompts import Crops, spread_crops
from .multimodal.python import python_sources
from .multimodal.video import Video
from .multimodal.video_config import read_placeholders, read_video_processor
from .output_processor import OutputProcessor
from .pooling_config import PoolerConfig, read_pooler

if TYPE_CHECKING:  # it imports NumPy
    from .speech.processor import SpeechProcessor

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or either in a mapping: ``{"prompt": …}``, ``{"prompt_token_ids": …}``. A chat's mapping also has a
``parser_config``. With images or videos, a mapping has them as ``multi_modal_data``: ``{"image": …, "video": …}``, one
or a list each, and perhaps ``mm_processor_kwargs``; or, where they are loaded and placed already, as ``images``."""
Messages = Sequence[Mapping[str, Any]]
MAX_TOKENS = 16
"""OpenAI's default for completions."""
NO_GENERATION = SamplingParams(max_tokens=1, detokenize=False)
"""Sampling parameters of requests that generate nothing (embeddings)."""


class ResponseFormats(NamedTuple):
    """How a model writes tool calls and reasoning; None where its chat template has none, or an unknown format."""

    tools: ToolCallFormat | None
    reasoning: ReasoningFormat | None


LOGPROB_FIELDS = ("logprobs", "prompt_logprobs", "return_context_logits", "return_generation_logits")
"""Fields that ask for logprobs or logits; ``enable_logprob`` false refuses them."""
REASONING_LIMITS = ("reasoning_max_tokens", "response_max_tokens")
"""Fields that limit the tokens of reasoning, and of the answer after it."""


@lru_cache(16)
def _response_formats(options: ModelOptions, template: str) -> ResponseFormats:
    reads_tools = re.search(r"\btools\b", template) is not None  # a template that does not read them would ignore them
    tools = tool_call_format(options.tool_call_parser, template) if reads_tools else None
    return ResponseFormats(tools, reasoning_format(options.reasoning_parser, template))


class InputProcessor:
    """A model's tokenizer, chat template and default sampling parameters.

    Args:
        model: folder of the checkpoint; empty for the built-in model.
        options: tokenizer, template and parser options.
        max_output_len: upper limit of a request's ``max_tokens``; 0 is none.
        isolated: run the tokenizer in another process, so that loading it does not block this one's event loop.
    """

    def __init__(
        self, model: str | Path, options: ModelOptions, max_output_len: int = 0, isolated: bool = False
    ) -> None:
        self._folder = folder = Path(model) if model else demo.CHAT
        self._options = options
        self.default_max_tokens = min(MAX_TOKENS, max_output_len or MAX_TOKENS)
        """``max_tokens`` of a completion that does not give it."""
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
        given = merge_media_kwargs(*options.media_kwargs())
        limit, token_id = options.max_image_pixels, self.tokenizer.token_to_id
        images = read_image_processor(folder, image_kwargs(given), limit, token_id)
        limits = options.max_video_frames, options.max_video_pixels
        videos = read_video_processor(folder, video_kwargs(given), *limits) if images else None
        self._placeholders = read_placeholders(folder, images, videos) if images else None
        self._media = MediaLoader(images, videos, options) if images else None
        self.speech = self._read_speech_processor(folder)
        """Of a model that transcribes audio; None of others."""
        self.sees_videos = videos is not None
        """Whether prompts may have videos."""

    def _read_speech_processor(self, folder: Path) -> SpeechProcessor | None:
        """The processor of a model that transcribes; None of others, whose processes then do without NumPy."""
        if not (folder / CONFIG).is_file() or not is_speech(config := read_config_json(folder, weights=False)):
            return None
        from .speech.processor import read_speech_processor

        return read_speech_processor(folder, self.tokenizer, self._defaults.eos_token_ids[0], config, self._options)

    @property
    def sees_images(self) -> bool:
        """Whether prompts may have images."""
        return self._media is not None

    @property
    def gives_logprobs(self) -> bool:
        """Whether requests may ask for logprobs."""
        return self._options.enable_logprob

    def check_chats(self) -> None:
        """Raise ``PenstockError`` (``unsupported``) where the model answers none."""
        if self.speech:
            words = "this model transcribes audio, and has no chats: send a file to /v1/audio/transcriptions"
            raise PenstockError(Code.UNSUPPORTED, words)

    def check_media(self, sources: Sequence[MediaSource]) -> None:
        """Raise ``PenstockError`` where the model sees none, or a prompt has too many."""
        for kind, seen in ((IMAGE, self.sees_images), (VIDEO, self.sees_videos)):
            count = sum(source.kind == kind for source in sources)
            if count and not seen:
                words = "this model sees none, only text" if not self.sees_images else "this model sees none"
                raise PenstockError(Code.UNSUPPORTED, f"{kind}s: {words}", f"{kind}s")
            if count > (maximum := self._options.max_media(kind)):
                raise invalid(f"{kind}s", f"{count} are more than a prompt may have (limit_mm_per_prompt)", maximum)

    def load_media(self, source: MediaSource, kwargs: Mapping[str, Any] | None = None, num_images: int = 1) -> Media:
        """Fetch, decode and resize an image or a video, which takes long. Its place in the prompt is not set.

        Args:
            kwargs: ``mm_processor_kwargs`` of the request.
            num_images: of the prompt.

        Raises ``PenstockError`` with one sentence where that is not possible.
        """
        assert self._media, "check_media first"
        return self._media.load(source, kwargs, num_images)

    def _load_all(self, sources: Sequence[MediaSource], kwargs: Mapping[str, Any] | None = None) -> list[Media]:
        num_images = sum(source.kind == IMAGE for source in sources)
        return [self.load_media(source, kwargs, num_images) for source in sources]

    def check_placeholders(self, token_ids: Sequence[int], sources: Sequence[MediaSource]) -> None:
        """Raise ``PenstockError`` (``invalid``) where a prompt has not as many placeholders as images and videos."""
        assert self._placeholders
        num_videos = sum(source.kind == VIDEO for source in sources)
        self._placeholders.check(token_ids, len(sources) - num_videos, num_videos)

    def place_media(
        self, token_ids: Sequence[int], text: str | None, media: Sequence[Media], add_special_tokens: bool = False
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """The tokens of a prompt with all placeholders, and its images and frames of videos with their places.

        Args:
            token_ids: with as many placeholders as images and videos.
            text: that ``token_ids`` are of; None where it is not known.
            add_special_tokens: as ``token_ids`` were encoded.
        """
        placeholders, tokenizer = self._placeholders, self.tokenizer
        assert placeholders
        if any(isinstance(each, Video) and each.timestamps for each in media):
            if text is None:
                token_ids = placeholders.spread(token_ids, media, lambda words: tokenizer.encode(words, False))
            else:  # a timestamp may share a token with the text before it
                marks = placeholders.video, placeholders.start, placeholders.end
                text = placeholders.spread_text(text, media, {mark: tokenizer.id_to_token(mark) for mark in marks})
                token_ids = tokenizer.encode(text, add_special_tokens)
        if text is not None and any(isinstance(each, Crops) for each in media):
            marker = tokenizer.id_to_token(placeholders.image_marker)
            token_ids = tokenizer.encode(spread_crops(text, marker, media), add_special_tokens)
        return placeholders.place(token_ids, media)

    def response_formats(self, template: str | None = None, tools: bool = True) -> ResponseFormats:
        """The formats of tool calls and reasoning under a chat template.

        Args:
            template: None is the model's own.
            tools: of the model's own, choose that for chats with tools.
        """
        if template is None:
            template = choose_template(self.tokenizer.templates, tools) or ""
        return _response_formats(self._options, template)

    def default_sampling(self) -> SamplingParams:
        """The sampling parameters of ``generation_config.json``, with ``override_generation_config`` applied."""
        checkpoint = {} if self._options.generation_config == "vllm" else self._defaults.sampling
        return SamplingParams(**{"max_tokens": self.default_max_tokens, **checkpoint, **self._options.sampling()})

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence, at least one."""
        return self._defaults.eos_token_ids

    @cached_property
    def pooler(self) -> PoolerConfig:
        """How the checkpoint pools hidden states into embeddings, classes or scores.

        Raises ``PenstockError`` where it is not supported.
        """
        return read_pooler(self._folder, self._options, self.tokenizer)

    def pair(self, first: str, second: str) -> Texts | Messages:
        """Two texts as a cross-encoder reads them: a pair, or with a chat template that was given, messages of the
        roles ``query`` and ``document``."""
        first, second = self.pooler.folded(first), self.pooler.folded(second)
        if self._options.chat_template:
            return [{"role": "query", "content": first}, {"role": "document", "content": second}]
        return Texts(first + second) if self.pooler.joins_texts else Texts(first, second)

    def encode_texts(self, texts: Texts) -> dict[str, Any]:
        """The prompt of a pair of texts, or of a text within a limit."""
        token_ids, second_text = self.tokenizer.encode_texts(texts)
        if second_text and self.pooler.token_types:
            return {"prompt_token_ids": token_ids, "second_text": second_text}
        return {"prompt_token_ids": token_ids}

    def create_output_processor(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams | None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        pooling: PoolingParams | None = None,
    ) -> OutputProcessor:
        """The output processor of a new request; its ``request`` is to be sent to the engine.

        Raises ``PenstockError`` where the request is invalid, or asks for logprobs that this server does not give.
        """
        sampling = sampling or self.default_sampling()
        for field in () if self._options.enable_logprob else LOGPROB_FIELDS:
            if (value := getattr(sampling, field)) is not None and value is not False:
                raise PenstockError(Code.UNSUPPORTED, f"{field}: none are given here (enable_logprob)", field)
        for field in LOGPROB_FIELDS[:2]:
            if (getattr(sampling, field) or 0) > (maximum := self._options.max_logprobs):
                raise invalid(field, f"must be at most {maximum} here (max_logprobs)", maximum)
        text, token_ids = self._prompt(prompt)
        token_ids, images = self._images(prompt, text, token_ids)
        parser_config = prompt.get("parser_config") if isinstance(prompt, Mapping) else None
        bad_words = [self.tokenizer.encode(form, False) for word in sampling.bad_words for form in (word, f" {word}")]
        if bad_words:
            sampling = sampling.replace(bad_word_ids=sampling.bad_word_ids + tuple(map(tuple, bad_words)))
        internal_logprobs = sampling.num_returned > sampling.n and sampling.logprobs is None
        if internal_logprobs:
            sampling = sampling.replace(logprobs=0)  # to choose the best n of best_of
        reasoning_span = self._reasoning_span(sampling, parser_config)
        if reasoning_span is None and (limit := sampling.response_max_tokens) is not None:  # no reasoning
            sampling = sampling.replace(max_tokens=min(limit, sampling.max_tokens or limit))
        request = EngineRequest(
            request_id=request_id,
            prompt=token_ids,
            sampling=sampling,
            eos_token_ids=self._defaults.eos_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            reasoning=reasoning_span,
            adapter=adapter,
            pooling=pooling,
            images=images,
            audio=prompt.get("audio") if isinstance(prompt, Mapping) else None,
            second_text=prompt.get("second_text", 0) if isinstance(prompt, Mapping) else 0,
        )
        return OutputProcessor(
            _validated(request),
            text,
            self.tokenizer if sampling.detokenize else None,
            parser_config,
            with_logprobs=not internal_logprobs,
        )

    def vocabulary(self) -> Vocabulary:
        """The vocabulary as guided decoding needs it."""
        return self._vocabulary

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer.to_json(), list(self._defaults.eos_token_ids))

    def chat_prompt(self, messages: Messages, **options: Any) -> Prompt:
        """Render and encode a chat; ``options`` are keyword arguments of ``ChatTemplate.render``."""
        messages, sources = split_media(messages)
        self.check_media(sources)
        try:
            text, token_ids = self._render_chat(messages, sources, options)
        except PenstockError:  # perhaps the template shows no images in the results of tools
            if (moved := move_tool_media(messages)) is None:
                raise
            text, token_ids = self._render_chat(moved, sources, options)
        images: tuple[ImageInput, ...] = ()
        if sources:
            token_ids, images = self.place_media(token_ids, text, self._load_all(sources))
        return {
            "prompt": text,
            "prompt_token_ids": token_ids,
            "images": images,
            "parser_config": self.parser_config(text, messages, options, bool(options.get("tools"))),
        }

    def _render_chat(
        self, messages: Messages, sources: Sequence[MediaSource], options: Mapping[str, Any]
    ) -> tuple[str, list[int]]:
        """The text of a chat and its tokens, with a placeholder for each image and video."""
        text = self.render(messages, options)
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        if sources:
            self.check_placeholders(token_ids, sources)
        return text, token_ids

    def parser_config(
        self,
        prompt: str,
        messages: Messages,
        options: Mapping[str, Any],
        allow_tool_calls: bool,
        template: str | None = None,
    ) -> ParserConfig:
        """How to parse the answer to a chat.

        Args:
            prompt: the rendered prompt, or its end.
            messages, options: what it was rendered from; ``tools`` among the options give arguments their types.
            allow_tool_calls: whether calls are recognized; without ``tools`` among the options, those that begin with
                a marker.
            template: the chat template that was used; None is the model's own.
        """
        tools, reasoning = self.response_formats(template, options.get("tools") is not None)
        stage, continued = ReasoningStage.AFTER, bool(options.get("continue_final_message"))
        if reasoning:
            stage = initial_stage(reasoning, prompt, (continued_text(messages[-1]) or "") if continued else "")
        if not allow_tool_calls:
            return ParserConfig(reasoning, stage, continued)
        if tools and tools.allow_unmarked and not options.get("tools"):  # JSON is an answer where no tools are shown
            tools = replace(tools, allow_unmarked=False)
        return ParserConfig(reasoning, stage, continued, tools, _schemas(options.get("tools")))

    def template_of(self, options: Mapping[str, Any]) -> ChatTemplate | IsolatedTemplate:
        """The model's template for a chat with these keyword arguments of ``ChatTemplate.render``.

        Raises ``PenstockError``: ``invalid`` for wrong options, ``unsupported`` for tools that the template does not
        read.
        """
        check_template_options(options)
        template = self.tokenizer.template_for(tools=options.get("tools") is not None)
        if options.get("tools") and "tools" not in template.variables:
            raise PenstockError(Code.UNSUPPORTED, "tools: this model's chat template has no form for them", "tools")
        return template

    def render(self, messages: Messages, options: Mapping[str, Any]) -> str:
        """Render a chat to text. Raises as ``template_of``, and where the template refuses the messages."""
        return self.template_of(options).render(messages, **options)

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt."""
        return self._prompt(prompt, add_special_tokens)[1]

    def _reasoning_span(self, sampling: SamplingParams, parser_config: ParserConfig | None) -> ReasoningSpan | None:
        """The reasoning span for the engine; None where neither a limit nor guided decoding depends on it.

        Raises ``PenstockError`` where the reasoning's length is to be limited and the model has no reasoning.
        """
        limits = [name for name in REASONING_LIMITS if getattr(sampling, name) is not None]
        if limits and parser_config is None:
            raise invalid(limits[0], "is for chats only")
        if not limits and not sampling.guided_decoding:
            return None
        form = parser_config.reasoning if parser_config else None
        if form is None and limits == ["response_max_tokens"]:
            return None
        markers = (form.begin or form.start_marker, form.end_marker) if form else ("", "")
        begin, end = (self.tokenizer.token_to_id(marker) for marker in markers)
        if begin is None or end is None:
            if limits:
                message = "this model's reasoning cannot be limited: there is no token that ends it"
                raise PenstockError(Code.UNSUPPORTED, f"{limits[0]}: {message}", limits[0])
            return None
        assert parser_config and form
        if parser_config.stage is ReasoningStage.AFTER:
            return None
        calls = sampling.guided_decoding is not None and sampling.guided_decoding.source_field == "tools"
        separator = form.before_call if calls else form.before_answer
        between = self.tokenizer.encode(f"{form.end_marker}{separator}", add_special_tokens=False)
        whole = between[0] == end and self.tokenizer.decode(between[1:], skip_special_tokens=False) == separator
        answer = between[1:] if whole else []
        opening = self.tokenizer.encode(form.start_marker, add_special_tokens=False) if form.channels else []
        begun = parser_config.stage is ReasoningStage.WITHIN
        return ReasoningSpan(begin, end, tuple(answer), begun, tuple(opening))

    def _images(
        self, prompt: Prompt, text: str | None, token_ids: list[int]
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """The prompt with placeholders for each feature, and its images and frames of videos."""
        if not isinstance(prompt, Mapping):
            return token_ids, ()
        if not (data := prompt.get("multi_modal_data")):
            return token_ids, tuple(prompt.get("images") or ())
        sources = python_sources(data)
        self.check_media(sources)
        if sources:
            self.check_placeholders(token_ids, sources)
        kwargs = prompt.get("mm_processor_kwargs")
        media = self._load_all(sources, kwargs)
        given = prompt.get("prompt_token_ids") is not None
        return self.place_media(token_ids, None if given else text, media, add_special_tokens=True)

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


def check_template_options(options: Mapping[str, Any]) -> None:
    """Raise ``PenstockError`` (``invalid``) for keyword arguments that a chat template cannot have."""
    if wrong := options.keys() & {"messages", "self"}:
        raise invalid("chat_template_kwargs", f"{wrong.pop()!r} cannot be given here")


def _schemas(tools: Any) -> dict[str, Mapping[str, Any]]:
    """The schemas of tools' arguments by name; of those that are as OpenAI has them."""
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, Mapping)]
    schemas = {
        function["name"]: function.get("parameters")
        for function in functions
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    }
    return {name: schema for name, schema in schemas.items() if isinstance(schema, Mapping)}


def _template(given: str | None, folder: Path) -> str | None:
    """The text of a chat template: given itself (it contains ``{``), in a file, or one that the checkpoint names."""
    if not given or "{" in given:
        return given
    path = Path(given)
    if not path.exists() and (template := read_side_files(folder).templates.get(given)) is not None:
        return template
    return read_text_file(path, "chat_template")


def _validated(request: EngineRequest) -> EngineRequest:
    """The request after a round trip through msgpack, which checks the types of all fields.

    Raises ``PenstockError`` (``invalid``) where a value is not of its field's type.
    """
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest)
    except UnicodeEncodeError as error:
        raise invalid(_invalid_text_field(request), f"is not valid text: {error}") from error
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        field = str(error).rpartition("$.")[2].rstrip("`").rpartition(".")[2].partition("[")[0]
        raise invalid(field if "$." in str(error) else "request", str(error)) from error


def _invalid_text_field(request: EngineRequest) -> str:
    """The field that holds an unpaired surrogate."""
    for part in (request, request.sampling):
        for name in part.__struct_fields__:
            try:
                msgspec.json.encode(getattr(part, name))
            except UnicodeEncodeError:
                if name != "sampling":
                    return name
    return "request"
