"""Scores as TensorRT-LLM's clients ask for them: ``context_logits`` and ``generation_logits``, against transformers."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from serving import Served
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from tritonclient.utils import InferenceServerException

from penstock import demo

TEXTS = ["Once upon a time", "What is the capital of France? It is"]
MOST = 2**21
"""Bytes that the server tells: some 146 tokens of the model in the box."""
ALL = {"return_context_logits": (True, np.bool_), "return_generation_logits": (True, np.bool_)}
DRAWN = {"temperature": (0.8, np.float32), "top_p": (0.9, np.float32), "random_seed": (3, np.uint64)}
CHANGED = {"repetition_penalty": (1.3, np.float32)}
"""What is told is what the model says before any of this."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "8", "--grpc-port", "0", "--max-logits-size", str(MOST))
    with Served("--num-gpu-blocks-override", "400", *flags) as served:
        yield served


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo.CHAT, dtype=torch.float32)


def inputs(of: Any, texts: list[str], tokens: int, **more: tuple[Any, Any]) -> list[Any]:
    given = {"text_input": np.array([[text.encode()] for text in texts], object)}
    given |= {"max_tokens": np.full((len(texts), 1), tokens, np.int32)}
    given |= {name: np.full((len(texts), 1), value, kind) for name, (value, kind) in more.items()}
    return tensors(of, given)


def tensors(of: Any, given: dict[str, np.ndarray]) -> list[Any]:
    kinds = {"object": "BYTES", "int32": "INT32", "float32": "FP32", "uint64": "UINT64", "bool": "BOOL"}
    made = []
    for name, array in given.items():
        made.append(of.InferInput(name, list(array.shape), kinds[array.dtype.name]).set_data_from_numpy(array))
    return made


@torch.inference_mode()
def table(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    found: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return found


def http(served: Served, texts: list[str], tokens: int, **more: tuple[Any, Any]) -> Any:
    with triton_http.InferenceServerClient(served.root.removeprefix("http://")) as client:
        return client.infer("ensemble", inputs(triton_http, texts, tokens, **more))


@pytest.mark.row("triton", "return_context_logits", "return_generation_logits")
def test_scores_are_the_model_s(served: Served, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Of rows of different lengths, several sequences of each, in chunks of eight tokens."""
    prompts = [tokenizer.encode(text) for text in TEXTS]
    longest, vocabulary = max(map(len, prompts)), model.config.vocab_size
    more = {**ALL, **CHANGED, "num_return_sequences": (2, np.int32), "end_id": (-1, np.int32)}
    more |= {"request_output_len": (6, np.int32), "temperature": (0.8, np.float32), "runtime_top_p": (0.9, np.float32)}
    given = {name: np.full((2, 1), value, kind) for name, (value, kind) in more.items()}
    given |= {"input_ids": np.array([ids + [0] * (longest - len(ids)) for ids in prompts], np.int32)}
    given |= {"input_lengths": np.array([[len(ids)] for ids in prompts], np.int32)}
    with triton_http.InferenceServerClient(served.root.removeprefix("http://")) as client:
        answer = client.infer("tensorrt_llm", tensors(triton_http, given))
    context, generated = answer.as_numpy("context_logits"), answer.as_numpy("generation_logits")
    assert context.shape == (2, longest, vocabulary) and generated.shape == (2, 2, 6, vocabulary)
    for row, prompt in enumerate(prompts):
        end = len(prompt)
        np.testing.assert_allclose(context[row, :end], table(model, prompt), atol=1e-3)
        assert not context[row, end:].any()
        for sequence in range(2):
            ids = answer.as_numpy("output_ids")[row, sequence, : end + 6].tolist()
            assert ids[:end] == prompt
            np.testing.assert_allclose(generated[row, sequence], table(model, ids)[end - 1 : -1], atol=1e-3)
            np.testing.assert_array_equal(generated[row, sequence, 0], context[row, end - 1])


def test_they_are_the_same_bits_in_any_form(served: Served) -> None:
    """Bytes, JSON, gRPC in one answer or in many; alone and beside others."""
    alone = http(served, TEXTS[:1], 6, **ALL)
    context, generated = alone.as_numpy("context_logits"), alone.as_numpy("generation_logits")
    together = http(served, TEXTS * 2, 6, **ALL)
    np.testing.assert_array_equal(together.as_numpy("context_logits")[2, : context.shape[1]], context[0])
    np.testing.assert_array_equal(together.as_numpy("generation_logits")[2], generated[0])

    asked = {"text_input": TEXTS[0], "max_tokens": 20, **{name: True for name in ALL}}
    fields = httpx.post(f"{served.root}/v2/models/ensemble/generate", json=asked, timeout=60).json()
    np.testing.assert_array_equal(np.float32(fields["context_logits"]), context.ravel())
    np.testing.assert_array_equal(np.float32(fields["generation_logits"])[: generated.size], generated.ravel())

    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(served.find(r"gRPC at (\S+)")[1]) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("ensemble", inputs(triton_grpc, TEXTS[:1], 6, **ALL, stream=(True, np.bool_)))
        client.stop_stream()
    contexts, pieces = [], []
    while not answers.empty():
        result, error = answers.get()
        assert error is None
        if (found := result.as_numpy("context_logits")) is not None:
            contexts.append(found)
        pieces.append(result.as_numpy("generation_logits"))
    assert len(contexts) == 1
    np.testing.assert_array_equal(contexts[0], context)
    np.testing.assert_array_equal(np.concatenate(pieces, axis=2), generated)


def test_scores_that_are_not_requested_are_a_zero(served: Served) -> None:
    """As in TensorRT-LLM 0.10, whose ``end_to_end_test.py`` reads them always."""
    dummies = {"cum_log_probs": (2, 1), "output_log_probs": (2, 1, 1)}
    dummies |= {"context_logits": (2, 1, 1), "generation_logits": (2, 1, 1, 1)}
    for asked in ({}, dict([*ALL.items()][:1])):
        found = http(served, TEXTS, 3, **asked)
        for name, shape in dummies.items():
            array = found.as_numpy(name)
            assert (array.shape == shape and not array.any()) == (f"return_{name}" not in asked), name


def test_too_many_are_refused(served: Served) -> None:
    for more, tokens, name in (
        ({"return_generation_logits": (True, np.bool_)}, 200, "return_generation_logits"),
        ({"return_context_logits": (True, np.bool_)}, 1, "return_context_logits"),
        ({**ALL, "num_return_sequences": (40, np.int32), **DRAWN}, 4, "return_context_logits"),
    ):
        texts = ["word " * 200] if tokens == 1 else TEXTS[:1]
        words = rf"{name}: requires at least \d+ bytes of logits; the maximum is {MOST}"
        with pytest.raises(InferenceServerException, match=words):
            http(served, texts, tokens, **more)
    beams = {"return_generation_logits": (True, np.bool_), "beam_width": (2, np.int32)}
    with pytest.raises(InferenceServerException, match="return_generation_logits: cannot be combined with"):
        http(served, TEXTS[:1], 4, **beams)
    assert http(served, TEXTS[:1], 4, beam_width=(2, np.int32), return_context_logits=(True, np.bool_))


def test_beams_tell_how_likely_each_token_is(served: Served) -> None:
    answer = http(served, TEXTS[:1], 6, beam_width=(3, np.int32), return_log_probs=(True, np.bool_))
    each, sums = answer.as_numpy("output_log_probs"), answer.as_numpy("cum_log_probs")
    assert each.shape == (1, 3, 6) and (each < 0).all()
    np.testing.assert_allclose(each.sum(-1), sums, rtol=1e-5)
