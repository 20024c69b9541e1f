"""The API of llama.cpp's server. There is no client library: the tests send the documented HTTP requests."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from serving import Served, Servers

from penstock import demo
from penstock.text import Tokenizer

PROMPT = "<|im_start|>user\nWhat is the capital of Canada?<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "n_predict": 60}


@pytest.fixture
def served(servers: Servers) -> Served:
    return servers.get()


def post(served: Served, path: str, status: int = 200, **body: Any) -> Any:
    answer = httpx.post(served.root + path, json=body, timeout=60)
    assert answer.status_code == status, answer.text
    assert "x-penstock-ignored" not in answer.headers, answer.headers
    return answer.json()


def events(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = httpx.post(served.root + path, json=body | {"stream": True}, timeout=60)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


@pytest.mark.row("llama-server", "/completion", "/completions")
@pytest.mark.row("llama-server", "n_predict")
@pytest.mark.row("llama-server", "return_tokens", "timings_per_token")
def test_completion_returns_text_tokens_and_timings(served: Served) -> None:
    tokenizer = Tokenizer(demo.CHAT)
    whole = post(served, "/completion", prompt=PROMPT, return_tokens=True, **GREEDY)
    assert "Ottawa" in whole["content"] and whole["stop"] is True and whole["prompt"] == PROMPT
    assert (whole["stop_type"], whole["stopping_word"], whole["truncated"]) == ("eos", "", False)
    assert tokenizer.decode(whole["tokens"]) == whole["content"]
    assert whole["tokens_predicted"] == len(whole["tokens"]) == whole["timings"]["predicted_n"]
    assert whole["tokens_evaluated"] == len(tokenizer.encode(PROMPT))
    assert whole["timings"]["prompt_n"] + whole["timings"]["cache_n"] == whole["tokens_evaluated"]
    assert whole["generation_settings"]["temperature"] == 0 and whole["generation_settings"]["n_predict"] == 60
    assert post(served, "/completions", prompt=PROMPT, **GREEDY)["content"] == whole["content"]
    *parts, last = events(served, "/completion", prompt=PROMPT, timings_per_token=True, **GREEDY)
    assert "".join(part["content"] for part in parts) == whole["content"] and len(parts) > 1
    assert all(part["stop"] is False and part["timings"] for part in parts)
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "eos")
    assert last["tokens_predicted"] == whole["tokens_predicted"]
    cut = post(served, "/completion", prompt=PROMPT, temperature=0, n_predict=3)
    assert (cut["tokens_predicted"], cut["stop_type"]) == (3, "limit")
    prefilled = post(served, "/completion", prompt=PROMPT, n_predict=0)
    assert (prefilled["content"], prefilled["tokens_predicted"], prefilled["stop_type"]) == ("", 0, "limit")
    assert post(served, "/completion", prompt=PROMPT, temperature=0, n_predict=-1)["content"] == whole["content"]


def test_prompts_are_strings_token_ids_or_mixed(served: Served) -> None:
    tokenizer = Tokenizer(demo.CHAT)
    ids = tokenizer.encode(PROMPT)
    content = post(served, "/completion", prompt=PROMPT, **GREEDY)["content"]
    assert post(served, "/completion", prompt=ids, **GREEDY)["content"] == content
    mixed = [ids[0], tokenizer.decode(ids[1:-1], False), ids[-1]]
    assert post(served, "/completion", prompt=mixed, **GREEDY)["content"] == content
    several = post(served, "/completion", prompt=[PROMPT, ids, mixed], **GREEDY)
    assert [answer["index"] for answer in several] == [0, 1, 2]
    assert {answer["content"] for answer in several} == {content}
    assert [answer["content"] for answer in post(served, "/completion", prompt=[PROMPT], **GREEDY)] == [content]
    parts = events(served, "/completion", prompt=[PROMPT, PROMPT], **GREEDY)
    for index in range(2):
        assert "".join(part["content"] for part in parts if part["index"] == index) == content


@pytest.mark.row(
    "llama-server", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed"
)
@pytest.mark.row("llama-server", "stop", "ignore_eos", "grammar")
@pytest.mark.row("llama-server", "repeat_penalty")
@pytest.mark.row("llama-server", "json_schema")
@pytest.mark.row("llama-server", "n_probs")
@pytest.mark.row("llama-server", "logit_bias")
@pytest.mark.row("llama-server", "cache_prompt", "id_slot", "n_keep", "repeat_last_n", "samplers", "n_cache_reuse")
@pytest.mark.row("llama-server", "mirostat", "typical_p", "dry_multiplier", "xtc_probability", "top_n_sigma")
@pytest.mark.row("llama-server", "dynatemp_range", "t_max_predict_ms", "lora", "response_fields", "post_sampling_probs")
def test_parameters_take_effect(served: Served) -> None:
    sampled = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 7, "n_predict": 12}
    sampled |= {"presence_penalty": 0.1, "frequency_penalty": 0.1, "repeat_penalty": 1.1}
    sampled |= {"cache_prompt": True, "id_slot": -1, "n_keep": 0, "repeat_last_n": 64, "n_cache_reuse": 0}
    sampled |= {"samplers": ["top_k"], "mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0, "top_n_sigma": -1}
    first, again = (post(served, "/completion", prompt=PROMPT, **sampled) for _ in range(2))
    assert first["content"] == again["content"] and first["generation_settings"]["seed"] == 7
    stopped = post(served, "/completion", prompt=PROMPT, stop=["Ottawa"], **GREEDY)
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", "Ottawa")
    assert "Ottawa" not in stopped["content"]
    endless = post(served, "/completion", prompt=PROMPT, ignore_eos=True, **GREEDY)
    assert (endless["tokens_predicted"], endless["stop_type"]) == (60, "limit")
    assert post(served, "/completion", prompt=PROMPT, grammar='root ::= "yes" | "no"', **GREEDY)["content"] in "yesno"
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    constrained = post(served, "/completion", prompt=PROMPT, json_schema=schema, **GREEDY)
    assert list(json.loads(constrained["content"])) == ["a"]
    scored = post(served, "/completion", prompt=PROMPT, n_probs=2, **GREEDY)
    assert len(scored["completion_probabilities"]) == scored["tokens_predicted"]
    for token in scored["completion_probabilities"]:
        assert len(token["top_logprobs"]) == 2 and token["logprob"] == token["top_logprobs"][0]["logprob"] <= 0
        assert bytes(token["bytes"]).decode("utf-8", "replace") == token["token"]
    word = post(served, "/tokenize", content=" Ottawa")["tokens"]
    for bias in ([[word[0], False]], [[" Ottawa", -100]], {" Ottawa": False}):
        assert " Ottawa" not in post(served, "/completion", prompt=PROMPT, logit_bias=bias, **GREEDY)["content"]


@pytest.mark.row("llama-server", "/props", "/slots")
def test_props_and_slots_report_server_state(served: Served) -> None:
    props = httpx.get(f"{served.root}/props").json()
    assert props["default_generation_settings"]["n_ctx"] > 1000 and "im_start" in props["chat_template"]
    assert (props["eos_token"], props["modalities"]) == ("<|im_end|>", {"vision": False, "audio": False})
    deadline, slots = time.monotonic() + 30, [{"is_processing": True}]
    while any(slot["is_processing"] for slot in slots):
        assert time.monotonic() < deadline  # the engine reports ended requests once a second
        slots = httpx.get(f"{served.root}/slots").json()
    assert len(slots) == props["total_slots"]
    assert "when the server starts" in post(served, "/props", 400, n_ctx=1)["error"]["message"]


@pytest.mark.row("llama-server", "/apply-template")
@pytest.mark.row("llama-server", "/tokenize", "/detokenize")
@pytest.mark.row("llama-server", "/embedding")
def test_templates_tokens_and_embeddings_are_returned(served: Served) -> None:
    question = {"role": "user", "content": "What is the capital of Canada?"}
    prompt = post(served, "/apply-template", messages=[question])["prompt"]
    assert PROMPT in prompt
    tokens = post(served, "/tokenize", content=prompt)["tokens"]
    assert tokens == Tokenizer(demo.CHAT).encode(prompt) == post(served, "/tokenize", prompt=prompt)["tokens"]
    assert post(served, "/detokenize", tokens=tokens) == {"prompt": prompt, "content": prompt}
    pieces = post(served, "/tokenize", content="fox 🦊", with_pieces=True)["tokens"]
    spelled = [
        token["piece"].encode() if isinstance(token["piece"], str) else bytes(token["piece"]) for token in pieces
    ]
    assert b"".join(spelled) == "fox 🦊".encode()
    both = post(served, "/embedding", content=["one text", "another"])
    expected = post(served, "/v1/embeddings", input=["one text", "another"])["data"]
    assert [item["embedding"][0] for item in both] == [pytest.approx(item["embedding"], abs=1e-6) for item in expected]
    (alone,) = post(served, "/embedding", content="another")
    assert alone["index"] == 0 and alone["embedding"][0] == pytest.approx(both[1]["embedding"][0], abs=1e-6)


def test_invalid_fields_are_rejected_by_name(served: Served) -> None:
    for body, kind, message in (
        ({"prompt": "x", "top_p": 7}, "invalid_request_error", "top_p"),
        ({"prompt": "x", "repeat_penalty": -1}, "invalid_request_error", "repeat_penalty"),
        ({"prompt": "x", "mirostat": 2}, "not_supported_error", "mirostat"),
        ({"prompt": 7}, "invalid_request_error", "prompt"),
        ({}, "invalid_request_error", "prompt"),
        ({"prompt": []}, "invalid_request_error", "prompt"),
        ({"prompt": [["a", 1]] * 3000}, "invalid_request_error", "the maximum is 2048"),
        (
            {"prompt": ["a", 1] * 90_000},
            "exceed_context_size_error",
            "has 9",
        ),  # the encoder stops at the maximum length, so the reported length is smaller
        ({"prompt": "x", "logit_bias": [["a", 1]] * 60_000}, "invalid_request_error", "at most 1024 entries"),
        ({"prompt": [1] * 5000}, "exceed_context_size_error", "5000"),
    ):
        error = post(served, "/completion", 400, **body)["error"]
        assert (error["code"], error["type"]) == (400, kind) and message in error["message"]
    assert "content" in post(served, "/embedding", 400, content=[])["error"]["message"]
    assert httpx.post(f"{served.root}/completion", content=b"{").json()["error"]["type"] == "invalid_request_error"
