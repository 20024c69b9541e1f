"""From the engine's token deltas to outputs with text: one ``OutputProcessor`` per request."""

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
    """Builds a request's output from its deltas: detokenizes, finds stop strings and parses chat answers.

    Args:
        tokenizer: None where the request does not want text (``detokenize`` false).
        parser_config: how to parse the answer, for chats; None for completions.
        with_logprobs: whether the caller asked for logprobs; with ``best_of`` they are computed in any case.
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
        count = sampling.num_returned
        self._texts = [_SequenceText(request, tokenizer, parser_config) if tokenizer else None for _ in range(count)]
        self._sequences = [CompletionOutput(index) for index in range(count)]
        """All sequences; with ``best_of``, ``output`` gets the best ``n`` of them once all have ended."""
        for output, text in zip(self._sequences, self._texts, strict=True):
            output.message = text.parser.message if text and text.parser else None
        chosen = self._sequences if count == sampling.n else [CompletionOutput(i) for i in range(sampling.n)]
        self.output = RequestOutput(request.request_id, prompt, request.prompt, chosen)
        if sampling.logprobs is not None:
            for output in self._sequences:
                output.logprobs, output.cumulative_logprob = [], 0.0

    def add(self, delta: TokenDelta) -> str | None:
        """Process a delta. Returns the stop string found in it, at which the caller has to end the sequence in the
        engine."""
        if self.request.sampling.stop and len(delta.token_ids) > 1:  # a stop string may end before the last token
            return next((stop for part in _per_token(delta) if (stop := self._add(part)) is not None), None)
        return self._add(delta)

    def _add(self, delta: TokenDelta) -> str | None:
        output, text = self._sequences[delta.sequence], self._texts[delta.sequence]
        if output.finished:
            return None  # ended by a stop string while the engine had computed another step
        output.token_ids += delta.token_ids
        if delta.token_ids or delta.embedding:
            self._record_times(delta)
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
                output.reasoning_tokens = text.num_reasoning_tokens(output.token_ids)
        if stop is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP, stop
        elif delta.finished:
            output.finish_reason, output.failure = delta.finished, delta.failure
            if delta.stop_token not in self.request.eos_token_ids:
                output.stop_reason = delta.stop_token
        if len(self._sequences) > len(self.output.outputs) and all(
            completion.finished for completion in self._sequences
        ):
            self._select_best()
        return stop

    def _select_best(self) -> None:
        """Put the ``n`` likeliest sequences into the output, the best first; a failed one comes before all others."""
        self.output.num_discarded_tokens = sum(len(completion.token_ids) for completion in self._sequences)
        ranked = sorted(
            self._sequences,
            key=lambda completion: (completion.failure is None, -(completion.cumulative_logprob or 0.0)),
        )
        for index, completion in enumerate(ranked[: len(self.output.outputs)]):
            logprobs = completion.logprobs if self._with_logprobs else None
            self.output.outputs[index] = replace(completion, index=index, logprobs=logprobs)
            self.output.num_discarded_tokens -= len(completion.token_ids)

    def fail(self, failure: Failure) -> None:
        """End every open sequence with a failure."""
        for output in (*self._sequences, *self.output.outputs):
            if not output.finished:
                output.finish_reason, output.failure = FinishReason.ERROR, failure

    def _record_times(self, delta: TokenDelta) -> None:
        times = self.output.times
        times.last_token = time.monotonic()
        if times.first_token is None:
            times.first_token, times.queued = times.last_token, delta.queued

    def _position(self, logprobs: Sequence[EngineLogprob]) -> PositionLogprobs:
        def decode(token_id: int) -> str:
            return self._tokenizer.decode_token(token_id) if self._tokenizer else ""

        position: PositionLogprobs = {}
        for token_id, logprob, rank in ((p.token_id, p.logprob, p.rank) for p in logprobs):
            position.setdefault(token_id, Logprob(logprob, rank, decode(token_id)))
        return position


def _per_token(delta: TokenDelta) -> Iterator[TokenDelta]:
    """Split a delta into one per token."""
    last = len(delta.token_ids) - 1
    for i, token in enumerate(delta.token_ids):
        logprobs = None if delta.logprobs is None else delta.logprobs[i : i + 1]
        logits = _row(delta.generation_logits, i, last + 1)
        part = msgspec.structs.replace(delta, token_ids=[token], logprobs=logprobs, generation_logits=logits)
        if i < last:
            part = msgspec.structs.replace(part, finished=None, failure=None, stop_token=None)
        yield part if i == 0 else msgspec.structs.replace(part, prompt_logprobs=None, context_logits=None)


def _row(rows: bytes | None, i: int, count: int) -> bytes | None:
    """Row ``i`` of ``count`` rows of the same size."""
    return None if rows is None else rows[i * len(rows) // count : (i + 1) * len(rows) // count]


class _SequenceText:
    """Detokenizes one sequence, finds its stop string and parses its answer."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer, parser_config: ParserConfig | None) -> None:
        sampling = request.sampling
        markers = parser_config.markers if parser_config else ()
        self._detokenizer: Detokenizer = tokenizer.detokenizer(sampling.skip_special_tokens, markers)
        self.parser: ResponseParser | None = None
        if parser_config:
            special = [marker for marker in markers if tokenizer.token_to_id(marker) in tokenizer.special_ids]
            self.parser = ResponseParser(parser_config, special if sampling.skip_special_tokens else ())
        form = parser_config.reasoning if parser_config else None
        self._reasoning_end = form.end_marker.encode() if form else b""
        self._num_reasoning_tokens: int | None = None
        """Set once the reasoning has ended."""
        self._vocabulary = tokenizer.vocabulary
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self._min_tokens = sampling.min_tokens
        self._keep_stop_token = sampling.include_stop_str_in_output

    def add(self, delta: TokenDelta, tokens: int) -> tuple[str, str | None]:
        """The text to append, and the stop string found.

        Args:
            tokens: number of tokens generated so far, this delta's included.
        """
        token_ids = delta.token_ids
        if delta.stop_token is not None and not self._keep_stop_token:
            token_ids = token_ids[:-1]
        piece = self._detokenizer.add(token_ids, last=delta.finished is not None)
        if tokens <= self._min_tokens and not delta.finished:
            return self._stops.skip(piece), None
        return self._stops.add(piece, last=delta.finished is not None)

    def num_reasoning_tokens(self, token_ids: list[int]) -> int:
        """Number of a sequence's tokens that are reasoning, the end marker included."""
        if self.parser is None or not self.parser.has_reasoning:
            return 0
        if self._num_reasoning_tokens is None and not self.parser.in_reasoning:
            self._num_reasoning_tokens = self._count_reasoning_tokens(token_ids)
        return len(token_ids) if self._num_reasoning_tokens is None else self._num_reasoning_tokens

    def _count_reasoning_tokens(self, token_ids: list[int]) -> int:
        """Counts by the tokens' bytes: a step may add several tokens, and the end marker may span several."""
        size = len(self._vocabulary)
        decode = [self._vocabulary[token] if token < size else b"" for token in token_ids]
        before, _, _ = b"".join(decode).partition(self._reasoning_end)
        lengths = itertools.accumulate(map(len, decode))
        complete = len(before) + len(self._reasoning_end)
        return min(sum(length < complete for length in lengths) + 1, len(token_ids))
