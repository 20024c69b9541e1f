"""TensorRT-LLM's client scripts against the KServe gRPC server: the same library calls with the same tensors.

The scripts are ``end_to_end_grpc_client.py``, ``inflight_batcher_llm_client.py`` and ``end_to_end_test.py``.
"""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from serving import Served
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

PROMPT = "Once upon a time"


class UserData:
    """Queue of results and errors received by a client's callback."""

    def __init__(self) -> None:
        self.completed: queue.Queue[Any] = queue.Queue()


SCORES = ("cum_log_probs", "output_log_probs", "context_logits", "generation_logits")


def callback(user_data: UserData, result: Any, error: Any) -> None:
    user_data.completed.put(result if error is None else error)


def prepare_tensor(name: str, array: np.ndarray) -> triton.InferInput:
    result = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    result.set_data_from_numpy(array)
    return result


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = ("--grpc-port", "0", "--max-beam-width", "4")
    with Served("--num-gpu-blocks-override", "400", *flags) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(url=served.find(r"gRPC at (\S+)")[1], verbose=False) as client:
        yield client


def completion(served: Served, **fields: Any) -> Any:
    """Return the only choice of OpenAI's completions endpoint."""
    body = {"prompt": PROMPT, "temperature": 0, "return_token_ids": True} | fields
    return httpx.post(f"{served.url}/completions", json=body, timeout=60).json()["choices"][0]


def received(user_data: UserData) -> Iterator[Any]:
    """Yield all results received so far. Call it after the stream is closed."""
    while not user_data.completed.empty():
        yield user_data.completed.get(block=False)


# --- end_to_end_grpc_client.py --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("streaming", [False, True])
def test_end_to_end_client_gets_same_text_as_openai(
    served: Served, client: triton.InferenceServerClient, model: str, streaming: bool
) -> None:
    rows = np.array([[PROMPT]]).astype(object)
    inputs = [
        prepare_tensor("text_input", rows),
        prepare_tensor("max_tokens", np.ones_like(rows).astype(np.int32) * 16),
        prepare_tensor("bad_words", np.array([[""]], dtype=object)),
        prepare_tensor("stop_words", np.array([[""]], dtype=object)),
        prepare_tensor("stream", np.array([[streaming]], dtype=bool)),
        prepare_tensor("beam_width", np.array([[1]], dtype=np.int32)),
        prepare_tensor("temperature", np.array([[1.0]], dtype=np.float32)),
        prepare_tensor("repetition_penalty", np.array([[1.0]], dtype=np.float32)),
        prepare_tensor("return_context_logits", np.array([[False]], dtype=bool)),
        prepare_tensor("return_generation_logits", np.array([[False]], dtype=bool)),
    ]
    user_data = UserData()
    client.start_stream(callback=partial(callback, user_data))
    client.async_stream_infer(model, inputs, request_id="1")
    client.stop_stream()
    text = ""
    for result in received(user_data):
        assert not isinstance(result, InferenceServerException), result
        output = result.as_numpy("text_output")
        assert output is not None and result.as_numpy("cum_log_probs") == 0
        text += output[0].decode("utf-8")
    assert text == ("" if streaming else PROMPT) + completion(served, max_tokens=16)["text"]


# --- inflight_batcher_llm_client.py ---------------------------------------------------------------------------------


def prepare_inputs(ids: list[int], tokens: int, streaming: bool, **more: np.ndarray) -> list[triton.InferInput]:
    return [
        prepare_tensor("input_ids", np.array([ids], dtype=np.int32)),
        prepare_tensor("input_lengths", np.array([[len(ids)]], dtype=np.int32)),
        prepare_tensor("request_output_len", np.array([[tokens]], dtype=np.uint32).astype(np.int32)),
        prepare_tensor("beam_width", np.array([[1]], dtype=np.int32)),
        prepare_tensor("temperature", np.array([[1.0]], dtype=np.float32)),
        prepare_tensor("streaming", np.array([[streaming]], dtype=bool)),
        *[prepare_tensor(name, value) for name, value in more.items()],
    ]


@pytest.mark.row("triton", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens")
def test_perf_metrics_and_token_counts_are_returned(served: Served, client: triton.InferenceServerClient) -> None:
    """``--return-perf-metrics``: the request is sent twice, and the second one reuses a block of the prefix cache."""
    requested = ("return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens")
    inputs = prepare_inputs(
        [*range(100, 200)], 40, False, **{name: np.array([[True]]) for name in requested}, **endless()
    )
    names = ("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks")
    names += ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    names += ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
    outputs = [triton.InferRequestedOutput(name) for name in ("output_ids", *names, "num_input_tokens")]
    outputs.append(triton.InferRequestedOutput("num_output_tokens"))
    for new, reused, total in (
        (2, 0, 3),
        (1, 1, 2),
    ):  # 100 prompt tokens and 39 of the 40 output tokens, in blocks of 64 tokens
        begun = time.monotonic_ns()
        result = client.infer("tensorrt_llm", inputs, outputs=outputs)
        ended = time.monotonic_ns()
        assert [result.as_numpy(name).tolist() for name in names[:3]] == [[[new]], [[reused]], [[total]]]
        times = [int(result.as_numpy(name)[0][0]) for name in names[3:7]]
        assert [begun, *times, ended] == sorted([begun, *times, ended]), "times must be readings of the monotonic clock"
        rate, accepted, drafted = (result.as_numpy(name)[0][0] for name in names[7:])
        assert 0 <= accepted <= drafted and rate == pytest.approx(accepted / max(drafted, 1))
        assert result.as_numpy("num_input_tokens").tolist() == [[100]]
        assert result.as_numpy("num_output_tokens").tolist() == [[140]], "output_ids must contain the prompt"
    assert client.infer("tensorrt_llm", inputs[:-4]).as_numpy("arrival_time_ns") is None


@pytest.mark.row("triton", "lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
@pytest.mark.row("triton", "decoder_input_ids", "decoder_input_lengths", "min_tokens", "seed")
def test_lookahead_and_decoder_inputs_are_ignored(served: Served, client: triton.InferenceServerClient) -> None:
    """The inputs that the client script sends with ``--lookahead-config`` and ``--decoder-input-tokens-csv``, and
    ``min_tokens`` and ``seed`` of newer versions."""
    plain = prepare_inputs([5, 6, 7], 6, False)
    ahead = {f"lookahead_{name}": [[7]] for name in ("window_size", "ngram_size", "verification_set_size")}
    ahead |= {"decoder_input_ids": [[3, 4]], "decoder_input_lengths": [[2]], "min_tokens": [[2]]}
    more = {name: np.array(value, dtype=np.int32) for name, value in ahead.items()}
    found = client.infer("tensorrt_llm", prepare_inputs([5, 6, 7], 6, False, **more, seed=np.array([[3]], np.uint64)))
    expected = client.infer("tensorrt_llm", plain).as_numpy("output_ids")
    assert found.as_numpy("output_ids").tolist() == expected.tolist()
    served.find("lookahead_window_size and similar inputs are ignored: --speculative-config")


# --- end_to_end_test.py ---------------------------------------------------------------------------------------------


def test_chained_models_return_text_and_scores_of_ensemble(
    served: Served, client: triton.InferenceServerClient
) -> None:
    """As in ``test_functionality_ifb``, the chained models are compared with ensemble and tensorrt_llm_bls."""
    text, tokens = np.array([[PROMPT]]).astype(object), np.array([[16]], dtype=np.int32)
    none = np.array([[""]], dtype=object)
    before = client.infer(
        "preprocessing",
        [
            prepare_tensor("QUERY", text),
            prepare_tensor("BAD_WORDS_DICT", none),
            prepare_tensor("STOP_WORDS_DICT", none),
            prepare_tensor("REQUEST_OUTPUT_LEN", tokens),
        ],
        request_id="0",
    )
    scores = {f"return_{name}": np.array([[True]]) for name in ("log_probs", "context_logits", "generation_logits")}
    passed = {
        "input_ids": "INPUT_ID",
        "decoder_input_ids": "DECODER_INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID",
    }
    between = client.infer(
        "tensorrt_llm",
        [prepare_tensor(name, before.as_numpy(output)) for name, output in passed.items()]
        + [prepare_tensor(name, value) for name, value in scores.items()],
        request_id="0",
    )
    after = client.infer(
        "postprocessing",
        [
            prepare_tensor("TOKENS_BATCH", between.as_numpy("output_ids").astype(np.int32)),
            prepare_tensor("SEQUENCE_LENGTH", between.as_numpy("sequence_length")),
        ],
        request_id="0",
    )
    score_names = ("cum_log_probs", "output_log_probs", "context_logits", "generation_logits")
    for model in ("ensemble", "tensorrt_llm_bls"):
        inputs = [prepare_tensor("text_input", text), prepare_tensor("max_tokens", tokens)]
        inputs += [prepare_tensor("bad_words", none), prepare_tensor("stop_words", none)]
        inputs += [prepare_tensor(name, value) for name, value in scores.items()]
        outputs = [triton.InferRequestedOutput(name) for name in ("text_output", *score_names)]
        result = client.infer(model, inputs, outputs=outputs, request_id="0")
        assert after.as_numpy("OUTPUT") == result.as_numpy("text_output")
        for name in score_names:
            np.testing.assert_array_equal(between.as_numpy(name), result.as_numpy(name))
    assert result.as_numpy("context_logits").shape[1] == before.as_numpy("INPUT_ID").size


@pytest.mark.row("triton", "CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS")
@pytest.mark.parametrize("requested", [(), ("context_logits", "generation_logits")])
def test_chained_models_of_0_10_pass_scores_through_postprocessing(
    client: triton.InferenceServerClient, requested: tuple[str, ...]
) -> None:
    """As in ``test_functionality`` of TensorRT-LLM 0.10, all scores are read from ``postprocessing``."""
    text, tokens = np.array([[PROMPT]]).astype(object), np.array([[16]], dtype=np.int32)
    flags = [prepare_tensor(f"return_{name}", np.array([[True]])) for name in requested]
    query = [prepare_tensor("QUERY", text), prepare_tensor("REQUEST_OUTPUT_LEN", tokens)]
    before = client.infer("preprocessing", query)
    passed = {
        "input_ids": "INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID",
    }
    inputs_of_ids = [prepare_tensor(name, before.as_numpy(output)) for name, output in passed.items()]
    between = client.infer("tensorrt_llm", [*inputs_of_ids, *flags])
    scores = {name: between.as_numpy(name) for name in SCORES}
    tokens_in = {"TOKENS_BATCH": between.as_numpy("output_ids"), "SEQUENCE_LENGTH": between.as_numpy("sequence_length")}
    after = client.infer(
        "postprocessing",
        [prepare_tensor(name.upper(), value) for name, value in (tokens_in | scores).items()],
    )
    inputs = [prepare_tensor("text_input", text), prepare_tensor("max_tokens", tokens), *flags]
    whole = client.infer("ensemble", inputs)
    assert after.as_numpy("OUTPUT") == whole.as_numpy("text_output")
    for name, score in scores.items():
        np.testing.assert_array_equal(after.as_numpy(f"OUT_{name.upper()}"), score)
        np.testing.assert_array_equal(whole.as_numpy(name), score)
        assert score.any() == (name in requested)
    bare = client.infer("postprocessing", [prepare_tensor(name, value) for name, value in tokens_in.items()])
    assert {bare.as_numpy(f"OUT_{name.upper()}").item() for name in SCORES} == {0.0}


VERSIONS = {
    "0.10": {
        "preprocessing": (
            "QUERY:BYTES REQUEST_OUTPUT_LEN:INT32 BAD_WORDS_DICT:BYTES STOP_WORDS_DICT:BYTES"
            " EMBEDDING_BIAS_WORDS:BYTES EMBEDDING_BIAS_WEIGHTS:FP32 END_ID:INT32 PAD_ID:INT32",
            "INPUT_ID:INT32 REQUEST_INPUT_LEN:INT32 BAD_WORDS_IDS:INT32 STOP_WORDS_IDS:INT32 EMBEDDING_BIAS:FP32"
            " REQUEST_OUTPUT_LEN:INT32 OUT_END_ID:INT32 OUT_PAD_ID:INT32",
        ),
        "tensorrt_llm": (
            "input_ids:INT32 input_lengths:INT32 request_output_len:INT32 end_id:INT32 pad_id:INT32"
            " stop_words_list:INT32 bad_words_list:INT32 embedding_bias:FP32 beam_width:INT32 temperature:FP32"
            " runtime_top_k:INT32 runtime_top_p:FP32 len_penalty:FP32 repetition_penalty:FP32 min_length:INT32"
            " presence_penalty:FP32 frequency_penalty:FP32 random_seed:UINT64 return_log_probs:BOOL"
            " return_context_logits:BOOL return_generation_logits:BOOL stop:BOOL streaming:BOOL",
            "output_ids:INT32 sequence_length:INT32 cum_log_probs:FP32 output_log_probs:FP32 context_logits:FP32"
            " generation_logits:FP32",
        ),
        "postprocessing": (
            "TOKENS_BATCH:INT32 SEQUENCE_LENGTH:INT32 CUM_LOG_PROBS:FP32 OUTPUT_LOG_PROBS:FP32 CONTEXT_LOGITS:FP32"
            " GENERATION_LOGITS:FP32",
            "OUTPUT:BYTES OUT_CUM_LOG_PROBS:FP32 OUT_OUTPUT_LOG_PROBS:FP32 OUT_CONTEXT_LOGITS:FP32"
            " OUT_GENERATION_LOGITS:FP32",
        ),
        "ensemble": (
            "text_input:BYTES max_tokens:INT32 bad_words:BYTES stop_words:BYTES end_id:INT32 pad_id:INT32 top_k:INT32"
            " top_p:FP32 temperature:FP32 length_penalty:FP32 repetition_penalty:FP32 min_length:INT32"
            " presence_penalty:FP32 frequency_penalty:FP32 random_seed:UINT64 return_log_probs:BOOL"
            " return_context_logits:BOOL return_generation_logits:BOOL beam_width:INT32 stream:BOOL"
            " embedding_bias_words:BYTES embedding_bias_weights:FP32",
            "text_output:BYTES cum_log_probs:FP32 output_log_probs:FP32 context_logits:FP32 generation_logits:FP32",
        ),
    },
    "1.0": {
        "preprocessing": ("", "DECODER_INPUT_ID:INT32 REQUEST_DECODER_INPUT_LEN:INT32"),
        "tensorrt_llm": (
            "num_return_sequences:INT32 decoder_input_ids:INT32 decoder_input_lengths:INT32 early_stopping:BOOL"
            " exclude_input_in_output:BOOL return_perf_metrics:BOOL return_num_input_tokens:BOOL"
            " return_num_output_tokens:BOOL lookahead_window_size:INT32 lookahead_ngram_size:INT32"
            " lookahead_verification_set_size:INT32",
            "batch_index:INT32 sequence_index:INT32 kv_cache_alloc_new_blocks:INT32 kv_cache_reused_blocks:INT32"
            " kv_cache_alloc_total_blocks:INT32 arrival_time_ns:INT64 first_scheduled_time_ns:INT64"
            " first_token_time_ns:INT64 last_token_time_ns:INT64 acceptance_rate:FP32"
            " total_accepted_draft_tokens:INT32 total_draft_tokens:INT32 num_input_tokens:INT32"
            " num_output_tokens:INT32",
        ),
        "ensemble": (
            "num_return_sequences:INT32 exclude_input_in_output:BOOL return_perf_metrics:BOOL"
            " guided_decoding_guide_type:BYTES guided_decoding_guide:BYTES",
            "batch_index:INT32 sequence_index:INT32",
        ),
    },
}
"""Input and output tensors in ``config.pbtxt`` by TensorRT-LLM version and model, without the tensors of adapters,
drafts and embeddings. The newer version lists only the tensors that it adds."""


@pytest.mark.parametrize(
    ("version", "model"), [(version, model) for version in VERSIONS for model in VERSIONS[version]]
)
def test_model_metadata_has_tensors_of_each_version(
    client: triton.InferenceServerClient, version: str, model: str
) -> None:
    names = (model, "tensorrt_llm_bls") if model == "ensemble" else (model,)
    for name in names:
        found: Any = client.get_model_metadata(name, as_json=True)
        for kind, expected in zip(("inputs", "outputs"), VERSIONS[version][model], strict=True):
            assert {f"{spec['name']}:{spec['datatype']}" for spec in found[kind]} >= set(expected.split())


@pytest.mark.parametrize(
    ("name", "dtype", "neutral", "wrong"),
    [
        ("runtime_top_p_min", np.float32, (0, 1e-6), 0.5),
        ("runtime_top_p_decay", np.float32, (0, 1), 0.5),
        ("runtime_top_p_reset_ids", np.int32, (0, -1), 7),
        ("beam_search_diversity_rate", np.float32, (0,), 1.5),
        ("draft_acceptance_threshold", np.float32, (0,), 0.5),
    ],
)
@pytest.mark.row("triton", "runtime_top_p_min", "runtime_top_p_decay", "runtime_top_p_reset_ids")
@pytest.mark.row("triton", "beam_search_diversity_rate", "draft_acceptance_threshold")
def test_neutral_values_of_unsupported_inputs_are_accepted(
    served: Served,
    client: triton.InferenceServerClient,
    name: str,
    dtype: Any,
    neutral: tuple[float, ...],
    wrong: float,
) -> None:
    ids = completion(served, max_tokens=4)["prompt_token_ids"]
    expected = client.infer("tensorrt_llm", prepare_inputs(ids, 4, False)).as_numpy("output_ids")
    for value in neutral:
        found = client.infer("tensorrt_llm", prepare_inputs(ids, 4, False, **{name: np.array([[value]], dtype=dtype)}))
        np.testing.assert_array_equal(found.as_numpy("output_ids"), expected)
    with pytest.raises(InferenceServerException, match=name):
        client.infer("tensorrt_llm", prepare_inputs(ids, 4, False, **{name: np.array([[wrong]], dtype=dtype)}))


def prepare_stop_signals() -> list[triton.InferInput]:
    return [
        prepare_tensor("input_ids", np.zeros([1, 1], dtype=np.int32)),
        prepare_tensor("input_lengths", np.zeros([1, 1], dtype=np.int32)),
        prepare_tensor("request_output_len", np.array([[0]], dtype=np.int32)),
        prepare_tensor("stop", np.array([[True]], dtype=bool)),
    ]


def endless() -> dict[str, np.ndarray]:
    return {"end_id": np.array([[-1]], dtype=np.int32)}


@pytest.mark.parametrize("streaming", [False, True])
def test_token_ids_equal_openai_completion(
    served: Served, client: triton.InferenceServerClient, streaming: bool
) -> None:
    expected = completion(served, max_tokens=12)
    ids = expected["prompt_token_ids"]
    inputs = prepare_inputs(ids, 12, streaming, return_log_probs=np.array([[True]], dtype=bool))
    user_data = UserData()
    if streaming:
        client.start_stream(callback=partial(callback, user_data))
        client.async_stream_infer("tensorrt_llm", inputs, request_id="7")
        client.stop_stream()
        answers = list(received(user_data))
    else:
        client.async_infer(
            "tensorrt_llm",
            inputs,
            request_id="7",
            callback=partial(callback, user_data),
            parameters={"Streaming": False},
        )
        answers = [user_data.completed.get(timeout=60)]
    output_ids: list[int] = []
    for result in answers:
        assert not isinstance(result, InferenceServerException), result
        assert result.get_response().id == "7"
        length = result.as_numpy("sequence_length")[0][0]
        output_ids += result.as_numpy("output_ids")[0][0][:length].tolist()
    assert output_ids == ([] if streaming else ids) + expected["token_ids"]


@pytest.mark.row("triton", "stop")
def test_stop_request_ends_stream(served: Served, client: triton.InferenceServerClient) -> None:
    """A stop request with the id of a running request ends its stream; the last response is marked as final."""
    ids = completion(served, max_tokens=1)["prompt_token_ids"]
    user_data, last = UserData(), "triton_final_response"
    client.start_stream(callback=partial(callback, user_data))
    client.async_stream_infer("tensorrt_llm", prepare_inputs(ids, 1900, True, **endless()), request_id="11")
    other = prepare_inputs(ids, 40, True, **endless())
    client.async_stream_infer("tensorrt_llm", other, request_id="12")
    answers = [user_data.completed.get(timeout=60)]
    client.async_stream_infer("tensorrt_llm", prepare_stop_signals(), request_id="11", parameters={"Streaming": True})
    client.stop_stream()
    answers += received(user_data)
    by_id: dict[str, list[Any]] = {"11": [], "12": []}
    for answer in answers:
        assert not isinstance(answer, InferenceServerException), answer
        by_id[answer.get_response().id].append(answer)
    ends = [answer.get_response().parameters[last].bool_param for answer in by_id["11"]]
    assert ends == [False] * (len(ends) - 1) + [True]
    num_tokens = {name: sum(int(a.as_numpy("sequence_length")[0][0]) for a in of_id) for name, of_id in by_id.items()}
    assert num_tokens["11"] < 1900 and num_tokens["12"] == 40, "the other request must continue"


def test_stop_request_ends_unary_call(served: Served, client: triton.InferenceServerClient) -> None:
    """Both calls use one connection. The stopped call returns its tokens so far; the stop call returns no tokens."""
    ids = completion(served, max_tokens=1)["prompt_token_ids"]
    user_data = UserData()
    ask: Callable[..., Any] = partial(client.async_infer, "tensorrt_llm", callback=partial(callback, user_data))
    ask(inputs=prepare_inputs(ids, 1900, False, **endless()), request_id="21")
    wait_until_running(served)
    completion(served, max_tokens=12)  # by the end of this request, request 21 has output tokens
    ask(inputs=prepare_stop_signals(), request_id="21")
    answers = [user_data.completed.get(timeout=60) for _ in range(2)]
    lengths = [int(found[0][0]) for a in answers if (found := a.as_numpy("sequence_length")) is not None]
    assert len(lengths) == 1 and len(ids) < lengths[0] < 1900


def test_cancelled_call_frees_request(served: Served, client: triton.InferenceServerClient) -> None:
    ids = completion(served, max_tokens=1)["prompt_token_ids"]
    user_data = UserData()
    future = client.async_infer(
        "tensorrt_llm",
        prepare_inputs(ids, 1900, False, **endless()),
        request_id="31",
        callback=partial(callback, user_data),
    )
    wait_until_running(served)
    future.cancel()
    assert user_data.completed.get(timeout=60).status() == "StatusCode.CANCELLED"
    wait_until_idle(served)


@pytest.mark.slow
def test_stop_without_matching_request_has_no_effect(served: Served, client: triton.InferenceServerClient) -> None:
    """The stop request names an ended request, a request of another client, or none."""
    assert client.infer("tensorrt_llm", prepare_stop_signals(), request_id="41").get_response().id == "41"
    with pytest.raises(InferenceServerException, match="id: stop requires gRPC"):
        client.infer("tensorrt_llm", prepare_stop_signals())
    body = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1, "stop": True, "id": "41"}
    answer = httpx.post(f"{served.root}/v2/models/tensorrt_llm/generate", json=body)
    assert answer.status_code == 400 and re.match("id: stop requires gRPC", answer.json()["error"])
    ids = completion(served, max_tokens=1)["prompt_token_ids"]
    user_data = UserData()
    client.async_infer(
        "tensorrt_llm",
        prepare_inputs(ids, 1900, False, **endless()),
        request_id="51",
        callback=partial(callback, user_data),
    )
    wait_until_running(served)
    separate = [("grpc.use_local_subchannel_pool", 1)]  # open a separate connection
    with triton.InferenceServerClient(served.find(r"gRPC at (\S+)")[1], channel_args=separate) as other:
        other.infer("tensorrt_llm", prepare_stop_signals(), request_id="51")
    assert user_data.completed.get(timeout=60).as_numpy("sequence_length")[0][0] == len(ids) + 1900


def test_beam_width_is_limited_by_max_beam_width(served: Served, client: triton.InferenceServerClient) -> None:
    ids = completion(served, max_tokens=1)["prompt_token_ids"]
    inputs = prepare_inputs(ids, 5, False)
    inputs[3] = prepare_tensor("beam_width", np.array([[4]], dtype=np.int32))
    assert client.infer("tensorrt_llm", inputs).as_numpy("output_ids").shape[:2] == (1, 4)
    inputs[3] = prepare_tensor("beam_width", np.array([[5]], dtype=np.int32))
    with pytest.raises(InferenceServerException, match=r"beam_width: must be at most 4, is 5 \(max_beam_width\)"):
        client.infer("tensorrt_llm", inputs)


@pytest.mark.parametrize("streaming", [False, True])
def test_streamed_beams_arrive_in_one_answer(
    served: Served, client: triton.InferenceServerClient, streaming: bool
) -> None:
    """The client script's ``-b 2``: one response of the stream has all beams."""
    ids = completion(served, max_tokens=1)["prompt_token_ids"]
    inputs = prepare_inputs(ids, 5, streaming)
    inputs[3] = prepare_tensor("beam_width", np.array([[2]], dtype=np.int32))
    user_data = UserData()
    client.start_stream(callback=partial(callback, user_data))
    client.async_stream_infer("tensorrt_llm", inputs, request_id="61")
    client.stop_stream()
    (answer,) = received(user_data)
    beams = answer.as_numpy("output_ids")
    whole = client.infer("tensorrt_llm", [*inputs[:-1], prepare_tensor("streaming", np.array([[False]]))])
    assert beams.shape[:2] == (1, 2)
    assert whole.as_numpy("output_ids")[0, :, -5:].tolist() == beams[0, :, -5:].tolist()


def test_served_model_name_is_not_a_triton_model(client: triton.InferenceServerClient) -> None:
    assert not client.is_model_ready("penstock-demo")
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'penstock-demo' is not found"):
        client.get_model_metadata("penstock-demo")


def wait_until_running(served: Served) -> None:
    """Wait until a request is open on the server."""
    _until(served, lambda value: value > 0)


def wait_until_idle(served: Served) -> None:
    """Wait until no request is open on the server."""
    _until(served, lambda value: value == 0)


def _until(served: Served, condition: Callable[[float], bool]) -> None:
    deadline = time.monotonic() + 60
    while True:
        page = httpx.get(f"{served.root}/metrics").text
        (value,) = re.findall(r"^penstock:num_requests_open\S* (\S+)$", page, flags=re.M)
        if condition(float(value)):
            return
        assert time.monotonic() < deadline, page
