"""Clients' numbers, ids and names with huge values, non-ASCII digits or trailing line breaks: no internal error."""

from __future__ import annotations

import ast
import copy
import json
import random
import re
import re._parser as regular
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from conftest import Servers
from fuzz_requests import BASES, Base
from serving import Served

import penstock
from penstock.core.numbers import read_decimal

SOURCE = Path(penstock.__file__).parent
FUNCTIONS = ("compile", "match", "search", "fullmatch", "sub", "subn", "findall", "finditer", "split")
FLAGS = ("--num-gpu-blocks-override", "400")


# --- The source ------------------------------------------------------------------------------------------------------


def texts_in(node: ast.AST | None, constants: Mapping[str, str]) -> Iterator[str]:
    """Texts of a regular expression; for an f-string, the part after its last value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[-1], ast.Constant):
        yield str(node.values[-1].value)
    elif isinstance(node, ast.Name) and node.id in constants:
        yield constants[node.id]
    elif isinstance(node, ast.BinOp):
        yield from texts_in(node.right, constants)


def expressions() -> Iterator[tuple[str, str]]:
    """Regular expressions in the package used without MULTILINE, each with file and line."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    used = re.compile(r"^import re\b|pattern=|^[A-Z_]+ = r\"", re.MULTILINE)
    trees = {path: ast.parse(text) for path, text in texts.items() if used.search(text)}
    constants = {
        target.id: node.value.value
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for path, tree in trees.items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            function = call.func
            if (
                isinstance(function, ast.Attribute)
                and isinstance(function.value, ast.Name)
                and (function.value.id in ("re", "regex") and function.attr in FUNCTIONS)
            ):
                given = call.args[0] if call.args else None
            else:
                given = next((keyword.value for keyword in call.keywords if keyword.arg == "pattern"), None)
            if given is not None and "MULTILINE" not in ast.unparse(call):
                for text in texts_in(given, constants):
                    yield text, f"{path.relative_to(SOURCE)}:{call.lineno}"


def accepts_line_break(items: Any) -> bool:
    """Return True if an expression has a ``$`` without ``(?!\\n)`` after it, which matches before a line break."""
    items = list(items)
    for i, (kind, value) in enumerate(items):
        if kind is regular.AT and value is regular.AT_END:
            follows = items[i + 1 : i + 2]
            if not follows or follows[0][0] is not regular.ASSERT_NOT:
                return True
        for inner in value if isinstance(value, tuple | list) else ():
            if isinstance(inner, regular.SubPattern) and accepts_line_break(inner):
                return True
            if isinstance(inner, list) and any(
                isinstance(item, regular.SubPattern) and accepts_line_break(item) for item in inner
            ):
                return True
    return False


def test_no_regular_expression_accepts_a_line_break_at_its_end() -> None:
    """``$`` matches before a trailing line break, which would then get into headers and logs."""
    scanned = list(expressions())
    assert len(scanned) > 80
    wrong = []
    for text, where in scanned:
        try:
            parsed = regular.parse(text)
        except re.error:  # the text is not in Python's syntax, or only part of an expression
            if text.endswith("$") and not text.endswith("\\$"):
                wrong.append((where, text))
            continue
        if accepts_line_break(parsed):
            wrong.append((where, text))
    assert not wrong


@pytest.mark.parametrize("expression", ["a$", "(a|b$)", "a(?:$|b)", "$", "(?=a$)", "a$|b"])
def test_scan_reports_dollar_in_every_position(expression: str) -> None:
    assert accepts_line_break(regular.parse(expression))


def test_client_numbers_are_parsed_only_by_read_decimal() -> None:
    """``isdecimal`` and ``isdigit`` accept digits of other scripts and texts that ``int`` refuses."""
    found = [
        str(path.relative_to(SOURCE))
        for folder in ("serve", "cluster", "frontend", "tracing")
        for path in sorted((SOURCE / folder).rglob("*.py"))
        if re.search(r"\.is(decimal|digit|numeric)\b", path.read_text(encoding="utf-8"))
    ]
    assert set(found) <= {"serve/http/body.py"}, (
        f"use read_decimal in {found} (body.py need not: its Content-Length has at most 18 ASCII digits)"
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("1000", 1000),
        ("1001", None),
        ("", None),
        ("-1", None),
        ("+1", None),
        (" 1", None),
        ("1\n", None),
        ("1_0", None),
        ("1.0", None),
        ("٣", None),
        ("²", None),
        ("9" * 5000, None),
        ("0" * 5000, 0),
        ("0" * 5000 + "12", 12),
    ],
)
def test_read_decimal_accepts_ascii_digits_up_to_limit(text: str, number: int | None) -> None:
    assert read_decimal(text, 1000) == number


# --- Requests to a server --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return servers.get(*FLAGS, "--storage-dir", str(tmp_path_factory.mktemp("texts")))


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.root, timeout=60) as http_client:
        yield http_client


DIGITS = ("9" * 4301, "0" * 4301 + "1", "-" + "9" * 4301, "٣", "²", "1\n", "1e9", "nan", "0x1", "", "9" * 400)
QUERIES = (
    *(f"/v1/{name}?limit=" for name in ("models", "files", "batches")),
    "/v1/conversations/conv_a/items?limit=",
    "/v1/responses/resp_a?starting_after=",
    "/v1/responses/resp_a/input_items?limit=",
    "/sleep?level=",
    "/server_info?config_format=",
)


@pytest.mark.parametrize("path", QUERIES)
@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}], ids=["openai", "anthropic"])
def test_number_in_a_query_causes_no_internal_error(client: httpx.Client, path: str, headers: dict[str, str]) -> None:
    for digits in DIGITS:
        for method in ("GET", "POST"):
            answer = client.request(method, path + str(httpx.QueryParams({"a": digits}))[2:], headers=headers)
            assert answer.status_code < 500, (digits[:10], answer.text)


@pytest.mark.parametrize(
    "name", ["inference-header-content-length", "range", "x-request-id", "retry-after", "traceparent", "content-length"]
)
def test_number_in_a_header_causes_no_internal_error(served: Served, name: str) -> None:
    """The response has a well-formed 4xx status line, without bytes of the header."""
    body = json.dumps({"inputs": [], "text_input": "a", "max_tokens": 1})
    host, _, port = served.root.rpartition("/")[2].partition(":")
    for digits in DIGITS:
        length = "" if name == "content-length" else f"content-length: {len(body)}\r\n"
        head = f"POST /v2/models/ensemble/infer HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{length}"
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(f"{head}{name}: {digits}\r\n\r\n{body}".encode())
            received = b""
            while more := connection.recv(2**16):
                received += more
        status, _, _ = received.partition(b"\r\n")
        assert re.fullmatch(rb"HTTP/1.1 4\d\d .*", status), (digits[:10], received[:200])


IDS = (
    "a\n",
    "a\r\nx-injected: 1",
    "a\r\n\r\nHTTP/1.1 200 OK",
    "\n",
    "a\x00",
    "a\x85b",
    "a\u2028",
    "ä",
    "a" * 5000,
    " ",
)


@pytest.mark.parametrize("request_id", IDS, ids=ascii)
def test_request_id_injects_no_header(client: httpx.Client, request_id: str) -> None:
    """Checks every body with a request id: response headers must have only printable characters."""
    requests = [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": request_id}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "request_id": request_id},
        ),
        ("/v1/chat/completions", {"text": "a", "max_dec_len": 1, "req_id": request_id}),
        ("/v1/chat/completions", {"text": "a", "max_dec_len": 1, "stream": True, "req_id": request_id}),
        ("/v2/models/ensemble/infer", {"id": request_id, "inputs": []}),
        ("/v2/models/ensemble/generate", {"id": request_id, "text_input": "a", "max_tokens": 1}),
        ("/generate", {"prompt": "a", "max_tokens": 1, "request_id": request_id}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1, "metadata": {"request_id": request_id}}),
    ]
    for path, body in requests:
        answer = client.post(path, json=body)
        assert answer.status_code < 500, (path, answer.text)
        assert "x-injected" not in answer.headers
        assert all(value.isprintable() for value in answer.headers.values()), path
        version = client.get("/version")
        assert version.status_code == 200, "the next response on this connection must be intact"


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Paths of the numbers and texts in a document."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from leaves(inner, (*path, key))
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        yield path, value


def variants() -> list[tuple[Base, str]]:
    """Fuzzing requests and their JSON bodies, each with one number or text replaced."""
    result = []
    for base in BASES:
        for path, value in leaves(base.body):
            others = [value + "\n", "9" * 4301] if isinstance(value, str) else []
            others += [10**25, 10**400, -(10**400), "9" * 4301, "٣", "1\n"]
            for other in others:
                body = copy.deepcopy(base.body)
                place: Any = body
                for key in path[:-1]:
                    place = place[key]
                if isinstance(place, list | dict):
                    place[path[-1]] = other
                result.append((base, json.dumps(body)))
            text = json.dumps(base.body)
            if not isinstance(value, str) and f": {json.dumps(value)}" in text:
                result += [(base, text.replace(f": {json.dumps(value)}", f": {n}", 1)) for n in ("9" * 4301, "1e999")]
    return result


def check(client: httpx.Client, base: Base, body: str) -> None:
    with client.stream("POST", base.path, content=body.encode(), headers=dict(base.headers)) as answer:
        text = answer.read().decode(errors="replace")
    assert answer.status_code < 500 or answer.status_code == 503, (base.path, body[:300], text[:300])
    assert "internal error" not in text, (base.path, body[:300])


def test_numbers_in_bodies_cause_no_internal_error(client: httpx.Client) -> None:
    """Sends a random sample of ``variants``."""
    for base, body in random.Random(41).sample(variants(), 120):
        check(client, base, body)


@pytest.mark.thorough
def test_all_numbers_in_bodies_cause_no_internal_error(client: httpx.Client) -> None:
    for base, body in variants():
        check(client, base, body)


def test_schema_patterns_refuse_trailing_line_breaks() -> None:
    """Checks the patterns of request ids and tool names."""
    from penstock.serve.chat.request import REQUEST_ID, TOOL_NAME
    from penstock.serve.dialects.paddlenlp.schema import Request

    for pattern in (REQUEST_ID, TOOL_NAME):
        assert re.search(pattern, "a") and not re.search(pattern, "a\n")
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"req_id": "a\n"}, Request)
