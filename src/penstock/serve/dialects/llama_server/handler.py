"""Answers of llama-server's completions, from OpenAI's handler."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from msgspec import UNSET

from penstock.frontend.outputs import PositionLogprobs, RequestOutput
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.responses import MIN_LOGPROB, event
from penstock.serve.generation import SequenceCursor
from penstock.serve.models.service import ModelService

from .requests import GenerationRequest
from .responses import Answer, TokenProbability, TopProbability, encode, stop_of, timings_of


class LlamaServerHandler:
    """One request.

    Args:
        completions: of its prompts.
        as_list: whether the answer is a list, as there is a list of prompts.
    """

    def __init__(
        self, service: ModelService, request: GenerationRequest, completions: CompletionHandler, as_list: bool
    ) -> None:
        self._service = service
        self._request = request
        self._completions = completions
        self._as_list = as_list
        self._tokenizer = service.gateway.input_processor.tokenizer
        self._is_empty = request.n_predict == 0
        """Whether the one token that is generated is not returned."""

    async def full(self) -> AsyncGenerator[bytes, None]:
        last: dict[int, RequestOutput] = {}
        async with aclosing(self._completions.outputs()) as outputs:
            async for i, output in outputs:
                last[i] = output
        answers = [self._whole(i, last[i]) for i in sorted(last)]
        yield encode(answers if self._as_list else answers[0])

    async def stream(self) -> AsyncGenerator[bytes, None]:
        cursors: dict[int, SequenceCursor] = {}
        async with aclosing(self._completions.outputs()) as outputs:
            async for i, output in outputs:
                completion = output.outputs[0]
                piece = cursors.setdefault(i, SequenceCursor()).advance(completion)
                if piece is not None and (piece.text or piece.positions) and not self._is_empty:
                    part = self._answer(i, output, piece.text, piece.token_ids, stop=False)
                    part.completion_probabilities = self._probabilities(piece.positions)
                    if self._request.timings_per_token:
                        part.timings = timings_of(output)
                    yield event(part)
                if completion.finished:
                    yield event(self._finish(self._answer(i, output, "", [], stop=True), output))

    def _whole(self, i: int, output: RequestOutput) -> Answer:
        completion = output.outputs[0]
        if self._is_empty:
            return self._finish(self._answer(i, output, "", [], stop=True), output)
        token_ids = completion.token_ids if self._request.return_tokens else []
        answer = self._answer(i, output, completion.text, token_ids, stop=True)
        answer.completion_probabilities = self._probabilities(completion.logprobs or [])
        return self._finish(answer, output)

    def _answer(self, i: int, output: RequestOutput, text: str, token_ids: list[int], stop: bool) -> Answer:
        return Answer(
            index=i,
            content=text,
            tokens=token_ids,
            stop=stop,
            tokens_predicted=0 if self._is_empty else len(output.outputs[0].token_ids),
            tokens_evaluated=len(output.prompt_token_ids),
        )

    def _finish(self, answer: Answer, output: RequestOutput) -> Answer:
        """Add what the end of an answer has."""
        completion = output.outputs[0]
        text = output.prompt
        if text is None:
            text = self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        answer.model, answer.prompt, answer.generation_settings = self._service.name, text, self._settings()
        answer.stop_type, answer.stopping_word = ("limit", "") if self._is_empty else stop_of(completion)
        answer.has_new_line, answer.truncated = "\n" in completion.text, False
        answer.tokens_cached = len(output.prompt_token_ids) + answer.tokens_predicted
        answer.timings = timings_of(output)
        return answer

    def _settings(self) -> dict[str, Any]:
        return settings_of(self._completions.sampling) | {
            "n_predict": self._request.n_predict if self._request.n_predict is not None else -1,
            "stream": bool(self._request.stream),
            "grammar": self._request.grammar or "",
            "timings_per_token": bool(self._request.timings_per_token),
        }

    def _probabilities(self, positions: list[PositionLogprobs]) -> Any:
        if not self._request.n_probs or not positions:
            return UNSET
        return [self._position(position) for position in positions]

    def _position(self, position: PositionLogprobs) -> TokenProbability:
        entries = [
            (
                each.rank,
                TopProbability(
                    id=token_id,
                    token=each.decoded_token,
                    bytes=self._bytes(token_id),
                    logprob=max(each.logprob, MIN_LOGPROB),
                ),
            )
            for token_id, each in position.items()
        ]
        chosen, maximum = entries[0][1], self._request.n_probs or 0
        top = [entry for rank, entry in sorted(entries, key=lambda one: one[0]) if rank <= maximum]
        return TokenProbability(
            id=chosen.id, token=chosen.token, bytes=chosen.bytes, logprob=chosen.logprob, top_logprobs=top
        )

    def _bytes(self, token_id: int) -> list[int]:
        vocabulary = self._tokenizer.vocabulary
        return [*vocabulary[token_id]] if token_id < len(vocabulary) else []


RANDOM_SEED = 2**32 - 1
"""Stands for a seed that is drawn."""


def settings_of(sampling: Any) -> dict[str, Any]:
    """Sampling parameters under llama-server's names."""
    return {
        "seed": RANDOM_SEED if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": max(sampling.top_k, 0),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": [*sampling.stop],
        "ignore_eos": sampling.ignore_eos,
        "n_probs": sampling.logprobs or 0,
    }
