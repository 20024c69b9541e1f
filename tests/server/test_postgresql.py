"""Storage in a PostgreSQL database shared by several API processes and servers."""

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
    """URL of an empty database on a new PostgreSQL server, which listens on a Unix socket and does not run as root."""
    as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
    folder = Path(tempfile.mkdtemp())
    if as_user:
        shutil.chown(folder, "postgres", "postgres")
    try:
        run = {"check": True, "capture_output": True, "cwd": folder}
        new = [*as_user, BINARIES[-1] / "initdb", "--auth=trust", "--username=penstock", "--no-sync", folder / "data"]
        subprocess.run(new, **run)  # type: ignore[call-overload]
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        control = [*as_user, BINARIES[-1] / "pg_ctl", "--pgdata", folder / "data", "--log", folder / "log", "--wait"]
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


def test_servers_share_stored_objects(url: str, tmp_path: Path) -> None:
    """Two servers share a database and a folder. Each finds the objects stored by the other. All four API processes
    start at the same time with an empty database."""
    with ThreadPoolExecutor(2) as pool:
        servers = [serve(url, tmp_path, "--api-server-count", "2", "--storage-quota", QUOTA) for _ in range(2)]
        try:
            list(pool.map(Served.__enter__, servers))
            first, second = map(client_of, servers)
            check_responses(first, second)
            check_conversations(first, second)
            check_files_and_batches(first, second)
            check_zero_bytes_are_refused(first)
            page = httpx.get(f"{servers[0].root}/metrics").text
            assert 'penstock:storage_responses{tenant=""} 6.0' in page
        finally:
            for server in servers:
                server.__exit__(*sys.exc_info())


def check_responses(one: openai.OpenAI, two: openai.OpenAI) -> None:
    first = one.responses.create(**PLAIN, input=CAPITAL)
    assert two.responses.retrieve(first.id) == first and ANSWER in first.output_text
    second = two.responses.create(**PLAIN, input="What did I ask?", previous_response_id=first.id)
    background = one.responses.create(**PLAIN, input=CAPITAL, background=True)
    while (response := two.responses.retrieve(background.id)).status in ("queued", "in_progress"):
        pass
    assert response.output_text == first.output_text
    two.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        one.responses.retrieve(second.id)


def check_zero_bytes_are_refused(client: openai.OpenAI) -> None:
    """PostgreSQL rejects zero bytes, and the server reports a client error (400) instead of a server error."""
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

    def created(client: openai.OpenAI) -> bool:
        try:
            return bool(client.conversations.create().id)
        except openai.BadRequestError as error:
            assert "2 conversations" in str(error)
            return False

    with ThreadPoolExecutor(8) as pool:  # the quota has room for one more conversation
        assert sum(pool.map(created, [one, two] * 8)) == 1
    for client in (one, two, one):
        assert client.responses.create(**PLAIN, input=CAPITAL).store
    with pytest.raises(openai.BadRequestError, match="6 responses"):
        two.responses.create(**PLAIN, input=CAPITAL, store=True)


def check_files_and_batches(one: openai.OpenAI, two: openai.OpenAI) -> None:
    file = one.files.create(file=("in.jsonl", json.dumps(LINE).encode()), purpose="batch")
    batch = two.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    while (finished := one.batches.retrieve(batch.id)).status not in ("completed", "failed"):
        pass
    assert finished.output_file_id and json.loads(two.files.content(finished.output_file_id).text)["custom_id"] == "a"


@pytest.mark.thorough
def test_database_of_earlier_version_is_migrated(url: str, tmp_path: Path) -> None:
    """API processes that start at the same time add the missing column exactly once."""
    import psycopg

    connect = url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(connect) as database:
        database.execute("alter table responses drop column size cascade")
    with serve(url, tmp_path, "--api-server-count", "3") as server:
        client = client_of(server)
        stored = client.responses.create(**PLAIN, input=CAPITAL)
        assert client.responses.retrieve(stored.id) == stored


@pytest.mark.thorough
def test_server_survives_database_outage(url: str, tmp_path: Path) -> None:
    """Requests that need the database get 503; other requests are answered. The server reconnects without a restart."""
    import psycopg

    connect = url.replace("postgresql+psycopg", "postgresql")
    with serve(url, tmp_path) as server:
        client = client_of(server)
        stored = client.responses.create(**PLAIN, input=CAPITAL)
        with psycopg.connect(connect, autocommit=True) as database:
            others = "from pg_stat_activity where pid != pg_backend_pid() and backend_type = 'client backend'"
            database.execute(f"select pg_terminate_backend(pid) {others}")
        assert client.responses.retrieve(stored.id) == stored
        with psycopg.connect(connect, autocommit=True) as database:
            database.execute("alter table responses rename to hidden")
            with pytest.raises(openai.APIStatusError, match="database does not answer") as unavailable:
                client.responses.retrieve(stored.id)
            assert unavailable.value.status_code == 503
            response = client.responses.create(**PLAIN, input=CAPITAL)
            assert ANSWER in response.output_text and response.store is False
            assert httpx.get(f"{server.root}/metrics").status_code == 200
            database.execute("alter table hidden rename to responses")
        assert client.responses.retrieve(stored.id) == stored
