"""``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from msgspec import UNSET

from penstock.core import SamplingParams
from penstock.core.errors import invalid
from penstock.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from penstock.frontend.prompts import TokenizedPrompt
from penstock.serve.chat.prompt import truncate
from penstock.serve.generation import SequenceCursor, generate, merge_streams
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.service import ModelService
from penstock.text.infill import infill_format

from .parse import completion_sampling
from .requests import MAX_PROMPTS, CompletionRequest
from .responses import (
    DONE,
    MIN_LOGPROB,
    PIECE_SIZE,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    encode,
    event,
    join_json,
    prompt_logprobs_of,
    token_of,
    usage_of,
)


class CompletionHandler:
    """One request of this kind, from its prompts to its choices."""

    def __init__(self, service: ModelService, record: RequestRecord, request: CompletionRequest) -> None:
        self._service = service
        self._record = record
        self._request = request
        self._fair_queue = service.gateway.fair_queue
        self._tokenizer = service.gateway.input_processor.tokenizer
        self._adapter = service.adapter_of(request.model)
        self.sampling: SamplingParams = completion_sampling(request, service.gateway.input_processor.default_sampling)
        self._suffix = request.suffix or ""
        if self._suffix:
            if request.truncate_prompt_tokens is not None:
                raise invalid("truncate_prompt_tokens", "cannot be combined with suffix")
            ends = infill_format(self._tokenizer).ends
            self.sampling = self.sampling.replace(stop_token_ids=(*self.sampling.stop_token_ids, *ends))
        self.num_hidden_tokens = 1 if request.max_tokens == 0 else 0
        """Generated tokens per sequence that are not returned (1 with ``max_tokens`` 0)."""
        self._prompts = _prompts(request)
        self._size = sum([len(prompt) for prompt in self._prompts if isinstance(prompt, str)])
        self._offsets = [0] * (len(self._prompts) * self.sampling.n)
        self.id = f"cmpl-{record.request_id}"
        self._created = int(time.time())

    @property
    def model(self) -> str:
        """Name of the model or adapter that answers."""
        return self._adapter or self._service.name

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        request = self._request
        options = {"priority": request.priority or 0, "cache_salt": request.cache_salt or "", "adapter": self._adapter}
        prompts = [await self._prompt(prompt) for prompt in self._prompts]
        streams = [generate(self._service, self._record, prompt, self.sampling, **options) for prompt in prompts]
        async with aclosing(merge_streams(streams)) as outputs:
            async for numbered in outputs:
                yield numbered

    async def full(self) -> AsyncGenerator[bytes, None]:
        last: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                last[index] = output
        result = [last[index] for index in range(len(self._prompts))]
        choices = [
            await self.choice(i, output, completion) for i, output in enumerate(result) for completion in output.outputs
        ]
        yield encode(self._response(choices, usage=usage_of(result, self.num_hidden_tokens)))

    async def stream(self) -> AsyncGenerator[bytes, None]:
        given = self._request.stream_options
        with_usage = given and given.include_usage
        always = with_usage and given and given.continuous_usage_stats
        last: dict[int, RequestOutput] = {}
        progress = [SequenceCursor() for _ in self._offsets]
        async with aclosing(self.outputs()) as outputs:
            async for i, output in outputs:
                last[i], events = output, []
                usage = usage_of([output], self.num_hidden_tokens) if always else None if with_usage else UNSET
                for completion in output.outputs:
                    choice = await self.added(i, output, completion, progress[i * self.sampling.n + completion.index])
                    for chunk in choice.chunks() if choice else ():
                        events.append(event(self._response([chunk], usage=usage)))
                if events:
                    yield b"".join(events)
        if with_usage:
            yield event(self._response([], usage=usage_of(list(last.values()), self.num_hidden_tokens)))
        yield DONE

    async def _prompt(self, prompt: str | list[int]) -> TokenizedPrompt:
        request, size, gateway = self._request, self._size, self._service.gateway
        text = prompt if isinstance(prompt, str) else None
        if self._suffix:
            assert isinstance(self._suffix, str)
            return TokenizedPrompt(await gateway.encode_infill(prompt, self._suffix, size), text)
        token_ids = await gateway.encode(prompt, request.add_special_tokens is not False, size)
        if request.truncate_prompt_tokens is None:
            return TokenizedPrompt(token_ids, text)
        maximum = gateway.engine_pool.require_engine().max_model_len - (self.sampling.max_tokens or 1)
        return TokenizedPrompt(truncate(token_ids, request, maximum))

    async def added(
        self, i: int, output: RequestOutput, completion: CompletionOutput, progress: SequenceCursor
    ) -> CompletionChoice | None:
        """What a step added to a sequence; None where there is nothing to send."""
        first = not progress.tokens
        piece = progress.advance(completion)
        if piece is None:
            return None
        text, ids, positions = ("", [], []) if self.num_hidden_tokens else piece
        ids_wanted = bool(self._request.return_token_ids)
        choice = CompletionChoice(index=i * self.sampling.n + completion.index, text=text)
        echoed: list[PositionLogprobs | None] = []
        if first and self._request.echo:
            choice.text = self._prompt_text(output) + text
            echoed = output.prompt_logprobs or []
        if first and ids_wanted:
            choice.prompt_token_ids = output.prompt_token_ids
        if first and self._request.prompt_logprobs is not None:
            choice.prompt_logprobs = await prompt_logprobs_of(output, self._fair_queue)
        if self.sampling.logprobs is not None:
            choice.logprobs = await self._logprobs(choice.index, [*echoed, *positions], output if echoed else None)
        if ids_wanted:
            choice.token_ids = choice.completion_token_ids = ids
        if progress.finished:
            self._finish(choice, completion)
        elif not choice.text and choice.logprobs is None and not ids_wanted and choice.prompt_logprobs is UNSET:
            return None
        return choice

    async def choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        choice = await self.added(i, output, completion, SequenceCursor())
        assert choice is not None
        return choice

    def _finish(self, choice: CompletionChoice, completion: CompletionOutput) -> None:
        if self.num_hidden_tokens:
            choice.finish_reason = "length"
        else:
            choice.finish_reason, choice.stop_reason = completion.finish_reason, completion.stop_reason  # type: ignore[assignment]

    def _response(self, choices: list[CompletionChoice], **usage: object) -> Completion:
        return Completion(
            id=self.id,
            created=self._created,
            model=self.model,
            choices=choices,
            **usage,  # type: ignore[arg-type]
        )

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    async def _logprobs(
        self, index: int, positions: list[PositionLogprobs | None], prompt: RequestOutput | None
    ) -> CompletionLogprobs:
        """The logprobs of consecutive tokens; long ones are built in pieces, one per turn of the event loop."""
        if len(positions) <= PIECE_SIZE:
            return self._piece(index, positions, prompt)
        parts: dict[str, list[bytes]] = {name: [] for name in CompletionLogprobs.__struct_fields__}
        for start in range(0, len(positions), PIECE_SIZE):
            await self._fair_queue.wait_turn()
            piece = self._piece(index, positions[start : start + PIECE_SIZE], prompt)
            for name, pieces in parts.items():
                pieces.append(encode(getattr(piece, name))[1:-1])
        encoded: dict[str, Any] = {name: join_json(pieces) for name, pieces in parts.items()}
        return CompletionLogprobs(**encoded)

    def _piece(
        self, index: int, positions: list[PositionLogprobs | None], prompt: RequestOutput | None
    ) -> CompletionLogprobs:
        """The logprobs of consecutive prompt and output tokens. None stands for the prompt's first token, which has
        none; ``prompt`` has its id."""
        as_ids = self._request.return_tokens_as_token_ids
        result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for position in positions:
            if position is None:
                assert prompt is not None
                token_id = prompt.prompt_token_ids[0]
                token = self._tokenizer.decode([token_id], skip_special_tokens=False)
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
            else:
                token_id, sampled = next(iter(position.items()))
                token = sampled.decoded_token
                result.token_logprobs.append(max(sampled.logprob, MIN_LOGPROB))
                likeliest = sorted(position.items(), key=lambda entry: entry[1].rank)
                result.top_logprobs.append({token_of(i, p, as_ids): max(p.logprob, MIN_LOGPROB) for i, p in likeliest})
            result.tokens.append(f"token_id:{token_id}" if as_ids else token)
            result.text_offset.append(self._offsets[index])
            self._offsets[index] += len(token)
        return result


def _prompts(request: CompletionRequest) -> list[str] | list[list[int]]:
    """One or several: texts, or lists of token ids.

    Raises ``PenstockError`` (``invalid``) where these are mixed.
    """
    field = "prompt" if request.prompt_token_ids is None else "prompt_token_ids"
    prompt = getattr(request, field)
    if isinstance(prompt, str):
        return [prompt]
    if len({type(entry) for entry in prompt}) > 1:
        raise invalid(field, "mixes texts, token ids and lists of token ids")
    if isinstance(prompt[0], int):
        return [cast(list[int], prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(field, f"holds {len(prompt)} prompts, and at most {MAX_PROMPTS} are taken", MAX_PROMPTS)
    return cast(list[str], prompt)
