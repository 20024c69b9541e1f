"""Request fields that constrain an answer: each dialect applies or rejects those of all dialects; none is ignored."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from serving import Servers

FLAGS = ("--num-gpu-blocks-override", "400")
WORD = "zq7"
SCHEMA = {"const": WORD}
GRAMMAR = f'root ::= "{WORD}"'
NAMED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TAG = {"format": {"type": "const_string", "value": WORD}}
MESSAGES = [{"role": "user", "content": "What is the capital of Canada?"}]
COMMON = {"max_tokens": 20, "temperature": 0}

FIELDS: list[tuple[str, Any]] = [
    ("response_format", NAMED),
    ("response_format", {"type": "json_object", "schema": SCHEMA}),
    ("response_format", {"type": "json_schema", "schema": SCHEMA}),
    ("response_format", {"type": "json_object", "value": SCHEMA}),
    ("response_format", {"type": "json", "value": SCHEMA}),
    ("response_format", {"type": "regex", "value": WORD}),
    ("response_format", {"type": "regex", "pattern": WORD}),
    ("response_format", {"type": "grammar", "grammar": GRAMMAR}),
    ("response_format", {"type": "text", "schema": SCHEMA}),
    ("response_format", {"type": "structural_tag"} | TAG),
    ("guided_json", SCHEMA),
    ("guided_regex", WORD),
    ("guided_choice", [WORD]),
    ("guided_grammar", GRAMMAR),
    ("structured_outputs", {"regex": WORD}),
    ("structured_outputs", {"choice": [WORD]}),
    ("structural_tag", TAG),
    ("guided_decoding", {"regex": WORD}),
    ("json_schema", SCHEMA),
    ("regex", WORD),
    ("grammar", GRAMMAR),
    ("grammar", {"type": "regex", "value": WORD}),
    ("ebnf", GRAMMAR),
    ("choice", [WORD]),
    ("format", SCHEMA),
    ("format", "json"),
    ("text", {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}),
    ("output_config", {"format": {"type": "json_schema", "schema": SCHEMA}}),
    ("output_format", {"type": "json_schema", "schema": SCHEMA}),
    ("response_schema", SCHEMA),
    ("responseSchema", SCHEMA),
    ("generationConfig", {"responseSchema": SCHEMA}),
    ("guided_decoding_guide", WORD),
    ("extra_body", {"guided_regex": WORD}),
]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", COMMON | {"messages": MESSAGES}),
    "completion": ("/v1/completions", COMMON | {"prompt": "x"}),
    "messages": ("/v1/messages", COMMON | {"messages": MESSAGES}),
    "responses": ("/v1/responses", {"input": "x", "max_output_tokens": 20, "temperature": 0}),
    "ollama chat": (
        "/api/chat",
        {"model": "default", "messages": MESSAGES, "stream": False, "options": {"num_predict": 20}},
    ),
    "ollama generate": (
        "/api/generate",
        {"model": "default", "prompt": "x", "stream": False, "options": {"num_predict": 20}},
    ),
    "llama-server": ("/completion", {"prompt": "x", "n_predict": 20}),
    "tgi": ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 20}}),
    "vllm": ("/generate", COMMON | {"prompt": "x"}),
    "triton": ("/v2/models/ensemble/generate", {"text_input": "x", "max_tokens": 20}),
    "bladellm": ("/v1/chat/completions", COMMON | {"messages": MESSAGES}),
    "paddlenlp": ("/v1/chat/completions", {"text": "x", "max_dec_len": 20}),
}
PLACES = [
    *((name, "") for name in REQUESTS),
    ("ollama chat", "options"),
    ("tgi", "parameters"),
    ("triton", "parameters"),
]


@pytest.mark.parametrize(("name", "place"), PLACES, ids=lambda part: str(part))
def test_constraint_is_followed_or_refused(servers: Servers, name: str, place: str) -> None:
    server = servers.get(*FLAGS)
    path, body = REQUESTS[name]
    key = "one" if name == "bladellm" else "Bearer one"
    ignored = []
    for field, value in FIELDS:
        if name == "paddlenlp" and field == "text":  # ``text`` is PaddleNLP's prompt
            continue
        more = {place: body.get(place, {}) | {field: value}} if place else {field: value}
        answer = httpx.post(server.root + path, json=body | more, headers={"Authorization": key}, timeout=60)
        refused = (answer.status_code in (400, 422, 501) or '"error_code":400' in answer.text) and field in answer.text
        followed = answer.status_code == 200 and (WORD in answer.text or (value == "json" and "{" in answer.text))
        if not refused and not followed:
            ignored.append((field, value, answer.status_code, answer.text[:200]))
    assert not ignored


def test_two_constraints_are_refused(servers: Servers) -> None:
    body = COMMON | {"messages": MESSAGES, "json_schema": SCHEMA, "guided_regex": WORD}
    answer = httpx.post(f"{servers.get(*FLAGS).url}/chat/completions", json=body)
    assert answer.status_code == 400 and "one constraint" in answer.text


@pytest.mark.parametrize("backend", ["outlines", "xgrammar", "guidance", "lm-format-enforcer:no-fallback", "auto"])
def test_guided_decoding_backend_of_a_request_is_accepted(servers: Servers, backend: str) -> None:
    body = COMMON | {"messages": MESSAGES, "guided_regex": WORD, "guided_decoding_backend": backend}
    answer = httpx.post(f"{servers.get(*FLAGS).url}/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == WORD
