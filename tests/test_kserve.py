"""The KServe v2 protocol over HTTP, asked by Triton's own client, and by ``requests`` as Triton's documents have it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import requests
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served
from tritonclient.utils import InferenceServerException

PROMPT = "Once upon a time"
MODELS = ["ensemble", "tensorrt_llm_bls", "preprocessing", "tensorrt_llm", "postprocessing", "model"]
KINDS = {
    np.dtype("int32"): "INT32",
    np.dtype("float32"): "FP32",
    np.dtype("uint64"): "UINT64",
    np.dtype("bool"): "BOOL",
}

WANTED: dict[str, Any] = {}
SESSION = httpx.Client(timeout=60)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--num-gpu-blocks-override", "400") as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served.root.removeprefix("http://")) as client:
        yield client


def tensor(name: str, values: Any, kind: Any = object, binary: bool = True, of: Any = triton) -> Any:
    array = np.array(values, dtype=kind)
    made = of.InferInput(name, list(array.shape), KINDS.get(array.dtype, "BYTES"))
    if of is triton:
        made.set_data_from_numpy(array, binary_data=binary)
    else:
        made.set_data_from_numpy(array)
    return made


def asking(texts: list[str], tokens: int, binary: bool = True, of: Any = triton) -> list[Any]:
    return [
        tensor("text_input", [[text.encode()] for text in texts], binary=binary, of=of),
        tensor("max_tokens", [[tokens]] * len(texts), np.int32, binary, of),
    ]


def generate(served: Served, fields: dict[str, Any], model: str = "ensemble") -> Any:
    return requests.post(f"{served.root}/v2/models/{model}/generate", json=fields, timeout=60)


def streamed(served: Served, fields: dict[str, Any], model: str = "ensemble") -> list[Any]:
    path = f"{served.root}/v2/models/{model}/generate_stream"
    with requests.post(path, json=fields, timeout=60, stream=True) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: ")]


def completion(served: Served, **fields: Any) -> str:
    """What OpenAI's dialect answers."""
    body = {"prompt": PROMPT, "temperature": 0} | fields
    return httpx.post(f"{served.url}/completions", json=body, timeout=60).json()["choices"][0]["text"]


# --- What a server tells of itself ----------------------------------------------------------------------------------


@pytest.mark.row("triton", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/NAME[/versions/1]", "/config")
@pytest.mark.row("triton", "/ready", "/v2/repository/index")
def test_a_server_tells_what_it_is(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert {"generate", "binary_tensor_data"} <= set(client.get_server_metadata()["extensions"])
    assert [model["name"] for model in client.get_model_repository_index()] == MODELS
    for name in MODELS:
        assert client.is_model_ready(name) and client.is_model_ready(name, "1")
        metadata, config = client.get_model_metadata(name, "1"), client.get_model_config(name)
        assert metadata["versions"] == ["1"]
        assert [i["name"] for i in metadata["inputs"]] == [i["name"] for i in config["input"]]
        assert [o["name"] for o in metadata["outputs"]] == [o["name"] for o in config["output"]]
        assert (config["max_batch_size"] > 0) == (name != "model")
    inputs = {i["name"]: i for i in client.get_model_metadata("ensemble")["inputs"]}
    assert inputs["text_input"] == {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}
    assert inputs["random_seed"]["datatype"] == "UINT64"
    optional = {i["name"]: i["optional"] for i in client.get_model_config("ensemble")["input"]}
    assert [name for name, may in optional.items() if not may] == ["text_input", "max_tokens"]


@pytest.mark.parametrize(("name", "version"), [("other", ""), ("ensemble", "2")])
def test_models_that_are_not_here_are_named(client: triton.InferenceServerClient, name: str, version: str) -> None:
    assert not client.is_model_ready(name, version)
    for ask in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
        with pytest.raises(InferenceServerException, match=f"unknown model: '{name}'"):
            ask(name, version)
    with pytest.raises(InferenceServerException, match=f"unknown model: '{name}'"):
        client.infer(name, asking([PROMPT], 1), model_version=version)


@pytest.mark.row("triton", "…/load", "…/unload")
def test_models_stay_loaded(client: triton.InferenceServerClient) -> None:
    client.load_model("ensemble")
    with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
        client.load_model("other")
    with pytest.raises(InferenceServerException, match="not by config"):
        client.load_model("ensemble", config="{}")
    with pytest.raises(InferenceServerException, match="--model-control-mode explicit"):
        client.unload_model("ensemble")
    assert client.is_model_ready("ensemble")


@pytest.mark.row("triton", "/v2/logging", "/v2/trace/setting")
def test_settings_are_told_and_kept(client: triton.InferenceServerClient) -> None:
    assert client.get_log_settings()["log_info"] is True
    assert client.update_log_settings({"log_info": True}) == client.get_log_settings()
    with pytest.raises(InferenceServerException, match="log_verbose_level"):
        client.update_log_settings({"log_verbose_level": 4})
    assert client.get_trace_settings("ensemble")["trace_level"] == ["OFF"]
    with pytest.raises(InferenceServerException, match="trace_rate"):
        client.update_trace_settings(settings={"trace_rate": "5"})


@pytest.mark.row("triton", "/stats")
def test_requests_are_counted(served: Served, client: triton.InferenceServerClient) -> None:
    def counts() -> tuple[int, int, int]:
        (found,) = client.get_inference_statistics("tensorrt_llm_bls")["model_stats"]
        stats = found["inference_stats"]
        assert stats["success"]["ns"] == stats["queue"]["ns"] + stats["compute_infer"]["ns"]
        return found["inference_count"], stats["success"]["count"], stats["fail"]["count"]

    before = counts()
    client.infer("tensorrt_llm_bls", asking([PROMPT, PROMPT], 2))
    with pytest.raises(InferenceServerException):
        client.infer("tensorrt_llm_bls", asking([PROMPT], 0))
    assert counts() == (before[0] + 2, before[1] + 1, before[2] + 1)
    page = httpx.get(f"{served.root}/metrics").text
    assert f'nv_inference_count{{model="tensorrt_llm_bls",version="1"}} {before[0] + 2:.1f}' in page


# --- infer ----------------------------------------------------------------------------------------------------------


@pytest.mark.row("triton", "…/infer")
@pytest.mark.parametrize("binary", [True, False])
def test_a_batch_is_answered(served: Served, client: triton.InferenceServerClient, binary: bool) -> None:
    outputs = [triton.InferRequestedOutput("text_output", binary_data=binary)]
    answer = client.infer("ensemble", asking([PROMPT, "The capital"], 6, binary), outputs=outputs, request_id="mine")
    texts = [
        PROMPT + completion(served, max_tokens=6),
        "The capital" + completion(served, prompt="The capital", max_tokens=6),
    ]
    assert [text.decode() if binary else text for text in answer.as_numpy("text_output")] == texts
    assert answer.get_response()["id"] == "mine"
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["text_output"]


def test_compressed_requests_are_read(served: Served, client: triton.InferenceServerClient) -> None:
    for how in ("gzip", "deflate"):
        answer = client.infer("ensemble", asking([PROMPT], 6), request_compression_algorithm=how)
        assert answer.as_numpy("text_output")[0].decode() == PROMPT + completion(served, max_tokens=6)


@pytest.mark.row("triton", "return_log_probs")
def test_log_probabilities_are_those_of_the_tokens(served: Served, client: triton.InferenceServerClient) -> None:
    answer = client.infer("ensemble", [*asking([PROMPT], 6), tensor("return_log_probs", [[True]], bool)])
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logprobs": 0}
    expected = httpx.post(f"{served.url}/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(answer.as_numpy("output_log_probs"), [[expected]], rtol=1e-6)
    np.testing.assert_allclose(answer.as_numpy("cum_log_probs"), [[sum(expected)]], rtol=1e-5)


@pytest.mark.row("triton", "exclude_input_in_output")
def test_rows_differ_in_what_they_ask_but_not_in_shape(served: Served, client: triton.InferenceServerClient) -> None:
    own = [
        tensor("return_log_probs", [[False], [True]], bool),
        tensor("exclude_input_in_output", [[True], [False]], bool),
        tensor("stop_words", [[b"", b""], [b",", b"."]]),
    ]
    answer = client.infer("ensemble", [*asking([PROMPT, PROMPT], 6), *own])
    whole, cut = [text.decode() for text in answer.as_numpy("text_output")]
    assert whole == completion(served, max_tokens=6)
    assert cut == PROMPT + completion(served, max_tokens=6, stop=[",", "."])
    assert answer.as_numpy("cum_log_probs")[0, 0] == 0 > answer.as_numpy("cum_log_probs")[1, 0]
    with pytest.raises(InferenceServerException, match="num_return_sequences: must be the same in all rows"):
        client.infer("ensemble", [*asking([PROMPT] * 2, 6), tensor("num_return_sequences", [[1], [2]], np.int32)])


@pytest.mark.row("triton", "QUERY", "REQUEST_OUTPUT_LEN", "BAD_WORDS_DICT", "STOP_WORDS_DICT")
def test_models_in_a_row_do_what_the_ensemble_does(served: Served, client: triton.InferenceServerClient) -> None:
    texts, stop = [PROMPT, "What is the capital of France? It is"], "a"
    before = client.infer(
        "preprocessing",
        [
            tensor("QUERY", [[text.encode()] for text in texts]),
            tensor("REQUEST_OUTPUT_LEN", [[12], [12]], np.int32),
            tensor("STOP_WORDS_DICT", [[stop.encode(), b""], [b"", b""]]),
            tensor("BAD_WORDS_DICT", [[b""], [b" the"]]),
        ],
    )
    passed = {
        "input_ids": "INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        "stop_words_list": "STOP_WORDS_IDS",
        "bad_words_list": "BAD_WORDS_IDS",
        "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID",
    }
    between = client.infer(
        "tensorrt_llm",
        [tensor(name, before.as_numpy(output), np.int32) for name, output in passed.items()]
        + [tensor("exclude_input_in_output", [[True], [True]], bool)],
    )
    after = client.infer(
        "postprocessing",
        [
            tensor("TOKENS_BATCH", between.as_numpy("output_ids"), np.int32),
            tensor("SEQUENCE_LENGTH", between.as_numpy("sequence_length"), np.int32),
        ],
    )
    ensemble = client.infer(
        "ensemble",
        [
            *asking(texts, 12),
            tensor("bad_words", [[b""], [b" the"]]),
            tensor("end_id", before.as_numpy("OUT_END_ID"), np.int32),
            tensor("exclude_input_in_output", [[True], [True]], bool),
        ],
    )
    found, expected = after.as_numpy("OUTPUT"), ensemble.as_numpy("text_output")
    assert found[1] == expected[1]
    assert expected[0].startswith(found[0].removesuffix(stop.encode()))


def test_the_asynchronous_client_asks_the_same(served: Served) -> None:
    async def ask() -> list[str]:
        async with triton_aio.InferenceServerClient(served.root.removeprefix("http://")) as client:
            asked = [client.infer("ensemble", asking([f"{PROMPT} {i}"], 5, of=triton_aio)) for i in range(8)]
            answers = await asyncio.gather(*asked)
            return [answer.as_numpy("text_output")[0].decode() for answer in answers]

    found = asyncio.run(ask())
    expected = [generate(served, {"text_input": f"{PROMPT} {i}", "max_tokens": 5}).json() for i in range(8)]
    assert found == [answer["text_output"] for answer in expected]


# --- generate, generate_stream --------------------------------------------------------------------------------------


@pytest.mark.row("triton", "text_input", "max_tokens", "…/generate")
def test_generate_as_the_document_has_it(served: Served) -> None:
    asked = '{"text_input": "如何保持正能量?","parameters": {"max_tokens": 20,"bad_words":[""],"stop_words":[""]}}'
    headers = {"content-type": "application/x-www-form-urlencoded"}  # as curl -d sends it
    answer = httpx.post(f"{served.root}/v2/models/ensemble/generate", content=asked, headers=headers, timeout=60)
    found = answer.json()
    expected = {"model_name": "ensemble", "model_version": "1", "sequence_id": 0}
    expected |= {"sequence_start": False, "sequence_end": False}
    assert found.items() >= expected.items()
    prompt = "如何保持正能量?"
    assert found["text_output"] == prompt + completion(served, prompt=prompt, max_tokens=20)


@pytest.mark.row("triton", "…/generate_stream", '"stream": true', "stream")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_stream_adds_up_to_the_whole(served: Served, model: str) -> None:
    fields = {"text_input": PROMPT, "max_tokens": 30, "bad_words": "", "stop_words": "", "return_log_probs": True}
    whole = generate(served, fields | {"exclude_input_in_output": True, "stream": False}, model).json()
    pieces = streamed(served, fields | {"stream": True}, model)
    assert len(pieces) > 5
    assert "".join(piece["text_output"] for piece in pieces) == whole["text_output"]
    probabilities = [p for piece in pieces for p in np.atleast_1d(piece["output_log_probs"])]
    assert probabilities == whole["output_log_probs"]
    assert pieces[-1]["cum_log_probs"] == whole["cum_log_probs"]


@pytest.mark.row("triton", "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty")
@pytest.mark.row("triton", "frequency_penalty", "random_seed", "num_return_sequences", "beam_width", "length_penalty")
def test_sampling_is_that_of_the_engine(served: Served) -> None:
    fields = {"text_input": PROMPT, "max_tokens": 20, "exclude_input_in_output": True}
    drawn = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.5}
    drawn |= {"frequency_penalty": 0.25}
    seeded = generate(served, fields | drawn | {"random_seed": 2**62 + 1}).json()["text_output"]
    assert seeded == completion(served, **drawn, seed=2**62 + 1, max_tokens=20)
    assert generate(served, fields | drawn | {"random_seed": 2**64 - 1}).status_code == 200
    assert generate(served, fields | {"temperature": 0.9}).json()["text_output"] == completion(served, max_tokens=20)
    unseeded = {generate(served, fields | drawn).json()["text_output"] for _ in range(2)}
    assert unseeded == {completion(served, **drawn, seed=0, max_tokens=20)}
    several = generate(served, fields | drawn | {"num_return_sequences": 3}).json()
    assert len(several["text_output"]) == 3 and several["sequence_index"] == [0, 1, 2]
    beams = generate(served, fields | {"beam_width": 3, "length_penalty": 1.0}).json()
    found = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "use_beam_search": True, "best_of": 3, "n": 3}
    choices = httpx.post(f"{served.url}/completions", json=found, timeout=60).json()["choices"]
    assert beams["text_output"] == [choice["text"] for choice in choices]


@pytest.mark.row("triton", "bad_words", "stop_words", "end_id", "embedding_bias_words", "embedding_bias_weights")
@pytest.mark.row("triton", "guided_decoding_guide_type", "guided_decoding_guide")
def test_words_ends_and_biases_act(served: Served) -> None:
    fields = {"text_input": PROMPT, "max_tokens": 30, "exclude_input_in_output": True}
    whole = generate(served, fields).json()["text_output"]
    word = whole.split()[3]
    assert generate(served, fields | {"stop_words": ["", word]}).json()["text_output"] == whole[: whole.index(word)]
    assert word not in generate(served, fields | {"bad_words": [word]}).json()["text_output"]
    bias = {"embedding_bias_words": [f" {word}"], "embedding_bias_weights": [-100.0]}
    assert generate(served, fields | bias).json()["text_output"] != whole
    ids = generate(served, {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 6}, "tensorrt_llm").json()
    assert ids["output_ids"][:3] == [5, 6, 7] and ids["sequence_length"] == 9
    end = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 6, "end_id": ids["output_ids"][4]}
    assert generate(served, end, "tensorrt_llm").json()["output_ids"][-1] == end["end_id"]
    guided = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(yes|no)"}
    assert generate(served, fields | guided).json()["text_output"] in ("yes", "no")


@pytest.mark.row("triton", "min_length", "early_stopping", "pad_id", "parameters")
def test_lengths_paddings_and_priorities(served: Served, client: triton.InferenceServerClient) -> None:
    fields = {"text_input": PROMPT, "max_tokens": 60, "exclude_input_in_output": True}
    asked = {"input_ids": [5], "input_lengths": 1, "request_output_len": 5}
    ids = generate(served, asked, "tensorrt_llm").json()["output_ids"]
    asked |= {"end_id": ids[2]}
    assert generate(served, asked, "tensorrt_llm").json()["sequence_length"] == 1 + ids.index(ids[2], 1) <= 3
    assert generate(served, asked | {"min_length": 4}, "tensorrt_llm").json()["sequence_length"] > 4
    beams = {"beam_width": 3, "early_stopping": True, "end_id": -1}
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60, "use_beam_search": True, "best_of": 3, "n": 3}
    body |= {"early_stopping": True, "length_penalty": 0, "ignore_eos": True}
    choices = httpx.post(f"{served.url}/completions", json=body, timeout=60).json()["choices"]
    assert generate(served, fields | beams).json()["text_output"] == [choice["text"] for choice in choices]

    rows = [
        tensor("input_ids", [[5, 6, 7], [5, 0, 0]], np.int32),
        tensor("input_lengths", [[3], [1]], np.int32),
        tensor("request_output_len", [[2], [2]], np.int32),
        tensor("end_id", [[-1], [-1]], np.int32),
    ]
    for more, filling in (([tensor("pad_id", [[9], [9]], np.int32)], [9, 9]), ([], None)):
        answer = client.infer("tensorrt_llm", rows + more)
        assert answer.as_numpy("sequence_length").tolist() == [[5], [3]]
        assert filling is None or answer.as_numpy("output_ids")[1, 0, 3:].tolist() == filling

    def infer(parameters: dict[str, Any]) -> Any:
        inputs = [
            {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]},
            {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [2]},
        ]
        body = {"inputs": inputs, "parameters": parameters}
        return httpx.post(f"{served.root}/v2/models/ensemble/infer", json=body, timeout=60)

    assert infer({"priority": 3, "timeout": 10, "mine": "a"}).status_code == 200
    assert infer({"priority": -1}).json() == {"error": "priority: must be a whole number from 0 on"}
    answer = infer({"binary_data_output": True})
    assert int(answer.headers["inference-header-content-length"]) < len(answer.content)


@pytest.mark.row("triton", "EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS", "END_ID", "PAD_ID")
@pytest.mark.row("triton", "TOKENS_BATCH", "SEQUENCE_LENGTH")
def test_preprocessing_hands_on_biases_and_ids(client: triton.InferenceServerClient) -> None:
    asked = [
        tensor("QUERY", [[PROMPT.encode()], [b"Once"]]),
        tensor("REQUEST_OUTPUT_LEN", [[3], [3]], np.int32),
        tensor("EMBEDDING_BIAS_WORDS", [[b" fox"], [b" fox"]]),
        tensor("EMBEDDING_BIAS_WEIGHTS", [[2.5], [0.0]], np.float32),
        tensor("END_ID", [[7], [8]], np.int32),
        tensor("PAD_ID", [[9], [9]], np.int32),
    ]
    found = client.infer("preprocessing", asked)
    bias = found.as_numpy("EMBEDDING_BIAS")
    assert bias.shape[0] == 2 and bias[0].max() == 2.5 and not bias[1].any()
    assert found.as_numpy("OUT_END_ID").tolist() == [[7], [8]] and found.as_numpy("OUT_PAD_ID").tolist() == [[9], [9]]
    assert found.as_numpy("INPUT_ID")[1, -1] == 9, "shorter rows are filled with it"
    lengths = found.as_numpy("REQUEST_INPUT_LEN")
    ids = tensor("TOKENS_BATCH", found.as_numpy("INPUT_ID")[:, None], np.int32)
    texts = client.infer("postprocessing", [ids, tensor("SEQUENCE_LENGTH", lengths, np.int32)]).as_numpy("OUTPUT")
    assert texts.tolist() == [PROMPT.encode(), b"Once"]
    given = {"input_ids": found.as_numpy("INPUT_ID")[:1], "input_lengths": lengths[:1], "embedding_bias": bias[:1] * 40}
    given |= {"request_output_len": np.array([[3]])}
    inputs = [tensor(n, v, np.float32 if n == "embedding_bias" else np.int32) for n, v in given.items()]
    made = client.infer("tensorrt_llm", inputs).as_numpy("output_ids")[0, 0]
    assert set(made[-3:].tolist()) == {int(bias[0].argmax())}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_token": 3}, "max_token: no such input .* mean max_tokens"),
        ({"max_tokens": None}, "max_tokens: is missing"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"max_tokens": "3"}, "max_tokens: .* no element of INT32"),
        ({"max_tokens": 2**40}, "max_tokens: must be at most"),
        ({"max_tokens": [3, 4]}, "max_tokens: has the shape"),
        ({"end_id": 99999}, "end_id: token ids go from 0 to 3583"),
        ({"text_input": 3}, "text_input"),
        ({"text_input": "long " * 9000}, "text_input: .* tokens"),
        ({"stream": True}, "stream: .*generate_stream"),
        ({"temperature": -1.0}, "temperature: must be at least 0"),
        ({"top_k": 1, "top_p": 2.0}, "top_p: must be at most 1"),
        ({"top_k": -2}, "top_k: must be at least 0"),
        ({"min_length": 30}, "min_length: must be at most 5"),
        ({"num_return_sequences": 200}, "num_return_sequences: must be at most"),
        ({"beam_width": 0}, "beam_width: must be at least 1"),
        ({"beam_width": 2, "num_return_sequences": 3}, "beam_width"),
        (
            {"return_generation_logits": True, "max_tokens": 1500},
            "return_generation_logits: is for .* at most 16777216",
        ),
        ({"lora_task_id": 5}, "lora_task_id: not supported yet; .*--lora-modules"),
        ({"prompt_embedding_table": [1.5]}, "prompt_embedding_table: not supported yet"),
        ({"num_draft_tokens": 3}, "num_draft_tokens: not supported yet; --speculative-config"),
        ({"embedding_bias_words": ["a"]}, "embedding_bias_weights: has 0 elements"),
        ({"guided_decoding_guide_type": "xml", "guided_decoding_guide": "a"}, "guided_decoding_guide_type: is none of"),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(("}, "guided_decoding_guide"),
        ({"parameters": {"max_tokens": 3}}, "max_tokens: is given twice"),
        ({"parameters": 3}, "parameters: is no JSON object"),
    ],
)
@pytest.mark.row("triton", "errors")
def test_wrong_requests_are_told_by_name(served: Served, fields: dict[str, Any], words: str) -> None:
    answer = generate(served, {"text_input": PROMPT, "max_tokens": 5} | fields)
    assert answer.status_code == 400 and answer.json().keys() == {"error"}
    assert re.search(words, answer.json()["error"]), answer.text


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b"{", {}, "is not JSON"),
        (b"{}", {"inference-header-content-length": "9"}, "inference-header-content-length"),
        (b'{"inputs":[{"shape":[1]}]}', {}, "without a name"),
        (b'{"inputs":[{"name":"text_input","shape":[1],"datatype":"TEXT","data":["a"]}]}', {}, "datatype"),
        (b'{"inputs":[{"name":"text_input","shape":[-1],"datatype":"BYTES","data":["a"]}]}', {}, "shape"),
        (b'{"inputs":[{"name":"text_input","shape":[3],"datatype":"BYTES","data":["a"]}]}', {}, "elements"),
        (b'{"inputs":[],"more":1}', {}, "no such field"),
        (b'{"inputs":[],"outputs":[{"name":"text"}]}', {}, "unexpected inference output"),
        (b'{"inputs":[{"name":"a","parameters":{"shared_memory_region":"x"}}]}', {}, "shared memory"),
        (b"{}", {"content-encoding": "br"}, "content-encoding"),
        (b"{}", {"content-encoding": "gzip"}, "not compressed"),
    ],
)
@pytest.mark.row("triton", "shared memory of the system or of CUDA")
def test_what_is_no_request_is_refused(served: Served, body: bytes, headers: dict[str, str], words: str) -> None:
    answer = httpx.post(f"{served.root}/v2/models/ensemble/infer", content=body, headers=headers)
    assert answer.status_code == 400 and words in answer.json()["error"], answer.text


def test_shared_memory_is_refused_by_name(client: triton.InferenceServerClient) -> None:
    for ask in (
        client.get_system_shared_memory_status,
        client.get_cuda_shared_memory_status,
        lambda: client.register_system_shared_memory("mine", "/mine", 64),
        client.unregister_cuda_shared_memory,
    ):
        with pytest.raises(InferenceServerException, match="shared memory is not supported yet; send tensors"):
            ask()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"end_id": ([[99999]], np.int32)}, "end_id: token ids go from 0 to 3583"),
        ({"stop_words_list": ([[[7, 99999], [2, -1]]], np.int32)}, "stop_words_list: token ids go from 0 to 3583"),
        ({"stop_words_list": ([[[7, -3], [2, -1]]], np.int32)}, "stop_words_list: token ids go from 0 to 3583"),
        ({"stop_words_list": ([[[7, 8], [2, 1]]], np.int32)}, "stop_words_list: has a second row that is no list"),
        ({"bad_words_list": ([[[99999], [1]]], np.int32)}, "bad_words_list: token ids go from 0 to 3583"),
        ({"embedding_bias": ([[1.0, 2.0]], np.float32)}, "embedding_bias: has 2 elements, and there are 3584 tokens"),
        ({"input_lengths": ([[2]], np.int32)}, "input_lengths: must be from 1 to the 1 of input_ids, is 2"),
        ({"input_ids": ([[-1]], np.int32)}, "input_ids: token ids go from 0 to 3583"),
        ({"request_output_len": ([[0]], np.int32)}, "request_output_len: must be at least 1"),
    ],
)
def test_wrong_token_ids_are_told_by_name(
    client: triton.InferenceServerClient, more: dict[str, tuple[Any, Any]], words: str
) -> None:
    given = {name: ([[value]], np.int32) for name, value in (("input_ids", 5), ("input_lengths", 1))}
    given |= {"request_output_len": ([[3]], np.int32)} | more
    with pytest.raises(InferenceServerException, match=words):
        client.infer("tensorrt_llm", [tensor(name, value, kind) for name, (value, kind) in given.items()])


def test_text_of_tokens_that_nobody_knows_is_refused(client: triton.InferenceServerClient) -> None:
    for token in (99999, -1):
        tokens = [tensor("TOKENS_BATCH", [[[5, token]]], np.int32), tensor("SEQUENCE_LENGTH", [[2]], np.int32)]
        with pytest.raises(InferenceServerException, match="TOKENS_BATCH: token ids go from 0 to 3583"):
            client.infer("postprocessing", tokens)


@pytest.mark.parametrize("raw", [b"", b"\x05\x00", b"\x05\x00\x00\x00abc", b"\x01\x00\x00\x00\xff"])
def test_bytes_that_are_no_text_are_refused(served: Served, raw: bytes) -> None:
    inputs = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}},
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [1]},
    ]
    head = json.dumps({"inputs": inputs}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    answer = httpx.post(f"{served.root}/v2/models/ensemble/infer", content=head + raw, headers=headers)
    assert answer.status_code == 400 and "text_input" in answer.json()["error"], answer.text


def drawn(depth: int = 2) -> st.SearchStrategy[Any]:
    plain = (
        st.none()
        | st.booleans()
        | st.integers(-3, 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=5)
    )
    return plain if not depth else plain | st.lists(drawn(depth - 1), max_size=3)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_comes_is_answered_or_refused(served: Served, client: triton.InferenceServerClient, data: Any) -> None:
    """Any inputs, of any type and shape, to any model."""
    model = data.draw(st.sampled_from(MODELS))
    specs = WANTED.setdefault(model, client.get_model_metadata(model)["inputs"])
    chosen = data.draw(st.lists(st.sampled_from(specs), unique_by=lambda spec: spec["name"], max_size=6))
    fields = {spec["name"]: data.draw(drawn()) for spec in chosen}
    kinds = st.sampled_from(["BYTES", "INT32", "FP32", "BOOL", "UINT64", "INT8", "X"])
    shapes = st.lists(st.integers(-1, 3), max_size=3)
    inputs = [
        {"name": name, "datatype": data.draw(kinds), "shape": data.draw(shapes), "data": value}
        for name, value in fields.items()
    ]
    for path, body in (("generate", fields), ("infer", {"inputs": inputs})):
        answer = SESSION.post(f"{served.root}/v2/models/{model}/{path}", json=body)
        assert answer.status_code in (200, 400), answer.text
        assert answer.status_code == 200 or answer.json().keys() == {"error"}


# --- Many, and those who leave --------------------------------------------------------------------------------------


def test_fifty_streams_at_once(served: Served) -> None:
    async def ask(client: httpx.AsyncClient, i: int) -> str:
        fields = {"text_input": f"{PROMPT} {i}", "max_tokens": 20, "stream": True}
        found = []
        async with client.stream("POST", "/v2/models/ensemble/generate_stream", json=fields) as answer:
            async for line in answer.aiter_lines():
                if line:
                    found.append(json.loads(line.removeprefix("data: "))["text_output"])
        return "".join(found)

    async def all_of_them() -> list[str]:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(base_url=served.root, timeout=60, limits=limits) as client:
            return await asyncio.gather(*[ask(client, i) for i in range(50)])

    found = asyncio.run(all_of_them())
    for i in (0, 17, 49):
        assert found[i] == completion(served, prompt=f"{PROMPT} {i}", max_tokens=20)


def test_who_leaves_cancels_the_request(served: Served) -> None:
    seen = len(served.lines)
    fields = {"text_input": PROMPT, "max_tokens": 1500, "stream": True, "end_id": -1}
    path = f"{served.root}/v2/models/ensemble/generate_stream"
    with requests.post(path, json=fields, timeout=60, stream=True) as answer:
        next(answer.iter_lines())
    served.find(r"generate_stream .*error=cancelled", after=seen)


def test_a_key_is_asked_for_but_not_by_probes() -> None:
    flags = ("--exclude-input-in-output", "--accumulate-tokens")
    with Served("--num-gpu-blocks-override", "50", "--api-key", "secret", *flags) as served:
        assert httpx.get(f"{served.root}/v2/health/live").status_code == 200
        assert httpx.get(f"{served.root}/v2/health/ready").status_code == 200
        with triton.InferenceServerClient(served.root.removeprefix("http://")) as client:
            assert client.is_server_live()
            with pytest.raises(InferenceServerException, match="API key"):
                client.infer("ensemble", asking([PROMPT], 4))
            key = {"Authorization": "Bearer secret"}
            found = client.infer("ensemble", asking([PROMPT], 4), headers=dict(key)).as_numpy("text_output")[0]
            assert not found.decode().startswith(PROMPT)  # as the server's option has it
        asked = {"text_input": PROMPT, "max_tokens": 12, "stream": True}
        path = f"{served.root}/v2/models/tensorrt_llm_bls/generate_stream"
        told = [
            json.loads(line[6:])["text_output"]
            for line in httpx.post(path, json=asked, headers=key).text.split("\n\n")[:-1]
        ]
        assert len(told) > 2 and all(later.startswith(before) for before, later in itertools.pairwise(told))

        path = f"{served.root}/v2/models/ensemble/generate_stream"
        with httpx.stream("POST", path, json=asked | {"max_tokens": 1500, "end_id": -1}, headers=key) as answer:
            lines = answer.iter_lines()
            assert "text_output" in next(lines)
            os.kill(served.pids["engine"][0], signal.SIGKILL)
            *_, last = [line for line in lines if line]
        assert json.loads(last[6:]).keys() == {"error"}
