"""Storage quotas per API key, server-wide storage limits, expiration of stored objects, and storage metrics."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Served

from penstock.config.options import ServerOptions
from penstock.serve.storage.database import Database

ENDED = ("completed", "cancelled", "failed")
KEYS = ("first key", "second key")
PLAIN: dict[str, Any] = {"model": "default", "temperature": 0, "max_output_tokens": 8, "input": "Hello."}
QUOTA = "bytes=40K,files=2,responses=3,conversations=1,batches=1"
BODY = b'{"prompt":"Hi","max_tokens":1500,"ignore_eos":true}'
LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":' + BODY + b"}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("storage")
    flags = ["--api-key", ",".join(KEYS), "--storage-dir", str(folder), "--api-server-count", "2"]
    flags += ["--storage-quota", QUOTA, "--storage-limit", "files=3"]
    with Served(*flags, "--num-gpu-blocks-override", "400", "--max-num-seqs", "2") as server:
        yield server


@pytest.fixture
def clients(served: Served) -> Iterator[list[openai.OpenAI]]:
    """One client per API key. Their batches and files are removed after the test."""
    result = [openai.OpenAI(base_url=served.url, api_key=key, max_retries=0) for key in KEYS]
    yield result
    for client in result:
        for batch in client.batches.list():
            if batch.status in ("validating", "in_progress"):
                client.batches.cancel(batch.id)
        until(lambda client=client: all(batch.status in ENDED for batch in client.batches.list()))  # type: ignore[misc]
        for file in client.files.list():
            client.files.delete(file.id)


def upload(client: openai.OpenAI, content: bytes = b"x", **fields: Any) -> Any:
    return client.files.create(file=("in.jsonl", content), purpose="batch", **fields)


def stored(served: Served) -> dict[str, list[float]]:
    """Return each storage metric's values over the tenants, largest first."""
    page = httpx.get(f"{served.root}/metrics").text
    families = {
        family.name.removeprefix("penstock:storage_"): family for family in text_string_to_metric_families(page)
    }
    return {
        name: sorted((sample.value for sample in family.samples), reverse=True) for name, family in families.items()
    }


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline


def test_files_beyond_quota_are_refused(clients: list[openai.OpenAI], served: Served) -> None:
    """The status is 400, as at OpenAI, so that clients do not retry."""
    mine, other = clients
    first, _ = upload(mine, b"x" * 1000), upload(mine)
    with pytest.raises(openai.BadRequestError, match="storage_quota of each API key is 2 files, of which 2 are used"):
        upload(mine)
    upload(other)
    with pytest.raises(openai.BadRequestError, match="storage_limit of the server is 3 files"):
        upload(other)
    until(lambda: stored(served)["files"] == [2, 1])
    assert stored(served)["bytes"] == [1001, 1]
    mine.files.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="40960 bytes, of which 1 are used, and 40960 more do not fit"):
        upload(mine, b"x" * 40_960)
    upload(mine, b"x" * 40_959)


def test_responses_beyond_quota_are_not_stored(clients: list[openai.OpenAI]) -> None:
    """Requests with ``store`` or ``background`` are refused. Other requests are answered, but not stored."""
    mine, other = clients
    stored_responses = [mine.responses.create(**PLAIN) for _ in range(3)]
    assert all(response.store for response in stored_responses)
    for fields in ({"store": True}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match="store: the storage_quota of each API key is 3 responses"):
            mine.responses.create(**PLAIN, **fields)
    unstored = mine.responses.create(**PLAIN)
    assert unstored.output_text == stored_responses[0].output_text and unstored.store is False
    *_, last = mine.responses.create(**PLAIN, stream=True)
    assert last.response.store is False  # type: ignore[union-attr]
    assert other.responses.create(**PLAIN).store
    mine.responses.delete(stored_responses[0].id)
    assert mine.responses.create(**PLAIN, store=True).store


def test_conversations_beyond_quota_are_refused(clients: list[openai.OpenAI], served: Served) -> None:
    mine, _ = clients
    conversation = mine.conversations.create().id
    with pytest.raises(openai.BadRequestError, match="1 conversations"):
        mine.conversations.create()
    long: Any = {"type": "message", "role": "user", "content": "x" * 41_000}
    with pytest.raises(openai.BadRequestError, match=r"conversation: .* 40960 bytes"):
        mine.conversations.items.create(conversation, items=[long])
    assert stored(served)["refusals"]
    mine.conversations.delete(conversation)
    mine.conversations.create()


def test_unfinished_batches_beyond_quota_are_refused(clients: list[openai.OpenAI]) -> None:
    """The status is 429, because a retry can succeed after a running batch has ended."""
    mine, other = clients
    fields: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
    file = upload(mine, LINE)
    first = mine.batches.create(input_file_id=file.id, **fields)
    with pytest.raises(openai.RateLimitError, match="1 batches, of which 1 are used; wait until a batch ends"):
        mine.batches.create(input_file_id=file.id, **fields)
    other.batches.create(input_file_id=upload(other, LINE).id, **fields)
    mine.batches.cancel(first.id)
    until(lambda: mine.batches.retrieve(first.id).status == "cancelled")
    mine.batches.create(input_file_id=file.id, **fields)


def test_files_expire_after_requested_time(clients: list[openai.OpenAI]) -> None:
    mine, _ = clients
    file = upload(mine, LINE, expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    later = upload(mine, b"x")
    assert later.expires_at == later.created_at + 30 * 86_400
    mine.files.delete(later.id)
    for wrong in (
        {"anchor": "created_at", "seconds": 60},
        {"anchor": "never", "seconds": 3600},
        {"anchor": "created_at"},
    ):
        with pytest.raises(openai.BadRequestError, match=r"expires_after: .*seconds from 3600 to 2592000"):
            upload(mine, expires_after=wrong)
    line = LINE.replace(b"1500", b"2")
    batch = mine.batches.create(
        input_file_id=upload(mine, line).id,
        endpoint="/v1/completions",
        completion_window="24h",
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    until(lambda: mine.batches.retrieve(batch.id).status == "completed")
    output = mine.files.retrieve(mine.batches.retrieve(batch.id).output_file_id or "")
    assert output.expires_at == output.created_at + 7200


def test_expired_objects_are_removed(tmp_path: Path) -> None:
    """An idle server removes expired rows and files. Its database is an earlier version, without a size column."""
    flags = ("--storage-dir", str(tmp_path), "--num-gpu-blocks-override", "100")
    with Served(*flags) as server:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        upload(client)
        client.responses.create(**PLAIN)
        client.conversations.create(items=[{"type": "message", "role": "user", "content": "One."}])
    tables = ("files", "responses", "conversations", "conversation_items")
    with sqlite3.connect(tmp_path / "penstock.db") as database:
        database.execute("drop index responses_use")
        database.execute("alter table responses drop column size")
        for table in tables[:3]:
            assert database.execute(f"select count(*) from {table}").fetchone() == (1,)
            database.execute(f"update {table} set expires = 1")
    assert len(os.listdir(tmp_path / "files")) == 1

    def remaining_rows() -> int:
        with sqlite3.connect(tmp_path / "penstock.db") as database:
            return sum(database.execute(f"select count(*) from {table}").fetchone()[0] for table in tables)

    with Served(*flags) as server:
        until(lambda: remaining_rows() == 0 and not os.listdir(tmp_path / "files"))
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
        assert client.responses.create(**PLAIN).store
        assert stored(server)["bytes"][0] > 100


@pytest.mark.parametrize("limits", ["bytes=much", "rows=1", "files"])
def test_malformed_quota_is_refused(limits: str) -> None:
    server = Served("--storage-quota", limits)
    try:
        server.find("storage_quota: .* is not a limit such as bytes=10G")
        assert server.ended() != 0
    finally:
        server.kill()


def open_each(folders: list[str], barrier: Barrier) -> None:
    for folder in folders:
        barrier.wait()
        Database(ServerOptions(storage_dir=folder))


def test_processes_can_open_new_database_at_same_time(tmp_path: Path) -> None:
    """API processes open the database at the same time. Without precautions, SQLite refuses this sometimes (1 of 240
    attempts in a measurement)."""
    context, count = multiprocessing.get_context("spawn"), 4
    barrier, folders = context.Barrier(count, timeout=60), [str(tmp_path / str(i)) for i in range(100)]
    processes = [context.Process(target=open_each, args=(folders, barrier)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * count
