"""What vLLM's clients send besides OpenAI's fields, what they find in answers, and what its operators call."""

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
    with Served("--num-gpu-blocks-override", "400", "--api-server-count", "2", "--api-key", "secret") as found:
        yield found


@pytest.fixture(scope="module")
def plain(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.root, timeout=60, headers={"Authorization": "Bearer secret"}) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="secret", max_retries=0, timeout=60) as found:
        yield found


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
    for include, given in ((None, False), (False, False), (True, True)):
        options = {"continuous_usage_stats": True} | ({} if include is None else {"include_usage": include})
        body = {**prompt, **GREEDY, "stream": True, "stream_options": options}
        lines = plain.post(f"/v1/{path}", json=body).text.split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert chunks and [bool(chunk.get("usage")) for chunk in chunks] == [given] * len(chunks)


@pytest.mark.row("vllm", "spaces_between_special_tokens")
@pytest.mark.parametrize("value", [True, False])
def test_spaces_between_special_tokens_change_nothing(plain: httpx.Client, value: bool) -> None:
    content = chat(plain, spaces_between_special_tokens=value)["choices"][0]["message"]["content"]
    assert content == chat(plain)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"truncation_side": "up"}, """truncation_side: 'up' is not one of "left", "right\""""),
        ({"response_format": {"type": "xml"}}, "response_format.type: 'xml' is not one of"),
        ({"early_stopping": "maybe"}, """early_stopping: 'maybe' is not one of "never", true, false"""),
    ],
)
def test_wrong_choice_is_answered_with_all_choices(plain: httpx.Client, field: dict[str, Any], words: str) -> None:
    assert words in chat(plain, 400, **field)["error"]["message"]


# --- Thoughts -------------------------------------------------------------------------------------------------------


@pytest.mark.row("vllm", "reasoning")
def test_a_thought_has_both_names(plain: httpx.Client) -> None:
    message = chat(plain, messages=SUM, max_tokens=100, **THINKING)["choices"][0]["message"]
    assert message["reasoning"] and message["reasoning"] == message["reasoning_content"]
    told = deltas(plain, messages=SUM, max_tokens=100, **THINKING)
    assert "".join(delta.get("reasoning", "") for delta in told) == message["reasoning"]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in told)
    without = chat(plain)["choices"][0]["message"]
    assert without["reasoning"] is None and without["reasoning_content"] is None
    assert not any(delta.keys() & {"reasoning", "reasoning_content"} for delta in deltas(plain))


def test_a_thought_is_read_as_in_vllm_s_example(client: openai.OpenAI) -> None:
    """``reasoning`` of the message, sent back with the next turn; in a stream whatever ``hasattr`` finds is text."""
    first: Any = client.chat.completions.create(model=MODEL, messages=SUM, extra_body=THINKING, temperature=0)  # type: ignore[arg-type]
    message = first.choices[0].message
    again = [*SUM, {"role": "assistant", "content": message.content, "reasoning": message.reasoning}, *CAPITAL]
    stream = client.chat.completions.create(model=MODEL, messages=again, stream=True, extra_body=THINKING)  # type: ignore[call-overload]
    thought = answer = ""
    for chunk in stream:
        delta = chunk.choices[0].delta
        if hasattr(delta, "reasoning"):
            thought += delta.reasoning
        elif hasattr(delta, "content") and delta.content:
            answer += delta.content
    assert thought or answer


def test_tools_are_called_as_in_vllm_s_examples(client: openai.OpenAI) -> None:
    """Calls are read from deltas, and what is no call from ``reasoning``; the message goes back in parts, and without
    content."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    messages: Any = [{"role": "user", "content": "巴黎的天气怎么样？"}]
    asked: Any = {"model": MODEL, "messages": messages, "tools": tools, "temperature": 0}
    whole: Any = client.chat.completions.create(**asked)
    (call,) = whole.choices[0].message.tool_calls
    thought, arguments, names = "", [], []
    for chunk in client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        if delta.tool_calls:
            part = delta.tool_calls[0]
            if part.index == len(arguments):
                arguments.append("")
                names.append(part.function.name)
            arguments[part.index] += part.function.arguments or ""
        elif hasattr(delta, "reasoning"):
            thought += delta.reasoning
    assert (names, arguments) == ([call.function.name], [call.function.arguments])
    assert thought == (whole.choices[0].message.reasoning or "")
    said = {"role": "assistant", "tool_calls": [call], "reasoning": whole.choices[0].message.reasoning}
    answer = {"role": "tool", "content": "22 °C", "tool_call_id": call.id, "name": call.function.name}
    again = client.chat.completions.create(**asked | {"messages": [*messages, said, answer]})
    assert again.choices[0].message.content


@pytest.mark.row("vllm", "thinking_token_budget")
def test_a_thought_has_a_budget(plain: httpx.Client) -> None:
    wanted = chat(plain, messages=SUM, max_tokens=100, reasoning_max_tokens=3, **THINKING)
    found = chat(plain, messages=SUM, max_tokens=100, thinking_token_budget=3, **THINKING)
    assert found["choices"][0]["message"] == wanted["choices"][0]["message"]
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] < 8
    free = chat(plain, messages=SUM, max_tokens=100, **THINKING)["choices"][0]["message"]
    assert (
        chat(plain, messages=SUM, max_tokens=100, thinking_token_budget=-1, **THINKING)["choices"][0]["message"] == free
    )
    error = chat(plain, 400, thinking_token_budget=3, reasoning_max_tokens=4)["error"]
    assert error["param"] == "thinking_token_budget"


# --- Fields ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("vllm", "return_tokens_as_token_ids")
def test_tokens_are_called_by_their_ids(plain: httpx.Client) -> None:
    asked = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = chat(plain, logprobs=True, top_logprobs=2, **asked)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(likely["token"].startswith("token_id:") for entry in content for likely in entry["top_logprobs"])
    body = {"prompt": "The capital", "logprobs": 1, "echo": True, **GREEDY, **asked}
    found = plain.post("/v1/completions", json=body).json()["choices"][0]
    ids = [*found["prompt_token_ids"], *found["token_ids"]]
    assert found["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]


@pytest.mark.row("vllm", "request_id")
def test_a_request_is_called_what_its_body_says(served: Served, plain: httpx.Client) -> None:
    answer = plain.post("/v1/chat/completions", json={"messages": CAPITAL, **GREEDY, "request_id": "mine-1"})
    assert answer.json()["id"] == "chatcmpl-mine-1" and answer.headers["x-request-id"] == "mine-1"
    served.find("id=mine-1 status=200")
    named = {"X-Request-Id": "header-1"}
    answer = plain.post("/v1/completions", json={"prompt": "x", **GREEDY, "request_id": "mine-2"}, headers=named)
    assert answer.json()["id"] == "cmpl-header-1"
    assert plain.post("/v1/embeddings", json={"input": "x", "request_id": "mine-3"}).json()["id"] == "embd-mine-3"
    assert chat(plain, 400, request_id="a b")["error"]["param"] == "request_id"


@pytest.mark.row("vllm", "truncate_prompt_tokens", "truncation_side")
def test_prompts_are_cut(plain: httpx.Client) -> None:
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
    wanted = plain.post("/v1/embeddings", json={"input": [ids[:4], ids[-4:]]}).json()["data"]
    assert [first["data"][0]["embedding"], last["data"][0]["embedding"]] == [one["embedding"] for one in wanted]


@pytest.mark.row("vllm", "echo", "add_special_tokens")
def test_a_chat_begins_with_its_last_message(plain: httpx.Client) -> None:
    begun = [*CAPITAL, {"role": "assistant", "content": "The capital of"}]
    asked = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    rest = chat(plain, **asked)["choices"][0]["message"]["content"]
    assert chat(plain, **asked, echo=True)["choices"][0]["message"]["content"] == f"The capital of{rest}"
    told = "".join(delta.get("content") or "" for delta in deltas(plain, **asked, echo=True))
    assert told == f"The capital of{rest}"
    assert chat(plain, echo=True) != "" and not chat(plain, echo=True)["choices"][0]["message"]["content"].startswith(
        "What"
    )
    plainly, specially = (
        chat(plain, add_special_tokens=special)["usage"]["prompt_tokens"] for special in (False, True)
    )
    extra = plain.post("/tokenize", json={"prompt": "x"}).json()["count"]
    extra -= plain.post("/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()["count"]
    assert specially - plainly == extra


@pytest.mark.row("vllm", "bad_words_token_ids")
def test_tokens_that_must_not_come_out(plain: httpx.Client) -> None:
    ids = chat(plain, return_token_ids=True)["choices"][0]["token_ids"]
    for words in ([ids[1]], [[ids[0], ids[1]]]):
        found = chat(plain, return_token_ids=True, bad_words_token_ids=words)["choices"][0]["token_ids"]
        assert found[0] == ids[0] and found[1] != ids[1]
    error = chat(plain, 400, bad_words_token_ids=[1], guided_choice=["a"])["error"]
    assert error["param"] == "bad_words_token_ids"


@pytest.mark.row("vllm", "return_prompt_text")
def test_the_prompt_is_told_as_text(plain: httpx.Client) -> None:
    found = chat(plain, return_prompt_text=True, return_token_ids=True)
    ids = plain.post("/detokenize", json={"tokens": found["prompt_token_ids"]}).json()
    assert found["prompt_text"] == ids["prompt"] and CAPITAL[0]["content"] in found["prompt_text"]
    body = {"messages": CAPITAL, **GREEDY, "stream": True, "return_prompt_text": True}
    lines = plain.post("/v1/chat/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[0]["prompt_text"] == found["prompt_text"]
    assert not any("prompt_text" in chunk for chunk in [*chunks[1:], chat(plain)])


@pytest.mark.row("vllm", "disable_additional_properties")
def test_one_request_closes_its_objects(plain: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    for given in (schema, json.dumps(schema)):
        form = {"json": given, "disable_additional_properties": True, "disable_any_whitespace": True}
        message = chat(plain, structured_outputs=form, max_tokens=40)["choices"][0]["message"]
        assert json.loads(message["content"]).keys() == {"a"}
    found = chat(plain, 400, structured_outputs={"json": "{", "disable_additional_properties": True})
    assert found["error"]["param"] == "structured_outputs.json"


@pytest.mark.row("vllm", "normalize")
def test_a_vector_is_not_normalized_where_its_request_says_so(plain: httpx.Client) -> None:
    def length(**fields: Any) -> float:
        answer = plain.post("/v1/embeddings", json={"input": "A city.", **fields})
        return sum(x * x for x in answer.json()["data"][0]["embedding"]) ** 0.5

    assert length() == pytest.approx(1) == length(normalize=True)
    assert length(normalize=False) != pytest.approx(1)


NOTHING: dict[str, list[Any]] = {
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
"""Fields of vLLM and of FastDeploy that are not there yet, with their defaults that ask for nothing."""


@pytest.mark.row("vllm", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection")
@pytest.mark.row("vllm", "media_io_kwargs", "mm_processor_kwargs", "prompt_embeds", "logits_processors")
@pytest.mark.row("vllm", "return_token_offsets", "return_assistant_tokens_mask")
@pytest.mark.row("fastdeploy", "logits_processors_args", "include_draft_logprobs", "include_logprobs_decode_token")
@pytest.mark.row("fastdeploy", "collect_metrics", "completion_token_ids", "disaggregate_info", "mm_hashes")
@pytest.mark.row("fastdeploy", "trace_context", "max_streaming_response_tokens")
@pytest.mark.parametrize(
    ("path", "body"), [("completions", {"prompt": "x"}), ("chat/completions", {"messages": CAPITAL})]
)
def test_known_fields_are_kept_or_refused_by_name(plain: httpx.Client, path: str, body: dict[str, Any]) -> None:
    body = {"max_tokens": 1, **body}
    for field, allowed in NOTHING.items():
        for value in (None, *allowed):
            answer = plain.post(f"/v1/{path}", json=body | {field: value})
            assert answer.status_code == 200 and "x-penstock-ignored" not in answer.headers, (field, value)
        refused = plain.post(f"/v1/{path}", json=body | {field: False if True in allowed else "asked"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert refused.json()["error"]["message"] == f"{field}: not supported yet"
    for name, asked in (("mm_processor_kwargs", {"max_pixels": 9408}), ("media_io_kwargs", {"video": {"fps": 1}})):
        refused = plain.post(f"/v1/{path}", json=body | {name: asked})
        reason = "this model does not support images" if "messages" in body else "is for chats only"
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, f"{name}: {reason}")
    taken = {
        "mm_processor_kwargs": {},
        "media_io_kwargs": {},
        "return_token_offsets": True,
        "return_assistant_tokens_mask": True,
        "max_streaming_response_tokens": 5,
    }
    answer = plain.post(f"/v1/{path}", json=body | taken | {"thinking_token_budget": -1})
    assert answer.status_code == 200 and "x-penstock-ignored" not in answer.headers


def test_known_fields_of_other_requests_are_refused_by_name(plain: httpx.Client) -> None:
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
def test_a_seed_of_minus_one_is_a_random_one(plain: httpx.Client) -> None:
    drawn = {"temperature": 5, "max_tokens": 30}
    assert len({chat(plain, seed=-1, **drawn)["choices"][0]["message"]["content"] for _ in range(3)}) == 3
    assert len({chat(plain, seed=-5, **drawn)["choices"][0]["message"]["content"] for _ in range(2)}) == 1


STRICT = {
    "type": "object",
    "properties": {"city": {"enum": ["Ottawa"]}, "at": {"type": "object", "properties": {"x": {"enum": [1]}}}},
}
WHOLE = {"city": "Ottawa", "at": {"x": 1}}


@pytest.mark.row("vllm", "strict")
def test_strict_closes_objects(plain: httpx.Client) -> None:
    """An object of a strict schema has all the properties that are listed, and no others."""
    named = {"name": "answer", "schema": STRICT, "strict": True}
    form = {"type": "json_schema", "json_schema": named}
    drawn = {"temperature": 5, "max_tokens": 200}
    for seed in range(3):
        found = chat(plain, response_format=form, **drawn, seed=seed)["choices"][0]["message"]["content"]
        assert json.loads(found) == WHOLE
    tool = {"type": "function", "function": {"name": "look", "parameters": STRICT, "strict": True}}
    found = chat(plain, tools=[tool], tool_choice="required", parallel_tool_calls=False, **drawn, seed=1)
    (call,) = found["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == WHOLE


@pytest.mark.row("vllm", "POST /score")
@pytest.mark.parametrize("names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")])
def test_scores_have_several_names(plain: httpx.Client, names: tuple[str, str]) -> None:
    first, second = "What is it?", ["A city.", "A dog."]
    wanted = plain.post("/score", json={"text_1": first, "text_2": second}).json()["data"]
    assert plain.post("/score", json=dict(zip(names, (first, second), strict=True))).json()["data"] == wanted
    mixed = plain.post("/score", json={"text_1": first, "text_2": second, names[1]: second})
    assert mixed.status_code == 400
    missing = plain.post("/v1/score", json={names[0]: first}).json()["error"]["param"]
    assert missing == ("documents" if names[0] == "queries" else names[1])


# --- Operators ------------------------------------------------------------------------------------------------------


@pytest.mark.row("vllm", "GET /ping", "GET /load", "GET /server_info", "GET /tokenizer_info")
def test_how_the_server_is_told(served: Served, plain: httpx.Client) -> None:
    for method in ("GET", "POST", "HEAD"):
        assert httpx.request(method, f"{served.root}/ping").status_code == 200, "needs no key"
    for path in ("/load", "/server_info", "/tokenizer_info"):
        assert httpx.get(served.root + path).status_code == 401
    assert plain.get("/load").json() == {"server_load": 0}
    told = plain.get("/server_info", params={"config_format": "json"}).json()["vllm_config"][MODEL]
    assert told["engine"]["num_gpu_blocks_override"] == 400 and told["server"]["api_key"] == "***"
    assert json.loads(plain.get("/server_info").json()["vllm_config"])[MODEL] == told
    info = plain.get("/tokenizer_info").json()
    assert info["tokenizer_class"] and "messages" in info["chat_template"]


@pytest.mark.row("vllm", "POST /reset_prefix_cache")
def test_cached_prefixes_are_forgotten(plain: httpx.Client) -> None:
    long = [{"role": "user", "content": "Count the words. " * 40}]

    def cached() -> int:
        found: int = chat(plain, messages=long)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    cached()
    assert cached() > 0
    assert plain.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0 and cached() > 0


@pytest.mark.row("vllm", "POST /abort_requests")
def test_requests_are_cancelled_whichever_process_has_them(served: Served, plain: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    for i in range(4):
        with plain.stream("POST", "/v1/completions", json=body | {"request_id": f"long-{i}"}) as stream:
            lines = stream.iter_lines()
            next(lines)
            with httpx.Client(base_url=served.root, headers=plain.headers) as other:  # a connection of its own
                named = f"cmpl-long-{i}" if i % 2 else [f"long-{i}", "unknown"]
                assert other.post("/abort_requests", json={"request_ids": named}).status_code == 200
            rest = [line for line in lines if line]
        assert '"the request was cancelled"' in rest[-2] and len(rest) < 2000
    assert plain.post("/abort_requests", json={}).json()["error"]["param"] == "request_ids"
    settled = threading.Event()
    while plain.get("/load").json()["server_load"]:
        assert not settled.wait(0.01)
