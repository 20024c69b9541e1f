"""Files and batches, tested with OpenAI's Python client."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch
from serving import Served

QUESTION, ANSWER = "What is the capital of Canada?", "Ottawa"
CHAT = "/v1/chat/completions"
KEYS = ("first key", "second key")
DONE = ("completed", "failed", "cancelled", "expired")


def line(name: str, url: str = CHAT, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 40, **fields}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def client_of(server: Served, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)


def create_batch(client: openai.OpenAI, *lines: str, endpoint: Any = CHAT) -> Batch:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


def wait_until(client: openai.OpenAI, name: str, condition: Callable[[Batch], bool]) -> Batch:
    deadline = time.monotonic() + 90
    while not condition(found := client.batches.retrieve(name)):
        assert time.monotonic() < deadline, found
    return found


def wait_until_ended(client: openai.OpenAI, name: str) -> Batch:
    return wait_until(client, name, lambda batch: batch.status in DONE)


def results(client: openai.OpenAI, name: str | None) -> dict[str, Any]:
    assert name
    return {result["custom_id"]: result for result in map(json.loads, client.files.content(name).text.splitlines())}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = str(tmp_path_factory.mktemp("storage"))
    flags = ["--api-key", ",".join(KEYS), "--storage-dir", folder, "--max-file-size", "100000"]
    with Served(*flags, "--client-timeout", "3", "--num-gpu-blocks-override", "400", "--max-num-seqs", "8") as server:
        yield server


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return client_of(served)


def test_files_are_created_listed_and_deleted_per_key(client: openai.OpenAI, served: Served) -> None:
    content = bytes(range(256)) * 20
    created = client.files.create(file=("data.bin", content), purpose="user_data")
    assert (created.filename, created.bytes, created.purpose, created.status) == (
        "data.bin",
        len(content),
        "user_data",
        "processed",
    )
    assert client.files.retrieve(created.id) == created
    assert client.files.content(created.id).content == content
    others = [client.files.create(file=(f"{i}.txt", b"x"), purpose="batch") for i in range(3)]
    assert [file.id for file in client.files.list(purpose="batch", limit=2)] == [file.id for file in others[::-1]]
    assert next(iter(client.files.list(order="asc"))).id == created.id
    with pytest.raises(openai.NotFoundError):  # the file belongs to another API key
        client_of(served, KEYS[1]).files.retrieve(created.id)
    assert client.files.delete(created.id).deleted
    with pytest.raises(openai.NotFoundError, match="does not exist or has expired"):
        client.files.content(created.id)
    for file in others:
        client.files.delete(file.id)


def test_invalid_upload_is_rejected_by_name(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.APIStatusError, match="at most 100000 bytes") as large:
        client.files.create(file=("large", b"x" * 100_001), purpose="batch")
    assert large.value.status_code == 413
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    for form, message in (
        ({"json": {}}, "multipart/form-data"),
        ({"files": {"other": b"x"}, "data": {"purpose": "batch"}}, "file: is missing"),
        ({"files": {"file": b"x"}}, "purpose: is missing"),
        ({"content": b"--x\r\nno", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "file"),
    ):
        more = form.pop("headers", {})
        answer = httpx.post(f"{served.url}/files", headers=headers | more, **form)  # type: ignore[arg-type]
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    more = headers | {"content-type": "Multipart/form-data; charset=utf-7; boundary=x"}
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="+2AA-"\r\n\r\nabc\r\n'
    form += b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    created = httpx.post(f"{served.url}/files", headers=more, content=form).json()
    assert created["filename"] == "+2AA-", "decoded as UTF-7, the name would be a lone surrogate"
    client.files.delete(created["id"])


@pytest.mark.parametrize("path", ["files", "audio/transcriptions"])
def test_stalled_upload_gets_408(served: Served, path: str) -> None:
    """The client stops sending. The server responds with 408 and closes the connection."""
    address = served.root.rpartition("/")[2].split(":")
    head = [f"POST /v1/{path} HTTP/1.1", "host: x", f"authorization: Bearer {KEYS[0]}", "content-length: 5000"]
    head += ["content-type: multipart/form-data; boundary=x", "", "--x", "content-disposition: form-data; name=file"]
    with socket.create_connection((address[0], int(address[1])), timeout=60) as connection:
        connection.sendall("\r\n".join(head).encode())
        received = b""
        while more := connection.recv(2**16):
            received += more
    status, _, body = received.partition(b"\r\n\r\n")
    assert status.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["message"] == "body: nothing was received for 3 seconds"


def test_batch_separates_answers_from_errors(client: openai.OpenAI, served: Served) -> None:
    lines = [line(f"q{i}") for i in range(20)]
    created = create_batch(
        client, *lines, line("wrong", temperature=-1), line("nobody", model="nobody"), line("mine", model="default")
    )
    assert created.status == "validating" and created.metadata == {"a": "b"}
    batch = wait_until_ended(client, created.id)
    assert batch.status == "completed" and batch.completed_at and batch.in_progress_at
    assert batch.request_counts and batch.request_counts.to_dict() == {"total": 23, "completed": 21, "failed": 2}
    good, bad = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert set(good) == {f"q{i}" for i in range(20)} | {"mine"}
    for result in good.values():
        assert ANSWER in result["response"]["body"]["choices"][0]["message"]["content"]
    assert "temperature" in bad["wrong"]["response"]["body"]["error"]["message"]
    assert bad["nobody"]["response"]["status_code"] == 404
    assert [listed.id for listed in client.batches.list(limit=1)][:1] == [batch.id]
    with pytest.raises(openai.NotFoundError):
        client_of(served, KEYS[1]).batches.retrieve(batch.id)


def test_batch_of_embeddings_or_completions_completes(client: openai.OpenAI) -> None:
    texts = [
        json.dumps({"custom_id": f"{i}", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}})
        for i in range(3)
    ]
    prompt = json.dumps(
        {"custom_id": "0", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}}
    )
    batches = [
        create_batch(client, *texts, endpoint="/v1/embeddings"),
        create_batch(client, prompt, endpoint="/v1/completions"),
    ]
    for batch in (wait_until_ended(client, created.id) for created in batches):
        assert batch.status == "completed" and batch.error_file_id is None
        assert results(client, batch.output_file_id)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["{"], "invalid_line"),
        ([line("a"), line("a")], "duplicate_custom_id"),
        ([line("a", url="/v1/embeddings")], "mismatched_endpoint"),
        ([""], "empty_file"),
    ],
)
def test_batch_of_malformed_file_fails_with_code(client: openai.OpenAI, lines: list[str], code: str) -> None:
    batch = wait_until_ended(client, create_batch(client, *lines).id)
    assert batch.status == "failed" and batch.errors and batch.errors.data
    assert batch.errors.data[0].code == code


def test_batch_with_invalid_arguments_is_rejected(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="input_file_id"):
        client.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
    file = client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
    for fields in ({"endpoint": "/v1/moderations"}, {"completion_window": "1h"}):
        with pytest.raises(openai.BadRequestError):
            client.batches.create(**{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields)  # type: ignore[arg-type]


def test_cancelled_batch_stops_early(client: openai.OpenAI) -> None:
    long = {"max_tokens": 1900, "min_tokens": 1900, "temperature": 1}
    created = create_batch(client, *[line(f"{i}", **long) for i in range(100)])
    wait_until(client, created.id, lambda batch: batch.status == "in_progress")
    assert client.batches.cancel(created.id).status == "cancelling"
    batch = wait_until_ended(client, created.id)
    assert batch.status == "cancelled" and batch.cancelled_at
    with pytest.raises(openai.BadRequestError, match="can no longer be cancelled"):
        client.batches.cancel(batch.id)
    assert batch.request_counts and batch.request_counts.completed < 100


def test_failing_batch_does_not_block_other_batches(client: openai.OpenAI, served: Served) -> None:
    waits = create_batch(client, *[line(f"{i}", max_tokens=100, min_tokens=100) for i in range(40)])
    broken = create_batch(client_of(served, KEYS[1]), line("a"), line("b"))
    odd = json.dumps(
        {"custom_id": "odd", "method": "POST", "url": CHAT, "body": {"model": "X", "messages": []}}
    ).encode()
    file = client.files.create(file=("odd", odd.replace(b"X", b"\xff")), purpose="batch")
    not_utf8 = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    gone = create_batch(client, line("a"))
    client.files.delete(gone.input_file_id)
    lost = wait_until_ended(client, gone.id)
    if lost.status != "completed":  # a completed batch has read its file before the deletion
        assert lost.status == "failed" and lost.errors and lost.errors.data
        assert lost.errors.data[0].code == "input_file_not_found"
    assert wait_until_ended(client, not_utf8.id).status in ("completed", "failed")
    assert wait_until_ended(client_of(served, KEYS[1]), broken.id).status == "completed"
    assert wait_until_ended(client, waits.id).status == "completed"


def test_batch_completes_while_engine_is_busy(tmp_path: Path) -> None:
    """Lines of the batch wait while the engine's queue is full; none is lost."""
    flags = ["--storage-dir", str(tmp_path), "--max-num-seqs", "2", "--max-waiting", "1", "--batch-concurrency", "4"]
    with Served(*flags) as server:
        client = client_of(server, "none")
        created = create_batch(client, *[line(f"{i}", max_tokens=30, min_tokens=30) for i in range(30)])
        busy = 0
        while client.batches.retrieve(created.id).status not in DONE:
            body = {"prompt": "a", "max_tokens": 50}
            busy += httpx.post(f"{server.url}/completions", json=body, timeout=60).status_code != 0
        batch = client.batches.retrieve(created.id)
        assert busy and batch.request_counts and batch.request_counts.completed == 30


def test_stored_files_are_readable_by_owner_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with Served("--storage-dir", str(tmp_path)) as server:
        client_of(server, "none").files.create(file=("x", b"x"), purpose="batch")
        readable = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
        assert [path.name for path in readable if path.suffix not in (".db-wal", ".db-shm")] == []


LINES = 20
"""Number of lines: more than the API process completes before it is killed."""


def test_batch_continues_after_api_process_is_killed(tmp_path: Path) -> None:
    """The restarted API process computes the remaining lines; no line is answered twice."""
    with Served(
        "--storage-dir", str(tmp_path), "--num-gpu-blocks-override", "400", "--batch-concurrency", "2"
    ) as server:
        client = client_of(server, "none")
        created = create_batch(client, *[line(f"q{i}", max_tokens=200, min_tokens=200) for i in range(LINES)])
        partial = tmp_path / "files" / f"{created.id}.partial"
        deadline = time.monotonic() + 60
        while not partial.exists() or not partial.stat().st_size:
            assert time.monotonic() < deadline
        os.kill(server.pids["api"][0], signal.SIGKILL)
        while True:
            try:
                batch = wait_until_ended(client, created.id)
                break
            except (openai.APIConnectionError, openai.InternalServerError):
                assert time.monotonic() < deadline + 60
        assert batch.request_counts and batch.request_counts.completed == LINES
        texts = client.files.content(batch.output_file_id or "").text.splitlines()
        assert sorted(json.loads(text)["custom_id"] for text in texts) == sorted(f"q{i}" for i in range(LINES))
        assert not partial.exists()
