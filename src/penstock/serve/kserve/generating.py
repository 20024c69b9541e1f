"""What models that generate have in common, of text or of token ids."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, NamedTuple, TypeVar

from penstock.core import PenstockError, SamplingParams
from penstock.core.errors import invalid
from penstock.frontend.outputs import CompletionOutput, RequestOutput
from penstock.frontend.prompts import Prompt
from penstock.serve.generation import Piece, Progress, generate, together
from penstock.serve.service import Service

from .model import Answer, Call, Model
from .sampling import Names
from .tensors import BOOL, FP32, INT32, UINT64, Spec, Tensor

T = TypeVar("T")

NOT_YET = {
    "return_context_logits": "not supported yet; return_log_probs is",
    "return_generation_logits": "not supported yet; return_log_probs is",
    "stop": "not supported yet; end the stream to cancel its requests",
}
SAMPLING = (
    Spec("end_id", INT32, optional=True),
    Spec("pad_id", INT32, optional=True),
    Spec("temperature", FP32, optional=True),
    Spec("repetition_penalty", FP32, optional=True),
    Spec("min_length", INT32, optional=True),
    Spec("presence_penalty", FP32, optional=True),
    Spec("frequency_penalty", FP32, optional=True),
    Spec("random_seed", UINT64, optional=True),
    Spec("return_log_probs", BOOL, optional=True),
    Spec("exclude_input_in_output", BOOL, optional=True),
    Spec("beam_width", INT32, optional=True),
    Spec("num_return_sequences", INT32, optional=True),
    Spec("early_stopping", BOOL, optional=True),
)
"""Inputs that both have under the same names."""
TOLD = (
    Spec("cum_log_probs", FP32, (-1,)),
    Spec("output_log_probs", FP32, (-1, -1)),
    Spec("batch_index", INT32, (-1,)),
    Spec("sequence_index", INT32, (-1,)),
)
"""Outputs likewise."""
LEAST = -3.4e38
"""Of a logarithm in FP32."""


class Row(NamedTuple):
    """One of a request's prompts."""

    prompt: Prompt
    sampling: SamplingParams


class Told(NamedTuple):
    """What an answer says of one sequence."""

    row: int
    output: RequestOutput
    made: CompletionOutput
    piece: Piece


class Generating(Model):
    """A model that generates: whole, or step by step where ``stream`` asks for it.

    Where a request may have many answers, each is of one sequence of one row, as in TensorRT-LLM's.
    """

    names: ClassVar[Names]
    decoupled = True
    not_yet = NOT_YET

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokenizer = service.gateway.preparer.tokenizer

    def parameters(self) -> dict[str, str]:
        return {"exclude_input_in_output": str(self._service.options.exclude_input_in_output).lower()}

    async def rows(self, call: Call) -> list[Row]:
        """The prompts of a request."""
        raise NotImplementedError

    def own(self, call: Call, told: list[Told], rows: int, streamed: bool) -> list[Tensor]:
        """The outputs that tell what was generated for so many rows."""
        raise NotImplementedError

    def worth(self, piece: Piece) -> bool:
        """Whether a step brought what an answer of its own is made for."""
        raise NotImplementedError

    async def answers(self, call: Call) -> AsyncGenerator[Answer, None]:
        try:
            streamed = bool(self._same(call, "stream"))
            self._same(call, "num_return_sequences")
            self._same(call, "beam_width")
            if streamed and not call.streamed:
                raise invalid("stream", "there is one answer to this request; ask generate_stream or ModelStreamInfer")
            rows = await self.rows(call)
            streams = [
                generate(self._service, call.record, row.prompt, row.sampling, priority=call.priority) for row in rows
            ]
            left = sum(row.sampling.n for row in rows)
            last: dict[int, RequestOutput] = {}
            progress = {(i, k): Progress() for i, row in enumerate(rows) for k in range(row.sampling.n)}
            async with aclosing(together(streams)) as outputs:
                async for i, output in outputs:
                    last[i] = output
                    for made in output.outputs if call.streamed else ():
                        piece = progress[i, made.index].advance(made)
                        if not streamed:  # each sequence is told by itself, once it is whole
                            piece = whole(made) if piece and made.finished else None
                        if piece and (made.finished or self.worth(piece)):
                            left -= made.finished
                            yield self._answer(call, [Told(i, output, made, piece)], 1, streamed, not left)
            if not call.streamed:
                told = [Told(i, last[i], made, whole(made)) for i in range(len(rows)) for made in last[i].outputs]
                yield self._answer(call, told, len(rows), False, True)
        except PenstockError as error:
            raise self.names.told(error) from error

    def _same(self, call: Call, name: str) -> Any:
        """What all rows have of an input that an answer's shape depends on."""
        found = {self.names.value(call, index, name) for index in range(call.rows)}
        if len(found) > 1:
            raise invalid(name, "must be the same in all rows")
        return found.pop()

    def excluded(self, call: Call, row: int) -> bool:
        """Whether a whole answer goes without a row's prompt."""
        asked = self.names.value(call, row, "exclude_input_in_output")
        return self._service.options.exclude_input_in_output if asked is None else bool(asked)

    def lead(self, call: Call, told: list[Told], rows: int) -> tuple[int, ...]:
        """The first dimensions of outputs: rows, where the request has a batch, and sequences of each."""
        return (len(told),) if call.batch is None else (rows, len(told) // rows)

    def _answer(self, call: Call, told: list[Told], rows: int, streamed: bool, last: bool) -> Answer:
        lead = self.lead(call, told, rows)
        found = self.own(call, told, rows, streamed)
        found.append(Tensor("batch_index", INT32, lead, [each.row for each in told]))
        found.append(Tensor("sequence_index", INT32, lead, [each.made.index for each in told]))
        if any(self.names.value(call, each.row, "return_log_probs") for each in told):
            sums = [each.made.cumulative_logprob or 0.0 for each in told]
            found.append(Tensor("cum_log_probs", FP32, lead, [max(value, LEAST) for value in sums]))
            each_one = [[max(next(iter(p.values())).logprob, LEAST) for p in each.piece.positions] for each in told]
            length, elements = padded(each_one, 0.0)
            found.append(Tensor("output_log_probs", FP32, (*lead, length), elements))
        return Answer(found, last)


def whole(made: CompletionOutput) -> Piece:
    """All of a sequence."""
    return Piece(made.text, made.token_ids, made.logprobs or [])


def padded(lists: list[list[T]], filling: T) -> tuple[int, list[T]]:
    """The greatest length, and all lists of that length one after the other."""
    length = max(map(len, lists), default=0)
    return length, [*itertools.chain.from_iterable([*each, *[filling] * (length - len(each))] for each in lists)]
