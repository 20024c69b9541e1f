"""PaddleNLP's HTTP protocol, tested with the clients of its documentation: ``requests`` and ``openai``."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import requests
from serving import Served
from transformers import PreTrainedTokenizerFast

from penstock import LLM, PenstockError, SamplingParams

LIMITS = (
    "--max-prompt-len",
    "64",
    "--max-output-len",
    "1900",
    "--max-num-seqs",
    "2",
    "--num-gpu-blocks-override",
    "99",
)
ENDLESS = {"text": "One two three", "min_dec_len": 1900, "max_dec_len": 1900}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*LIMITS, "--num-gpu-blocks-override", "99", "--api-server-count", "2") as served:
        yield served


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def ask(served: Served, path: str = "/chat/completions", **body: Any) -> requests.Response:
    return requests.post(served.url + path, json=body, timeout=60)


def lines(served: Served, path: str = "/chat/completions", **body: Any) -> list[dict[str, Any]]:
    with requests.post(served.url + path, json={**body, "stream": True}, stream=True, timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line) for line in response.iter_lines()]


def turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def greedy(served: Served, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = ask(served, temperature=0, **body).json()
    return found


# --- Fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("paddlenlp", "stream", "streamed")
def test_stream_lines_are_numbered_and_have_req_id(served: Served) -> None:
    req_id = str(uuid.uuid1())
    single = lines(served, text="Hello, how are you?", req_id=req_id, max_dec_len=64)
    conversation = [
        {"role": "user", "content": "Hello, who are you"},
        {"role": "system", "content": "I'm a helpful AI assistant."},
        {"role": "user", "content": "List 3 countries and their capitals."},
    ]
    multi = lines(served, messages=conversation, req_id=req_id, max_dec_len=64)  # the req_id is free again
    for found in (single, multi):
        assert found and all(line["error_msg"] == "" and line["error_code"] == 0 for line in found)
        assert {line["req_id"] for line in found} == {req_id}
        assert [line["send_idx"] for line in found] == list(range(len(found)))
        assert [line["is_end"] for line in found] == [0] * (len(found) - 1) + [1]
        assert "".join(line["token"] for line in found)
        assert all("usage" not in line for line in found)


@pytest.mark.row(
    "paddlenlp", "/v1/chat/completions", "/v1/completions", "whole", "return_usage", "return_all_tokens", "infer_seed"
)
@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_stream_equals_whole_answer(served: Served, path: str) -> None:
    body: dict[str, Any] = {"text": "Tell me about 加拿大 and 🦊.", "max_dec_len": 40, "infer_seed": 3}
    whole = ask(served, path, **body, return_usage=True).json()
    assert whole["tokens_all"] == whole["result"] and whole["error_code"] == 0 and whole["error_msg"] == ""
    streamed = lines(served, path, **body, return_usage=True)
    assert "".join(line["token"] for line in streamed) == whole["result"]
    assert [line["usage"] for line in streamed if "usage" in line] == [whole["usage"]] == [streamed[-1]["usage"]]
    (at_once,) = lines(served, path, **body, return_all_tokens=True)
    assert at_once["token"] == whole["result"] and at_once["is_end"] == 1 and at_once["send_idx"] == 0
    assert at_once["token_ids"] == [token for line in streamed for token in line["token_ids"]]


@pytest.mark.row("paddlenlp", "seed")
def test_sampling_defaults_equal_paddlenlp_defaults(served: Served, llm: LLM) -> None:
    """The model's ``generation_config.json`` is ignored."""
    sampling = SamplingParams(temperature=0.95, top_p=0.7, min_tokens=1, max_tokens=30, seed=5)
    text = llm.chat(turn("Once upon a time"), sampling, use_tqdm=False)[0].outputs[0].text
    assert ask(served, text="Once upon a time", max_dec_len=30, seed=5).json()["result"] == text


@pytest.mark.row("paddlenlp", "text", "messages", "input_ids", "system")
def test_text_input_ids_and_messages_give_same_answer(served: Served, tokenizer: PreTrainedTokenizerFast) -> None:
    """A text becomes one user message, as in PaddleNLP's server with USE_HF_TOKENIZER=0."""
    text = "What is the capital of Canada?"
    messages = turn(text)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    expected = greedy(served, input_ids=ids, max_dec_len=16, return_usage=True)
    assert "Ottawa" in expected["result"]
    for prompt in ({"text": text}, {"messages": messages}):
        found = greedy(served, **prompt, max_dec_len=16, req_id="chat", return_usage=True)
        assert (found["result"], found["usage"]) == (expected["result"], expected["usage"])
    system = {"role": "system", "content": "Answer in one word."}
    expected_with_system = greedy(
        served, messages=[system, *messages], req_id="chat", max_dec_len=16, return_usage=True
    )
    for prompt in ({"text": text}, {"messages": messages}):
        found = greedy(served, **prompt, system=system["content"], max_dec_len=16, return_usage=True)
        assert (found["result"], found["usage"]) == (expected_with_system["result"], expected_with_system["usage"])


@pytest.mark.row("paddlenlp", "max_dec_len", "seq_len", "max_tokens", "min_dec_len", "eos_token_ids")
def test_length_limits_and_eos_token_ids_take_effect(served: Served, tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("max_dec_len", "seq_len", "max_tokens"):
        usage = greedy(served, text="One two three", min_dec_len=7, return_usage=True, **{name: 7})["usage"]
        assert usage["completion_tokens"] == 7
        assert usage["total_tokens"] == usage["prompt_tokens"] + 7
    found = lines(served, text="One two three", max_dec_len=9, min_dec_len=9, temperature=0, return_usage=True)
    ids = [token for line in found for token in line["token_ids"]]
    assert len(ids) == found[-1]["usage"]["completion_tokens"] == 9
    for ends in (ids[4], [ids[4]]):
        ended = lines(served, text="One two three", max_dec_len=9, eos_token_ids=ends, temperature=0)
        assert [token for line in ended for token in line["token_ids"]] == ids[: ids.index(ids[4])]


@pytest.mark.row("paddlenlp", "penalty_score", "frequency_score", "presence_score", "topp", "top_p", "temperature")
@pytest.mark.parametrize(
    ("name", "value", "parameter"),
    [
        ("penalty_score", 1.5, "repetition_penalty"),
        ("frequency_score", 1.5, "frequency_penalty"),
        ("presence_score", 1.5, "presence_penalty"),
        ("topp", 0.3, "top_p"),
        ("top_p", 0.3, "top_p"),
        ("topp", 0, "temperature"),
        ("temperature", 0, "temperature"),
        ("temperature", 1.5, "temperature"),
    ],
)
def test_sampling_fields_equal_sampling_params(
    served: Served, llm: LLM, name: str, value: float, parameter: str
) -> None:
    sampling = SamplingParams(temperature=0.95, top_p=0.7, min_tokens=1, max_tokens=30, seed=5).replace(
        **{parameter: value}
    )
    text = llm.chat(turn("The dog and the dog"), sampling, use_tqdm=False)[0].outputs[0].text
    found = ask(served, text="The dog and the dog", max_dec_len=30, seed=5, model="whatever", **{name: value})
    assert found.json()["result"] == text


def test_request_with_prompt_is_answered_as_openai(served: Served) -> None:
    """``topp``, a field of PaddleNLP only, is ignored."""
    answer = ask(served, "/completions", prompt="a", topp=0.5)
    assert answer.json()["object"] == "text_completion" and answer.headers["x-penstock-ignored"] == "topp"


@pytest.mark.parametrize(
    "field", ["timeout", "system", "text", "input_ids", "response_timeout", "return_usage", "req_id"]
)
def test_openai_client_with_extra_field_gets_openai_answer(served: Served, field: str) -> None:
    """With ``model``, a request is OpenAI's. Without it, only ``req_id`` marks a request as PaddleNLP's."""
    extra = {field: {"timeout": 5, "input_ids": [1], "return_usage": True}.get(field, "a")}
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="default",
        messages=turn("Hi"),  # type: ignore[arg-type]
        max_tokens=2,
        extra_body=extra,
    )
    assert answer.object == "chat.completion" and answer.choices[0].message.content
    found = ask(served, messages=turn("Hi"), max_tokens=2, **extra)
    assert ("result" if field == "req_id" else "choices") in found.json()
    if field != "req_id":
        assert found.headers["x-penstock-ignored"] == field


# --- Errors and limits ------------------------------------------------------------------------------------------------


@pytest.mark.row("paddlenlp", "wrong")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"req_id": "a"}, "text: is missing; give text, messages or input_ids"),
        ({"text": ""}, "text: "),
        ({"text": "a", "input_ids": [1]}, "input_ids: cannot be combined with text"),
        ({"input_ids": [1], "system": "b"}, "system: cannot be combined with input_ids"),
        ({"input_ids": [10**6]}, "input_ids: token ids go from 0"),
        ({"text": "a", "max_dec_len": 0}, "max_dec_len: "),
        ({"text": "a", "max_dec_len": 3, "max_tokens": 3}, "max_tokens: is another name of max_dec_len"),
        ({"text": "a", "topp": 0.5, "top_p": 0.5}, "top_p: is another name of topp"),
        ({"text": "a", "seed": 1, "infer_seed": 1}, "seed: is another name of infer_seed"),
        ({"text": "a", "timeout": 1, "response_timeout": 1}, "response_timeout: is another name of timeout"),
        ({"text": "a", "topp": 1.5}, "topp: "),
        ({"text": "a", "temperature": -1}, "temperature: "),
        ({"text": "a", "penalty_score": 0}, "penalty_score: "),
        ({"text": "a", "min_dec_len": 9, "max_dec_len": 3}, "min_dec_len: must be at most 3, is 9"),
        ({"text": "a", "stream": "perhaps"}, "stream: "),
        ({"text": "a", "timeout": 0}, "timeout: "),
        ({"text": "a", "eos_token_ids": [1, 2]}, "eos_token_ids: "),
        ({"text": "a", "req_id": "line\nbreak"}, "req_id: "),
        ({"text": "a " * 100}, "text: has "),
        ({"messages": [{"role": "user", "content": "a " * 100}], "req_id": "b"}, "messages: has "),
        ({"text": "a", "max_dec_len": 1901}, "max_dec_len: 1901 is more than MAX_DEC_LEN (1900)"),
        ({"text": "a", "seq_len": 1901}, "seq_len: 1901 is more than MAX_DEC_LEN (1900)"),
        ({"text": "a", "min_dec_len": 1901}, "min_dec_len: must be at most 1900, is 1901"),
        ({"text": "a", "max_tokens": 2048}, "max_tokens: 13 input tokens and 2048 output tokens exceed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_field_is_rejected_by_name(served: Served, body: dict[str, Any], message: str, stream: bool) -> None:
    answer = ask(served, **{"stream": stream, **body})
    (line,) = answer.iter_lines()
    found = json.loads(line)
    assert found["error_msg"].startswith(message), found
    assert (found["error_code"], answer.status_code) == (400, 200)  # clients ignore the HTTP status
    assert found["req_id"] == body.get("req_id", "")


def test_prompt_above_max_seq_len_is_rejected(served: Served) -> None:
    assert "more than MAX_SEQ_LEN (64)" in ask(served, text="a " * 100).json()["error_msg"]


class Endless:
    """A streamed request that generates until the context is full."""

    def __init__(self, served: Served, **body: Any) -> None:
        self._stream = httpx.stream("POST", f"{served.url}/completions", json={**ENDLESS, "stream": True, **body})
        self._lines = self._stream.__enter__().iter_lines()
        self.first = json.loads(next(self._lines))

    def last(self) -> dict[str, Any]:
        """Read the stream to its end; return its last line as a document."""
        found: dict[str, Any] = json.loads(list(self._lines)[-1])
        return found

    def __enter__(self) -> Endless:
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(None, None, None)


@pytest.mark.row("paddlenlp", "req_id")
def test_req_id_is_rejected_while_in_use(served: Served) -> None:
    """The check applies across API processes: either one may receive the second request."""
    with Endless(served, req_id="mine") as running:
        assert running.first["req_id"] == "mine"
        for _ in range(12):  # enough connections to reach both API processes
            refused = ask(served, text="a", req_id="mine")
            assert refused.json()["error_msg"].startswith("req_id: 'mine' already exists")
        assert ask(served, text="a", req_id="yours", max_dec_len=1).json()["error_code"] == 0
    deadline = threading.Event()
    while ask(served, text="a", req_id="mine", max_dec_len=1).json()["error_code"]:
        assert not deadline.wait(0.01)  # until the engine has noticed the disconnect


@pytest.mark.row("paddlenlp", "timeout", "response_timeout")
def test_waiting_request_times_out(served: Served) -> None:
    with Endless(served), Endless(served):  # as many requests as max_num_seqs
        for name in ("timeout", "response_timeout"):
            late = f"late {name}"  # a unique id: log lines of the two API processes may be out of order
            answer = ask(served, text="a", req_id=late, **{name: 0.2})
            message = "timeout: no output for 0.2 seconds; retry, or send a longer timeout"
            assert answer.json() == {"req_id": late, "error_msg": message, "error_code": 408}


@pytest.mark.slow
def test_response_timeout_limits_whole_answer_but_not_stream(served: Served) -> None:
    """The timeout limits the time between outputs: the chunks of a stream, or the whole answer as a single output."""
    answer = ask(served, **ENDLESS, req_id="slow", response_timeout=0.2).json()
    message = "timeout: no output for 0.2 seconds; retry, or send a longer timeout"
    assert answer == {"req_id": "slow", "error_msg": message, "error_code": 408}
    begun, long = time.monotonic(), ENDLESS | {"min_dec_len": 700, "max_dec_len": 700}
    lines(served, **long)
    less = 0.75 * (time.monotonic() - begun)  # less than the duration of the stream, but far more than that of a chunk
    assert lines(served, **long, response_timeout=less)[-1]["is_end"] == 1


@pytest.mark.slow
def test_full_queue_and_dead_engine_are_reported() -> None:
    flags = ("--num-gpu-blocks-override", "99", "--max-num-seqs", "1", "--max-waiting", "0", "--no-resume")
    with Served(*flags) as small:
        with Endless(small, req_id="first") as running:
            refused = ask(small, text="a", req_id="second")
            assert refused.json()["error_code"] == 429 and refused.headers["retry-after"]
            assert refused.json()["req_id"] == "second" and "waiting" in refused.json()["error_msg"]
            os.kill(small.pids["engine"][0], signal.SIGKILL)
            last = running.last()
        assert last == {"req_id": "first", "error_msg": last["error_msg"], "error_code": 503}
        assert "the engine died" in last["error_msg"]


def test_length_limits_hold_in_all_dialects_and_llm(served: Served) -> None:
    client = openai.OpenAI(base_url=served.url, api_key="none")
    with pytest.raises(openai.BadRequestError, match=r"max_prompt_len \(64\)"):
        client.completions.create(model="default", prompt="a " * 100)
    with pytest.raises(openai.BadRequestError, match=r"max_output_len \(1900\)"):
        client.completions.create(model="default", prompt="a", max_tokens=1901)
    llm = LLM(max_prompt_len=8, max_output_len=5)
    ignoring = SamplingParams(max_tokens=None, ignore_eos=True)
    assert len(llm.generate(["a"], ignoring, use_tqdm=False)[0].outputs[0].token_ids) == 5
    with pytest.raises(PenstockError, match="max_prompt_len"):
        llm.generate(["a b c d e f g h i"], ignoring, use_tqdm=False)
