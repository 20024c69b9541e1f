"""``ensemble`` and ``tensorrt_llm_bls``: models with text as input and output."""

from __future__ import annotations

from penstock.core.errors import invalid
from penstock.frontend.prompts import TokenizedPrompt
from penstock.serve.generation import SequenceDelta
from penstock.serve.models.served_models import ServedModel

from ..model import ModelCall
from ..tensors import BOOL, BYTES, FP32, INT32, Spec, Tensor, text
from .base import GENERATION_OUTPUTS, SAMPLING_INPUTS, GenerationModel, Row, SequenceResponse
from .sampling import InputNames, guided_of, logit_bias_of, sampling_of


class TextModel(GenerationModel):
    """Generation of text from text.

    Args:
        name: model name in the repository.
        accumulate: streamed responses contain all text so far, instead of only the new text.
    """

    names = InputNames({})
    inputs = (
        Spec("text_input", BYTES),
        Spec("max_tokens", INT32),
        Spec("bad_words", BYTES, (-1,), optional=True),
        Spec("stop_words", BYTES, (-1,), optional=True),
        Spec("top_k", INT32, optional=True),
        Spec("top_p", FP32, optional=True),
        Spec("length_penalty", FP32, optional=True),
        Spec("stream", BOOL, optional=True),
        Spec("embedding_bias_words", BYTES, (-1,), optional=True),
        Spec("embedding_bias_weights", FP32, (-1,), optional=True),
        Spec("guided_decoding_guide_type", BYTES, optional=True),
        Spec("guided_decoding_guide", BYTES, optional=True),
        *SAMPLING_INPUTS,
    )
    outputs = (Spec("text_output", BYTES, (-1,)), *GENERATION_OUTPUTS)

    def __init__(self, service: ServedModel, name: str, accumulate: bool = False) -> None:
        super().__init__(service)
        self.name = name
        self._accumulate = accumulate

    async def rows(self, call: ModelCall) -> list[Row]:
        prompts = [text("text_input", element) for element in call.inputs["text_input"].elements]
        size = sum(map(len, prompts))
        result = []
        for index, prompt in enumerate(prompts):
            word_lists = {
                name: texts_of(call, index, input_name)
                for name, input_name in (("stop", "stop_words"), ("bad_words", "bad_words"))
            }
            bias = await self._bias(call, index)
            guided = guided_of(call, index, self.names)
            sampling = sampling_of(call, index, self.names, self.vocab_size, **word_lists, **bias, **guided)
            result.append(Row(TokenizedPrompt(await self._service.gateway.encode(prompt, size=size), prompt), sampling))
        return result

    async def _bias(self, call: ModelCall, index: int) -> dict[str, object]:
        words = texts_of(call, index, "embedding_bias_words")
        weights = call.row("embedding_bias_weights", index) or ()
        if len(words) != len(weights):
            message = f"has {len(weights)} elements; must have one per word of embedding_bias_words ({len(words)})"
            raise invalid("embedding_bias_weights", message)

        def encoded() -> dict[str, object]:
            return logit_bias_of([(self._tokenizer.encode(w, False), x) for w, x in zip(words, weights, strict=True)])

        return await self._service.gateway.prepare(sum(map(len, words)), encoded)

    def output_tensors(
        self, call: ModelCall, responses: list[SequenceResponse], rows: int, streamed: bool
    ) -> list[Tensor]:
        texts = [self._text(call, each, streamed).encode() for each in responses]
        return [Tensor("text_output", BYTES, (len(texts),), texts)]  # one-dimensional, as Triton's clients expect

    def _text(self, call: ModelCall, response: SequenceResponse, streamed: bool) -> str:
        if streamed:
            return response.completion.text if self._accumulate else response.delta.text
        return (
            response.completion.text
            if self.excluded(call, response.row)
            else f"{response.output.prompt}{response.completion.text}"
        )

    def has_output(self, delta: SequenceDelta) -> bool:
        return bool(delta.text or delta.positions)


def texts_of(call: ModelCall, index: int, name: str) -> tuple[str, ...]:
    """The non-empty texts in one row of the input ``name``."""
    return tuple([text(name, element) for element in call.row(name, index) or () if element])
