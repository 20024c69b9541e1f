"""``OutputProcessor``: builds the output of one request from the engine's token deltas."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from penstock.core import EngineRequest, Failure, FinishReason, GeneratedSequence, TokenDelta
from penstock.core import Logprob as EngineLogprob
from penstock.text import Detokenizer, ParserConfig, ResponseParser, StopStrings, Tokenizer
from penstock.text.harmony import END

from .outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput


class OutputProcessor:
    """Builds a request's output from its deltas: detokenizes, finds stop strings and parses chat answers.

    Args:
        tokenizer: None if the request wants no text (``detokenize`` false).
        parser_config: parser of chat answers; None for completions.
        with_logprobs: False if the request did not ask for logprobs, and they are computed only to rank ``best_of``.
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
        """All sequences; with ``best_of``, the best ``n`` are copied to ``output`` once all are finished."""
        for output, text in zip(self._sequences, self._texts, strict=True):
            output.message = text.parser.message if text and text.parser else None
        chosen = self._sequences if count == sampling.n else [CompletionOutput(i) for i in range(sampling.n)]
        self.output = RequestOutput(request.request_id, prompt, request.prompt, chosen)
        if sampling.logprobs is not None:
            for output in self._sequences:
                output.logprobs, output.cumulative_logprob = [], 0.0

    def add(self, delta: TokenDelta) -> str | None:
        """Process a delta. Returns the stop string that ends the sequence, or None. After a stop string, the caller
        ends the sequence in the engine."""
        if self.request.sampling.stop and len(delta.token_ids) > 1:  # a stop string may end before the last token
            return next((stop for part in per_token(delta) if (stop := self._add(part)) is not None), None)
        return self._add(delta)

    def _add(self, delta: TokenDelta) -> str | None:
        output, text = self._sequences[delta.sequence], self._texts[delta.sequence]
        if output.finished:
            return None  # a stop string was found while the engine computed another step
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
        if delta.lowered_tools:
            self.output.lowered_tools = delta.lowered_tools
        if delta.perf is not None:
            output.perf = delta.perf
        stop = None
        if text:
            new_text, stop = text.add(delta, len(output.token_ids))
            output.text += new_text
            if text.parser:
                text.parser.add(new_text, last=stop is not None or delta.finished is not None)
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
        """Put ``n`` sequences into the output: failed sequences first, then the most likely ones."""
        self.output.num_discarded_tokens = sum(len(completion.token_ids) for completion in self._sequences)
        ranked = sorted(
            self._sequences,
            key=lambda completion: (completion.failure is None, -(completion.cumulative_logprob or 0.0)),
        )
        for index, completion in enumerate(ranked[: len(self.output.outputs)]):
            logprobs = completion.logprobs if self._with_logprobs else None
            self.output.outputs[index] = replace(completion, index=index, logprobs=logprobs)
            self.output.num_discarded_tokens -= len(completion.token_ids)

    def token_ids(self, index: int) -> list[int]:
        """Generated tokens of a sequence, which must not be changed."""
        return self._sequences[index].token_ids

    def generated(self) -> list[GeneratedSequence]:
        """Output so far of each sequence."""
        return [GeneratedSequence(one.token_ids, one.finished) for one in self._sequences]

    def fail(self, failure: Failure) -> None:
        """Finish every open sequence with a failure."""
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


def per_token(delta: TokenDelta) -> Iterator[TokenDelta]:
    """Split a delta into deltas of one token each."""
    last = len(delta.token_ids) - 1
    if last < 1:
        yield delta
        return
    for i, token in enumerate(delta.token_ids):
        logprobs = None if delta.logprobs is None else delta.logprobs[i : i + 1]
        logits = _row(delta.generation_logits, i, last + 1)
        part = msgspec.structs.replace(delta, token_ids=[token], logprobs=logprobs, generation_logits=logits)
        if i < last:
            part = msgspec.structs.replace(part, finished=None, failure=None, stop_token=None)
        yield part if i == 0 else msgspec.structs.replace(part, prompt_logprobs=None, context_logits=None)


def _row(rows: bytes | None, i: int, count: int) -> bytes | None:
    """Row ``i`` of ``count`` equal-sized rows."""
    return None if rows is None else rows[i * len(rows) // count : (i + 1) * len(rows) // count]


class _SequenceText:
    """Detokenizes one sequence, finds stop strings and parses the answer."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer, parser_config: ParserConfig | None) -> None:
        sampling = request.sampling
        markers = parser_config.markers if parser_config else ()
        self._detokenizer: Detokenizer = tokenizer.detokenizer(sampling.skip_special_tokens, markers)
        self.parser: ResponseParser | None = None
        if parser_config:
            special = [marker for marker in markers if tokenizer.token_to_id(marker) in tokenizer.special_ids]
            self.parser = ResponseParser(parser_config, special if sampling.skip_special_tokens else ())
        form = parser_config.reasoning if parser_config else None
        self._reasoning_end = (form.end_marker if form else END).encode()
        self._num_reasoning_tokens: int | None = None
        """Final number of reasoning tokens; None until the reasoning has ended."""
        self._vocabulary = tokenizer.vocabulary
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self._min_tokens = sampling.min_tokens
        self._keep_stop_token = sampling.include_stop_str_in_output

    def add(self, delta: TokenDelta, tokens: int) -> tuple[str, str | None]:
        """Detokenize a delta. Returns the text to append, and the stop string found in it or None.

        Args:
            tokens: number of tokens generated so far, including this delta.
        """
        token_ids = delta.token_ids
        if delta.stop_token is not None and not self._keep_stop_token:
            token_ids = token_ids[:-1]
        text = self._detokenizer.add(token_ids, last=delta.finished is not None)
        if tokens <= self._min_tokens and not delta.finished:
            return self._stops.skip(text), None
        return self._stops.add(text, last=delta.finished is not None)

    def num_reasoning_tokens(self, token_ids: list[int]) -> int:
        """Number of reasoning tokens in a sequence, including the end marker."""
        if self.parser is None or not self.parser.has_reasoning:
            return 0
        if self._num_reasoning_tokens is None and not self.parser.in_reasoning:
            self._num_reasoning_tokens = self._count_reasoning_tokens(token_ids)
        return len(token_ids) if self._num_reasoning_tokens is None else self._num_reasoning_tokens

    def _count_reasoning_tokens(self, token_ids: list[int]) -> int:
        """Count by bytes, as the end marker may span several tokens, and a step may add several tokens."""
        size = len(self._vocabulary)
        decoded = [self._vocabulary[token] if token < size else b"" for token in token_ids]
        before, _, _ = b"".join(decoded).partition(self._reasoning_end)
        lengths = itertools.accumulate(map(len, decoded))
        complete = len(before) + len(self._reasoning_end)
        return min(sum(length < complete for length in lengths) + 1, len(token_ids))
