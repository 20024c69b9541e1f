"""vLLM's extensions of OpenAI's API: fields of requests and answers, and operator endpoints."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from serving import Served

MODEL = "penstock-demo"
CAPITAL = [{"role": "user", "content": "What is the capital of Canada?"}]
SUM = [{"role": "user", "content": "What is 12 + 34 + 56?"}]
GREEDY = {"temperature": 0, "max_tokens": 8}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--num-gpu-blocks-override", "400", "--api-server-count", "2", "--api-key", "secret") as server:
        yield server


@pytest.fixture(scope="module")
def plain(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.root, timeout=60, headers={"Authorization": "Bearer secret"}) as http:
        yield http


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="secret", max_retries=0, timeout=60) as openai_client:
        yield openai_client


def chat(plain: httpx.Client, status: int = 200, **fields: Any) -> dict[str, Any]:
    answer = plain.post("/v1/chat/completions", json={"messages": CAPITAL, **GREEDY, **fields})
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def deltas(plain: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": CAPITAL, **GREEDY, "stream": True, **fields}
    lines = plain.post("/v1/chat/completions", json=body).text.split("\n\n")
    return [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("path", "prompt"), [("chat/completions", {"messages": CAPITAL}), ("completions", {"prompt": "a"})]
)
def test_continuous_usage_needs_include_usage(plain: httpx.Client, path: str, prompt: dict[str, Any]) -> None:
    for include, expected in ((None, False), (False, False), (True, True)):
        options = {"continuous_usage_stats": True} | ({} if include is None else {"include_usage": include})
        body = {**prompt, **GREEDY, "stream": True, "stream_options": options}
        lines = plain.post(f"/v1/{path}", json=body).text.split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert chunks and [bool(chunk.get("usage")) for chunk in chunks] == [expected] * len(chunks)


@pytest.mark.row("vllm", "spaces_between_special_tokens")
@pytest.mark.parametrize("value", [True, False])
def test_spaces_between_special_tokens_has_no_effect(plain: httpx.Client, value: bool) -> None:
    content = chat(plain, spaces_between_special_tokens=value)["choices"][0]["message"]["content"]
    assert content == chat(plain)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"truncation_side": "up"}, """truncation_side: 'up' is not one of "left", "right\""""),
        ({"response_format": {"type": "xml"}}, "response_format.type: 'xml' is not one of"),
        ({"early_stopping": "maybe"}, """early_stopping: 'maybe' is not one of "never", true, false"""),
    ],
)
def test_error_of_invalid_choice_lists_all_choices(plain: httpx.Client, field: dict[str, Any], message: str) -> None:
    assert message in chat(plain, 400, **field)["error"]["message"]


# --- Reasoning and tool calls ---------------------------------------------------------------------------------------


@pytest.mark.row("vllm", "reasoning")
def test_reasoning_has_both_field_names(plain: httpx.Client) -> None:
    message = chat(plain, messages=SUM, max_tokens=100, **THINKING)["choices"][0]["message"]
    assert message["reasoning"] and message["reasoning"] == message["reasoning_content"]
    streamed = deltas(plain, messages=SUM, max_tokens=100, **THINKING)
    assert "".join(delta.get("reasoning", "") for delta in streamed) == message["reasoning"]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in streamed)
    without = chat(plain)["choices"][0]["message"]
    assert without["reasoning"] is None and without["reasoning_content"] is None
    assert not any(delta.keys() & {"reasoning", "reasoning_content"} for delta in deltas(plain))


def test_vllm_example_reads_reasoning(client: openai.OpenAI) -> None:
    """As in vLLM's example: the next turn has ``reasoning``; in a stream, it is always a string if present."""
    first: Any = client.chat.completions.create(model=MODEL, messages=SUM, extra_body=THINKING, temperature=0)  # type: ignore[arg-type]
    message = first.choices[0].message
    again = [*SUM, {"role": "assistant", "content": message.content, "reasoning": message.reasoning}, *CAPITAL]
    stream = client.chat.completions.create(model=MODEL, messages=again, stream=True, extra_body=THINKING)  # type: ignore[call-overload]
    reasoning = answer = ""
    for chunk in stream:
        delta = chunk.choices[0].delta
        if hasattr(delta, "reasoning"):
            reasoning += delta.reasoning
        elif hasattr(delta, "content") and delta.content:
            answer += delta.content
    assert reasoning or answer


def test_vllm_examples_call_tools(client: openai.OpenAI) -> None:
    """As in vLLM's example: deltas without calls are read as ``reasoning``; the message with calls has no content."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    messages: Any = [{"role": "user", "content": "巴黎的天气怎么样？"}]
    fields: Any = {"model": MODEL, "messages": messages, "tools": tools, "temperature": 0}
    whole: Any = client.chat.completions.create(**fields)
    (call,) = whole.choices[0].message.tool_calls
    reasoning, arguments, names = "", [], []
    for chunk in client.chat.completions.create(**fields, stream=True):
        delta = chunk.choices[0].delta
        if delta.tool_calls:
            part = delta.tool_calls[0]
            if part.index == len(arguments):
                arguments.append("")
                names.append(part.function.name)
            arguments[part.index] += part.function.arguments or ""
        elif hasattr(delta, "reasoning"):
            reasoning += delta.reasoning
    assert (names, arguments) == ([call.function.name], [call.function.arguments])
    assert reasoning == (whole.choices[0].message.reasoning or "")
    assistant = {"role": "assistant", "tool_calls": [call], "reasoning": whole.choices[0].message.reasoning}
    answer = {"role": "tool", "content": "22 °C", "tool_call_id": call.id, "name": call.function.name}
    again = client.chat.completions.create(**fields | {"messages": [*messages, assistant, answer]})
    assert again.choices[0].message.content


@pytest.mark.row("vllm", "thinking_token_budget")
def test_thinking_token_budget_limits_reasoning(plain: httpx.Client) -> None:
    expected = chat(plain, messages=SUM, max_tokens=100, reasoning_max_tokens=3, **THINKING)
    found = chat(plain, messages=SUM, max_tokens=100, thinking_token_budget=3, **THINKING)
    assert found["choices"][0]["message"] == expected["choices"][0]["message"]
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] < 8
    free = chat(plain, messages=SUM, max_tokens=100, **THINKING)["choices"][0]["message"]
    assert (
        chat(plain, messages=SUM, max_tokens=100, thinking_token_budget=-1, **THINKING)["choices"][0]["message"] == free
    )
    error = chat(plain, 400, thinking_token_budget=3, reasoning_max_tokens=4)["error"]
    assert error["param"] == "thinking_token_budget"


# --- Fields ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("vllm", "return_tokens_as_token_ids")
def test_tokens_are_returned_as_token_ids(plain: httpx.Client) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = chat(plain, logprobs=True, top_logprobs=2, **fields)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(likely["token"].startswith("token_id:") for entry in content for likely in entry["top_logprobs"])
    body = {"prompt": "The capital", "logprobs": 1, "echo": True, **GREEDY, **fields}
    found = plain.post("/v1/completions", json=body).json()["choices"][0]
    ids = [*found["prompt_token_ids"], *found["token_ids"]]
    assert found["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]


@pytest.mark.row("vllm", "request_id")
def test_request_id_of_body_sets_id(served: Served, plain: httpx.Client) -> None:
    answer = plain.post("/v1/chat/completions", json={"messages": CAPITAL, **GREEDY, "request_id": "mine-1"})
    assert answer.json()["id"] == "chatcmpl-mine-1" and answer.headers["x-request-id"] == "mine-1"
    served.find("id=mine-1 status=200")
    headers = {"X-Request-Id": "header-1"}
    answer = plain.post("/v1/completions", json={"prompt": "x", **GREEDY, "request_id": "mine-2"}, headers=headers)
    assert answer.json()["id"] == "cmpl-header-1"
    assert plain.post("/v1/embeddings", json={"input": "x", "request_id": "mine-3"}).json()["id"] == "embd-mine-3"
    assert chat(plain, 400, request_id="a b")["error"]["param"] == "request_id"


@pytest.mark.row("vllm", "truncate_prompt_tokens", "truncation_side")
def test_prompts_are_truncated(plain: httpx.Client) -> None:
    text = "One two three four five six seven eight nine ten"
    ids = plain.post("/tokenize", json={"prompt": text}).json()["tokens"]

    def cut(**fields: Any) -> list[int]:
        body = {"prompt": text, "return_token_ids": True, **GREEDY, **fields}
        found: list[int] = plain.post("/v1/completions", json=body).json()["choices"][0]["prompt_token_ids"]
        return found

    assert cut(truncate_prompt_tokens=4) == ids[-4:]
    assert cut(truncate_prompt_tokens=4, truncation_side="left") == ids[-4:]
    assert cut(truncate_prompt_tokens=4, truncation_side="right") == ids[:4]
    assert cut(truncate_prompt_tokens=-1) == ids
    long = "a " * 4000
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/completions", {"prompt": long}),
    ):
        answer = plain.post(path, json={**body, **GREEDY, "truncate_prompt_tokens": -1})
        assert answer.json()["usage"]["prompt_tokens"] == 2048 - GREEDY["max_tokens"]
        assert plain.post(path, json={**body, "truncate_prompt_tokens": 0}).json()["error"]["param"] == (
            "truncate_prompt_tokens"
        )
    cut_text = plain.post("/generate", json={"prompt": text, **GREEDY, "truncate_prompt_tokens": 4}).json()["text"][0]
    after = plain.post("/v1/completions", json={"prompt": ids[-4:], **GREEDY}).json()["choices"][0]["text"]
    assert cut_text == text + after
    first, last = (
        plain.post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": 4, **side}).json()
        for side in ({}, {"truncation_side": "left"})
    )
    expected = plain.post("/v1/embeddings", json={"input": [ids[:4], ids[-4:]]}).json()["data"]
    assert [first["data"][0]["embedding"], last["data"][0]["embedding"]] == [entry["embedding"] for entry in expected]


@pytest.mark.row("vllm", "echo", "add_special_tokens")
def test_echo_returns_last_message_and_answer(plain: httpx.Client) -> None:
    messages = [*CAPITAL, {"role": "assistant", "content": "The capital of"}]
    fields = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    rest = chat(plain, **fields)["choices"][0]["message"]["content"]
    assert chat(plain, **fields, echo=True)["choices"][0]["message"]["content"] == f"The capital of{rest}"
    streamed = "".join(delta.get("content") or "" for delta in deltas(plain, **fields, echo=True))
    assert streamed == f"The capital of{rest}"
    assert chat(plain, echo=True) != "" and not chat(plain, echo=True)["choices"][0]["message"]["content"].startswith(
        "What"
    )
    without, with_special = (
        chat(plain, add_special_tokens=special)["usage"]["prompt_tokens"] for special in (False, True)
    )
    extra = plain.post("/tokenize", json={"prompt": "x"}).json()["count"]
    extra -= plain.post("/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()["count"]
    assert with_special - without == extra


@pytest.mark.row("vllm", "bad_words_token_ids")
def test_bad_words_token_ids_are_not_generated(plain: httpx.Client) -> None:
    ids = chat(plain, return_token_ids=True)["choices"][0]["token_ids"]
    for bad_words in ([ids[1]], [[ids[0], ids[1]]]):
        found = chat(plain, return_token_ids=True, bad_words_token_ids=bad_words)["choices"][0]["token_ids"]
        assert found[0] == ids[0] and found[1] != ids[1]
    error = chat(plain, 400, bad_words_token_ids=[1], guided_choice=["a"])["error"]
    assert error["param"] == "bad_words_token_ids"


@pytest.mark.row("vllm", "return_prompt_text")
def test_return_prompt_text_returns_prompt(plain: httpx.Client) -> None:
    found = chat(plain, return_prompt_text=True, return_token_ids=True)
    ids = plain.post("/detokenize", json={"tokens": found["prompt_token_ids"]}).json()
    assert found["prompt_text"] == ids["prompt"] and CAPITAL[0]["content"] in found["prompt_text"]
    body = {"messages": CAPITAL, **GREEDY, "stream": True, "return_prompt_text": True}
    lines = plain.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[0]["prompt_text"] == found["prompt_text"]
    assert not any("prompt_text" in chunk for chunk in [*chunks[1:], chat(plain)])


@pytest.mark.row("vllm", "disable_additional_properties")
def test_disable_additional_properties_restricts_objects(plain: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    for json_schema in (schema, json.dumps(schema)):
        constraint = {"json": json_schema, "disable_additional_properties": True, "disable_any_whitespace": True}
        message = chat(plain, structured_outputs=constraint, max_tokens=40)["choices"][0]["message"]
        assert json.loads(message["content"]).keys() == {"a"}
    found = chat(plain, 400, structured_outputs={"json": "{", "disable_additional_properties": True})
    assert found["error"]["param"] == "structured_outputs.json"


@pytest.mark.row("vllm", "normalize")
def test_normalize_false_returns_unnormalized_vector(plain: httpx.Client) -> None:
    def length(**fields: Any) -> float:
        answer = plain.post("/v1/embeddings", json={"input": "A city.", **fields})
        return sum(x * x for x in answer.json()["data"][0]["embedding"]) ** 0.5

    assert length() == pytest.approx(1) == length(normalize=True)
    assert length(normalize=False) != pytest.approx(1)


NEUTRAL: dict[str, list[Any]] = {
    "kv_transfer_params": [{}],
    "ec_transfer_params": [{}],
    "vllm_xargs": [{}],
    "repetition_detection": [],
    "prompt_embeds": [],
    "logits_processors": [],
    "logits_processors_args": [{}],
    "include_draft_logprobs": [False],
    "include_logprobs_decode_token": [True],
    "collect_metrics": [False],
    "completion_token_ids": [[]],
    "disaggregate_info": [{}],
    "mm_hashes": [[]],
    "trace_context": [""],
}
"""Unsupported fields of vLLM and FastDeploy, each with the values that have no effect and are accepted."""


@pytest.mark.row("vllm", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection")
@pytest.mark.row("vllm", "media_io_kwargs", "mm_processor_kwargs", "prompt_embeds", "logits_processors")
@pytest.mark.row("vllm", "return_token_offsets", "return_assistant_tokens_mask")
@pytest.mark.row("fastdeploy", "logits_processors_args", "include_draft_logprobs", "include_logprobs_decode_token")
@pytest.mark.row("fastdeploy", "collect_metrics", "completion_token_ids", "disaggregate_info", "mm_hashes")
@pytest.mark.row("fastdeploy", "trace_context", "max_streaming_response_tokens")
@pytest.mark.parametrize(
    ("path", "body"), [("completions", {"prompt": "x"}), ("chat/completions", {"messages": CAPITAL})]
)
def test_known_fields_are_accepted_or_rejected_by_name(plain: httpx.Client, path: str, body: dict[str, Any]) -> None:
    body = {"max_tokens": 1, **body}
    for field, allowed in NEUTRAL.items():
        for value in (None, *allowed):
            answer = plain.post(f"/v1/{path}", json=body | {field: value})
            assert answer.status_code == 200 and "x-penstock-ignored" not in answer.headers, (field, value)
        refused = plain.post(f"/v1/{path}", json=body | {field: False if True in allowed else "asked"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert refused.json()["error"]["message"] == f"{field}: not supported yet"
    for name, media_options in (
        ("mm_processor_kwargs", {"max_pixels": 9408}),
        ("media_io_kwargs", {"video": {"fps": 1}}),
    ):
        refused = plain.post(f"/v1/{path}", json=body | {name: media_options})
        chat_only = "is for chats only; leave it out, or use /v1/chat/completions"
        reason = "this model does not support images" if "messages" in body else chat_only
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, f"{name}: {reason}")
    accepted = {
        "mm_processor_kwargs": {},
        "media_io_kwargs": {},
        "return_token_offsets": True,
        "return_assistant_tokens_mask": True,
        "max_streaming_response_tokens": 5,
    }
    answer = plain.post(f"/v1/{path}", json=body | accepted | {"thinking_token_budget": -1})
    assert answer.status_code == 200 and "x-penstock-ignored" not in answer.headers


def test_fields_of_other_requests_are_rejected_by_name(plain: httpx.Client) -> None:
    for path, body, fields in (
        ("/v1/embeddings", {"input": "a"}, ("embed_dtype", "endianness", "use_activation", "messages")),
        ("/score", {"text_1": "a", "text_2": "b"}, ("use_activation", "instruction", "max_tokens_per_doc")),
        ("/tokenize", {"messages": CAPITAL}, ("chat_template", "mm_processor_kwargs")),
    ):
        assert plain.post(path, json=body | dict.fromkeys(fields)).status_code == 200
        for field in fields:
            answer = plain.post(path, json=body | {field: "asked"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.row("vllm", "seed")
def test_seed_minus_one_is_random(plain: httpx.Client) -> None:
    sampling = {"temperature": 5, "max_tokens": 30}
    assert len({chat(plain, seed=-1, **sampling)["choices"][0]["message"]["content"] for _ in range(3)}) == 3
    assert len({chat(plain, seed=-5, **sampling)["choices"][0]["message"]["content"] for _ in range(2)}) == 1


STRICT = {
    "type": "object",
    "properties": {"city": {"enum": ["Ottawa"]}, "at": {"type": "object", "properties": {"x": {"enum": [1]}}}},
}
WHOLE = {"city": "Ottawa", "at": {"x": 1}}


@pytest.mark.row("vllm", "strict")
def test_strict_schema_requires_listed_properties_only(plain: httpx.Client) -> None:
    """Every listed property is required, and no other is allowed."""
    json_schema = {"name": "answer", "schema": STRICT, "strict": True}
    response_format = {"type": "json_schema", "json_schema": json_schema}
    sampling = {"temperature": 5, "max_tokens": 200}
    for seed in range(3):
        found = chat(plain, response_format=response_format, **sampling, seed=seed)["choices"][0]["message"]["content"]
        assert json.loads(found) == WHOLE
    tool = {"type": "function", "function": {"name": "look", "parameters": STRICT, "strict": True}}
    found = chat(plain, tools=[tool], tool_choice="required", parallel_tool_calls=False, **sampling, seed=1)
    (call,) = found["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == WHOLE


@pytest.mark.row("vllm", "POST /score")
@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_score_accepts_alternative_field_names(plain: httpx.Client, names: tuple[str, str]) -> None:
    first, second = "What is it?", ["A city.", "A dog."]
    expected = plain.post("/score", json={"text_1": first, "text_2": second}).json()["data"]
    assert plain.post("/score", json=dict(zip(names, (first, second), strict=True))).json()["data"] == expected
    mixed = plain.post("/score", json={"text_1": first, "text_2": second, names[1]: second})
    assert mixed.status_code == 400
    missing = plain.post("/v1/score", json={names[0]: first}).json()["error"]["param"]
    assert missing == ("documents" if names[0] == "queries" else names[1])


# --- Operators ------------------------------------------------------------------------------------------------------


@pytest.mark.row("vllm", "GET /ping", "GET /load", "GET /server_info", "GET /tokenizer_info")
def test_operator_endpoints_report_server_state(served: Served, plain: httpx.Client) -> None:
    for method in ("GET", "POST", "HEAD"):
        assert httpx.request(method, f"{served.root}/ping").status_code == 200, "/ping must not require a key"
    for path in ("/load", "/server_info", "/tokenizer_info"):
        assert httpx.get(served.root + path).status_code == 401
    assert plain.get("/load").json() == {"server_load": 0}
    server_info = plain.get("/server_info", params={"config_format": "json"}).json()["vllm_config"][MODEL]
    assert server_info["engine"]["num_gpu_blocks_override"] == 400 and server_info["server"]["api_key"] == "***"
    assert json.loads(plain.get("/server_info").json()["vllm_config"])[MODEL] == server_info
    info = plain.get("/tokenizer_info").json()
    assert info["tokenizer_class"] and "messages" in info["chat_template"]


@pytest.mark.row("vllm", "POST /reset_prefix_cache")
def test_reset_prefix_cache_empties_cache(plain: httpx.Client) -> None:
    long = [{"role": "user", "content": "Count the words. " * 40}]

    def cached() -> int:
        found: int = chat(plain, messages=long)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    cached()
    assert cached() > 0
    assert plain.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0 and cached() > 0


@pytest.mark.row("vllm", "POST /abort_requests")
def test_abort_requests_reaches_all_api_processes(served: Served, plain: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    for i in range(4):
        with plain.stream("POST", "/v1/completions", json=body | {"request_id": f"long-{i}"}) as stream:
            lines = stream.iter_lines()
            next(lines)
            with httpx.Client(base_url=served.root, headers=plain.headers) as other:  # open a separate connection
                request_ids = f"cmpl-long-{i}" if i % 2 else [f"long-{i}", "unknown"]
                assert other.post("/abort_requests", json={"request_ids": request_ids}).status_code == 200
            rest = [line for line in lines if line]
        assert '"the request was cancelled"' in rest[-2] and len(rest) < 2000
    assert plain.post("/abort_requests", json={}).json()["error"]["param"] == "request_ids"
    settled = threading.Event()
    while plain.get("/load").json()["server_load"]:
        assert not settled.wait(0.01)
