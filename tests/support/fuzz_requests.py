"""HTTP requests for fuzzing: one or more valid requests to every POST endpoint, and mutations of them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

PROMPT = "The story of a fox:"
QUESTION = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a fox?"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": CONTENT, "end": "</a>"}}
PANIC = {"type": "object", "required": "🦊" * 50}
"""Schema for which llguidance panics while it formats an error. The first panic loads 49 MiB of debug symbols, which
stay in memory."""
BARE = {"authorization": "TOKEN"}
REGION = f"penstock_fuzz_{os.getpid()}"
"""Name of a shared memory segment; per process, as a killed run does not remove its segment."""
METHODS = "GET HEAD PUT PATCH DELETE OPTIONS".split()
KEYWORDS = (
    "type enum const minimum maximum exclusiveMinimum multipleOf minLength maxLength pattern format items prefixItems "
    "minItems maxItems properties required additionalProperties patternProperties anyOf oneOf allOf not $ref $defs"
).split()
"""Keywords of JSON schemas, used as field names in addition to those of requests."""
HEADERS: dict[str, tuple[str, ...]] = {
    "content-type": ("text/plain", "multipart/form-data", "application/json; charset=utf-16", "\xe9", ""),
    "content-encoding": ("gzip", "deflate", "br", "identity"),
    "accept": ("text/event-stream", "application/octet-stream", "*/*;q=x"),
    "authorization": ("TOKEN", "Bearer", "Bearer x", "Basic eDp5", "\xff", "x" * 5000),
    "inference-header-content-length": ("0", "1", "-1", "9" * 400, "x"),
    "x-request-id": ("same", "x" * 129, "\xe9"),  # concurrent requests share the id "same"
    "anthropic-version": ("2023-06-01", "x"),
    "user-agent": ("anthropic/1", "\xe9" * 300),
    "connection": ("close", "upgrade"),
    "upgrade": ("websocket", "h2c"),
    "expect": ("100-continue", "x"),
    "cookie": ("a=b" * 1000,),
}


class Base(NamedTuple):
    """A valid request and its expected status."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str] = MappingProxyType({})
    status: int = 200
    settings: bool = False
    """True if the request changes settings: it is sent after each of its mutations to restore them."""


def tensor(name: str, datatype: str, value: Any, shape: tuple[int, ...] = (1, 1)) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": value if len(value) != 1 else list(value)}


def ints(name: str, *values: int) -> dict[str, Any]:
    return tensor(name, "INT32", list(values), (1, len(values)))


TEXT = {"inputs": [tensor("text_input", "BYTES", [PROMPT]), ints("max_tokens", 2)]}
FIELDS = {"text_input": PROMPT, "max_tokens": 2, "temperature": 0.5, "top_k": 3, "stop_words": ["zq"]}
SAMPLING = {"max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["zq"]}
CHAT = {"messages": QUESTION, **SAMPLING}
MODEL = "penstock-demo"
OLLAMA = {"options": {"num_predict": 2, "temperature": 0.5, "seed": 1, "stop": ["zq"]}, "keep_alive": "5m"}
PADDLE = {"req_id": "a", "max_dec_len": 2, "temperature": 0.5, "topp": 0.5, "penalty_score": 1.1}
SHM = "/v2/systemsharedmemory"
PLACE = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
IDS = [ints("input_ids", 5, 6, 7), ints("input_lengths", 3), ints("request_output_len", 2)]

BASES = [
    Base("/v1/completions", {"prompt": PROMPT, "logprobs": 2, "n": 2, **SAMPLING}),
    Base(
        "/v1/completions",
        {"prompt": [[5, 6], [7]], "stream": True, "stream_options": {"include_usage": True}}
        | {"max_tokens": 2, "logit_bias": {"5": -3}, "echo": True},
    ),
    Base("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "use_beam_search": True, "n": 2, "temperature": 0}),
    Base("/v1/completions", {"prompt": PROMPT, "guided_json": SCHEMA, "guided_whitespace_pattern": " ?"} | SAMPLING),
    Base("/v1/completions", {"prompt": PROMPT, "guided_json": PANIC}, status=400),
    Base("/v1/completions", {"prompt": PROMPT, "guided_regex": "(a|b)+[0-9]{2,3}", **SAMPLING}),
    Base("/v1/completions", {"prompt": PROMPT, "guided_choice": ["a", "bc"], **SAMPLING}),
    Base("/v1/completions", {"prompt": PROMPT, "guided_grammar": 'start: "a" | %json {"enum": [1]}', **SAMPLING}),
    Base("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "structural_tag": TAG}),
    Base("/v1/chat/completions/completions", {"prompt": PROMPT, "max_tokens": 2}),
    Base("/v1/chat/completions/chat/completions", CHAT),
    Base("/v1/chat/completions", CHAT | {"stream": True, "logprobs": True, "top_logprobs": 2}),
    Base("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto"}),
    Base(
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    ),
    Base("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"enable_thinking": False}, "user": "u"}),
    Base("/v1/completions", {"prompt": PROMPT, **SAMPLING}, BARE),
    Base("/v1/chat/completions", CHAT | {"stream": True}, BARE),
    Base("/v1/completions", {"text": PROMPT, **PADDLE}),
    Base("/v1/chat/completions", {"messages": QUESTION, "stream": True, "response_timeout": 20, **PADDLE}),
    Base("/v1/completions", {"input_ids": [5, 6, 7], "min_dec_len": 1, "eos_token_ids": [2], **PADDLE}),
    Base("/v1/messages", {"model": "default", "max_tokens": 2, "messages": QUESTION[1:], "system": "Be short."}),
    Base(
        "/v1/messages",
        {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "text", "text": "?"}]}]}
        | {"stream": True, "tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}},
    ),
    Base("/v1/messages/count_tokens", {"messages": QUESTION[1:], "system": [{"type": "text", "text": "x"}]}),
    Base("/v1/responses", {"input": QUESTION, "max_output_tokens": 2, "temperature": 0.5, "metadata": {"a": "b"}}),
    Base(
        "/v1/responses",
        {"input": "?", "max_output_tokens": 2, "stream": True, "instructions": "Be short."}
        | {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
    ),
    Base("/v1/responses/input_tokens", {"input": "?", "tools": [{"type": "function", **FUNCTION}]}),
    Base("/v1/embeddings", {"input": [PROMPT, "x"], "encoding_format": "base64", "dimensions": 8}),
    Base("/score", {"queries": "x", "documents": ["y", "z"]}),
    Base("/v1/score", {"text_1": "x", "text_2": ["y"]}),
    Base("/rerank", {"query": "x", "documents": ["y", {"text": "z"}], "top_n": 1}),
    Base("/v1/rerank", {"query": "x", "documents": ["y"], "return_documents": False}),
    Base("/v2/rerank", {"query": "x", "documents": ["y", "z"], "truncate_prompt_tokens": 4}),
    Base("/classify", {"input": [PROMPT, "x"]}, status=400),
    Base("/pooling", {"input": [PROMPT, "x"], "task": "token_embed"}),
    Base("/tokenize", {"messages": QUESTION, "return_token_strs": True}),
    Base("/tokenize", {"prompt": PROMPT, "add_special_tokens": False}),
    Base("/detokenize", {"tokens": [5, 6]}),
    Base("/generate", {"prompt": PROMPT, "stream": True, "top_k": 3, "ignore_eos": True, **SAMPLING}),
    *[Base(f"/v1/audio/{name}", {"model": MODEL}, status=400) for name in ("transcriptions", "translations")],
    *[
        Base(
            path,
            {"prompt": PROMPT, "n_predict": 2, "n_probs": 2, "stream": stream, "stop": ["zq"], "cache_prompt": True},
        )
        for path, stream in (("/completion", True), ("/completions", False))
    ],
    Base("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}, status=400),
    Base("/embedding", {"content": [PROMPT, "x"]}),
    Base("/apply-template", {"messages": QUESTION}),
    Base("/tokenize", {"content": PROMPT, "with_pieces": True}),
    Base("/props", {"n_ctx": 1}, status=400),
    *[
        Base(
            path, {"inputs": PROMPT, "parameters": {"max_new_tokens": 2, "details": True, "seed": 1, "top_n_tokens": 2}}
        )
        for path in ("/generate", "/generate_stream", "/")
    ],
    Base("/api/chat", {"model": MODEL, "messages": QUESTION, "options": {"num_predict": 2, "top_k": 3}}),
    Base("/api/chat", {"model": MODEL, "messages": QUESTION, "stream": False, "format": SCHEMA} | OLLAMA),
    Base(
        "/api/chat",
        {"model": MODEL, "messages": QUESTION, "tools": [{"type": "function", "function": FUNCTION}]} | OLLAMA,
    ),
    Base(
        "/api/generate", {"model": MODEL, "prompt": PROMPT, "system": "x", "logprobs": True, "top_logprobs": 2} | OLLAMA
    ),
    Base("/api/generate", {"model": MODEL, "prompt": PROMPT, "raw": True, "stream": False} | OLLAMA),
    Base("/api/embed", {"model": MODEL, "input": [PROMPT, "x"], "dimensions": 8, "truncate": True}),
    Base("/api/embeddings", {"model": MODEL, "prompt": PROMPT}),
    Base("/v1/embed", {"texts": [PROMPT, "x"], "input_type": "search_query", "truncate": "START"}),
    Base("/v2/embed", {"texts": [PROMPT], "embedding_types": ["float", "int8", "ubinary"], "output_dimension": 8}),
    Base("/v2/embed", {"inputs": [{"content": [{"type": "text", "text": PROMPT}]}], "max_tokens": 4}),
    Base("/api/show", {"model": MODEL, "verbose": True}),
    Base("/api/pull", {"name": MODEL}),
    *[Base(f"/api/{name}", {"model": MODEL}, status=400) for name in ("create", "copy", "push")],
    Base("/ping", {}),
    Base("/reset_prefix_cache", {}),
    Base("/abort_requests", {"request_ids": ["nobody"]}),
    Base("/v1/abort_requests", {"req_ids": ["nobody"], "abort_all": False}),
    Base("/v2/models/ensemble/infer", TEXT | {"id": "a", "outputs": [{"name": "text_output"}]}),
    Base("/v2/models/ensemble/infer", TEXT | {"parameters": {"binary_data_output": True}}),
    Base("/v2/models/tensorrt_llm_bls/versions/1/infer", TEXT),
    Base(
        "/v2/models/preprocessing/infer", {"inputs": [tensor("QUERY", "BYTES", ["x"]), ints("REQUEST_OUTPUT_LEN", 2)]}
    ),
    Base(
        "/v2/models/postprocessing/infer",
        {"inputs": [tensor("TOKENS_BATCH", "INT32", [5, 6], (1, 1, 2)), ints("SEQUENCE_LENGTH", 2)]},
    ),
    Base("/v2/models/tensorrt_llm/infer", {"inputs": [*IDS, tensor("runtime_top_p", "FP32", [0.5])]}),
    Base("/v2/models/ensemble/generate", FIELDS),
    Base("/v2/models/ensemble/generate_stream", FIELDS | {"stream": True}),
    Base("/v2/models/ensemble/versions/1/generate", FIELDS),
    Base("/v2/models/ensemble/versions/1/generate_stream", FIELDS | {"stream": True}),
    Base("/v2/repository/index", {"ready": True}),
    Base("/v2/repository/models/ensemble/load", {"parameters": {"config": '{"max_batch_size": 8}'}}, settings=True),
    Base("/v2/repository/models/tensorrt_llm/unload", {"parameters": {"unload_dependents": True}}, status=400),
    Base(f"{SHM}/unregister", {}),
    Base(f"{SHM}/region/r/register", {"key": REGION, "offset": 0, "byte_size": 4096}),
    Base(
        "/v2/models/preprocessing/infer",
        {
            "inputs": [
                tensor("QUERY", "BYTES", ["x"]),
                {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [1, 1], "parameters": PLACE},
            ]
        },
    ),
    Base(f"{SHM}/region/r/unregister", {}),
    Base("/v2/cudasharedmemory/unregister", {}),
    Base("/v2/cudasharedmemory/region/r/unregister", {}),
    Base("/v2/cudasharedmemory/region/r/register", {}, status=400),
    Base(
        "/v2/logging", {"log_verbose_level": 0, "log_info": True, "log_warning": True, "log_error": True}, settings=True
    ),
    Base("/v2/trace/setting", {"trace_level": ["OFF"], "trace_rate": "1000"}, settings=True),
    Base("/v2/models/ensemble/trace/setting", {"trace_level": None, "log_frequency": "0"}, settings=True),
]
"""Base requests, in an order in which each one gets its expected status."""


class DuplicateKey(str):
    """A dict key that differs from equal strings, so that a JSON object has the key twice."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def nested(kind: str, depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found] if kind == "list" else {"a": found}
    return found


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 100, 2**31, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e-300, 1e308),
    *(float("nan"), float("inf"), "", "x", "0", "null", "\0", "\ud800", "🦊", "../../etc/passwd", "{{ x }}", "(a+)+$"),
    *("[", '{"type": "object"}', "x" * 5000, "é🦊" * 1500, "9" * 5000),
    *([], [[]], [None], [1], [1, "a"], ["x"] * 300, [-1, 10**20], {}, {"a": None}, {"1": 1e308}, {"\ud800": 1}),
    *({"type": "object", "properties": {"a": {"$ref": "#"}}}, {"type": "json_object"}, {"type": ["x"]}),
    *(nested("list", 100), nested("object", 100)),
)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container of a tree with each of its keys or indices."""
    found = []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        found.append((tree, key))
        if isinstance(value, dict | list):
            found += places(value)
    return found


def mutate(tree: dict[str, Any], names: list[str], values: tuple[Any, ...], rng: random.Random) -> dict[str, Any]:
    """Copy a tree with one to three changes: a field is replaced, removed, duplicated, renamed or added."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = json.loads(json.dumps(rng.choice(values)))
        container, key = rng.choice(places(tree) or [(tree, "x")])
        change = rng.choice(("replace", "replace", "replace", "replace", "remove", "duplicate", "rename", "add", "add"))
        if change == "remove":
            container.pop(key) if isinstance(container, list) else container.pop(key, None)
        elif change == "replace" or isinstance(container, list):
            container[key] = value
        elif change == "duplicate":
            container[DuplicateKey(key)] = value
        elif change == "rename":
            container[rng.choice((*names, f"{key}s", str(key)[:-1]))] = container.pop(key, value)
        else:
            container[rng.choice(names)] = value
    return tree


def damage(raw: bytes, rng: random.Random) -> bytes:
    """Replace, remove, insert or repeat some bytes; the result may be cut off."""
    for _ in range(rng.choice((1, 1, 2, 8))):
        begin = rng.randrange(len(raw) + 1)
        end = min(len(raw), begin + rng.choice((0, 1, 1, 4, 30)))
        noise = bytes(rng.randrange(256) for _ in range(rng.choice((1, 1, 3))))
        repeated = raw[begin:end] * 3
        new = rng.choice((b"", noise, repeated, b"[" * 20_000, b'{"a":' * 20_000, b"\xff\xfe", b"\xed\xa0\x80"))
        raw = raw[:begin] + new + raw[end:]
    return raw if rng.random() < 0.8 else raw[: rng.randrange(len(raw) + 1)]


@dataclass
class Request:
    """A request to send. ``raw``, if set, replaces all other fields, and is sent on a separate connection."""

    base: Base
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    raw: bytes | None = None
    timeout: float | None = None
    """Seconds after which the client disconnects; None: it waits for the response."""

    def __str__(self) -> str:
        sent = self.body if self.raw is None else self.raw
        return f"{self.method} {self.path} {self.headers if self.raw is None else 'raw'} {sent[:600]!r}"


def draw_request(seed: int, number: int, names: list[str]) -> Request:
    """Request number ``number`` of the random sequence of a seed."""
    rng = random.Random(f"{seed} {number}")
    base = rng.choice(BASES)
    request = Request(base, "POST", base.path, dict(base.headers), encode(base.body))
    kind = rng.random()
    if kind < 0.65:
        others = tuple(value for other in rng.sample(BASES, 3) for value in other.body.values())
        ascii_only = rng.random() < 0.9
        request.body = encode(mutate(base.body, names, VALUES + others, rng), ascii_only)
    elif kind < 0.78:
        request.body = damage(request.body, rng)
    elif kind < 0.9:
        for name in rng.sample(sorted(HEADERS), rng.choice((0, 1, 1, 3))):
            request.headers[name] = rng.choice(HEADERS[name])
        if rng.random() < 0.3:
            request.method = rng.choice(METHODS)
        if rng.random() < 0.3:
            parts = request.path.split("/")
            parts[rng.randrange(1, len(parts))] = rng.choice(("", "..", "x", "%00", "%ff", "%F0%9F%A6%8A", "x" * 2000))
            request.path = "/".join(parts)
    else:
        size = len(request.body) + rng.choice((0, 0, 0, -1, 1, 100, 10**9))
        length = rng.choice((f"content-length: {size}", f"content-length: {size}", "transfer-encoding: chunked"))
        head = f"POST {base.path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{length}\r\n\r\n".encode()
        request.raw = head + request.body
        if rng.random() < 0.5:
            request.raw = damage(request.raw, rng)
    if rng.random() < 0.04:
        request.timeout = rng.uniform(0, 0.05)
    return request


def encode(tree: Any, ascii_only: bool = True) -> bytes:
    return json.dumps(tree, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
