"""Base class of the TensorRT-LLM models that generate text or token ids."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, NamedTuple, TypeVar

from penstock.core import Code, PenstockError, SamplingParams
from penstock.core.errors import invalid
from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.frontend.prompts import TokenizedPrompt
from penstock.serve.generation import SequenceCursor, SequenceDelta, generate, merge_streams
from penstock.serve.models.served_models import ServedModel

from ..model import Model, ModelCall, ModelResponse
from ..tensors import BOOL, FP32, INT32, UINT64, Spec, Tensor
from .perf_metrics import OUTPUTS as PERF_METRICS
from .perf_metrics import perf_metrics
from .sampling import InputNames
from .stopping import RunningRequests

T = TypeVar("T")

NEUTRAL_INPUTS: dict[str, tuple[float, ...]] = {
    "beam_search_diversity_rate": (0,),
    "draft_acceptance_threshold": (0,),
    "runtime_top_p_decay": (0, 1),
    "runtime_top_p_min": (0, 1e-6),
    "runtime_top_p_reset_ids": (0, -1),
}
"""Unsupported input → values that have no effect and are accepted."""
UNSUPPORTED_INPUTS = {
    **dict.fromkeys(
        ("lora_task_id", "lora_weights", "lora_config"),
        "not supported yet; use OpenAI's API with the name of an adapter (--lora-modules) as model",
    ),
    **dict.fromkeys(
        ("prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_id", "image_input", "image_bytes_input"),
        "not supported yet; prompts must be text or token ids",
    ),
    **dict.fromkeys(NEUTRAL_INPUTS, "not supported; use top_p, or length_penalty for beam search"),
    **dict.fromkeys(
        ("draft_input_ids", "draft_logits", "num_draft_tokens", "use_draft_logits"),
        "not supported yet; configure speculative decoding with --speculative-config on the server",
    ),
}
ALIASES = {"min_tokens": "min_length", "seed": "random_seed"}
"""Input name since TensorRT-LLM 0.17 → name before 0.17."""
SAMPLING_INPUTS = (
    Spec("end_id", INT32, optional=True),
    Spec("pad_id", INT32, optional=True),
    Spec("temperature", FP32, optional=True),
    Spec("repetition_penalty", FP32, optional=True),
    Spec("min_length", INT32, optional=True),
    Spec("presence_penalty", FP32, optional=True),
    Spec("frequency_penalty", FP32, optional=True),
    Spec("random_seed", UINT64, optional=True),
    Spec("return_log_probs", BOOL, optional=True),
    Spec("return_context_logits", BOOL, optional=True),
    Spec("return_generation_logits", BOOL, optional=True),
    Spec("exclude_input_in_output", BOOL, optional=True),
    Spec("beam_width", INT32, optional=True),
    Spec("num_return_sequences", INT32, optional=True),
    Spec("early_stopping", BOOL, optional=True),
    Spec("return_perf_metrics", BOOL, optional=True),
    Spec("return_num_input_tokens", BOOL, optional=True),
    Spec("return_num_output_tokens", BOOL, optional=True),
)
"""Inputs with the same names in text and token models."""
GENERATION_OUTPUTS = (
    Spec("cum_log_probs", FP32, (-1,)),
    Spec("output_log_probs", FP32, (-1, -1)),
    Spec("context_logits", FP32, (-1, -1)),
    Spec("generation_logits", FP32, (-1, -1, -1)),
    Spec("batch_index", INT32, (-1,)),
    Spec("sequence_index", INT32, (-1,)),
    *PERF_METRICS,
    Spec("num_input_tokens", INT32),
    Spec("num_output_tokens", INT32),
)
"""Outputs with the same names in text and token models."""
FP32_BYTES = 4
EMPTY_DELTA = SequenceDelta("", [], [])
MIN_FP32 = -3.4e38
"""Value that replaces minus infinity in FP32 outputs."""


class Row(NamedTuple):
    """One prompt of a request, and its sampling parameters."""

    prompt: TokenizedPrompt
    sampling: SamplingParams


class SequenceResponse(NamedTuple):
    """One sequence in a response."""

    row: int
    """Index of the row in the request."""
    output: RequestOutput
    completion: CompletionOutput
    delta: SequenceDelta
    """The output to return: the new tokens of one step, or the whole sequence."""


class GenerationModel(Model):
    """A model that generates text or token ids. With the input ``stream``, the output of each step is a response.

    As in TensorRT-LLM, a response of a decoupled call has one sequence, or all beams of a row.
    """

    names: ClassVar[InputNames]
    decoupled = True
    aliases = ALIASES
    unsupported_inputs = UNSUPPORTED_INPUTS
    neutral_inputs = NEUTRAL_INPUTS

    def __init__(self, service: ServedModel) -> None:
        self._service = service
        self._tokenizer = service.gateway.input_processor.tokenizer
        self._running = RunningRequests()

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary."""
        return self._service.gateway.engine_pool.known_engine().vocab_size

    def parameters(self) -> dict[str, str]:
        return {"exclude_input_in_output": str(self._service.options.exclude_input_in_output).lower()}

    @abstractmethod
    async def rows(self, call: ModelCall) -> list[Row]:
        """The prompts of a request with their sampling parameters, one per row of its batch."""

    @abstractmethod
    def output_tensors(
        self, call: ModelCall, responses: list[SequenceResponse], rows: int, streamed: bool
    ) -> list[Tensor]:
        """The text or token tensors of a response with ``rows`` rows; the caller adds ``GENERATION_OUTPUTS``."""

    @abstractmethod
    def has_output(self, delta: SequenceDelta) -> bool:
        """True if the output of a step is sent in a streamed response; False if it is empty."""

    async def infer(self, call: ModelCall) -> AsyncGenerator[ModelResponse, None]:
        try:
            if self._uniform_value(call, "stop"):
                self._stop(call)
                if not call.streamed:
                    yield ModelResponse([])
                return
            streamed = bool(self._uniform_value(call, "stream"))
            self._uniform_value(call, "num_return_sequences")
            self._check_beams(self._uniform_value(call, "beam_width"))
            if streamed and not call.streamed:
                raise invalid("stream", "this request has one response; use generate_stream or ModelStreamInfer")
            rows = await self.rows(call)
            await self._check_logits_size(rows)
            streams = [
                generate(self._service, call.record, row.prompt, row.sampling, i, priority=call.priority)
                for i, row in enumerate(rows)
            ]
            last: dict[int, RequestOutput] = {}
            left = {(i, k): SequenceCursor() for i, row in enumerate(rows) for k in range(row.sampling.n)}
            with self._running.track(_client(call), call.id) as stoppable, stoppable.until_stopped():
                async with aclosing(merge_streams(streams)) as outputs:
                    async for i, output in outputs:
                        last[i] = output
                        for responses in (
                            self._step_responses(i, rows[i], output, left, streamed) if call.streamed else ()
                        ):
                            yield self._response(call, responses, 1, streamed, not left)
            if len(last) < len(rows):
                raise PenstockError(Code.CANCELLED, "the request was stopped before each of its prompts had output")
            if not call.streamed:
                responses = [
                    SequenceResponse(i, last[i], completion, full_delta(completion))
                    for i in range(len(rows))
                    for completion in last[i].outputs
                ]
                yield self._response(call, responses, len(rows), False, True)
                return
            for responses, final in group_stopped(
                [
                    SequenceResponse(
                        i, last[i], last[i].outputs[k], EMPTY_DELTA if streamed else full_delta(last[i].outputs[k])
                    )
                    for i, k in left
                ],
                rows,
            ):
                yield self._response(call, responses, 1, streamed, final)
        except PenstockError as error:
            raise self.names.renamed(error) from error

    def _step_responses(
        self, index: int, row: Row, output: RequestOutput, left: dict[tuple[int, int], SequenceCursor], streamed: bool
    ) -> Iterator[list[SequenceResponse]]:
        """Yield the responses of a step, as lists of sequences: one response for each finished sequence (removed from
        ``left``) and, if ``streamed``, for each sequence with new tokens. All beams of a row are in one response."""
        for completion in output.outputs:
            cursor = left.get((index, completion.index))
            if cursor is None or (delta := cursor.advance(completion)) is None:
                continue
            if completion.finished:
                del left[index, completion.index]
            if row.sampling.use_beam_search:
                if not any((index, k) in left for k in range(row.sampling.n)):
                    yield [SequenceResponse(index, output, each, full_delta(each)) for each in output.outputs]
            elif completion.finished or (streamed and self._sends_response(row, delta)):
                yield [SequenceResponse(index, output, completion, delta if streamed else full_delta(completion))]

    def _stop(self, call: ModelCall) -> None:
        if not (call.record.client and call.id):
            raise invalid("id", "stop requires gRPC, and the id of a running request of the same connection")
        self._running.stop(_client(call), call.id)

    def _check_beams(self, beams: int | None) -> None:
        if (beams or 0) > (maximum := self._service.options.max_beam_width):
            raise invalid("beam_width", f"must be at most {maximum}, is {beams} (max_beam_width)", maximum)

    async def _check_logits_size(self, rows: Sequence[Row]) -> None:
        """Raise ``PenstockError`` (``invalid``) if the requested logits exceed ``max_logits_size``."""
        gateway, maximum = self._service.gateway, self._service.options.max_logits_size
        engine, size = gateway.engine_pool.known_engine(), 0
        for row in rows:
            tokens = 0
            if row.sampling.return_context_logits:
                tokens += len(row.prompt.token_ids)
            if row.sampling.return_generation_logits:
                tokens += row.sampling.n * min(row.sampling.max_tokens or 0, engine.max_model_len)
            size += tokens * engine.vocab_size * FP32_BYTES
            if size > maximum:
                context = row.sampling.return_context_logits
                message = f"requires at least {size} bytes of logits; the maximum is {maximum} (max_logits_size)"
                raise invalid("return_context_logits" if context else "return_generation_logits", message, maximum)

    def _sends_response(self, row: Row, delta: SequenceDelta) -> bool:
        sampling = row.sampling
        return sampling.return_context_logits or sampling.return_generation_logits or self.has_output(delta)

    def _uniform_value(self, call: ModelCall, name: str) -> Any:
        """The value of an input that must have the same value in all rows; None if it is absent."""
        result = {self.names.value(call, index, name) for index in range(call.rows)}
        if len(result) > 1:
            raise invalid(name, f"must be the same in all rows, has {' and '.join(sorted(map(str, result)))}")
        return result.pop()

    def excluded(self, call: ModelCall, row: int) -> bool:
        """True if responses that are not streamed omit the prompt of a row."""
        exclude = self.names.value(call, row, "exclude_input_in_output")
        return self._service.options.exclude_input_in_output if exclude is None else bool(exclude)

    def leading_shape(self, call: ModelCall, responses: list[SequenceResponse], rows: int) -> tuple[int, ...]:
        """Leading dimensions of outputs: ``(sequences,)``, or ``(rows, sequences per row)`` with a batch dimension."""
        return (len(responses),) if call.batch is None else (rows, len(responses) // rows)

    def _response(
        self, call: ModelCall, responses: list[SequenceResponse], rows: int, streamed: bool, last: bool
    ) -> ModelResponse:
        lead = self.leading_shape(call, responses, rows)
        result = self.output_tensors(call, responses, rows, streamed)
        result.append(Tensor("batch_index", INT32, lead, [each.row for each in responses]))
        result.append(Tensor("sequence_index", INT32, lead, [each.completion.index for each in responses]))
        if self._is_requested(call, responses, "return_log_probs"):
            sums = [each.completion.cumulative_logprob or 0.0 for each in responses]
            result.append(Tensor("cum_log_probs", FP32, lead, [max(value, MIN_FP32) for value in sums]))
            logprobs = [
                [max(next(iter(p.values())).logprob, MIN_FP32) for p in each.delta.positions] for each in responses
            ]
            length, elements = pad(logprobs, 0.0)
            result.append(Tensor("output_log_probs", FP32, (*lead, length), elements))
        else:
            result += [zeros("cum_log_probs", lead), zeros("output_log_probs", (*lead, 1))]
        result += self._token_counts(call, responses, lead, streamed)
        if not self._is_requested(call, responses, "return_context_logits"):
            result.append(zeros("context_logits", (*lead[:-1], 1, 1)))
        if not self._is_requested(call, responses, "return_generation_logits"):
            result.append(zeros("generation_logits", (*lead, 1, 1)))
        return ModelResponse(result + self._logits(responses, lead), last)

    def _is_requested(self, call: ModelCall, responses: list[SequenceResponse], name: str) -> bool:
        """True if the input ``name``, which requests an output, is true for any row of the response."""
        return any(self.names.value(call, each.row, name) for each in responses)

    def _token_counts(
        self, call: ModelCall, responses: list[SequenceResponse], lead: tuple[int, ...], streamed: bool
    ) -> list[Tensor]:
        """Token counts and performance metrics, if requested."""
        result: list[Tensor] = []
        prompts = [len(each.output.prompt_token_ids) for each in responses]
        if self._is_requested(call, responses, "return_num_input_tokens"):
            result.append(Tensor("num_input_tokens", INT32, lead, prompts))
        if self._is_requested(call, responses, "return_num_output_tokens"):  # output_ids may include the prompt
            begins = [
                0 if streamed or self.excluded(call, each.row) else n
                for each, n in zip(responses, prompts, strict=True)
            ]
            tokens = [begin + len(each.delta.token_ids) for each, begin in zip(responses, begins, strict=True)]
            result.append(Tensor("num_output_tokens", INT32, lead, tokens))
        if self._is_requested(call, responses, "return_perf_metrics"):
            block_size = self._service.gateway.engine_pool.known_engine().block_size
            result += perf_metrics([each.output for each in responses], block_size, lead)
        return result

    def _logits(self, responses: list[SequenceResponse], lead: tuple[int, ...]) -> list[Tensor]:
        """Requested logits: context logits with the first tokens of a row, generation logits with each token."""
        context = [
            each.output.context_logits or b""
            for each in responses
            if each.completion.index == 0 and len(each.delta.token_ids) == len(each.completion.token_ids)
        ]
        generated = [each.completion.generation_logits for each in responses]
        if not (any(context) or any(generated)):
            return []
        result, width = [], self.vocab_size
        if any(context):
            length, elements = rows_of(context, width)
            result.append(Tensor("context_logits", FP32, (*lead[:-1], length, width), elements))
        if any(generated):
            length, elements = rows_of([logits_of(each, width) for each in responses], width)
            result.append(Tensor("generation_logits", FP32, (*lead, length, width), elements))
        return result


def _client(call: ModelCall) -> tuple[str, str]:
    """Connection and tenant of a call. ``stop`` requires that both match, as tenants may share a proxy's connection."""
    return call.record.client, call.record.tenant


def group_stopped(
    stopped: list[SequenceResponse], rows: Sequence[Row]
) -> Iterator[tuple[list[SequenceResponse], bool]]:
    """Group the sequences of a stopped request into responses; yields each response, and True for the last one."""
    responses: list[list[SequenceResponse]] = []
    for sequence in stopped:
        if responses and rows[sequence.row].sampling.use_beam_search and responses[-1][0].row == sequence.row:
            responses[-1].append(sequence)
        else:
            responses.append([sequence])
    for response in responses:
        yield response, response is responses[-1]


def full_delta(completion: CompletionOutput) -> SequenceDelta:
    """Convert a whole sequence to one delta."""
    return SequenceDelta(completion.text, completion.token_ids, completion.logprobs or [])


def logits_of(response: SequenceResponse, width: int) -> bytes:
    """The generation logits of the tokens in a response: ``width`` (vocabulary size) FP32 numbers per token."""
    first = len(response.completion.token_ids) - len(response.delta.token_ids)
    return bytes((response.completion.generation_logits or bytearray())[first * width * FP32_BYTES :])


def rows_of(parts: Sequence[bytes], width: int) -> tuple[int, memoryview[float]]:
    """Zero-pad FP32 matrices (``width`` columns) to the same number of rows; returns this number and all elements."""
    maximum = max(map(len, parts))
    raw = parts[0] if len(parts) == 1 else b"".join([part.ljust(maximum, b"\0") for part in parts])
    return maximum // (width * FP32_BYTES), memoryview(raw).cast("f")


def zeros(name: str, shape: tuple[int, ...]) -> Tensor:
    """Zeros for an output that was not requested: clients of TensorRT-LLM's backend read all score outputs."""
    return Tensor(name, FP32, shape, [0.0] * math.prod(shape))


def pad(lists: list[list[T]], filling: T) -> tuple[int, list[T]]:
    """Pad lists with ``filling`` to the length of the longest; returns this length and the concatenated elements."""
    length = max(map(len, lists), default=0)
    return length, [*itertools.chain.from_iterable([*each, *[filling] * (length - len(each))] for each in lists)]
