"""Load from one client: limits of body size, elements and memory, fair turns in the event loop, streams of others."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import load_storm
import pytest
from attacks import Victim, peak_memory
from load_storm import MIB, Body
from scripted_engine import scripted_server
from serving import Served
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from penstock import demo
from penstock.core import Code, PenstockError
from penstock.frontend.fair_queue import FairQueue
from penstock.serve.http import body as http_body
from penstock.serve.http.body import BodyParser, ElementCount
from penstock.serve.http.body_memory import MAX_WAITING_OF_CLIENT, BodyMemory, Reservation
from penstock.serve.shared_result import SharedResult

A, B = {"authorization": "Bearer key-a"}, {"authorization": "Bearer key-b"}
JSON = {"content-type": "application/json"}
ROOM = ("--num-gpu-blocks-override", "2000")
GAP = 0.5
"""Maximum pause of a stream in seconds, on an otherwise idle machine."""
MAX_GROWTH = 1024
"""Maximum memory growth of a process over its idle size, in MiB."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Server with all optional routes."""
    storage = ("--storage-dir", str(tmp_path_factory.mktemp("storage")), "--server-dev-mode")
    keys = ("--api-key", "key-a,key-b", "--admin-api-key", "key-a", "--allow-runtime-lora-updating")
    with Served(*ROOM, *keys, *storage, "--grpc-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def paths(served: Served) -> dict[str, dict[str, Any]]:
    """Paths of the routes that accept JSON bodies, with the schemas of their requests."""
    return load_storm.json_paths(httpx.get(f"{served.root}/openapi.json", headers=A).json())


# --- Counting elements ----------------------------------------------------------------------------------------------

SCALARS = (None, True, 1, -1.5, "", "a,b{[:", "\\", '\\\\"', '"', '\u00e9\U0001f600\\"{', '\\\\\\"{,')


def draw_document(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.random()
    if depth > 4 or kind < 0.5:
        return draw.choice(SCALARS)
    if kind < 0.75:
        return [draw_document(draw, depth + 1) for _ in range(draw.randrange(5))]
    return {f"{draw.choice(SCALARS)}{i}": draw_document(draw, depth + 1) for i in range(draw.randrange(5))}


def elements(document: Any) -> Counter[str]:
    count: Counter[str] = Counter()
    if isinstance(document, dict | list):
        count += Counter(objects=1, values=max(len(document) - 1, 0))
        for inner in document.values() if isinstance(document, dict) else document:
            count += elements(inner)
    if isinstance(document, dict):
        count += Counter(members=len(document))
    return count


def test_elements_are_counted_without_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(41)
    for _ in range(3000):
        document = draw_document(draw)
        text = json.dumps(document, ensure_ascii=draw.random() < 0.5).encode()
        monkeypatch.setattr(http_body, "CHUNK_SIZE", draw.choice((1, 2, 3, 7, 64)))
        count = ElementCount()
        count.add(text)
        expected = elements(document)
        memory = http_body.OBJECT_BYTES * expected["objects"]
        assert count.memory == memory + http_body.VALUE_BYTES * (expected["members"] + expected["values"]), text


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (b"[" + b"[]," * 2**16 + b"[]]", "65536 objects and arrays"),
        (b"{" + b'"a":1,' * 2**18 + b'"b":1}', "262144 members of objects"),
        (b"[" + b"1," * (2**20 + 1) + b"1]", "1048576 values"),
        (b'""' * (2**20 + 2**18 + 1), "1310720 strings"),
    ],
)
def test_text_with_too_many_elements_is_refused(text: bytes, limit: str) -> None:
    with pytest.raises(PenstockError, match=f"has more than {limit}"):
        ElementCount().add(text)


@pytest.mark.parametrize("character", ["\U0001f600", "\\ud83d\\ude00", "\u00e9"])
@pytest.mark.parametrize("position", ["begin", "end"])
def test_long_text_must_be_ascii(character: str, position: str) -> None:
    """ASCII strings may be longer (base64), because other text takes several bytes per character when decoded."""
    long = "a" * (http_body.MAX_WIDE_TEXT + 2**18)
    ElementCount().add(f'["{character}", "{long}", "{character}"]'.encode())
    ElementCount().add(f'["{character * 1000}{long[: 2**23]}"]'.encode())
    text = character + long if position == "begin" else long + character * 2**15
    with pytest.raises(PenstockError, match="a string of more than 16777216 bytes that is not ASCII"):
        ElementCount().add(f'{{"a": "x", "b": "{text}"}}'.encode())


def test_elements_of_several_texts_are_counted_together() -> None:
    count = ElementCount("arguments")
    with pytest.raises(PenstockError, match="arguments: has more than 1048576 values"):
        for _ in range(17):
            count.add(b"[" + b"1," * 2**16 + b"1]")


# --- Memory of bodies -----------------------------------------------------------------------------------------------


def test_memory_of_bodies_stays_within_limits_and_is_freed() -> None:
    asyncio.run(random_reservations(random.Random(41)))


async def random_reservations(draw: random.Random) -> None:
    memory, held = BodyMemory(1000), Counter[str]()

    def check() -> None:
        assert held.total() <= memory.used <= 2000  # granted memory is counted before the waiting task continues
        assert all(size <= 1000 for size in held.values()), "no client may exceed its share"

    async def request(client: str) -> None:
        size = draw.randrange(1, 500)
        try:
            reservation = await memory.reserve(client, size, timeout=60)
        except PenstockError as error:
            assert error.failure.code is Code.OVERLOADED
            return
        held[client] += size
        try:
            check()
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
                new = draw.randrange(1, 700)
                try:
                    reservation.resize(new, parsed=True)
                except PenstockError:
                    continue
                held[client] += new - size
                size = new
                check()
        finally:
            held[client] -= size
            reservation.release()
            reservation.release()

    for _ in range(30):
        tasks = [asyncio.create_task(request(draw.choice("abc"))) for _ in range(draw.randrange(1, 200))]
        for task in draw.sample(tasks, len(tasks) // 4):
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [result for result in results if isinstance(result, Exception)]
        assert memory.used == 0
        (await memory.reserve("d", 1000, timeout=0)).release()  # fails if a task still waits for memory


def test_body_waits_for_memory_until_timeout() -> None:
    async def run() -> None:
        memory = BodyMemory(1000)
        first = await memory.reserve("a", 500, timeout=1)
        with pytest.raises(PenstockError, match="there is no room for 1 more of 1000"):
            await memory.reserve("a", 1, timeout=0)
        other = await memory.reserve("b", 500, timeout=0)
        waiting = asyncio.create_task(memory.reserve("a", 400, timeout=60))
        await asyncio.sleep(0)
        first.release()
        (await waiting).release()
        other.release()
        assert memory.used == 0

    asyncio.run(run())


def test_body_larger_than_client_share_is_accepted_alone() -> None:
    async def run() -> None:
        memory = BodyMemory(1000)
        (await memory.reserve("a", 3000, timeout=0)).release()
        growing = Reservation(memory, "a")
        growing.resize(5000, parsed=True)
        growing.release()
        assert memory.used == 0

    asyncio.run(run())


def test_one_client_cannot_fill_waiting_queue() -> None:
    async def run() -> None:
        memory = BodyMemory(1000)
        first = await memory.reserve("a", 1000, timeout=0)
        waiting = [asyncio.create_task(memory.reserve("a", 1, timeout=60)) for _ in range(MAX_WAITING_OF_CLIENT)]
        await asyncio.sleep(0)
        with pytest.raises(PenstockError, match="there is no room"):
            await asyncio.wait_for(memory.reserve("a", 1, timeout=60), 30)
        other = asyncio.create_task(memory.reserve("b", 1, timeout=60))
        await asyncio.sleep(0)
        first.release()
        for reservation in await asyncio.gather(other, *waiting):
            reservation.release()
        assert memory.used == 0

    asyncio.run(run())


def test_joined_reservations_are_released_together() -> None:
    async def run() -> None:
        memory = BodyMemory(1000)
        body, items = await memory.reserve("a", 100, timeout=0), await memory.reserve("a", 300, timeout=0)
        joined = body.joined(items)
        body.release()
        items.release()
        assert memory.used == joined.size == 400
        joined.release()
        assert memory.used == 0

    asyncio.run(run())


def test_memory_of_body_is_freed_before_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only memory of the prompt is still reserved. This template drops the text, just as image data is dropped."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    short, text = "{{ messages | length }}", "x" * 100_000

    async def run() -> None:
        async with scripted_server(chat_template=short) as server:
            server.say("Yes.")
            used: list[int] = []
            add = server.engines.add
            monkeypatch.setattr(
                server.engines, "add", lambda request: (used.append(server.body_memory.used), add(request))
            )
            for path, fields in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
                ("/v1/messages", {"messages": [{"role": "user", "content": text}], "max_tokens": 9}),
                ("/v1/responses", {"input": text}),
                ("/api/chat", {"messages": [{"role": "user", "content": text}]}),
            ):
                answer = await server.http.post(path, json={"model": "default", **fields})
                assert answer.status_code == 200, answer.text
                assert 0 < used[-1] < 1000, path
                assert server.body_memory.used == 0
            assert len(used) == 4

    asyncio.run(run())


# --- Turns ----------------------------------------------------------------------------------------------------------


def test_fair_queue_runs_one_task_per_iteration_in_turn() -> None:
    async def run() -> list[str]:
        queue, order = FairQueue(), []
        iteration = 0

        async def work(client: str) -> None:
            await queue.wait_turn(client)
            order.append((iteration, client))

        tasks = [asyncio.create_task(work(client)) for client in "aaaaabc"]
        while not all(task.done() for task in tasks):
            iteration += 1
            await asyncio.sleep(0)
        assert len({turn for turn, _ in order}) == len(tasks), "each iteration must run one task"
        return [client for _, client in order]

    assert asyncio.run(run()) == [*"aabcaaa"]


def test_large_bodies_are_parsed_one_at_a_time_in_client_turns() -> None:
    async def run() -> list[str]:
        parser, order, running = BodyParser(), [], []

        def work(client: str) -> None:
            running.append(client)
            assert len(running) == 1
            order.append(running.pop())

        large = http_body.MAX_INLINE_SIZE + 1
        parses = [parser.parse(client, large, lambda client=client: work(client)) for client in "aaaabc"]
        tasks = [asyncio.create_task(parse) for parse in parses]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return order

    assert asyncio.run(run()) == [*"aabca"]


def test_shared_result_is_never_older_than_call() -> None:
    async def run() -> None:
        computations = 0

        async def compute() -> int:
            nonlocal computations
            computations += 1
            number = computations
            await asyncio.sleep(0)
            return number

        shared = SharedResult(compute, interval=0.0)

        async def ask() -> None:
            before = computations
            assert await shared.get() > before

        async def ask_often() -> None:
            for _ in range(5):
                await ask()

        await asyncio.gather(*(ask_often() for _ in range(200)))
        assert computations < 20, "the 1000 calls must share computations"

    asyncio.run(run())


# --- Limits of every endpoint ---------------------------------------------------------------------------------------


def test_every_endpoint_refuses_too_many_elements_in_its_format(
    served: Served, paths: dict[str, dict[str, Any]]
) -> None:
    body = b'{"a":[' + b"[]," * 2**16 + b"[]]}"
    with httpx.Client(headers=A | JSON, timeout=60) as client:
        for path in paths:
            answer = client.post(served.root + path.replace("{name}", "ensemble"), content=body)
            assert answer.status_code in (400, 404, 422), (path, answer.text)
            if answer.status_code != 404:  # 404: the path names a missing object
                assert "has more than 65536 objects and arrays" in answer.text, (path, answer.text)
    assert not [line for line in served.lines if "Traceback" in line]


def test_every_endpoint_refuses_a_large_body_without_reading_it(
    served: Served, paths: dict[str, dict[str, Any]]
) -> None:
    host, _, port = served.root.rpartition("/")[2].rpartition(":")
    for path in paths:
        name = path.replace("{name}", "ensemble").replace("{version}", "1")
        with socket.create_connection((host, int(port))) as connection:
            head = (
                f"POST {name} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-a\r\ncontent-length: {100 * MIB}\r\n\r\n"
            )
            connection.sendall(head.encode())
            status = connection.recv(2**16).split(b" ")[1]
        assert status in (b"413", b"404", b"422"), (path, status)


def test_schema_text_beyond_limit_is_refused(served: Served) -> None:
    schema = '{"properties":{"a":[' + "1," * 300_000 + "1]}}"
    for body in (
        {"prompt": "a", "guided_json": schema},
        {"prompt": "a", "structured_outputs": {"json": schema}},
        {"prompt": "a", "structural_tag": schema},
    ):
        answer = httpx.post(f"{served.url}/completions", json=body, headers=A, timeout=60)
        assert answer.status_code == 400 and "at most 65536 characters" in answer.text, answer.text


def test_arguments_of_all_calls_are_limited_together(served: Served) -> None:
    arguments = '{"a":[' + "[]," * 4000 + "[]]}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call] * 20}]
    answer = httpx.post(f"{served.url}/chat/completions", json={"messages": messages}, headers=A, timeout=60)
    assert answer.status_code == 400 and "has more than 65536 objects and arrays" in answer.text
    assert "arguments" in answer.json()["error"]["message"]


def test_form_with_many_or_long_fields_is_refused(served: Served) -> None:
    file = {"file": ("a.jsonl", b"{}")}
    for fields, message in (
        ({f"f{i}": "a" for i in range(190)}, "Too many fields"),
        ({"purpose": "a" * 100_000}, "Part exceeded maximum size"),
    ):
        answer = httpx.post(f"{served.url}/files", data=fields, files=file, headers=A)
        assert answer.status_code == 400 and message in answer.text, answer.text


def test_batch_line_with_too_many_elements_gets_an_error(served: Served) -> None:
    body = {"prompt": [[1]] * 70_000, "max_tokens": 1}
    lines = [{"custom_id": "many", "body": body}, {"custom_id": "one", "body": {"prompt": "a", "max_tokens": 1}}]
    text = "\n".join(json.dumps({"method": "POST", "url": "/v1/completions"} | line) for line in lines)
    with httpx.Client(base_url=served.url, headers=A, timeout=60) as client:
        file = client.post("/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", text)}).json()
        request = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/batches", json=request).json()
        while (batch := client.get(f"/batches/{batch['id']}").json())["status"] != "completed":
            time.sleep(0.05)
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert "has more than 65536 objects" in client.get(f"/files/{batch['error_file_id']}/content").text


# --- gRPC -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "message"), [(1.5, "the maximum is 1048576"), (3, "larger than max")])
def test_grpc_message_beyond_the_limit_is_refused(served: Served, size: float, message: str) -> None:
    request = pb.ModelInferRequest(model_name="ensemble", raw_input_contents=[b"x" * int(size * MIB)])
    with grpc.insecure_channel(served.find(r"gRPC at (\S+)")[1]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(request, metadata=list(A.items()))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert message in refused.value.details()


def test_grpc_limit_depends_on_context_length_and_option(tmp_path: Path) -> None:
    """The limit is 64 bytes per token: 4 MiB for a context of 65,536 tokens. It is set when the engine is ready."""
    shutil.copytree(demo.DRAFT, folder := tmp_path / "long")
    configuration = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 2**16}
    (folder / "config.json").write_text(json.dumps(configuration))
    request = pb.ModelInferRequest(model_name="ensemble", raw_input_contents=[b"x" * (3 * MIB)])
    for flags in (("--model", str(folder)), ("--max-body-size", str(4 * MIB))):
        with (
            Served("--num-gpu-blocks-override", "5000", "--grpc-port", "0", *flags) as server,
            grpc.insecure_channel(server.find(r"gRPC at (\S+)")[1]) as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()


# --- Memory of a server's bodies ------------------------------------------------------------------------------------


def test_bodies_wait_for_memory_and_are_answered() -> None:
    """An incomplete body reserves its client's memory: the client's other body waits until the first is complete."""
    content = json.dumps({"prompt": "a", "max_tokens": 1, "user": "a" * 300_000}).encode()
    with Served(*ROOM, "--max-body-memory", "1000000", "--client-timeout", "20") as server:
        host, _, port = server.root.rpartition("/")[2].rpartition(":")
        address, head = (host, int(port)), b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
        with socket.create_connection(address) as first, socket.create_connection(address) as second:
            length = b"content-length: %d\r\n\r\n" % len(content)
            first.sendall(head + length + content[:-1])
            second.sendall(head + length + content)
            second.settimeout(1)
            with pytest.raises(TimeoutError):
                second.recv(1)
            with httpx.stream("POST", f"{server.url}/completions", content=iter([content]), timeout=60) as chunked:
                assert chunked.status_code == 429 and chunked.headers["retry-after"]
                assert "there is no room for" in json.loads(chunked.read())["error"]["message"]
            first.sendall(content[-1:])
            for connection in (first, second):
                connection.settimeout(60)
                assert connection.recv(2**16).startswith(b"HTTP/1.1 200")


# --- Streams under load ----------------------------------------------------------------------------------------------


class MemoryGrowth:
    """Growth of the peak memory of a server's API and engine processes since construction."""

    def __init__(self, served: Served) -> None:
        self._pids = [*served.pids["api"], *served.pids["engine"]]
        self._idle = [peak_memory(pid) for pid in self._pids]

    def check(self) -> None:
        growth = [peak_memory(pid) - idle for pid, idle in zip(self._pids, self._idle, strict=True)]
        assert max(growth) <= MAX_GROWTH, growth


def bodies_by_path(paths: dict[str, dict[str, Any]], size: int) -> dict[str, list[Body]]:
    draw = random.Random(41)
    return {path: [*load_storm.bodies(path, schema, size, draw)] for path, schema in paths.items()}


@pytest.mark.thorough
def test_streams_do_not_pause_for_the_largest_bodies_of_any_endpoint(
    served: Served, paths: dict[str, dict[str, Any]]
) -> None:
    growth, gaps = MemoryGrowth(served), {}
    for path, bodies in bodies_by_path(paths, MIB).items():
        with Victim(served, B) as victim:
            load_storm.in_subprocess(load_storm.send, served.root, A | JSON, bodies, 4, 1)
        gaps[path] = victim.gap
    assert {path: gap for path, gap in gaps.items() if gap > GAP} == {}
    growth.check()


@pytest.mark.thorough
def test_streams_do_not_pause_for_many_bodies(served: Served, paths: dict[str, dict[str, Any]]) -> None:
    """For each endpoint, 100 connections send a body of 1 MB with one large field."""
    growth, gaps, draw = MemoryGrowth(served), {}, random.Random(42)
    for path, bodies in bodies_by_path(paths, MIB).items():
        with Victim(served, B) as victim:
            load_storm.in_subprocess(load_storm.send, served.root, A | JSON, [draw.choice(bodies)], 100, 100)
        gaps[path] = victim.gap
    assert {path: gap for path, gap in gaps.items() if gap > GAP} == {}
    growth.check()


@pytest.mark.thorough
def test_streams_do_not_pause_with_64_mib_bodies(paths: dict[str, dict[str, Any]]) -> None:
    with Served(*ROOM, "--api-key", "key-a,key-b", "--max-body-size", str(64 * MIB)) as server:
        growth, gaps = MemoryGrowth(server), {}
        for path, bodies in bodies_by_path(paths, 64 * MIB).items():
            if not path.startswith("/v1/") or path.startswith(("/v1/responses/", "/v1/conversations")):
                continue
            chosen = [body for body in bodies if body.name.startswith(("messages", "prompt", "input", "refused"))]
            with Victim(server, B) as victim:
                load_storm.in_subprocess(load_storm.send, server.root, A | JSON, chosen, 4, 1)
            gaps[path] = victim.gap
        with Victim(server, B) as victim:
            load_storm.in_subprocess(load_storm.send, server.root, A | JSON, [chosen[0]], 30, 30)
        gaps["30 connections"] = victim.gap
        assert {path: gap for path, gap in gaps.items() if gap > GAP} == {}
        growth.check()


@pytest.mark.thorough
def test_streams_do_not_pause_for_bursts_of_cheap_requests(served: Served) -> None:
    """For each GET path, 1000 connections are open at the same time."""
    document = httpx.get(f"{served.root}/openapi.json", headers=A).json()
    known = [path for path, methods in document["paths"].items() if "get" in methods and "{" not in path]
    readable = [path for path in known if path not in ("/clear_load_weight", "/update_model_weight")]
    growth, gaps = MemoryGrowth(served), {}
    for path in readable:
        with Victim(served, B) as victim:
            load_storm.in_subprocess(load_storm.count_ok, served.root, A, path, 1000)
        gaps[path] = victim.gap
    assert {path: gap for path, gap in gaps.items() if gap > GAP} == {}
    growth.check()


@pytest.mark.thorough
def test_streams_do_not_pause_for_forms_and_messages(served: Served) -> None:
    """The load is 10 forms with 190 fields of 1 MB, and 40 gRPC messages of 60 MB."""
    growth = MemoryGrowth(served)
    with Victim(served, B) as victim:
        load_storm.in_subprocess(load_storm.send_forms, served.url, A, 10)
        load_storm.in_subprocess(load_storm.send_messages, served.find(r"gRPC at (\S+)")[1], A, 40, 60 * MIB)
        load_storm.in_subprocess(load_storm.send_messages, served.find(r"gRPC at (\S+)")[1], A, 400, MIB - 100)
    assert victim.gap <= GAP
    growth.check()
