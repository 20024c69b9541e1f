"""OpenAI's audio API: ``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import FormData

from penstock.core import Code, PenstockError, PoolingParams, SamplingParams
from penstock.core.audio import AudioInput
from penstock.core.errors import invalid
from penstock.frontend.input_processor import NO_GENERATION
from penstock.frontend.outputs import embedding_of
from penstock.frontend.prompts import TokenizedPrompt
from penstock.frontend.speech.languages import language_name
from penstock.serve.generation import generate
from penstock.serve.http.body import Reading, RequestBody, Unsupported, convert
from penstock.serve.http.reply import encode, event
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel

if TYPE_CHECKING:  # these modules import NumPy, which only models that transcribe need
    from penstock.frontend.speech.processor import SpeechProcessor
    from penstock.frontend.speech.transcription import Segment, SpeechTask, Transcription

LISTS = (
    "timestamp_granularities",
    "include",
    "known_speaker_names",
    "known_speaker_references",
    "keywords",
    "languages",
)
"""Form fields that may be repeated, with or without ``[]`` after the name."""
UNSUPPORTED = {
    "include": Unsupported("log probabilities of audio are not supported; leave it out", ([],)),
    "chunking_strategy": Unsupported("audio is always split at the model's timestamps; leave it out"),
    "known_speaker_names": Unsupported("speakers are not distinguished; leave it out", ([],)),
    "known_speaker_references": Unsupported("speakers are not distinguished; leave it out", ([],)),
    "keywords": Unsupported("is not supported; put keywords in prompt", ([],)),
    "languages": Unsupported("is not supported; set one language in language, or leave both out", ([],)),
}
UNFINISHED = "\ufffd "
"""Characters removed from the end of unfinished text: the replacement character (incomplete UTF-8), and spaces, which
the final text may not contain at this position."""
TOKEN_TIMES = PoolingParams(pooling_type="last", normalize=False)
"""Pooling parameters of requests with ``AudioInput.alignment``, which return token times."""
NOT_A_TRANSCRIBER = "this model does not transcribe audio; use a Whisper model"


class TranscriptionRequest(RequestBody, kw_only=True):
    """The fields of the multipart form, without the file."""

    reading: ClassVar = Reading(unsupported=UNSUPPORTED)

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    stream: bool = False
    include: list[str] | None = None
    chunking_strategy: str | None = None
    known_speaker_names: list[str] | None = None
    known_speaker_references: list[str] | None = None
    keywords: list[str] | None = None
    languages: list[str] | None = None


class AudioUsage(msgspec.Struct, kw_only=True):
    type: Literal["duration"] = "duration"
    seconds: float


class TranscriptionSegment(msgspec.Struct, kw_only=True):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None = None


class TranscriptionWord(msgspec.Struct, kw_only=True):
    word: str
    start: float
    end: float


class TranscriptionResponse(msgspec.Struct, kw_only=True):
    """A transcript. The fields from ``task`` to ``words`` are set with the response format ``verbose_json``."""

    text: str
    task: Literal["transcribe", "translate"] | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    segments: list[TranscriptionSegment] | UnsetType = UNSET
    words: list[TranscriptionWord] | UnsetType = UNSET
    usage: AudioUsage


class TranscriptionEvent(msgspec.Struct, kw_only=True):
    """An event of a streamed transcript."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    usage: AudioUsage | UnsetType = UNSET


def fields_of(form: FormData) -> dict[str, Any]:
    """The fields of a multipart form, without the file. Fields in ``LISTS`` have a list of values."""
    fields: dict[str, Any] = {}
    for key, value in form.multi_items():
        name = key.removesuffix("[]")
        if name == "file" or not isinstance(value, str):
            continue
        if name in LISTS:
            fields.setdefault(name, []).append(value)
        else:
            fields[name] = value
    return fields


def read_request(fields: dict[str, Any], record: RequestRecord, translate: bool = False) -> TranscriptionRequest:
    """Convert the fields of a form to a request. Raises ``PenstockError`` for invalid or unsupported values."""
    if translate and "language" in fields:
        raise invalid("language", "is always English for translations; leave it out")
    if fields.get("response_format") == "diarized_json":
        message = "response_format: diarized_json is not supported, as speakers are not distinguished; use verbose_json"
        raise PenstockError(Code.UNSUPPORTED, message, "response_format")
    request = convert(fields, TranscriptionRequest, record.unknown)
    if translate and "word" in (request.timestamp_granularities or ()):
        message = "timestamp_granularities: word timestamps are supported for transcriptions, not for translations"
        raise PenstockError(Code.UNSUPPORTED, message, "timestamp_granularities")
    if request.timestamp_granularities and request.response_format != "verbose_json":
        message = f"requires the response_format verbose_json, not {request.response_format}"
        raise invalid("timestamp_granularities", message)
    if request.stream and request.response_format not in ("json", "text"):
        message = f"stream: the response_format {request.response_format} cannot be streamed; use json or text"
        raise PenstockError(Code.UNSUPPORTED, message, "stream")
    return request


class TranscriptionHandler:
    """Handler of one request: transcribes or translates an audio file."""

    def __init__(
        self,
        service: ServedModel,
        record: RequestRecord,
        request: TranscriptionRequest,
        file: bytes,
        translate: bool,
    ) -> None:
        self._service, self._record, self._request, self._file = service, record, request, file
        speech = service.gateway.input_processor.speech
        if speech is None:
            raise PenstockError(Code.UNSUPPORTED, NOT_A_TRANSCRIBER, "model")
        if len(file) > speech.max_file_size:
            message = f"file: has {len(file)} bytes; the maximum is {speech.max_file_size} (max_audio_size)"
            raise PenstockError(Code.TOO_LARGE, message, "file", speech.max_file_size)
        service.adapter_of(request.model)
        self._speech: SpeechProcessor = speech
        self._translate = translate
        verbose = request.response_format in ("srt", "verbose_json", "vtt")
        self._granularities = set(request.timestamp_granularities or ["segment"])
        word_times = "word" in self._granularities
        self._task: SpeechTask = speech.task(translate, request.language, request.prompt, verbose, word_times)
        self._with_logprobs = (
            request.response_format == "verbose_json" and service.gateway.input_processor.allows_logprobs
        )

    async def full(self) -> AsyncGenerator[bytes, None]:
        transcription = await self._open()
        async with aclosing(self._texts(transcription)) as texts:
            async for _ in texts:
                pass
        yield self._document(transcription)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        transcription, sent = await self._open(), 0
        async with aclosing(self._texts(transcription)) as texts:
            async for text in texts:
                if len(text) > sent:
                    yield event(TranscriptionEvent(type="transcript.text.delta", delta=text[sent:]))
                    sent = len(text)
        usage = _usage(transcription)
        yield event(TranscriptionEvent(type="transcript.text.done", text=transcription.text(), usage=usage))

    async def _open(self) -> Transcription:
        gateway, file = self._service.gateway, self._file
        self._file = b""
        max_len = gateway.engine_pool.known_engine().max_model_len
        return await gateway.in_media_thread(lambda: self._speech.open(file, self._task, max_len))

    async def _texts(self, transcription: Transcription) -> AsyncGenerator[str, None]:
        """Transcribe the audio; yields the text so far after each step (streamed) or each window of audio."""
        gateway = self._service.gateway
        while window := await gateway.in_media_thread(transcription.next_window):
            prompt, audio, max_tokens = window
            sampling = SamplingParams(
                temperature=self._request.temperature,
                max_tokens=max_tokens,
                logprobs=0 if self._with_logprobs else None,
                detokenize=False,
            )
            tokenized = TokenizedPrompt(prompt, audio=audio)
            async with aclosing(generate(self._service, self._record, tokenized, sampling)) as outputs:
                async for _, output in outputs:
                    completion = output.outputs[0]
                    if self._request.stream and not completion.finished:
                        yield transcription.text(completion.token_ids).rstrip(UNFINISHED)
            positions = completion.logprobs
            logprobs = [next(iter(each.values())).logprob for each in positions] if positions else None
            aligned = transcription.alignment(completion.token_ids)
            times = await self._times(*aligned) if aligned else ()
            transcription.add(completion.token_ids, logprobs, times)
            yield transcription.text()

    async def _times(self, prompt: list[int], audio: AudioInput) -> list[float]:
        """The times of tokens in the audio, seconds (``AudioInput.alignment``)."""
        tokenized = TokenizedPrompt(prompt, audio=audio)
        stream = generate(self._service, self._record, tokenized, NO_GENERATION, pooling=TOKEN_TIMES)
        async with aclosing(stream) as outputs:
            return [time async for _, output in outputs if output.finished for time in embedding_of(output)]

    def _document(self, transcription: Transcription) -> bytes:
        segments = transcription.segments
        match self._request.response_format:
            case "text":
                return f"{transcription.text()}\n".encode()
            case "srt":
                return "".join(
                    f"{i}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{_cue(each)}\n\n"
                    for i, each in enumerate(segments, 1)
                ).encode()
            case "vtt":
                cues = (f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{_cue(each)}\n\n" for each in segments)
                return ("WEBVTT\n\n" + "".join(cues)).encode()
            case "json":
                return encode(TranscriptionResponse(text=transcription.text(), usage=_usage(transcription)))
        words = [
            TranscriptionWord(word=word.text.strip(), start=word.start, end=word.end)
            for each in segments
            for word in each.words
        ]
        described = [
            TranscriptionSegment(
                id=i,
                seek=each.seek,
                start=each.start,
                end=each.end,
                text=each.text,
                tokens=each.tokens,
                temperature=self._request.temperature,
                avg_logprob=each.avg_logprob,
                compression_ratio=each.compression_ratio,
            )
            for i, each in enumerate(segments)
        ]
        return encode(
            TranscriptionResponse(
                text=transcription.text(),
                task="translate" if self._translate else "transcribe",
                language=language_name(transcription.language or "en"),
                duration=transcription.duration,
                segments=described if "segment" in self._granularities else UNSET,
                words=words if "word" in self._granularities else UNSET,
                usage=_usage(transcription),
            )
        )

    @property
    def is_json(self) -> bool:
        """True if the response is JSON, not plain text."""
        return self._request.response_format in ("json", "verbose_json")


def _cue(segment: Segment) -> str:
    return segment.text.strip().replace("-->", "->")


def _usage(transcription: Transcription) -> AudioUsage:
    return AudioUsage(seconds=transcription.duration)


def _time(seconds: float, separator: str) -> str:
    """Format a time as ``HH:MM:SS``, ``separator`` and milliseconds."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{separator}{milliseconds:03}"


SCHEMAS = (TranscriptionRequest, TranscriptionResponse)
