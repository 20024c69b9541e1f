"""Storage with large objects: paginated reads, reads during writes, limits of conversations, and file modes."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from serving import Served

KEYS = ("first key", "second key")
PLAIN: dict[str, Any] = {"model": "default", "temperature": 0, "max_output_tokens": 8}
FLAGS = ("--api-key", ",".join(KEYS), "--num-gpu-blocks-override", "200", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with Served("--storage-dir", str(folder), *FLAGS) as server:
        yield server


def client_of(server: Served, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return client_of(served)


def database(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(folder / "penstock.db", timeout=60, isolation_level=None)


def resident(pid: int, field: str = "VmHWM") -> int:
    """Return the peak resident memory of a process in bytes (``VmHWM``), or the current one (``VmRSS``)."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


# --- Reads ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(served: Served) -> dict[str, str]:
    """One stored object of each kind: id by kind."""
    client = client_of(served)
    conversation = client.conversations.create(items=[message("a")])  # type: ignore[list-item]
    file = client.files.create(file=b'{"custom_id": "1"}', purpose="batch")
    return {
        "response": client.responses.create(**PLAIN, input="Hello!").id,
        "conversation": conversation.id,
        "item": client.conversations.items.list(conversation.id).data[0].id,
        "file": file.id,
        "batch": client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"}
        ).id,
    }


READS = (
    "responses/{response}",
    "responses/{response}/input_items",
    "conversations/{conversation}",
    "conversations/{conversation}/items",
    "conversations/{conversation}/items/{item}",
    "files",
    "files/{file}",
    "files/{file}/content",
    "batches",
    "batches/{batch}",
)


def test_reads_do_not_wait_for_a_writer(served: Served, folder: Path, stored: dict[str, str]) -> None:
    """Read-only requests succeed while another process holds the write lock of the database."""
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with database(folder) as writer:
        writer.execute("BEGIN IMMEDIATE")
        for path in READS:
            response = httpx.get(f"{served.url}/{path.format(**stored)}", headers=headers, timeout=8)
            assert response.status_code == 200, (path, response.text)
        for context in ({"previous_response_id": stored["response"]}, {"conversation": stored["conversation"]}):
            body = {**context, "input": "Go on.", "model": "default"}
            response = httpx.post(f"{served.url}/responses/input_tokens", json=body, headers=headers, timeout=8)
            assert response.status_code == 200, response.text
        unstored = {**PLAIN, "previous_response_id": stored["response"], "input": "Go on.", "store": False}
        assert httpx.post(f"{served.url}/responses", json=unstored, headers=headers, timeout=8).status_code == 200
        assert httpx.get(f"{served.root}/metrics", timeout=8).status_code == 200
        writer.execute("ROLLBACK")


@pytest.mark.parametrize("kind", ["files", "batches"])
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_add_up_to_complete_list(
    served: Served, folder: Path, stored: dict[str, str], kind: str, order: str
) -> None:
    """Several entries have the same creation time."""
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with database(folder) as writer:
        columns = [row[1] for row in writer.execute(f"PRAGMA table_info({kind})")]
        row = dict(zip(columns, writer.execute(f"SELECT * FROM {kind} WHERE owner != ''").fetchone(), strict=True))
        for number in range(17):
            name = f"{kind}-{order}-{number}"
            changed = {**row, "id": name, "created": row["created"] + number // 5}
            if kind == "batches":
                changed |= {"status": "completed", "document": json.dumps(json.loads(row["document"]) | {"id": name})}
            placeholders = ", ".join("?" for _ in columns)
            writer.execute(f"INSERT INTO {kind} VALUES ({placeholders})", [changed[column] for column in columns])
    pages: list[list[str]] = []
    after: dict[str, str] = {}
    more = True
    while more:
        query = {"limit": "5", "order": order, **after}
        page = httpx.get(f"{served.url}/{kind}", params=query, headers=headers).json()
        pages.append([entry["id"] for entry in page["data"]])
        after, more = {"after": page["last_id"]}, page["has_more"]
    complete = httpx.get(f"{served.url}/{kind}", params={"limit": "1000", "order": order}, headers=headers).json()
    assert [name for names in pages for name in names] == [entry["id"] for entry in complete["data"]]
    assert {f"{kind}-{order}-{number}" for number in range(17)} <= {entry["id"] for entry in complete["data"]}
    times = [entry["created_at"] for entry in complete["data"]]
    if kind == "files":
        assert times == sorted(times, reverse=order == "desc")


def test_oversized_conversation_is_paged_but_refused_as_context(served: Served, folder: Path) -> None:
    """Reading a page takes little memory. A response in the conversation is refused before its items are read."""
    client, (api,) = client_of(served), served.pids["api"]
    conversation = client.conversations.create(items=[message("a")])  # type: ignore[list-item]
    text = "x" * 2**20
    with database(folder) as writer:
        writer.execute("BEGIN IMMEDIATE")
        for number in range(300):
            document = json.dumps({"id": f"big{number}", "type": "message", "role": "user", "content": text})
            row = (conversation.id, f"big{number}", document, len(document))
            writer.execute("INSERT INTO conversation_items (conversation, id, document, size) VALUES (?,?,?,?)", row)
        writer.execute("UPDATE conversations SET size = ? WHERE id = ?", (300 * 2**20, conversation.id))
        writer.execute("COMMIT")
    before = resident(api)
    page = client.conversations.items.list(conversation.id, limit=1)
    assert [item.id for item in page.data] == ["big299"] and page.has_more
    second = client.conversations.items.list(conversation.id, limit=1, after="big299")
    assert [item.id for item in second.data] == ["big298"]
    for call in (client.responses.create, client.responses.input_tokens.count):
        limits = PLAIN if call == client.responses.create else {"model": "default"}
        with pytest.raises(openai.APIStatusError, match=r"the limit is [0-9]+ \(max_body_size") as refused:
            call(**limits, input="Hello!", conversation=conversation.id)
        assert refused.value.status_code == 413
    assert client_of(served, KEYS[1]).responses.create(**PLAIN, input="Hello!").status in ("completed", "incomplete")
    assert resident(api) - before < 2**26
    client.conversations.delete(conversation.id)


def test_long_response_chain_is_refused_before_reading(served: Served, folder: Path) -> None:
    client, (api,) = client_of(served), served.pids["api"]
    first = client.responses.create(**PLAIN, input="Hello!")
    with database(folder) as writer:
        columns = [row[1] for row in writer.execute("PRAGMA table_info(responses)")]
        template = writer.execute("SELECT * FROM responses WHERE id = ?", (first.id,)).fetchone()
        text = json.dumps([{"id": "in", "role": "user", "content": "x" * 900_000}])
        for number in range(200):
            row = dict(zip(columns, template, strict=True))
            row |= {"id": f"resp_{number}", "previous": f"resp_{number - 1}" if number else "", "input": text}
            placeholders = ", ".join("?" for _ in columns)
            writer.execute(f"INSERT INTO responses VALUES ({placeholders})", [row[column] for column in columns])
    before = resident(api)
    with pytest.raises(openai.APIStatusError, match=r"the limit is [0-9]+ \(max_body_size") as refused:
        client.responses.create(**PLAIN, input="Go on.", previous_response_id="resp_199")
    assert refused.value.status_code == 413
    listed = client.responses.input_items.list("resp_199", limit=1)
    assert [item.id for item in listed.data] == ["in"] and not listed.has_more
    assert resident(api) - before < 2**26


# --- Limits -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("limited")
    limits = ("--max-conversation-items", "4", "--max-conversation-bytes", "2000")
    with Served("--storage-dir", str(folder), *limits, "--num-gpu-blocks-override", "200") as server:
        yield server


@pytest.mark.parametrize(
    ("items", "more", "limit"),
    [
        ([message("a")] * 4, message("b"), r"has 4 items; 1 more exceed the limit of 4 \(max_conversation_items\)"),
        ([message("a" * 1700)], message("b" * 400), r"exceed the limit of 2000 \(max_conversation_bytes\)"),
    ],
)
def test_conversation_item_and_byte_limits_are_enforced(limited: Served, items: Any, more: Any, limit: str) -> None:
    client = client_of(limited)
    conversation = client.conversations.create(items=items)
    with pytest.raises(openai.BadRequestError, match=limit):
        client.conversations.items.create(conversation.id, items=[more])
    assert len(client.conversations.items.list(conversation.id).data) == len(items)
    client.conversations.items.delete(
        client.conversations.items.list(conversation.id).data[0].id, conversation_id=conversation.id
    )
    client.conversations.items.create(conversation.id, items=[more])
    with pytest.raises(openai.BadRequestError, match="conversation"):
        client.conversations.create(items=[message("a")] * 5)  # type: ignore[list-item]


def test_full_conversation_is_refused_before_generation(limited: Served) -> None:
    client = client_of(limited)
    conversation = client.conversations.create(items=[message("a")] * 4)  # type: ignore[list-item]
    with pytest.raises(openai.BadRequestError, match="create another conversation"):
        client.responses.create(**PLAIN, input="Hello!", conversation=conversation.id)


@pytest.mark.parametrize("path", ["responses", "batches", "conversations"])
@pytest.mark.parametrize("metadata", [{"a": "x" * 513}, {"k" * 65: "x"}, {str(number): "" for number in range(17)}])
def test_oversized_metadata_is_refused(
    served: Served, stored: dict[str, str], path: str, metadata: dict[str, str]
) -> None:
    bodies = {
        "responses": {**PLAIN, "input": "Hello!"},
        "batches": {"input_file_id": stored["file"], "endpoint": "/v1/completions", "completion_window": "24h"},
        "conversations": {},
    }
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    answer = httpx.post(f"{served.url}/{path}", json=bodies[path] | {"metadata": metadata}, headers=headers)
    assert answer.status_code == 400 and "metadata" in answer.text


# --- Files and clocks -------------------------------------------------------------------------------------------------


def test_stored_files_have_mode_600(served: Served, folder: Path) -> None:
    """Stored files, including the output of batches, are readable by the server's user only."""
    client = client_of(served)
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}
    wrong = {**line, "custom_id": "2", "body": {"prompt": "a", "max_tokens": -1}}
    file = client.files.create(file="\n".join(map(json.dumps, (line, wrong))).encode(), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    deadline = time.monotonic() + 60
    while batch.status != "completed":
        assert time.monotonic() < deadline and batch.status != "failed", batch
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id and batch.error_file_id
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}, paths


CLOCK = """
import pathlib, time
_time, _offset = time.time, pathlib.Path({path!r})
time.time = lambda: _time() + float(_offset.read_text() or 0)
"""
"""Code of a ``sitecustomize`` module that shifts the clock of every server process by the seconds in a file."""


def test_background_response_survives_clock_step(tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(CLOCK.format(path=str(offset)))
    search = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    flags = ("--storage-dir", str(tmp_path / "storage"), "--num-gpu-blocks-override", "200")
    with Served(*flags, environment={"PYTHONPATH": search}) as server:
        client = client_of(server)
        long = {**PLAIN, "max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
        response: Response = client.responses.create(**long, input="Go on.", background=True)
        while response.status == "queued":
            response = client.responses.retrieve(response.id)
        for step in ("60", "3600", "0"):
            (tmp_path / "new").write_text(step)
            (tmp_path / "new").rename(offset)
            assert client.responses.retrieve(response.id).status == "in_progress"
        client.responses.cancel(response.id)
