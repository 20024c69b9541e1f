"""``tensorrt_llm`` (token ids as input and output), ``preprocessing`` and ``postprocessing``."""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from penstock.core.errors import invalid
from penstock.frontend.gateway import MAX_INLINE_SIZE
from penstock.frontend.prompts import TokenizedPrompt
from penstock.serve.generation import SequenceDelta
from penstock.serve.models.served_models import ServedModel

from ..model import Model, ModelCall, ModelResponse
from ..tensors import BOOL, BYTES, FP32, INT32, MAX_VALUES, Spec, Tensor, text
from .base import GENERATION_OUTPUTS, SAMPLING_INPUTS, GenerationModel, Row, SequenceResponse, pad, zeros
from .sampling import InputNames, check_ids, logit_bias_of, sampling_of
from .text_models import texts_of

logger = logging.getLogger(__name__)

DECODER_INPUTS = (
    Spec("decoder_input_ids", INT32, (-1,), optional=True),
    Spec("decoder_input_lengths", INT32, optional=True),
)
"""Inputs of encoder-decoder models, ignored; ``preprocessing`` always returns them."""
LOOKAHEAD_INPUTS = tuple(
    Spec(name, INT32, optional=True)
    for name in ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
)
"""Lookahead decoding parameters, ignored: speculative decoding is configured for the whole server."""
WORD_INPUTS = ("BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")
SCORES = {"CUM_LOG_PROBS": 1, "OUTPUT_LOG_PROBS": 2, "CONTEXT_LOGITS": 2, "GENERATION_LOGITS": 3}
"""Inputs that ``postprocessing`` of TensorRT-LLM 0.10 returns unmodified (``OUT_…``) → number of dimensions."""
PADDING = -1
"""Padding value of word offsets in ``BAD_WORDS_IDS`` and ``STOP_WORDS_IDS``."""


class TokenModel(GenerationModel):
    """Generation of token ids from token ids."""

    name = "tensorrt_llm"
    platform = "tensorrtllm"
    names = InputNames(
        {
            "text_input": "input_ids",
            "max_tokens": "request_output_len",
            "top_k": "runtime_top_k",
            "top_p": "runtime_top_p",
            "length_penalty": "len_penalty",
            "stream": "streaming",
            "bad_words": "bad_words_list",
            "stop_words": "stop_words_list",
            "embedding_bias_weights": "embedding_bias",
        }
    )
    inputs = (
        Spec("input_ids", INT32, (-1,)),
        Spec("input_lengths", INT32),
        Spec("request_output_len", INT32),
        Spec("bad_words_list", INT32, (2, -1), optional=True),
        Spec("stop_words_list", INT32, (2, -1), optional=True),
        Spec("runtime_top_k", INT32, optional=True),
        Spec("runtime_top_p", FP32, optional=True),
        Spec("len_penalty", FP32, optional=True),
        Spec("streaming", BOOL, optional=True),
        Spec("stop", BOOL, optional=True),
        Spec("embedding_bias", FP32, (-1,), optional=True),
        *DECODER_INPUTS,
        *LOOKAHEAD_INPUTS,
        *SAMPLING_INPUTS,
    )
    outputs = (Spec("output_ids", INT32, (-1, -1)), Spec("sequence_length", INT32, (-1,)), *GENERATION_OUTPUTS)

    async def rows(self, call: ModelCall) -> list[Row]:
        if any(spec.name in call.inputs for spec in LOOKAHEAD_INPUTS):
            _log_ignored_lookahead()
        return [self._row(call, index) for index in range(call.rows)]

    def _row(self, call: ModelCall, index: int) -> Row:
        prompt = call.row("input_ids", index) or ()
        length = self.names.value(call, index, "input_lengths")
        if not 1 <= length <= len(prompt):
            raise invalid("input_lengths", f"must be from 1 to {len(prompt)} (length of input_ids), is {length}")
        vocab_size = self.vocab_size
        stops = split_words("stop_words_list", call.row("stop_words_list", index), vocab_size)
        stop_tokens = tuple([word[0] for word in stops if len(word) == 1])
        stop_strings = tuple([self._tokenizer.decode(word, False) for word in stops if len(word) > 1])
        biases = call.row("embedding_bias", index) or ()
        if len(biases) not in (0, len(self._tokenizer.vocabulary), vocab_size):
            message = f"has {len(biases)} elements; must have one per token of the vocabulary ({vocab_size})"
            raise invalid("embedding_bias", message, vocab_size)
        bias = [([i], x) for i, x in enumerate(biases) if x]
        sampling = sampling_of(
            call,
            index,
            self.names,
            vocab_size,
            stop_token_ids=stop_tokens,
            stop=stop_strings,
            bad_word_ids=tuple(
                map(tuple, split_words("bad_words_list", call.row("bad_words_list", index), vocab_size))
            ),
            detokenize=bool(stop_strings),
            **logit_bias_of(bias),
        )
        return Row(TokenizedPrompt(list(prompt[:length])), sampling)

    def output_tensors(
        self, call: ModelCall, responses: list[SequenceResponse], rows: int, streamed: bool
    ) -> list[Tensor]:
        result = [
            [
                *([] if streamed or self.excluded(call, each.row) else each.output.prompt_token_ids),
                *each.delta.token_ids,
            ]
            for each in responses
        ]
        filling = next((x for n in ("pad_id", "end_id") if (x := self.names.value(call, 0, n)) is not None), None)
        length, elements = pad(result, default_end_id(self._service) if filling is None else filling)
        lead = self.leading_shape(call, responses, rows)
        return [
            Tensor("output_ids", INT32, (*lead, length), elements),
            Tensor("sequence_length", INT32, lead, [len(each) for each in result]),
        ]

    def has_output(self, delta: SequenceDelta) -> bool:
        return bool(delta.token_ids)


class Preprocessing(Model):
    """Conversion of text to token ids."""

    name = "preprocessing"
    inputs = (
        Spec("QUERY", BYTES),
        Spec("REQUEST_OUTPUT_LEN", INT32),
        Spec("BAD_WORDS_DICT", BYTES, (-1,), optional=True),
        Spec("STOP_WORDS_DICT", BYTES, (-1,), optional=True),
        Spec("EMBEDDING_BIAS_WORDS", BYTES, (-1,), optional=True),
        Spec("EMBEDDING_BIAS_WEIGHTS", FP32, (-1,), optional=True),
        Spec("END_ID", INT32, optional=True),
        Spec("PAD_ID", INT32, optional=True),
    )
    outputs = (
        Spec("INPUT_ID", INT32, (-1,)),
        Spec("REQUEST_INPUT_LEN", INT32),
        Spec("DECODER_INPUT_ID", INT32, (-1,)),
        Spec("REQUEST_DECODER_INPUT_LEN", INT32),
        Spec("BAD_WORDS_IDS", INT32, (2, -1)),
        Spec("STOP_WORDS_IDS", INT32, (2, -1)),
        Spec("EMBEDDING_BIAS", FP32, (-1,)),
        Spec("REQUEST_OUTPUT_LEN", INT32),
        Spec("OUT_END_ID", INT32),
        Spec("OUT_PAD_ID", INT32),
    )

    def __init__(self, service: ServedModel) -> None:
        self._service = service
        self._tokenizer = service.gateway.input_processor.tokenizer

    async def infer(self, call: ModelCall) -> AsyncGenerator[ModelResponse, None]:
        queries = [text("QUERY", element) for element in call.inputs["QUERY"].elements]
        size = sum(map(len, queries))
        prompts = [await self._service.gateway.encode(query, size=size) for query in queries]
        end = default_end_id(self._service)
        ends = call.inputs["END_ID"].elements if "END_ID" in call.inputs else [end] * call.rows
        pads = call.inputs["PAD_ID"].elements if "PAD_ID" in call.inputs else ends
        longest, ids = pad(prompts, int(pads[0]))
        sizes = [len(word) for name in WORD_INPUTS if name in call.inputs for word in call.inputs[name].elements]
        if "EMBEDDING_BIAS_WORDS" in call.inputs:
            sizes.append(call.rows * len(self._tokenizer.vocabulary))

        def encoded() -> list[Tensor]:
            return [
                self._words(call, "BAD_WORDS_DICT", "BAD_WORDS_IDS"),
                self._words(call, "STOP_WORDS_DICT", "STOP_WORDS_IDS"),
                self._bias(call),
            ]

        result = [
            Tensor("INPUT_ID", INT32, call.shape(longest), ids),
            Tensor("REQUEST_INPUT_LEN", INT32, call.shape(1), [len(prompt) for prompt in prompts]),
            Tensor("DECODER_INPUT_ID", INT32, call.shape(1), list(pads)),
            Tensor("REQUEST_DECODER_INPUT_LEN", INT32, call.shape(1), [1] * call.rows),
            *await self._service.gateway.prepare(sum(sizes), encoded),
            Tensor("REQUEST_OUTPUT_LEN", INT32, call.shape(1), call.inputs["REQUEST_OUTPUT_LEN"].elements),
            Tensor("OUT_END_ID", INT32, call.shape(1), ends),
            Tensor("OUT_PAD_ID", INT32, call.shape(1), pads),
        ]
        yield ModelResponse(result)

    def _words(self, call: ModelCall, input_name: str, output_name: str) -> Tensor:
        """Encode words as two rows: concatenated token ids, and the end offset of each word."""
        rows = [
            [self._tokenizer.encode(word, False) for word in texts_of(call, index, input_name)]
            for index in range(call.rows)
        ]
        ids = [[*itertools.chain.from_iterable(words)] for words in rows]
        ends = [[*itertools.accumulate(map(len, words))] for words in rows]
        longest = max(map(len, ids))
        elements: list[int] = []
        for row, until in zip(ids, ends, strict=True):
            elements += [*row, *[0] * (longest - len(row)), *until, *[PADDING] * (longest - len(until))]
        return Tensor(output_name, INT32, call.shape(2, longest), elements)

    def _bias(self, call: ModelCall) -> Tensor:
        size = len(self._tokenizer.vocabulary)
        elements = array("f")
        for index in range(call.rows):
            words = texts_of(call, index, "EMBEDDING_BIAS_WORDS")
            weights = call.row("EMBEDDING_BIAS_WEIGHTS", index) or ()
            if len(words) != len(weights):
                message = f"has {len(weights)} elements; must have one per word of EMBEDDING_BIAS_WORDS ({len(words)})"
                raise invalid("EMBEDDING_BIAS_WEIGHTS", message)
            if "EMBEDDING_BIAS_WORDS" in call.inputs:
                row = [0.0] * size
                for word, weight in zip(words, weights, strict=True):
                    for token_id in self._tokenizer.encode(word, False):
                        row[token_id] += weight
                maximum = MAX_VALUES[FP32]  # a sum of weights may exceed the range of FP32
                elements.extend([max(-maximum, min(value, maximum)) for value in row])
        return Tensor("EMBEDDING_BIAS", FP32, call.shape(len(elements) // call.rows), memoryview(elements))


class Postprocessing(Model):
    """Conversion of token ids to text."""

    name = "postprocessing"
    inputs = (
        Spec("TOKENS_BATCH", INT32, (-1, -1)),
        Spec("SEQUENCE_LENGTH", INT32, (-1,)),
        *(Spec(name, FP32, (-1,) * size, optional=True) for name, size in SCORES.items()),
    )
    outputs = (
        Spec("OUTPUT", BYTES, (-1,)),
        *(Spec(f"OUT_{name}", FP32, (-1,) * size) for name, size in SCORES.items()),
    )

    def __init__(self, service: ServedModel) -> None:
        self._service = service

    async def infer(self, call: ModelCall) -> AsyncGenerator[ModelResponse, None]:
        tokens, lengths = call.inputs["TOKENS_BATCH"], call.inputs["SEQUENCE_LENGTH"].elements
        *lead, longest = tokens.shape
        if len(lengths) * longest != len(tokens.elements):
            message = f"has {len(lengths)} elements; must have one per sequence of TOKENS_BATCH {[*lead, longest]}"
            raise invalid("SEQUENCE_LENGTH", message)
        engine = self._service.gateway.engine_pool.known_engine()
        if longest > (maximum := engine.max_model_len):
            raise invalid("TOKENS_BATCH", f"{longest} tokens exceed the context length of {maximum}", maximum)
        if wrong := [length for length in lengths if not 0 <= length <= longest]:
            raise invalid("SEQUENCE_LENGTH", f"must be from 0 to {longest}, is {wrong[0]}")
        check_ids("TOKENS_BATCH", tokens.elements, engine.vocab_size)
        rows = [tokens.elements[i * longest : i * longest + length] for i, length in enumerate(lengths)]

        def decoded() -> list[bytes]:
            return [self._service.gateway.input_processor.tokenizer.decode(row).encode() for row in rows]

        texts = await asyncio.to_thread(decoded) if len(tokens.elements) > MAX_INLINE_SIZE else decoded()
        yield ModelResponse([Tensor("OUTPUT", BYTES, (len(texts),), texts), *self._scores(call)])

    def _scores(self, call: ModelCall) -> list[Tensor]:
        """The score inputs, unmodified; zeros for absent score inputs."""
        return [
            replace(call.inputs[name], name=f"OUT_{name}")
            if name in call.inputs
            else zeros(f"OUT_{name}", call.shape(*[1] * size))
            for name, size in SCORES.items()
        ]


@cache
def _log_ignored_lookahead() -> None:
    logger.info("lookahead_window_size and similar inputs are ignored: --speculative-config sets the draft length")


def split_words(name: str, tensor: Sequence[Any] | None, vocab_size: int) -> list[list[int]]:
    """Split a word list tensor (flattened rows: concatenated token ids, end offset of each word) into words.

    Raises ``PenstockError`` (``invalid``) for invalid offsets, and for token ids outside the vocabulary.
    """
    if not tensor:
        return []
    ids, ends = tensor[: len(tensor) // 2], [end for end in tensor[len(tensor) // 2 :] if end != PADDING]
    if any(not begin < end <= len(ids) for begin, end in itertools.pairwise([0, *ends])):
        message = f"the second row must be increasing end offsets of words, at most {len(ids)}, is {ends[:10]}"
        raise invalid(name, message)
    words = [list(ids[begin:end]) for begin, end in itertools.pairwise([0, *ends])]
    check_ids(name, itertools.chain.from_iterable(words), vocab_size)
    return words


def default_end_id(service: ServedModel) -> int:
    """Id of the model's first EOS token."""
    return service.gateway.input_processor.eos_token_ids[0]
