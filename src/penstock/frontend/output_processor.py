"""From deltas of token ids to outputs with text: one assembler a request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from penstock.core import EngineRequest, Failure, FinishReason, TokenDelta
from penstock.core import Logprob as EngineLogprob
from penstock.text import Detokenizer, ParserConfig, ResponseParser, StopStrings, Tokenizer

from .outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput


class OutputProcessor:
    """Puts a request's output together as its deltas come.

    Args:
        tokenizer: None where no text is wanted.
        reading: how answers are read, where the prompt is a chat's.
        with_logprobs: whether what the request tells of them is for its caller, too.
    """

    def __init__(
        self,
        request: EngineRequest,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        parser_config: ParserConfig | None = None,
        with_logprobs: bool = True,
    ) -> None:
        sampling = request.sampling
        self._with_logprobs = with_logprobs
        self.request = request
        self._tokenizer = tokenizer
        self._texts = [_Text(request, tokenizer, parser_config) if tokenizer else None for _ in range(sampling.told)]
        self._made = [CompletionOutput(index) for index in range(sampling.told)]
        """All sequences, of which ``output`` has the best only once all have ended."""
        for output, text in zip(self._made, self._texts, strict=True):
            output.message = text.parser.message if text and text.parser else None
        chosen = self._made if sampling.told == sampling.n else [CompletionOutput(i) for i in range(sampling.n)]
        self.output = RequestOutput(request.request_id, prompt, request.prompt, chosen)
        if sampling.logprobs is not None:
            for output in self._made:
                output.logprobs, output.cumulative_logprob = [], 0.0

    def add(self, delta: TokenDelta) -> str | None:
        """Take in a delta. Returns the stop string that ended the sequence here, for the engine to end it, too."""
        if self.request.sampling.stop and len(delta.token_ids) > 1:  # of which some may come after a stop string
            return next((stop for part in _one_by_one(delta) if (stop := self._add(part)) is not None), None)
        return self._add(delta)

    def _add(self, delta: TokenDelta) -> str | None:
        output, text = self._made[delta.sequence], self._texts[delta.sequence]
        if output.finished:
            return None  # the engine was a step ahead of a stop string
        output.token_ids += delta.token_ids
        if delta.token_ids or delta.embedding:
            self._note_times(delta)
        if delta.embedding:
            self.output.embedding = delta.embedding
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, delta.cached_tokens)
        if delta.logprobs is not None and output.logprobs is not None:
            output.logprobs += map(self._position, delta.logprobs)
            output.cumulative_logprob = (output.cumulative_logprob or 0) + sum(p[0].logprob for p in delta.logprobs)
        if delta.cumulative_logprob is not None:
            output.cumulative_logprob = delta.cumulative_logprob
        if delta.prompt_logprobs is not None:
            before = self.output.prompt_logprobs or [None]
            self.output.prompt_logprobs = [*before, *map(self._position, delta.prompt_logprobs)]
        if delta.context_logits is not None:
            self.output.context_logits = delta.context_logits
        if delta.generation_logits is not None:
            output.generation_logits = output.generation_logits or bytearray()
            output.generation_logits += delta.generation_logits
        if delta.perf is not None:
            output.perf = delta.perf
        stop = None
        if text:
            piece, stop = text.add(delta, len(output.token_ids))
            output.text += piece
            if text.parser:
                text.parser.add(piece, last=stop is not None or delta.finished is not None)
                output.reasoning_tokens = text.thought_tokens(output.token_ids)
        if stop is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP, stop
        elif delta.finished:
            output.finish_reason, output.failure = delta.finished, delta.failure
            if delta.stop_token not in self.request.eos_token_ids:
                output.stop_reason = delta.stop_token
        if len(self._made) > len(self.output.outputs) and all(made.finished for made in self._made):
            self._choose()
        return stop

    def _choose(self) -> None:
        """The likeliest of all that were made, the best first. One that failed stands for all."""
        self.output.num_discarded_tokens = sum(len(made.token_ids) for made in self._made)
        ranked = sorted(self._made, key=lambda made: (made.failure is None, -(made.cumulative_logprob or 0.0)))
        for index, made in enumerate(ranked[: len(self.output.outputs)]):
            told = made.logprobs if self._with_logprobs else None
            self.output.outputs[index] = replace(made, index=index, logprobs=told)
            self.output.num_discarded_tokens -= len(made.token_ids)

    def fail(self, failure: Failure) -> None:
        """End every sequence that has not ended."""
        for output in (*self._made, *self.output.outputs):
            if not output.finished:
                output.finish_reason, output.failure = FinishReason.ERROR, failure

    def _note_times(self, delta: TokenDelta) -> None:
        times = self.output.times
        times.last_token = time.monotonic()
        if times.first_token is None:
            times.first_token, times.queued = times.last_token, delta.queued

    def _position(self, found: Sequence[EngineLogprob]) -> PositionLogprobs:
        def spelled(token_id: int) -> str:
            return self._tokenizer.spell(token_id) if self._tokenizer else ""

        position: PositionLogprobs = {}
        for token_id, logprob, rank in ((p.token_id, p.logprob, p.rank) for p in found):
            position.setdefault(token_id, Logprob(logprob, rank, spelled(token_id)))
        return position


def _one_by_one(delta: TokenDelta) -> Iterator[TokenDelta]:
    """A delta for each of its tokens."""
    last = len(delta.token_ids) - 1
    for i, token in enumerate(delta.token_ids):
        told = None if delta.logprobs is None else delta.logprobs[i : i + 1]
        scores = _nth(delta.generation_logits, i, last + 1)
        part = msgspec.structs.replace(delta, token_ids=[token], logprobs=told, generation_logits=scores)
        if i < last:
            part = msgspec.structs.replace(part, finished=None, failure=None, stop_token=None)
        yield part if i == 0 else msgspec.structs.replace(part, prompt_logprobs=None, context_logits=None)


def _nth(rows: bytes | None, i: int, count: int) -> bytes | None:
    """One of so many rows of the same size."""
    return None if rows is None else rows[i * len(rows) // count : (i + 1) * len(rows) // count]


class _Text:
    """The text of one sequence, up to its stop string."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer, parser_config: ParserConfig | None) -> None:
        sampling = request.sampling
        marks = parser_config.marks if parser_config else ()
        self._detokenizer: Detokenizer = tokenizer.detokenizer(sampling.skip_special_tokens, marks)
        self.parser: ResponseParser | None = None
        if parser_config:
            special = [mark for mark in marks if tokenizer.id_of(mark) in tokenizer.special_ids]
            self.parser = ResponseParser(parser_config, special if sampling.skip_special_tokens else ())
        form = parser_config.thought if parser_config else None
        self._thought_end = form.closed.encode() if form else b""
        self._thought_tokens: int | None = None
        """Once it has ended."""
        self._vocabulary = tokenizer.vocabulary
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self._min_tokens = sampling.min_tokens
        self._keep_stop_token = sampling.include_stop_str_in_output

    def add(self, delta: TokenDelta, tokens: int) -> tuple[str, str | None]:
        """The text to append, and the stop string found; ``tokens`` counts those generated with this delta."""
        token_ids = delta.token_ids
        if delta.stop_token is not None and not self._keep_stop_token:
            token_ids = token_ids[:-1]
        piece = self._detokenizer.add(token_ids, last=delta.finished is not None)
        if tokens <= self._min_tokens and not delta.finished:
            return self._stops.skip(piece), None
        return self._stops.add(piece, last=delta.finished is not None)

    def thought_tokens(self, token_ids: list[int]) -> int:
        """How many of a sequence's tokens are its thought, with what ends it."""
        if self.parser is None or not self.parser.thought:
            return 0
        if self._thought_tokens is None and not self.parser.thinking:
            self._thought_tokens = self._until_thought_ends(token_ids)
        return len(token_ids) if self._thought_tokens is None else self._thought_tokens

    def _until_thought_ends(self, token_ids: list[int]) -> int:
        """Counted by what tokens spell: several may come at once, and the mark need not be one of them."""
        size = len(self._vocabulary)
        spelled = [self._vocabulary[token] if token < size else b"" for token in token_ids]
        before, _, _ = b"".join(spelled).partition(self._thought_end)
        lengths = itertools.accumulate(map(len, spelled))
        complete = len(before) + len(self._thought_end)
        return min(sum(length < complete for length in lengths) + 1, len(token_ids))
