"""Answers of Text Generation Inference, from OpenAI's handler of completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET

from penstock.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from penstock.serve.dialects.openai.completions import CompletionHandler
from penstock.serve.dialects.openai.responses import MIN_LOGPROB
from penstock.serve.generation import SequenceCursor
from penstock.serve.models.service import ModelService

from .requests import GenerateRequest
from .responses import Details, Generation, PromptToken, StreamDetails, StreamToken, Token, encode, reason_of


class TGIHandler:
    """One request.

    Args:
        as_list: whether the answer is a list of one, as that of ``/`` is.
    """

    def __init__(
        self, service: ModelService, request: GenerateRequest, completions: CompletionHandler, as_list: bool
    ) -> None:
        self._request = request
        self._parameters = request.parameters
        self._completions = completions
        self._as_list = as_list
        self._tokenizer = service.gateway.input_processor.tokenizer

    async def full(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._completions.outputs()) as outputs:
            async for _, output in outputs:
                last = output
        answer = Generation(generated_text=self._text(last.outputs[0]))
        if self._parameters.details or self._parameters.decoder_input_details:
            answer.details = self._details(last)
        yield encode([answer] if self._as_list else answer)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """An event for each token; the text of a step's tokens that is not yet certain comes with a later one."""
        cursor, index = SequenceCursor(), 0
        async with aclosing(self._completions.outputs()) as outputs:
            async for _, output in outputs:
                completion = output.outputs[0]
                piece = cursor.advance(completion)
                if piece is None:
                    continue
                tokens = [self._token(position) for position in piece.positions]
                _spread(tokens, piece.text)
                events = []
                for token, position in zip(tokens, piece.positions, strict=True):
                    index += 1
                    events.append(StreamToken(index=index, token=token, top_tokens=self._top(position) or UNSET))
                if events and completion.finished:
                    events[-1].generated_text = self._text(completion)
                    events[-1].details = self._stream_details(output)
                if events:
                    yield b"".join([b"data:" + encode(event) + b"\n\n" for event in events])

    def _text(self, completion: CompletionOutput) -> str:
        return self._request.inputs + completion.text if self._parameters.return_full_text else completion.text

    def _details(self, output: RequestOutput) -> Details:
        completion = output.outputs[0]
        positions = completion.logprobs or []
        wanted = bool(self._parameters.top_n_tokens)
        return Details(
            finish_reason=reason_of(completion),
            generated_tokens=len(completion.token_ids),
            seed=self._parameters.seed,
            prefill=self._prefill(output) if self._parameters.decoder_input_details else [],
            tokens=[self._token(position) for position in positions],
            top_tokens=[self._top(position) for position in positions] if wanted and positions else UNSET,
        )

    def _stream_details(self, output: RequestOutput) -> StreamDetails:
        completion = output.outputs[0]
        return StreamDetails(
            finish_reason=reason_of(completion),
            generated_tokens=len(completion.token_ids),
            seed=self._parameters.seed,
            input_length=len(output.prompt_token_ids),
        )

    def _prefill(self, output: RequestOutput) -> list[PromptToken]:
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        return [
            PromptToken(
                id=token_id,
                text=self._tokenizer.decode_token(token_id),
                logprob=max(position[token_id].logprob, MIN_LOGPROB) if position else None,
            )
            for token_id, position in pairs
        ]

    def _token(self, position: PositionLogprobs) -> Token:
        return self._tokens(position)[0][1]

    def _top(self, position: PositionLogprobs) -> list[Token]:
        """The likeliest tokens at a position."""
        maximum = self._parameters.top_n_tokens or 0
        return [token for rank, token in sorted(self._tokens(position), key=lambda one: one[0]) if rank <= maximum]

    def _tokens(self, position: PositionLogprobs) -> list[tuple[int, Token]]:
        """Those of a position with their ranks, the sampled one first."""
        special = self._tokenizer.special_ids
        return [
            (
                each.rank,
                Token(
                    id=token_id,
                    text=each.decoded_token,
                    logprob=max(each.logprob, MIN_LOGPROB),
                    special=token_id in special,
                ),
            )
            for token_id, each in position.items()
        ]


def _spread(tokens: list[Token], text: str) -> None:
    """Give the tokens of a step its text, so that all texts but those of special tokens are the answer."""
    spoken = [token for token in tokens if not token.special]
    if "".join(token.text for token in spoken) == text:
        return
    for token in spoken:
        token.text = ""
    if spoken:
        spoken[-1].text = text
    elif tokens and text:  # what was held back comes with the end
        tokens[-1].text, tokens[-1].special = text, False
