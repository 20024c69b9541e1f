"""From deltas of token ids to outputs with text: one assembler a request."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.core import EngineRequest, Failure, FinishReason, TokenDelta
from penstock.core import Logprob as EngineLogprob
from penstock.text import Detokenizer, StopStrings, Tokenizer

from .outputs import CompletionOutput, Logprob, Position, RequestOutput


class Assembler:
    """Puts a request's output together as its deltas come.

    Args:
        tokenizer: None where no text is wanted.
    """

    def __init__(self, request: EngineRequest, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        sampling = request.sampling
        self.request = request
        self._tokenizer = tokenizer
        self._texts = [_Text(request, tokenizer) if tokenizer else None for _ in range(sampling.n)]
        outputs = [CompletionOutput(index) for index in range(sampling.n)]
        self.output = RequestOutput(request.request_id, prompt, request.prompt, outputs)
        if sampling.logprobs is not None:
            for output in outputs:
                output.logprobs, output.cumulative_logprob = [], 0.0

    def add(self, delta: TokenDelta) -> str | None:
        """Take in a delta. Returns the stop string that ended the sequence here, for the engine to end it, too."""
        output, text = self.output.outputs[delta.sequence], self._texts[delta.sequence]
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
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None, *map(self._position, delta.prompt_logprobs)]
        stop = None
        if text:
            piece, stop = text.add(delta, len(output.token_ids))
            output.text += piece
        if stop is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP, stop
        elif delta.finished:
            output.finish_reason, output.failure = delta.finished, delta.failure
            if delta.stop_token not in self.request.eos_token_ids:
                output.stop_reason = delta.stop_token
        return stop

    def fail(self, failure: Failure) -> None:
        """End every sequence that has not ended."""
        for output in self.output.outputs:
            if not output.finished:
                output.finish_reason, output.failure = FinishReason.ERROR, failure

    def _note_times(self, delta: TokenDelta) -> None:
        times = self.output.times
        times.last_token = time.monotonic()
        if times.first_token is None:
            times.first_token, times.queued = times.last_token, delta.queued

    def _position(self, found: Sequence[EngineLogprob]) -> Position:
        def spelled(token_id: int) -> str:
            return self._tokenizer.spell(token_id) if self._tokenizer else ""

        position: Position = {}
        for token_id, logprob, rank in ((p.token_id, p.logprob, p.rank) for p in found):
            position.setdefault(token_id, Logprob(logprob, rank, spelled(token_id)))
        return position


class _Text:
    """The text of one sequence, up to its stop string."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self._detokenizer: Detokenizer = tokenizer.detokenizer(sampling.skip_special_tokens)
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
