"""``context_logits`` and ``generation_logits`` of TensorRT-LLM's protocol, compared with transformers' logits."""

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
MAX_LOGITS_SIZE = 2**21
"""Maximum number of bytes of logits in a response: about 146 tokens of the built-in model."""
ALL = {"return_context_logits": (True, np.bool_), "return_generation_logits": (True, np.bool_)}
SAMPLED = {"temperature": (0.8, np.float32), "top_p": (0.9, np.float32), "random_seed": (3, np.uint64)}
PENALIZED = {"repetition_penalty": (1.3, np.float32)}
"""Input that enables a logits processor. Returned logits are computed before all logits processors."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = (
        "--dtype",
        "float32",
        "--max-num-batched-tokens",
        "8",
        "--grpc-port",
        "0",
        "--max-logits-size",
        str(MAX_LOGITS_SIZE),
    )
    with Served("--num-gpu-blocks-override", "400", *flags) as served:
        yield served


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo.CHAT, dtype=torch.float32)


def inputs(client_module: Any, texts: list[str], tokens: int, **more: tuple[Any, Any]) -> list[Any]:
    arrays = {"text_input": np.array([[text.encode()] for text in texts], object)}
    arrays |= {"max_tokens": np.full((len(texts), 1), tokens, np.int32)}
    arrays |= {name: np.full((len(texts), 1), value, kind) for name, (value, kind) in more.items()}
    return tensors(client_module, arrays)


def tensors(client_module: Any, arrays: dict[str, np.ndarray]) -> list[Any]:
    kinds = {"object": "BYTES", "int32": "INT32", "float32": "FP32", "uint64": "UINT64", "bool": "BOOL"}
    result = []
    for name, array in arrays.items():
        result.append(
            client_module.InferInput(name, list(array.shape), kinds[array.dtype.name]).set_data_from_numpy(array)
        )
    return result


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Return transformers' logits of token ids, ``[tokens, vocabulary]``."""
    logits: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return logits


def infer(served: Served, texts: list[str], tokens: int, **more: tuple[Any, Any]) -> Any:
    with triton_http.InferenceServerClient(served.root.removeprefix("http://")) as client:
        return client.infer("ensemble", inputs(triton_http, texts, tokens, **more))


@pytest.mark.row("triton", "return_context_logits", "return_generation_logits")
def test_logits_equal_transformers(served: Served, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Rows have different lengths and two sequences each; prompts are computed in chunks of eight tokens."""
    prompts = [tokenizer.encode(text) for text in TEXTS]
    longest, vocabulary = max(map(len, prompts)), model.config.vocab_size
    more = {**ALL, **PENALIZED, "num_return_sequences": (2, np.int32), "end_id": (-1, np.int32)}
    more |= {"request_output_len": (6, np.int32), "temperature": (0.8, np.float32), "runtime_top_p": (0.9, np.float32)}
    arrays = {name: np.full((2, 1), value, kind) for name, (value, kind) in more.items()}
    arrays |= {"input_ids": np.array([ids + [0] * (longest - len(ids)) for ids in prompts], np.int32)}
    arrays |= {"input_lengths": np.array([[len(ids)] for ids in prompts], np.int32)}
    with triton_http.InferenceServerClient(served.root.removeprefix("http://")) as client:
        answer = client.infer("tensorrt_llm", tensors(triton_http, arrays))
    context, generated = answer.as_numpy("context_logits"), answer.as_numpy("generation_logits")
    assert context.shape == (2, longest, vocabulary) and generated.shape == (2, 2, 6, vocabulary)
    for row, prompt in enumerate(prompts):
        end = len(prompt)
        np.testing.assert_allclose(context[row, :end], logits_of(model, prompt), atol=1e-3)
        assert not context[row, end:].any()
        for sequence in range(2):
            ids = answer.as_numpy("output_ids")[row, sequence, : end + 6].tolist()
            assert ids[:end] == prompt
            np.testing.assert_allclose(generated[row, sequence], logits_of(model, ids)[end - 1 : -1], atol=1e-3)
            np.testing.assert_array_equal(generated[row, sequence, 0], context[row, end - 1])


def test_logits_are_identical_in_every_transport_and_batch(served: Served) -> None:
    """The request is sent over HTTP (binary tensors and JSON) and streaming gRPC, alone and in a batch."""
    alone = infer(served, TEXTS[:1], 6, **ALL)
    context, generated = alone.as_numpy("context_logits"), alone.as_numpy("generation_logits")
    together = infer(served, TEXTS * 2, 6, **ALL)
    np.testing.assert_array_equal(together.as_numpy("context_logits")[2, : context.shape[1]], context[0])
    np.testing.assert_array_equal(together.as_numpy("generation_logits")[2], generated[0])

    body = {"text_input": TEXTS[0], "max_tokens": 20, **{name: True for name in ALL}}
    fields = httpx.post(f"{served.root}/v2/models/ensemble/generate", json=body, timeout=60).json()
    np.testing.assert_array_equal(np.float32(fields["context_logits"]), context.ravel())
    np.testing.assert_array_equal(np.float32(fields["generation_logits"])[: generated.size], generated.ravel())

    answers: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(served.find(r"gRPC at (\S+)")[1]) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("ensemble", inputs(triton_grpc, TEXTS[:1], 6, **ALL, stream=(True, np.bool_)))
        client.stop_stream()
    contexts, chunks = [], []
    while not answers.empty():
        result, error = answers.get()
        assert error is None
        if (found := result.as_numpy("context_logits")) is not None:
            contexts.append(found)
        chunks.append(result.as_numpy("generation_logits"))
    assert len(contexts) == 1
    np.testing.assert_array_equal(contexts[0], context)
    np.testing.assert_array_equal(np.concatenate(chunks, axis=2), generated)


def test_unrequested_scores_are_zero(served: Served) -> None:
    """``end_to_end_test.py`` of TensorRT-LLM 0.10 reads all scores, also those it has not requested."""
    dummies = {"cum_log_probs": (2, 1), "output_log_probs": (2, 1, 1)}
    dummies |= {"context_logits": (2, 1, 1), "generation_logits": (2, 1, 1, 1)}
    for requested in ({}, dict([*ALL.items()][:1])):
        found = infer(served, TEXTS, 3, **requested)
        for name, shape in dummies.items():
            array = found.as_numpy(name)
            assert (array.shape == shape and not array.any()) == (f"return_{name}" not in requested), name


def test_logits_above_size_limit_are_rejected(served: Served) -> None:
    for more, tokens, name in (
        ({"return_generation_logits": (True, np.bool_)}, 200, "return_generation_logits"),
        ({"return_context_logits": (True, np.bool_)}, 1, "return_context_logits"),
        ({**ALL, "num_return_sequences": (40, np.int32), **SAMPLED}, 4, "return_context_logits"),
    ):
        texts = ["word " * 200] if tokens == 1 else TEXTS[:1]
        message = rf"{name}: requires at least \d+ bytes of logits; the maximum is {MAX_LOGITS_SIZE}"
        with pytest.raises(InferenceServerException, match=message):
            infer(served, texts, tokens, **more)
    beams = {"return_generation_logits": (True, np.bool_), "beam_width": (2, np.int32)}
    with pytest.raises(InferenceServerException, match="return_generation_logits: cannot be combined with"):
        infer(served, TEXTS[:1], 4, **beams)
    assert infer(served, TEXTS[:1], 4, beam_width=(2, np.int32), return_context_logits=(True, np.bool_))


def test_beams_have_log_prob_of_each_token(served: Served) -> None:
    answer = infer(served, TEXTS[:1], 6, beam_width=(3, np.int32), return_log_probs=(True, np.bool_))
    log_probs, sums = answer.as_numpy("output_log_probs"), answer.as_numpy("cum_log_probs")
    assert log_probs.shape == (1, 3, 6) and (log_probs < 0).all()
    np.testing.assert_allclose(log_probs.sum(-1), sums, rtol=1e-5)
