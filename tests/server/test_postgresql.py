"""What is stored in PostgreSQL: a real one, which several API processes and servers share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Served

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
pytestmark = pytest.mark.skipif(
    not BINARIES or find_spec("psycopg") is None, reason="needs PostgreSQL and psycopg (apt install postgresql)"
)
PLAIN: dict[str, Any] = {"model": "default", "temperature": 0, "max_output_tokens": 30}
CAPITAL, ANSWER = "What is the capital of Canada?", "Ottawa"
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 2}}
QUOTA = "files=4,responses=6,conversations=2,batches=2"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of an empty database of a server of its own, over a socket in its folder. It does not run as root."""
    other = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
    folder = Path(tempfile.mkdtemp())
    if other:
        shutil.chown(folder, "postgres", "postgres")
    try:
        run = {"check": True, "capture_output": True, "cwd": folder}
        new = [*other, BINARIES[-1] / "initdb", "--auth=trust", "--username=penstock", "--no-sync", folder / "data"]
        subprocess.run(new, **run)  # type: ignore[call-overload]
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        control = [*other, BINARIES[-1] / "pg_ctl", "--pgdata", folder / "data", "--log", folder / "log", "--wait"]
        subprocess.run([*control, "--options", options, "start"], **run)  # type: ignore[call-overload]
        try:
            yield f"postgresql+psycopg://penstock@/postgres?host={folder}"
        finally:
            subprocess.run([*control, "--mode", "immediate", "stop"], **run)  # type: ignore[call-overload]
    finally:
        shutil.rmtree(folder)


def serve(url: str, folder: Path, *flags: str) -> Served:
    common = ("--num-gpu-blocks-override", "200", "--max-num-seqs", "4")
    return Served("--storage-url", url, "--storage-dir", str(folder), *common, *flags)


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def test_everything_that_is_stored(url: str, tmp_path: Path) -> None:
    """By one of two servers that share database and folder, and found by the other. Four processes begin with an empty
    database at the same moment."""
    with ThreadPoolExecutor(2) as pool:
        servers = [serve(url, tmp_path, "--api-server-count", "2", "--storage-quota", QUOTA) for _ in range(2)]
        try:
            list(pool.map(Served.__enter__, servers))
            one, two = map(client_of, servers)
            check_responses(one, two)
            check_conversations(one, two)
            check_files_and_batches(one, two)
            check_texts_that_it_does_not_take(one)
            page = httpx.get(f"{servers[0].root}/metrics").text
            assert 'penstock:storage_responses{tenant=""} 6.0' in page
        finally:
            for server in servers:
                server.__exit__(*sys.exc_info())


def check_responses(one: openai.OpenAI, two: openai.OpenAI) -> None:
    first = one.responses.create(**PLAIN, input=CAPITAL)
    assert two.responses.retrieve(first.id) == first and ANSWER in first.output_text
    second = two.responses.create(**PLAIN, input="What did I ask?", previous_response_id=first.id)
    begun = one.responses.create(**PLAIN, input=CAPITAL, background=True)
    while (ended := two.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
        pass
    assert ended.output_text == first.output_text
    two.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        one.responses.retrieve(second.id)


def check_texts_that_it_does_not_take(client: openai.OpenAI) -> None:
    """PostgreSQL takes no zero byte, which is the sender's mistake, and no failure of the server."""
    for path in ("files/%00", "responses/a%00b", "conversations/%00", "batches/%00"):
        answer = httpx.get(f"{client.base_url}{path}")
        assert answer.status_code == 400 and "rejects a value" in answer.text


def check_conversations(one: openai.OpenAI, two: openai.OpenAI) -> None:
    conversation = one.conversations.create(metadata={"a": "b"}).id
    answer = two.responses.create(**PLAIN, input=CAPITAL, conversation=conversation)
    items: Any = list(one.conversations.items.list(conversation, order="asc"))
    assert [item.content[0].text for item in items] == [CAPITAL, answer.output_text]
    two.conversations.items.delete(items[0].id, conversation_id=conversation)
    assert [item.id for item in one.conversations.items.list(conversation)] == [items[1].id]

    def begun(client: openai.OpenAI) -> bool:
        try:
            return bool(client.conversations.create().id)
        except openai.BadRequestError as error:
            assert "2 conversations" in str(error)
            return False

    with ThreadPoolExecutor(8) as pool:  # there is room for one
        assert sum(pool.map(begun, [one, two] * 8)) == 1
    for client in (one, two, one):
        assert client.responses.create(**PLAIN, input=CAPITAL).store
    with pytest.raises(openai.BadRequestError, match="6 responses"):
        two.responses.create(**PLAIN, input=CAPITAL, store=True)


def check_files_and_batches(one: openai.OpenAI, two: openai.OpenAI) -> None:
    file = one.files.create(file=("in.jsonl", json.dumps(LINE).encode()), purpose="batch")
    batch = two.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    while (ended := one.batches.retrieve(batch.id)).status not in ("completed", "failed"):
        pass
    assert ended.output_file_id and json.loads(two.files.content(ended.output_file_id).text)["custom_id"] == "a"


@pytest.mark.thorough
def test_a_database_of_an_earlier_version(url: str, tmp_path: Path) -> None:
    """Processes that start at the same moment add a column once."""
    import psycopg

    connect = url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(connect) as database:
        database.execute("alter table responses drop column size cascade")
    with serve(url, tmp_path, "--api-server-count", "3") as server:
        client = client_of(server)
        kept = client.responses.create(**PLAIN, input=CAPITAL)
        assert client.responses.retrieve(kept.id) == kept


@pytest.mark.thorough
def test_a_database_that_goes_away(url: str, tmp_path: Path) -> None:
    """Requests that need it are told so; others are answered. It is back, and nobody has to start anything."""
    import psycopg

    connect = url.replace("postgresql+psycopg", "postgresql")
    with serve(url, tmp_path) as server:
        client = client_of(server)
        kept = client.responses.create(**PLAIN, input=CAPITAL)
        with psycopg.connect(connect, autocommit=True) as database:
            others = "from pg_stat_activity where pid != pg_backend_pid() and backend_type = 'client backend'"
            database.execute(f"select pg_terminate_backend(pid) {others}")
        assert client.responses.retrieve(kept.id) == kept
        with psycopg.connect(connect, autocommit=True) as database:
            database.execute("alter table responses rename to hidden")
            with pytest.raises(openai.APIStatusError, match="database does not answer") as failed:
                client.responses.retrieve(kept.id)
            assert failed.value.status_code == 503
            answered = client.responses.create(**PLAIN, input=CAPITAL)
            assert ANSWER in answered.output_text and answered.store is False
            assert httpx.get(f"{server.root}/metrics").status_code == 200
            database.execute("alter table hidden rename to responses")
        assert client.responses.retrieve(kept.id) == kept
