"""Handler of OpenAI's ``/v1/completions``."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.core import SamplingParams
from penstock.core.errors import invalid
from penstock.frontend.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from penstock.frontend.prompts import TokenizedPrompt
from penstock.serve.chat.prompt import truncate
from penstock.serve.chat.sampling import sampling_of
from penstock.serve.generation import Output, SequenceCursor, merge_streams
from penstock.serve.http.reply import encode
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel
from penstock.text.infill import infill_format

from .choices import ChoiceHandler
from .schema import (
    CHUNK_SIZE,
    MIN_LOGPROB,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    join_json,
    one_or_several,
    prompt_logprobs_of,
    token_of,
    usage_of,
)


class CompletionHandler(ChoiceHandler):
    """Handler of one completion request."""

    request: CompletionRequest

    def __init__(self, service: ServedModel, record: RequestRecord, request: CompletionRequest) -> None:
        sampling = completion_sampling(request, service.gateway.input_processor.default_sampling)
        super().__init__(service, record, request, sampling)
        self.request = request
        self.tokenizer = service.gateway.input_processor.tokenizer
        self.suffix = request.suffix or ""
        if self.suffix:
            if request.truncate_prompt_tokens is not None:
                raise invalid("truncate_prompt_tokens", "cannot be combined with suffix; leave one out")
            ends = infill_format(self.tokenizer).ends
            self.sampling = sampling.replace(stop_token_ids=(*sampling.stop_token_ids, *ends))
        self.num_hidden_tokens = 1 if request.max_tokens == 0 else 0
        """Number of generated tokens per sequence that are not returned: 1 with ``max_tokens`` 0, otherwise 0."""
        field = "prompt" if request.prompt_token_ids is None else "prompt_token_ids"
        self._prompts = one_or_several(getattr(request, field), field, "prompts")
        self._size = sum([len(prompt) for prompt in self._prompts if isinstance(prompt, str)])
        self._offsets: defaultdict[int, int] = defaultdict(int)
        """Choice index → number of characters of the tokens in its logprobs so far."""
        self.cursors: defaultdict[int, SequenceCursor] = defaultdict(SequenceCursor)
        """Choice index → position up to which the output has been formatted."""
        self.id = f"cmpl-{record.request_id}"
        self.created = int(time.time())

    async def outputs(self) -> AsyncGenerator[Output, None]:
        prompts = [await self._prompt(prompt) for prompt in self._prompts]
        return merge_streams([self.generate(prompt, i) for i, prompt in enumerate(prompts)])

    async def choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> msgspec.Struct:
        return await self.full_choice(i, output, completion)

    async def chunks(self, i: int, output: RequestOutput, completion: CompletionOutput) -> Sequence[msgspec.Struct]:
        choice = await self.delta_choice(i, output, completion)
        return choice.chunks() if choice else ()

    def response(self, choices: Any, usage: Any) -> msgspec.Struct:
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def usage(self, outputs: list[RequestOutput]) -> Any:
        return usage_of(outputs, self.num_hidden_tokens)

    async def _prompt(self, prompt: str | list[int]) -> TokenizedPrompt:
        request, size, gateway = self.request, self._size, self.service.gateway
        text = prompt if isinstance(prompt, str) else None
        if self.suffix:
            assert isinstance(self.suffix, str)
            return TokenizedPrompt(await gateway.encode_infill(prompt, self.suffix, size), text)
        token_ids = await gateway.encode(prompt, request.add_special_tokens is not False, size)
        if request.truncate_prompt_tokens is None:
            return TokenizedPrompt(token_ids, text)
        room = self.max_model_len - (self.sampling.max_tokens or 1)
        return truncate(TokenizedPrompt(token_ids), request, room)

    def number(self, i: int, completion: CompletionOutput) -> int:
        """The choice index of a sequence of prompt ``i``."""
        return i * self.sampling.n + completion.index

    async def full_choice(self, i: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        """The choice of a finished sequence."""
        choice = await self.delta_choice(i, output, completion)
        assert choice is not None
        return choice

    async def delta_choice(
        self, i: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice | None:
        """The choice for the output of one step of a sequence; None if there is nothing to send."""
        number, request = self.number(i, completion), self.request
        cursor = self.cursors[number]
        first = not cursor.tokens
        delta = cursor.advance(completion)
        if delta is None:
            return None
        text, ids, positions = ("", [], []) if self.num_hidden_tokens else delta
        with_ids = bool(request.return_token_ids)
        choice = CompletionChoice(index=number, text=text)
        echoed: list[PositionLogprobs | None] = []
        if first and request.echo:
            choice.text = self.prompt_text(output) + text
            echoed = output.prompt_logprobs or []
        if first and with_ids:
            choice.prompt_token_ids = output.prompt_token_ids
        if first and request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = await prompt_logprobs_of(output, self.service.gateway.fair_queue)
        if self.sampling.logprobs is not None:
            choice.logprobs = await self._logprobs(number, [*echoed, *positions], output if echoed else None)
        if with_ids:
            choice.token_ids = choice.completion_token_ids = ids
        if cursor.finished:
            self._finish(choice, completion)
        elif not choice.text and choice.logprobs is None and not with_ids and choice.prompt_logprobs is UNSET:
            return None
        return choice

    def _finish(self, choice: CompletionChoice, completion: CompletionOutput) -> None:
        if self.num_hidden_tokens:
            choice.finish_reason = "length"
        else:
            choice.finish_reason, choice.stop_reason = completion.finish_reason, completion.stop_reason  # type: ignore[assignment]

    async def _logprobs(
        self, number: int, positions: list[PositionLogprobs | None], prompt: RequestOutput | None
    ) -> CompletionLogprobs:
        """The logprobs of consecutive tokens. Long lists are encoded in chunks, one per turn of the event loop."""
        if len(positions) <= CHUNK_SIZE:
            return self.logprobs_of(number, positions, prompt)
        parts: dict[str, list[bytes]] = {name: [] for name in CompletionLogprobs.__struct_fields__}
        for start in range(0, len(positions), CHUNK_SIZE):
            await self.service.gateway.fair_queue.wait_turn()
            chunk = self.logprobs_of(number, positions[start : start + CHUNK_SIZE], prompt)
            for name, encoded_chunks in parts.items():
                encoded_chunks.append(encode(getattr(chunk, name))[1:-1])
        encoded: dict[str, Any] = {name: join_json(encoded_chunks) for name, encoded_chunks in parts.items()}
        return CompletionLogprobs(**encoded)

    def logprobs_of(
        self, number: int, positions: Sequence[PositionLogprobs | None], prompt: RequestOutput | None = None
    ) -> CompletionLogprobs:
        """The logprobs of consecutive prompt and output tokens of a choice.

        Args:
            positions: logprobs of each token; None for the first token of the prompt (it has no logprobs).
            prompt: output with the token ids of the prompt; required if ``positions`` contains None.
        """
        as_ids = self.request.return_tokens_as_token_ids
        result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for position in positions:
            if position is None:
                assert prompt is not None
                token_id = prompt.prompt_token_ids[0]
                token = self.tokenizer.decode([token_id], skip_special_tokens=False)
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
            else:
                token_id, sampled = next(iter(position.items()))
                token = sampled.decoded_token
                result.token_logprobs.append(max(sampled.logprob, MIN_LOGPROB))
                likeliest = sorted(position.items(), key=lambda entry: entry[1].rank)
                result.top_logprobs.append({token_of(i, p, as_ids): max(p.logprob, MIN_LOGPROB) for i, p in likeliest})
            result.tokens.append(f"token_id:{token_id}" if as_ids else token)
            result.text_offset.append(self._offsets[number])
            self._offsets[number] += len(token)
        return result


def completion_sampling(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """The sampling parameters of a completion. With ``max_tokens`` 0, one token is generated but not returned.

    Raises ``PenstockError`` (``invalid``) for contradictory fields.
    """
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "must be at least 1, is 0 (0 is allowed with echo)", 1)
    overrides: dict[str, Any] = {"logprobs": request.logprobs}
    if request.max_tokens is not None:
        overrides["max_tokens"] = max(request.max_tokens, 1)
    if request.echo and request.logprobs is not None:
        if request.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "cannot be combined with logprobs and echo; leave prompt_logprobs out")
        overrides["prompt_logprobs"] = request.logprobs
    return sampling_of(request, defaults, **overrides)
