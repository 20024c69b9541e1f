"""Error messages have a single line and at most 500 characters, for any damaged file or oversized request value."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from fuzz_requests import BASES, Base
from serving import Served, Servers

from penstock import LLM, demo
from penstock.core import PenstockError

MAX_LENGTH = 500
LONG = "long " * 20_000
WORD = "w" * 100_000
INDEX = "model.safetensors.index.json"


# --- Files ------------------------------------------------------------------------------------------------------------


def not_utf8(path: Path) -> None:
    path.write_bytes(b'{"model_type": "\xff\xfe"}')


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20] if path.exists() else b"{")


def folder_instead(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def number(path: Path) -> None:
    path.write_text("7")


def long_number(path: Path) -> None:
    path.write_text("1" * 10_000)


def long_strings(path: Path) -> None:
    """Lengthen every string of a JSON file and add a long field name; if absent, write an index with long names."""

    def lengthen(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: lengthen(entry) for name, entry in value.items()} | {WORD: 1}
        if isinstance(value, list):
            return [lengthen(entry) for entry in value]
        return value + LONG if isinstance(value, str) else value

    path.write_text(
        json.dumps(lengthen(json.loads(path.read_text()) if path.exists() else {"weight_map": {WORD: WORD}}))
    )


DAMAGES = (not_utf8, deep, cut, folder_instead, number, long_number, long_strings)
FILES = ("config.json", INDEX, "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
CASES = [
    (name, damage) for name in FILES for damage in DAMAGES if name != "model.safetensors" or damage != long_strings
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(demo.CHAT, tmp_path / "model")


def check_file(folder: Path, name: str, damage: Callable[[Path], None]) -> None:
    """Check that loading the folder with the damaged file succeeds, or raises a bounded one-line error."""
    damage(folder / name)
    try:
        LLM(str(folder), num_gpu_blocks_override=20)
    except PenstockError as error:
        assert 0 < len(str(error)) <= MAX_LENGTH and "\n" not in str(error), str(error)


@pytest.mark.parametrize(("name", "damage"), Random(1).sample(CASES, 6))
def test_damaged_file_gives_bounded_message(checkpoint: Path, name: str, damage: Callable[[Path], None]) -> None:
    check_file(checkpoint, name, damage)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "damage"), CASES)
def test_every_damaged_file_gives_bounded_message(checkpoint: Path, name: str, damage: Callable[[Path], None]) -> None:
    check_file(checkpoint, name, damage)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([f"model-{part:05}-of-03000.safetensors" for part in range(3000)], "lacks 3000 files"),
        (["x" * 5000 + ".safetensors"], "a file name of 5012 bytes"),
        (["é" * 200 + ".safetensors"], "a file name of 412 bytes"),
        (["a", "b.safetensors"], "it must name a .safetensors file"),
    ],
)
def test_index_with_missing_files_gives_bounded_message(checkpoint: Path, files: list[str], message: str) -> None:
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {f"tensor{i}": file for i, file in enumerate(files)}}))
    with pytest.raises(PenstockError, match=message) as refused:
        LLM(str(checkpoint), num_gpu_blocks_override=20)
    assert len(str(refused.value)) <= MAX_LENGTH


def test_shortened_message_keeps_beginning_and_end() -> None:
    message = str(PenstockError.of(PenstockError("invalid", f"field: {WORD} is wrong; do this").failure))  # type: ignore[arg-type]
    assert message.startswith("field: www") and message.endswith("www is wrong; do this") and len(message) <= MAX_LENGTH


# --- Requests ---------------------------------------------------------------------------------------------------------


def paths_in(value: Any) -> Iterator[list[str | int]]:
    """Yield the path of each value in a request body."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield [key]
        yield from ([key, *rest] for rest in paths_in(entry))


def changed(body: Any, path: list[str | int], text: str) -> Any:
    copy = json.loads(json.dumps(body))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = text
    return copy


def messages(value: Any) -> Iterator[str]:
    """Yield every string of an error document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from messages(entry)


def check_request(server: Served, base: Base, body: Any) -> None:
    answer = httpx.post(server.root + base.path, json=body)
    assert answer.status_code != 500, (base.path, answer.text[:1000])
    if answer.status_code < 400:
        return
    try:
        document = answer.json()
    except ValueError:
        document = answer.text
    for text in messages(document):
        assert len(text) <= MAX_LENGTH, (base.path, len(text), text[:200], text[-200:])
    for name, value in answer.headers.items():
        assert len(value) <= 1024, name


REQUESTS = [
    (base, place, text)
    for base in BASES
    if base.status == 200 and not base.settings and not base.headers
    for place in [*paths_in(base.body), ["model"], ["unknown_field"], ["x" * 50_000]]
    for text in (WORD, LONG)
]


@pytest.fixture(scope="module")
def server(servers: Servers) -> Served:
    return servers.get("--num-gpu-blocks-override", "400")


@pytest.mark.parametrize("seed", range(3))
def test_long_values_are_not_echoed(server: Served, seed: int) -> None:
    for base, path, text in Random(seed).sample(REQUESTS, 25):
        check_request(server, base, changed(base.body, path, text))


@pytest.mark.thorough
@pytest.mark.parametrize("path", sorted({base.path for base, _, _ in REQUESTS}))
def test_long_values_of_every_field_are_not_echoed(server: Served, path: str) -> None:
    for base, place, text in REQUESTS:
        if base.path == path:
            check_request(server, base, changed(base.body, place, text))


@pytest.mark.parametrize("name", ["x-request-id", "anthropic-version", "authorization", "content-type", "accept"])
def test_long_headers_and_paths_are_not_echoed(server: Served, name: str) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v2/models/x/infer", "/" + "p" * 5000):
        answer = httpx.post(server.root + path, json={"model": "x" * 5000}, headers={name: "h" * 5000})
        assert answer.status_code >= 400 and all(len(text) <= MAX_LENGTH for text in messages(answer.json())), (
            answer.text
        )
