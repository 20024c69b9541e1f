"""The KServe v2 protocol over HTTP, tested with Triton's client and with the requests of its documentation."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import requests
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served, Servers
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

PROMPT = "Once upon a time"
MODELS = ["ensemble", "tensorrt_llm_bls", "preprocessing", "tensorrt_llm", "postprocessing", "model"]
KINDS = {
    np.dtype("int32"): "INT32",
    np.dtype("float32"): "FP32",
    np.dtype("uint64"): "UINT64",
    np.dtype("bool"): "BOOL",
}

REGION = f"/penstock_test_{os.getpid()}"
"""Name of the POSIX shared memory object, unique per test process."""
EXAMPLES = int(os.environ.get("PENSTOCK_KSERVE_EXAMPLES", "120"))
INPUTS: dict[str, Any] = {}
"""Input tensors of each model's metadata: cache of ``test_random_request_is_answered_or_rejected``."""
SESSION = httpx.Client(timeout=60)


@pytest.fixture(scope="module")
def served(servers: Servers) -> Served:
    return servers.get("--num-gpu-blocks-override", "400")


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served.root.removeprefix("http://")) as client:
        yield client


def tensor(name: str, values: Any, kind: Any = object, binary: bool = True, client_module: Any = triton) -> Any:
    array = np.array(values, dtype=kind)
    result = client_module.InferInput(name, list(array.shape), KINDS.get(array.dtype, "BYTES"))
    if client_module is triton:
        result.set_data_from_numpy(array, binary_data=binary)
    else:
        result.set_data_from_numpy(array)
    return result


def text_inputs(texts: list[str], tokens: int, binary: bool = True, client_module: Any = triton) -> list[Any]:
    return [
        tensor("text_input", [[text.encode()] for text in texts], binary=binary, client_module=client_module),
        tensor("max_tokens", [[tokens]] * len(texts), np.int32, binary, client_module),
    ]


def generate(served: Served, fields: dict[str, Any], model: str = "ensemble") -> Any:
    return requests.post(f"{served.root}/v2/models/{model}/generate", json=fields, timeout=60)


def streamed(served: Served, fields: dict[str, Any], model: str = "ensemble") -> list[Any]:
    path = f"{served.root}/v2/models/{model}/generate_stream"
    with requests.post(path, json=fields, timeout=60, stream=True) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: ")]


def completion(served: Served, **fields: Any) -> str:
    """Return the text of OpenAI's completions endpoint."""
    body = {"prompt": PROMPT, "temperature": 0} | fields
    return httpx.post(f"{served.url}/completions", json=body, timeout=60).json()["choices"][0]["text"]


# --- Server state and settings --------------------------------------------------------------------------------------


@pytest.mark.row("triton", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/NAME[/versions/1]", "/config")
@pytest.mark.row("triton", "/ready", "/v2/repository/index")
def test_server_and_model_metadata_are_reported(served: Served, client: triton.InferenceServerClient) -> None:
    assert client.is_server_live(query_params={"test_1": 1, "test_2": 2}) and client.is_server_ready()
    assert httpx.get(f"{served.root}/v2").headers["server"].startswith("penstock/")
    metadata = client.get_server_metadata()
    assert metadata["name"] == "triton" and {"generate", "binary_tensor_data"} <= set(metadata["extensions"])
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
def test_unknown_model_or_version_is_rejected_by_name(
    served: Served, client: triton.InferenceServerClient, name: str, version: str
) -> None:
    assert not client.is_model_ready(name, version)
    path = f"/v2/models/{name}/versions/{version}/ready" if version else f"/v2/models/{name}/ready"
    assert httpx.get(f"{served.root}{path}").status_code == 400, "Triton returns the same status"
    for ask in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
        with pytest.raises(InferenceServerException, match=f"unknown model: '{name}'"):
            ask(name, version)
    with pytest.raises(InferenceServerException, match=f"unknown model: '{name}'"):
        client.infer(name, text_inputs([PROMPT], 1), model_version=version)


@pytest.mark.row("triton", "…/load", "…/unload")
def test_load_changes_config_and_unload_is_rejected(client: triton.InferenceServerClient) -> None:
    client.load_model("ensemble")
    with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
        client.load_model("other")
    client.load_model("ensemble", config='{"max_batch_size": "2", "instance_group": [{"count": 2}]}')
    assert client.get_model_config("ensemble")["max_batch_size"] == 2
    with pytest.raises(InferenceServerException, match="text_input: has 3 rows; model 'ensemble' accepts 1 to 2"):
        client.infer("ensemble", text_inputs([PROMPT] * 3, 1))
    for config, message in [
        ('"parameters": {"config": {{}}}', "config: is not JSON"),
        ("[]", "config: must be a JSON object"),
        ('{"max_batch_siz": 4}', "config: unknown field: max_batch_siz; did you mean max_batch_size"),
        ('{"max_batch_size": 257}', "max_batch_size: must be an integer from 0 to 256"),
        ('{"parameters": {"gpt_model_type": {"string_value": "V1"}}}', "config.parameters: can only be set when"),
    ]:
        with pytest.raises(InferenceServerException, match=f"failed to load 'ensemble', {message}"):
            client.load_model("ensemble", config=config)
    with pytest.raises(
        InferenceServerException, match=r"failed to load .ensemble., file:1/model.py: Invalid file path"
    ):
        client.load_model("ensemble", config="{}", files={"file:1/model.py": b"a"})
    client.load_model("ensemble")
    assert client.get_model_config("ensemble")["max_batch_size"] == 256, "the default is restored"
    with pytest.raises(InferenceServerException, match="--model-control-mode explicit"):
        client.unload_model("ensemble")
    assert client.is_model_ready("ensemble")


def test_unknown_fields_of_control_requests_are_rejected(served: Served, client: triton.InferenceServerClient) -> None:
    """A misspelt field of a request that changes the server is an error."""
    for path, body, field in (
        ("repository/models/ensemble/load", {"parametres": {"config": '{"max_batch_size": 2}'}}, "parametres"),
        ("repository/models/ensemble/unload", {"parametres": {"unload_dependents": True}}, "parametres"),
        ("repository/models/ensemble/unload", {"unload_dependents": True}, "unload_dependents"),
        ("systemsharedmemory/region/a/register", {"key": "/a", "byte_size": 4, "ofset": 4}, "ofset"),
    ):
        answer = httpx.post(f"{served.root}/v2/{path}", json=body)
        assert answer.status_code == 400 and answer.json()["error"].startswith(f"{field}: no such field"), answer.text
    assert client.get_model_config("ensemble")["max_batch_size"] == 256
    assert httpx.post(f"{served.root}/v2/repository/index", json={"redy": True}).status_code == 200, (
        "read-only requests must ignore unknown fields"
    )


@pytest.mark.row("triton", "/v2/logging", "/v2/trace/setting")
def test_log_settings_change_at_runtime(served: Served, client: triton.InferenceServerClient) -> None:
    initial = client.get_log_settings()
    assert initial["log_info"] is True and initial["log_verbose_level"] == 0
    seen = len(served.lines)
    changed = client.update_log_settings({"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"})
    assert (
        changed
        == client.get_log_settings()
        == initial
        | {
            "log_info": False,
            "log_verbose_level": 1,
            "log_format": "ISO8601",
        }
    )
    assert client.is_server_live() and client.is_model_ready("ensemble")
    served.find("GET /v2/health/live", after=seen)  # probes are logged at level debug
    client.update_log_settings({"log_info": True, "log_verbose_level": 0, "log_format": "default"})
    assert client.is_model_ready("tensorrt_llm")
    served.find("GET /v2/models/tensorrt_llm/ready", after=seen)
    assert not [line for line in served.lines[seen:] if "/v2/models/ensemble/ready" in line]
    for wrong, message in [
        ({"log_file": "/tmp/other"}, "log_file: can not be updated through network protocol"),
        ({"log_info": "no"}, "log_info: must be true or false"),
        ({"log_verbose_level": -1}, "log_verbose_level"),
        ({"log_format": "json"}, "log_format: must be one of default, ISO8601"),
        ({"log_verbos_level": 1}, "log_verbos_level: no such setting.* log_verbose_level"),
    ]:
        with pytest.raises(InferenceServerException, match=message):
            client.update_log_settings(wrong)
    assert client.get_log_settings() == initial


def test_trace_settings_are_stored_with_a_warning(served: Served, client: triton.InferenceServerClient) -> None:
    initial = client.get_trace_settings()
    assert initial["trace_level"] == ["OFF"]
    changes = {"trace_level": ["TIMESTAMPS"], "trace_rate": "5"}
    assert client.update_trace_settings(settings=changes) == initial | changes
    served.find(r"WARNING trace_level=\['TIMESTAMPS'\]: trace settings are stored but have no effect")
    of_model = client.update_trace_settings("ensemble", settings={"trace_rate": 7, "trace_level": "OFF"})
    assert of_model == initial | {"trace_rate": "7"} == client.get_trace_settings("ensemble")
    assert client.get_trace_settings("tensorrt_llm") == initial | changes
    cleared = client.update_trace_settings("ensemble", settings={"trace_rate": None, "trace_level": None})
    assert cleared == initial | changes
    assert client.update_trace_settings(settings={"trace_level": None, "trace_rate": None}) == initial
    for wrong, message in [
        ({"trace_level": ["ALL"]}, "trace_level: must be a list of OFF, TIMESTAMPS, TENSORS"),
        ({"trace_rate": "often"}, "trace_rate: must be an integer, is 'often'"),
        ({"trace_count": -2}, "trace_count: must be at least -1"),
        ({"trace_file": "/tmp/x"}, "trace_file: can not be updated through network protocol"),
        ({"trace": 1}, "trace: no such setting"),
    ]:
        with pytest.raises(InferenceServerException, match=message):
            client.update_trace_settings(settings=wrong)
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.get_trace_settings("other")


@pytest.mark.row("triton", "/stats")
def test_statistics_count_requests(served: Served, client: triton.InferenceServerClient) -> None:
    def counts() -> tuple[int, int, int]:
        (found,) = client.get_inference_statistics("tensorrt_llm_bls")["model_stats"]
        stats = found["inference_stats"]
        assert stats["success"]["ns"] == stats["queue"]["ns"] + stats["compute_infer"]["ns"]
        return found["inference_count"], stats["success"]["count"], stats["fail"]["count"]

    before = counts()
    begun = time.time_ns() // 10**6
    client.infer("tensorrt_llm_bls", text_inputs([PROMPT, PROMPT], 2))
    last = client.get_inference_statistics("tensorrt_llm_bls")["model_stats"][0]["last_inference"]
    assert begun <= last <= time.time_ns() // 10**6, "last_inference must be in milliseconds since 1970"
    with pytest.raises(InferenceServerException):
        client.infer("tensorrt_llm_bls", text_inputs([PROMPT], 0))
    assert counts() == (before[0] + 2, before[1] + 1, before[2] + 1)
    page = httpx.get(f"{served.root}/metrics").text
    assert f'nv_inference_count{{model="tensorrt_llm_bls",version="1"}} {before[0] + 2:.1f}' in page


@pytest.mark.row("triton", ":8002/metrics")
def test_trtllm_metrics_have_documented_names_and_values(served: Served) -> None:
    """The names and labels are those that ``custom_metrics_verification_tests.py`` reads."""

    def figures() -> dict[str, dict[str, float]]:
        page = httpx.get(f"{served.root}/metrics").text
        found: dict[str, dict[str, float]] = {}
        for name, kind, value in re.findall(
            r'^nv_trt_llm_(\w+){.*?(?:\w+_(?:type|metric))="(\w+)".*} (\S+)$', page, flags=re.M
        ):
            found.setdefault(name, {})[kind] = float(value)
        return found

    generate(served, {"text_input": PROMPT * 40, "max_tokens": 3})
    generate(served, {"text_input": PROMPT * 40, "max_tokens": 3})
    deadline = time.monotonic() + 60
    while (found := figures())["kv_cache_block_metrics"]["reused"] == 0:  # the engine reports metrics once a second
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {name: [*values] for name, values in found.items()} == {
        "request_metrics": ["active", "max", "scheduled", "context", "waiting"],
        "runtime_memory_metrics": ["cpu", "gpu", "pinned"],
        "kv_cache_block_metrics": ["max", "free", "used", "tokens_per", "reused", "fraction"],
        "general_metrics": ["timestamp", "iteration_counter"],
        "inflight_batcher_metrics": [
            "total_context_tokens",
            "generation_requests",
            "micro_batch_id",
            "paused_requests",
        ],
    }
    blocks = found["kv_cache_block_metrics"]
    assert blocks["max"] == 400 == blocks["free"] + blocks["used"] and blocks["tokens_per"] == 64
    assert found["request_metrics"]["max"] == 256 and found["general_metrics"]["iteration_counter"] >= 6
    assert found["runtime_memory_metrics"]["cpu"] > 10**7


# --- infer ----------------------------------------------------------------------------------------------------------


@pytest.mark.row("triton", "…/infer")
@pytest.mark.parametrize("binary", [True, False])
def test_batch_of_two_rows_is_answered(served: Served, client: triton.InferenceServerClient, binary: bool) -> None:
    outputs = [triton.InferRequestedOutput("text_output", binary_data=binary)]
    answer = client.infer(
        "ensemble", text_inputs([PROMPT, "The capital"], 6, binary), outputs=outputs, request_id="mine"
    )
    texts = [
        PROMPT + completion(served, max_tokens=6),
        "The capital" + completion(served, prompt="The capital", max_tokens=6),
    ]
    assert [text.decode() if binary else text for text in answer.as_numpy("text_output")] == texts
    assert answer.get_response()["id"] == "mine"
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["text_output"]


def test_compressed_requests_are_accepted(served: Served, client: triton.InferenceServerClient) -> None:
    for algorithm in ("gzip", "deflate"):
        answer = client.infer("ensemble", text_inputs([PROMPT], 6), request_compression_algorithm=algorithm)
        assert answer.as_numpy("text_output")[0].decode() == PROMPT + completion(served, max_tokens=6)


@pytest.mark.row("triton", "return_log_probs")
def test_log_probs_equal_openai_logprobs(served: Served, client: triton.InferenceServerClient) -> None:
    answer = client.infer("ensemble", [*text_inputs([PROMPT], 6), tensor("return_log_probs", [[True]], bool)])
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logprobs": 0}
    expected = httpx.post(f"{served.url}/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(answer.as_numpy("output_log_probs"), [[expected]], rtol=1e-6)
    np.testing.assert_allclose(answer.as_numpy("cum_log_probs"), [[sum(expected)]], rtol=1e-5)


@pytest.mark.row("triton", "exclude_input_in_output")
def test_rows_have_separate_parameters_but_one_shape(served: Served, client: triton.InferenceServerClient) -> None:
    parameters = [
        tensor("return_log_probs", [[False], [True]], bool),
        tensor("exclude_input_in_output", [[True], [False]], bool),
        tensor("stop_words", [[b"", b""], [b",", b"."]]),
    ]
    answer = client.infer("ensemble", [*text_inputs([PROMPT, PROMPT], 6), *parameters])
    whole, cut = [text.decode() for text in answer.as_numpy("text_output")]
    assert whole == completion(served, max_tokens=6)
    assert cut == PROMPT + completion(served, max_tokens=6, stop=[",", "."])
    assert answer.as_numpy("cum_log_probs")[0, 0] == 0 > answer.as_numpy("cum_log_probs")[1, 0]
    with pytest.raises(InferenceServerException, match="num_return_sequences: must be the same in all rows"):
        client.infer("ensemble", [*text_inputs([PROMPT] * 2, 6), tensor("num_return_sequences", [[1], [2]], np.int32)])


@pytest.mark.row("triton", "QUERY", "REQUEST_OUTPUT_LEN", "BAD_WORDS_DICT", "STOP_WORDS_DICT")
def test_chained_models_equal_ensemble(served: Served, client: triton.InferenceServerClient) -> None:
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
            *text_inputs(texts, 12),
            tensor("bad_words", [[b""], [b" the"]]),
            tensor("end_id", before.as_numpy("OUT_END_ID"), np.int32),
            tensor("exclude_input_in_output", [[True], [True]], bool),
        ],
    )
    found, expected = after.as_numpy("OUTPUT"), ensemble.as_numpy("text_output")
    assert found[1] == expected[1]
    assert expected[0].startswith(found[0].removesuffix(stop.encode()))


def test_async_client_answers_equal_generate_endpoint(served: Served) -> None:
    async def ask() -> list[str]:
        async with triton_aio.InferenceServerClient(served.root.removeprefix("http://")) as client:
            calls = [
                client.infer("ensemble", text_inputs([f"{PROMPT} {i}"], 5, client_module=triton_aio)) for i in range(8)
            ]
            answers = await asyncio.gather(*calls)
            return [answer.as_numpy("text_output")[0].decode() for answer in answers]

    found = asyncio.run(ask())
    expected = [generate(served, {"text_input": f"{PROMPT} {i}", "max_tokens": 5}).json() for i in range(8)]
    assert found == [answer["text_output"] for answer in expected]


# --- generate, generate_stream --------------------------------------------------------------------------------------


@pytest.mark.row("triton", "text_input", "max_tokens", "…/generate")
def test_generate_accepts_request_of_documentation(served: Served) -> None:
    body = '{"text_input": "如何保持正能量?","parameters": {"max_tokens": 20,"bad_words":[""],"stop_words":[""]}}'
    headers = {"content-type": "application/x-www-form-urlencoded"}  # content type that curl -d sends
    answer = httpx.post(f"{served.root}/v2/models/ensemble/generate", content=body, headers=headers, timeout=60)
    found = answer.json()
    expected = {"model_name": "ensemble", "model_version": "1", "sequence_id": 0}
    expected |= {"sequence_start": False, "sequence_end": False}
    assert found.items() >= expected.items()
    prompt = "如何保持正能量?"
    assert found["text_output"] == prompt + completion(served, prompt=prompt, max_tokens=20)


@pytest.mark.row("triton", "…/generate_stream", '"stream": true', "stream")
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_stream_chunks_add_up_to_whole_answer(served: Served, model: str) -> None:
    fields = {"text_input": PROMPT, "max_tokens": 30, "bad_words": "", "stop_words": "", "return_log_probs": True}
    whole = generate(served, fields | {"exclude_input_in_output": True, "stream": False}, model).json()
    chunks = streamed(served, fields | {"stream": True}, model)
    assert "".join(chunk["text_output"] for chunk in chunks) == whole["text_output"]
    probabilities = [p for chunk in chunks for p in np.atleast_1d(chunk["output_log_probs"])]
    assert probabilities == whole["output_log_probs"]
    assert chunks[-1]["cum_log_probs"] == whole["cum_log_probs"]


@pytest.mark.row("triton", "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty")
@pytest.mark.row("triton", "frequency_penalty", "random_seed", "num_return_sequences", "beam_width", "length_penalty")
def test_sampling_parameters_equal_openai_completion(served: Served) -> None:
    fields = {"text_input": PROMPT, "max_tokens": 20, "exclude_input_in_output": True}
    sampling = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.5}
    sampling |= {"frequency_penalty": 0.25}
    seeded = generate(served, fields | sampling | {"random_seed": 2**62 + 1}).json()["text_output"]
    assert seeded == completion(served, **sampling, seed=2**62 + 1, max_tokens=20)
    assert generate(served, fields | sampling | {"random_seed": 2**64 - 1}).status_code == 200
    assert generate(served, fields | {"temperature": 0.9}).json()["text_output"] == completion(served, max_tokens=20)
    unseeded = {generate(served, fields | sampling).json()["text_output"] for _ in range(2)}
    assert unseeded == {completion(served, **sampling, seed=0, max_tokens=20)}
    several = generate(served, fields | sampling | {"num_return_sequences": 3}).json()
    assert len(several["text_output"]) == 3 and several["sequence_index"] == [0, 1, 2]
    beams = generate(served, fields | {"beam_width": 3, "length_penalty": 1.0}).json()
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "use_beam_search": True, "best_of": 3, "n": 3}
    choices = httpx.post(f"{served.url}/completions", json=body, timeout=60).json()["choices"]
    assert beams["text_output"] == [choice["text"] for choice in choices]


@pytest.mark.row("triton", "bad_words", "stop_words", "end_id", "embedding_bias_words", "embedding_bias_weights")
@pytest.mark.row("triton", "guided_decoding_guide_type", "guided_decoding_guide")
def test_stop_words_bad_words_end_id_bias_and_guide_take_effect(served: Served) -> None:
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
def test_min_length_beams_padding_and_priority_take_effect(
    served: Served, client: triton.InferenceServerClient
) -> None:
    fields = {"text_input": PROMPT, "max_tokens": 60, "exclude_input_in_output": True}
    request = {"input_ids": [5], "input_lengths": 1, "request_output_len": 5}
    ids = generate(served, request, "tensorrt_llm").json()["output_ids"]
    request |= {"end_id": ids[2]}
    assert generate(served, request, "tensorrt_llm").json()["sequence_length"] == 1 + ids.index(ids[2], 1) <= 3
    assert generate(served, request | {"min_length": 4}, "tensorrt_llm").json()["sequence_length"] > 4
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
    for more, padding in (([tensor("pad_id", [[9], [9]], np.int32)], [9, 9]), ([], None)):
        answer = client.infer("tensorrt_llm", rows + more)
        assert answer.as_numpy("sequence_length").tolist() == [[5], [3]]
        assert padding is None or answer.as_numpy("output_ids")[1, 0, 3:].tolist() == padding

    def infer(parameters: dict[str, Any]) -> Any:
        inputs = [
            {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]},
            {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [2]},
        ]
        body = {"inputs": inputs, "parameters": parameters}
        return httpx.post(f"{served.root}/v2/models/ensemble/infer", json=body, timeout=60)

    assert infer({"priority": 3, "timeout": 10, "mine": "a"}).status_code == 200
    assert infer({"priority": -1}).json() == {"error": "priority: must be an integer from 0 to 2147483647, is -1"}
    answer = infer({"binary_data_output": True})
    assert int(answer.headers["inference-header-content-length"]) < len(answer.content)


@pytest.mark.row("triton", "EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS", "END_ID", "PAD_ID")
@pytest.mark.row("triton", "TOKENS_BATCH", "SEQUENCE_LENGTH")
def test_preprocessing_returns_biases_and_ids(client: triton.InferenceServerClient) -> None:
    inputs_of_preprocessing = [
        tensor("QUERY", [[PROMPT.encode()], [b"Once"]]),
        tensor("REQUEST_OUTPUT_LEN", [[3], [3]], np.int32),
        tensor("EMBEDDING_BIAS_WORDS", [[b" fox"], [b" fox"]]),
        tensor("EMBEDDING_BIAS_WEIGHTS", [[2.5], [0.0]], np.float32),
        tensor("END_ID", [[7], [8]], np.int32),
        tensor("PAD_ID", [[9], [9]], np.int32),
    ]
    found = client.infer("preprocessing", inputs_of_preprocessing)
    bias = found.as_numpy("EMBEDDING_BIAS")
    assert bias.shape[0] == 2 and bias[0].max() == 2.5 and not bias[1].any()
    assert found.as_numpy("OUT_END_ID").tolist() == [[7], [8]] and found.as_numpy("OUT_PAD_ID").tolist() == [[9], [9]]
    assert found.as_numpy("INPUT_ID")[1, -1] == 9, "shorter rows must be padded with PAD_ID"
    lengths = found.as_numpy("REQUEST_INPUT_LEN")
    ids = tensor("TOKENS_BATCH", found.as_numpy("INPUT_ID")[:, None], np.int32)
    texts = client.infer("postprocessing", [ids, tensor("SEQUENCE_LENGTH", lengths, np.int32)]).as_numpy("OUTPUT")
    assert texts.tolist() == [PROMPT.encode(), b"Once"]
    arrays = {
        "input_ids": found.as_numpy("INPUT_ID")[:1],
        "input_lengths": lengths[:1],
        "embedding_bias": bias[:1] * 40,
    }
    arrays |= {"request_output_len": np.array([[3]])}
    inputs = [tensor(n, v, np.float32 if n == "embedding_bias" else np.int32) for n, v in arrays.items()]
    output_ids = client.infer("tensorrt_llm", inputs).as_numpy("output_ids")[0, 0]
    assert set(output_ids[-3:].tolist()) == {int(bias[0].argmax())}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: is missing"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"max_tokens": "3"}, "max_tokens: must be INT32"),
        ({"max_tokens": 2**40}, "max_tokens: must be at most"),
        ({"max_tokens": [3, 4]}, "max_tokens: has the shape"),
        ({"end_id": 99999}, "end_id: token ids must be from 0 to 3583"),
        ({"text_input": 3}, "text_input"),
        ({"text_input": "long " * 9000}, "text_input: .* tokens"),
        ({"stream": True}, "stream: .*generate_stream"),
        ({"temperature": -1.0}, "temperature: must be at least 0"),
        ({"temperature": 10**400}, "temperature: has an integer out of the range of FP32"),
        ({"temperature": 1e300}, "temperature: must be finite numbers from .*FP32.*, has 1e"),
        ({"top_k": 1, "top_p": 2.0}, "top_p: must be at most 1"),
        ({"top_k": -2}, "top_k: must be at least 0"),
        ({"min_length": 30}, "min_length: must be at most 5"),
        ({"num_return_sequences": 200}, "num_return_sequences: must be at most"),
        ({"beam_width": 0}, "beam_width: must be at least 1"),
        ({"beam_width": 2, "num_return_sequences": 3}, "beam_width"),
        (
            {"return_generation_logits": True, "max_tokens": 1500},
            "return_generation_logits: requires .* the maximum is 16777216",
        ),
        ({"lora_task_id": 5}, "lora_task_id: not supported yet; .*--lora-modules"),
        ({"prompt_embedding_table": [1.5]}, "prompt_embedding_table: not supported yet"),
        ({"num_draft_tokens": 3}, "num_draft_tokens: not supported yet; .*--speculative-config"),
        ({"embedding_bias_words": ["a"]}, "embedding_bias_weights: has 0 elements"),
        (
            {"guided_decoding_guide_type": "xml", "guided_decoding_guide": "a"},
            "guided_decoding_guide_type: must be one of",
        ),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(("}, "guided_decoding_guide"),
        ({"parameters": {"max_tokens": 3}}, "max_tokens: is given both"),
        ({"parameters": 3}, "parameters: must be a JSON object"),
    ],
)
@pytest.mark.row("triton", "errors")
def test_invalid_field_is_rejected_by_name(served: Served, fields: dict[str, Any], message: str) -> None:
    answer = generate(served, {"text_input": PROMPT, "max_tokens": 5} | fields)
    assert answer.status_code == 400 and answer.json().keys() == {"error"}
    assert re.search(message, answer.json()["error"]), answer.text


def test_unknown_fields_of_generate_are_ignored(served: Served) -> None:
    """Triton treats unknown fields as request parameters. These models read none of them."""
    fields = {"text_input": PROMPT, "max_tokens": 3, "min_tokens": 2, "seed": 7}
    more = {"accumulate_tokens": True, "mine": "a", "parameters": {"foo": [1, {"a": None}]}}
    answer = generate(served, fields | more)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-penstock-ignored"] == "accumulate_tokens, mine, foo"
    assert answer.json()["text_output"] == generate(served, fields).json()["text_output"]


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (b"{", {}, "is not JSON"),
        (b"{}", {"inference-header-content-length": "9"}, "inference-header-content-length"),
        (b'{"inputs":[{"shape":[1]}]}', {}, "must be objects with a name"),
        (b'{"inputs":[{"name":"text_input","shape":[1],"datatype":"TEXT","data":["a"]}]}', {}, "datatype"),
        (b'{"inputs":[{"name":"text_input","shape":[1],"datatype":["BYTES"],"data":["a"]}]}', {}, "datatype"),
        (b'{"inputs":[{"name":"text_input","shape":[1],"datatype":{"a":[]},"data":["a"]}]}', {}, "datatype"),
        (b'{"inputs":[{"name":"text_input","shape":[-1],"datatype":"BYTES","data":["a"]}]}', {}, "shape"),
        (b'{"inputs":[{"name":"text_input","shape":[3],"datatype":"BYTES","data":["a"]}]}', {}, "elements"),
        (b'{"inputs":[],"outputs":[{"name":"text"}]}', {}, "unexpected inference output"),
        (b'{"inputs":[{"name":"a","parameters":{"shared_memory_region":"x"}}]}', {}, "Unable to find shared memory"),
        (b'{"inputs":[{"name":"a","parameters":{"shared_memory_region":[]}}]}', {}, "Unable to find shared memory"),
        (b'{"inputs":[{"name":"a","parameters":{"shared_memory_offset":4}}]}', {}, "require shared_memory_region"),
        (b"{}", {"content-encoding": "br"}, "content-encoding"),
        (b"{}", {"content-encoding": "gzip"}, "not valid gzip"),
    ],
)
def test_malformed_request_is_rejected(served: Served, body: bytes, headers: dict[str, str], message: str) -> None:
    answer = httpx.post(f"{served.root}/v2/models/ensemble/infer", content=body, headers=headers)
    assert answer.status_code == 400 and message in answer.json()["error"], answer.text


@pytest.fixture
def region(client: triton.InferenceServerClient) -> Iterator[Any]:
    """A shared memory object of 4,096 bytes, registered as ``data``."""
    made = shm.create_shared_memory_region("data", REGION, 4096)
    try:
        client.register_system_shared_memory("data", REGION, 4096)
        yield made
    finally:
        client.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(made)


@pytest.mark.row("triton", "shared memory of the system or of CUDA")
def test_tensors_are_read_and_written_in_shared_memory(client: triton.InferenceServerClient, region: Any) -> None:
    """The client calls are those of ``simple_http_shm_client.py`` and ``simple_http_shm_string_client.py``."""
    texts = [PROMPT.encode(), b"The capital"]
    plain = client.infer("ensemble", text_inputs([text.decode() for text in texts], 6)).as_numpy("text_output")
    array = np.array([[text] for text in texts], dtype=object)
    tokens = np.array([[6], [6]], dtype=np.int32)
    raw = serialize_byte_tensor(array)
    shm.set_shared_memory_region(region, [raw], offset=16)
    shm.set_shared_memory_region(region, [tokens], offset=1024)
    inputs = [triton.InferInput("text_input", [2, 1], "BYTES"), triton.InferInput("max_tokens", [2, 1], "INT32")]
    inputs[0].set_shared_memory("data", len(raw.item()), 16)
    inputs[1].set_shared_memory("data", tokens.nbytes, 1024)
    outputs = [triton.InferRequestedOutput(name) for name in ("text_output", "sequence_index")]
    outputs[0].set_shared_memory("data", 2048, 2048)
    result = client.infer("ensemble", inputs, outputs=outputs)
    found = result.get_output("text_output")
    assert found["parameters"] == {
        "shared_memory_region": "data",
        "shared_memory_byte_size": sum(4 + len(text) for text in plain),
        "shared_memory_offset": 2048,
    }
    assert shm.get_contents_as_numpy(region, np.object_, found["shape"], 2048).tolist() == plain.tolist()
    assert result.as_numpy("sequence_index").tolist() == [[0], [0]], "outputs without a region must be in the response"
    assert client.get_system_shared_memory_status() == [{"name": "data", "key": REGION, "offset": 0, "byte_size": 4096}]
    assert client.get_system_shared_memory_status("data")
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'other'"):
        client.get_system_shared_memory_status("other")


def test_invalid_shared_memory_ranges_are_rejected(
    served: Served, client: triton.InferenceServerClient, region: Any
) -> None:
    def infer(size: int, offset: int = 0, name: str = "data") -> None:
        text_input = triton.InferInput("text_input", [1, 1], "BYTES")
        text_input.set_shared_memory(name, size, offset)
        client.infer("ensemble", [text_input, *text_inputs([PROMPT], 2)[1:]])

    for place, message in [
        ((4097,), "Invalid offset"),
        ((16, 4090), "Invalid offset"),
        ((16, -1), "must be a number of bytes"),
        ((16, 2**64), "must be a number of bytes"),
        ((16, 0, "other"), "Unable to find shared memory region: 'other'"),
    ]:
        with pytest.raises(InferenceServerException, match=f"text_input: .*{message}"):
            infer(*place)
    output = triton.InferRequestedOutput("text_output")
    output.set_shared_memory("data", 4)
    with pytest.raises(InferenceServerException, match=r"text_output: shared memory size specified .* at least"):
        client.infer("ensemble", text_inputs([PROMPT], 2), outputs=[output])
    for name, key, size, message in [
        ("data", REGION, 64, "'data' already in manager"),
        ("a", f"{REGION}_none", 64, f"Unable to open shared memory region: '{REGION}_none'"),
        ("a", REGION, 4097, "Invalid offset"),
        ("a", REGION, 0, "byte_size: must be a number of bytes, at least 1"),
        ("a", "/../etc/passwd", 4, "key: must be the name of a POSIX shared memory object"),
        ("a", "penstock-ranks-1", 4, "key: must be the name of a POSIX shared memory object"),
        ("a", "..", 4, "key: must be the name of a POSIX shared memory object"),
        ("a", "/a/b", 4, "key: must be the name of a POSIX shared memory object"),
        ("a", "a\0b", 4, "key: must be the name of a POSIX shared memory object"),
    ]:
        with pytest.raises(InferenceServerException, match=message):
            client.register_system_shared_memory(name, key, size)
    link = Path(f"/dev/shm{REGION}_link")
    link.symlink_to("/etc/passwd")
    try:
        with pytest.raises(InferenceServerException, match="Unable to open shared memory region"):
            client.register_system_shared_memory("a", link.name, 4)
    finally:
        link.unlink()
    os.truncate(f"/dev/shm{REGION}", 8)  # the client shrinks the object after registering it
    with pytest.raises(InferenceServerException, match=f"'{REGION}', which has 8 bytes"):
        infer(16)
    assert client.is_server_live()
    client.unregister_system_shared_memory("none")  # the unknown name is ignored, as in Triton
    client.unregister_cuda_shared_memory()
    assert client.get_cuda_shared_memory_status() == []
    for ask in (
        lambda: client.register_cuda_shared_memory("a", b"handle", 0, 64),
        lambda: client.get_cuda_shared_memory_status("a"),
    ):
        with pytest.raises(InferenceServerException, match="CUDA shared memory is not supported; use system"):
            ask()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"end_id": ([[99999]], np.int32)}, "end_id: token ids must be from 0 to 3583"),
        ({"stop_words_list": ([[[7, 99999], [2, -1]]], np.int32)}, "stop_words_list: token ids must be from 0 to 3583"),
        ({"stop_words_list": ([[[7, -3], [2, -1]]], np.int32)}, "stop_words_list: token ids must be from 0 to 3583"),
        ({"stop_words_list": ([[[7, 8], [2, 1]]], np.int32)}, "stop_words_list: the second row must be"),
        ({"bad_words_list": ([[[99999], [1]]], np.int32)}, "bad_words_list: token ids must be from 0 to 3583"),
        ({"embedding_bias": ([[1.0, 2.0]], np.float32)}, "embedding_bias: has 2 elements; .*3584"),
        ({"input_lengths": ([[2]], np.int32)}, "input_lengths: must be from 1 to 1 .*, is 2"),
        ({"input_ids": ([[-1]], np.int32)}, "input_ids: token ids go from 0 to 3583"),
        ({"request_output_len": ([[0]], np.int32)}, "request_output_len: must be at least 1"),
    ],
)
def test_invalid_tensor_of_tensorrt_llm_is_rejected_by_name(
    client: triton.InferenceServerClient, more: dict[str, tuple[Any, Any]], message: str
) -> None:
    tensors = {name: ([[value]], np.int32) for name, value in (("input_ids", 5), ("input_lengths", 1))}
    tensors |= {"request_output_len": ([[3]], np.int32)} | more
    with pytest.raises(InferenceServerException, match=message):
        client.infer("tensorrt_llm", [tensor(name, value, kind) for name, (value, kind) in tensors.items()])


def test_postprocessing_rejects_unknown_token_ids(client: triton.InferenceServerClient) -> None:
    for token in (99999, -1):
        tokens = [tensor("TOKENS_BATCH", [[[5, token]]], np.int32), tensor("SEQUENCE_LENGTH", [[2]], np.int32)]
        with pytest.raises(InferenceServerException, match="TOKENS_BATCH: token ids must be from 0 to 3583"):
            client.infer("postprocessing", tokens)


@pytest.mark.parametrize("raw", [b"", b"\x05\x00", b"\x05\x00\x00\x00abc", b"\x01\x00\x00\x00\xff"])
def test_malformed_bytes_tensor_is_rejected(served: Served, raw: bytes) -> None:
    inputs = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}},
        {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [1]},
    ]
    head = json.dumps({"inputs": inputs}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    answer = httpx.post(f"{served.root}/v2/models/ensemble/infer", content=head + raw, headers=headers)
    assert answer.status_code == 400 and "text_input" in answer.json()["error"], answer.text


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.just(10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
ANY_JSON = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
"""Strategy for any JSON value."""
VALID: dict[str, dict[str, Any]] = {
    "text_input": {"datatype": "BYTES", "shape": [1], "data": [PROMPT]},
    "max_tokens": {"datatype": "INT32", "shape": [1], "data": [2]},
    "input_ids": {"datatype": "INT32", "shape": [2], "data": [5, 6]},
    "input_lengths": {"datatype": "INT32", "shape": [1], "data": [2]},
    "request_output_len": {"datatype": "INT32", "shape": [1], "data": [2]},
    "QUERY": {"datatype": "BYTES", "shape": [1], "data": [PROMPT]},
    "REQUEST_OUTPUT_LEN": {"datatype": "INT32", "shape": [1], "data": [2]},
    "TOKENS_BATCH": {"datatype": "INT32", "shape": [1, 2], "data": [5, 6]},
    "SEQUENCE_LENGTH": {"datatype": "INT32", "shape": [1], "data": [2]},
    "IN": {"datatype": "BYTES", "shape": [1], "data": ['[{"text": "a", "max_dec_len": 2}]']},
}
"""Valid values of the models' required inputs."""


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a JSON document as a tuple of keys and indices."""
    yield path
    for key, value in (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    ):
        yield from places(value, (*path, key))


def replace(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of the document in which the value at ``path`` is replaced."""
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = replace(document[path[0]], path[1:], value)
    return copy


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_request_is_answered_or_rejected(
    served: Served, client: triton.InferenceServerClient, data: Any
) -> None:
    """Each request has the required inputs, one more input, and a random value at one path."""
    model = data.draw(st.sampled_from(MODELS))
    specs = INPUTS.setdefault(model, client.get_model_metadata(model)["inputs"])
    given = {spec["name"]: VALID[spec["name"]] for spec in specs if spec["name"] in VALID}
    more = data.draw(st.sampled_from(specs))
    if more["name"] not in given:
        given[more["name"]] = {"datatype": more["datatype"], "shape": [1], "data": data.draw(ANY_JSON)}
    inputs = [{"name": name, "parameters": {}, **value} for name, value in given.items()]
    body = {"id": "a", "inputs": inputs, "outputs": [{"name": "text_output"}], "parameters": {"priority": 1}}
    fields = {name: value["data"] for name, value in given.items()}
    for path, whole in (("generate", fields), ("infer", body)):
        mutated = replace(whole, data.draw(st.sampled_from([*places(whole)])), data.draw(ANY_JSON))
        content = json.dumps(mutated).encode("utf-8", "surrogatepass")
        answer = SESSION.post(f"{served.root}/v2/models/{model}/{path}", content=content)
        assert answer.status_code in (200, 400), (content, answer.text)
        assert answer.status_code == 200 or answer.json().keys() == {"error"}


# --- Concurrency, cancellation and access ---------------------------------------------------------------------------


def test_fifty_concurrent_streams_equal_openai_completions(served: Served) -> None:
    async def ask(client: httpx.AsyncClient, i: int) -> str:
        fields = {"text_input": f"{PROMPT} {i}", "max_tokens": 20, "stream": True}
        found = []
        async with client.stream("POST", "/v2/models/ensemble/generate_stream", json=fields) as answer:
            async for line in answer.aiter_lines():
                if line:
                    found.append(json.loads(line.removeprefix("data: "))["text_output"])
        return "".join(found)

    async def ask_all() -> list[str]:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(base_url=served.root, timeout=60, limits=limits) as client:
            return await asyncio.gather(*[ask(client, i) for i in range(50)])

    found = asyncio.run(ask_all())
    for i in (0, 17, 49):
        assert found[i] == completion(served, prompt=f"{PROMPT} {i}", max_tokens=20)


def test_disconnect_cancels_request(served: Served) -> None:
    seen = len(served.lines)
    fields = {"text_input": PROMPT, "max_tokens": 1500, "stream": True, "end_id": -1}
    path = f"{served.root}/v2/models/ensemble/generate_stream"
    with requests.post(path, json=fields, timeout=60, stream=True) as answer:
        next(answer.iter_lines())
    served.find(r"generate_stream .*error=cancelled", after=seen)


@pytest.mark.slow
def test_allow_shared_memory_permits_shared_memory_on_any_address() -> None:
    """The server listens on all addresses. The next test covers the refusal without the option."""
    flags = ("--num-gpu-blocks-override", "50", "--host", "0.0.0.0", "--allow-shared-memory")
    region = shm.create_shared_memory_region("data", REGION, 64)
    try:
        with Served(*flags) as served, triton.InferenceServerClient(served.root.removeprefix("http://")) as client:
            client.register_system_shared_memory("data", REGION, 64)
            shm.set_shared_memory_region(region, [np.array([2], dtype=np.int32)])
            inputs = text_inputs([PROMPT], 1)
            inputs[1] = triton.InferInput("max_tokens", [1, 1], "INT32")
            inputs[1].set_shared_memory("data", 4)
            assert client.infer("ensemble", inputs).as_numpy("text_output") is not None
    finally:
        shm.destroy_shared_memory_region(region)


@pytest.mark.slow
def test_api_key_is_required_except_for_probes() -> None:
    flags = ("--exclude-input-in-output", "--accumulate-tokens", "--no-resume")
    with Served("--num-gpu-blocks-override", "50", "--api-key", "secret", *flags, "--host", "0.0.0.0") as served:
        assert httpx.get(f"{served.root}/v2/health/live").status_code == 200
        assert httpx.get(f"{served.root}/v2/health/ready").status_code == 200
        with triton.InferenceServerClient(served.root.removeprefix("http://")) as client:
            assert client.is_server_live()
            with pytest.raises(InferenceServerException, match="API key"):
                client.infer("ensemble", text_inputs([PROMPT], 4))
            key = {"Authorization": "Bearer secret"}
            with pytest.raises(InferenceServerException, match=r"loopback address, or .*--allow-shared-memory"):
                client.register_system_shared_memory("data", "/data", 64, headers=dict(key))
            found = client.infer("ensemble", text_inputs([PROMPT], 4), headers=dict(key)).as_numpy("text_output")[0]
            assert not found.decode().startswith(PROMPT)  # --exclude-input-in-output removes the prompt
        body = {"text_input": PROMPT, "max_tokens": 12}
        path = f"{served.root}/v2/models/tensorrt_llm_bls/generate"
        whole = httpx.post(path, json=body, headers=key).json()["text_output"]
        lines = httpx.post(f"{path}_stream", json=body | {"stream": True}, headers=key).text.split("\n\n")[:-1]
        texts = [json.loads(line[6:])["text_output"] for line in lines]
        assert all(later.startswith(before) for before, later in itertools.pairwise([*texts, whole]))
        assert texts[-1] == whole

        body |= {"max_tokens": 1500, "end_id": -1, "stream": True}
        path = f"{served.root}/v2/models/ensemble/generate_stream"
        with httpx.stream("POST", path, json=body, headers=key) as answer:
            lines = answer.iter_lines()
            assert "text_output" in next(lines)
            os.kill(served.pids["engine"][0], signal.SIGKILL)
            *_, last = [line for line in lines if line]
        assert json.loads(last[6:]).keys() == {"error"}
