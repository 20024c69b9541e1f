"""What one client does to harm the others: their streams go on, whole and unchanged, and what it is told."""

from __future__ import annotations

import fcntl
import http.client
import json
import logging
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from attacks import Victim, peak_memory
from serving import Served
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from penstock.config.log_stream import LogHandler
from penstock.config.temporary_folder import TemporaryFolder
from penstock.serve.process.metrics_files import INITIAL_SIZE, AllocatedDict

A, B = {"authorization": "Bearer key-a"}, {"authorization": "Bearer key-b"}
KEYS = ("--api-key", "key-a,key-b")
GAP = 0.5
"""Seconds that a stream may pause beside an attack, on a machine that does nothing else."""
LONG_PROMPT = "The sea is wide, and the ship that sails on it is small. " * 20


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--num-gpu-blocks-override", "4000", "--grpc-port", "0", *KEYS) as server:
        yield server


@pytest.fixture
def stub(served: Served) -> Iterator[Any]:
    with grpc.insecure_channel(served.find(r"gRPC at (\S+)")[1]) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def address_of(served: Served) -> tuple[str, int]:
    host, _, port = served.root.rpartition("/")[2].rpartition(":")
    return host, int(port)


def words(name: str, *elements: bytes) -> dict[str, Any]:
    data = [element.decode() for element in elements]
    return {"name": name, "datatype": "BYTES", "shape": [1, len(data)], "data": data}


def generation(request_id: str, tokens: int, **more: bool) -> Any:
    """A streamed request of KServe's."""
    made = pb.ModelInferRequest(model_name="ensemble", id=request_id)
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"The sea")
    made.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1]).contents.int_contents.append(tokens)
    made.inputs.add(name="end_id", datatype="INT32", shape=[1, 1]).contents.int_contents.append(-1)
    for name, value in more.items():
        made.inputs.add(name=name, datatype="BOOL", shape=[1, 1]).contents.bool_contents.append(value)
    return made


# --- One request that takes long in the server ----------------------------------------------------------------------


def huge_shapes(served: Served) -> None:
    """Their product has a million digits."""
    shape = ",".join(["1" + "0" * 19] * 49_000)
    body = f'{{"inputs":[{{"name":"text_input","datatype":"BYTES","shape":[{shape}],"data":["a"]}}]}}'
    answer = httpx.post(f"{served.root}/v2/models/ensemble/infer", content=body, headers=A)
    assert answer.status_code == 400 and "49000 dimensions" in answer.json()["error"]
    body = '{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[9223372036854775808],"data":["a"]}]}'
    answer = httpx.post(f"{served.root}/v2/models/ensemble/infer", content=body, headers=A)
    assert answer.status_code == 400 and "dimension larger than" in answer.json()["error"]


def many_words(served: Served) -> None:
    """Stop words as long as a request may be, and a bias of the whole vocabulary for each of 256 rows."""
    given = [
        words("QUERY", b"x"),
        {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [1, 1], "data": [1]},
        words("STOP_WORDS_DICT", *[b"w blah kjh askjdh " * 45] * 1000),
    ]
    rows = [256, 1]
    biased: list[dict[str, Any]] = [
        {"name": "QUERY", "datatype": "BYTES", "shape": rows, "data": ["x"] * 256},
        {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": rows, "data": [1] * 256},
        {"name": "EMBEDDING_BIAS_WORDS", "datatype": "BYTES", "shape": rows, "data": ["a"] * 256},
        {"name": "EMBEDDING_BIAS_WEIGHTS", "datatype": "FP32", "shape": rows, "data": [0.5] * 256},
    ]
    for inputs in (given, biased):
        answer = httpx.post(
            f"{served.root}/v2/models/preprocessing/infer", json={"inputs": inputs}, headers=A, timeout=60
        )
        outputs = {output["name"]: output for output in answer.json()["outputs"]}
    bias = outputs["EMBEDDING_BIAS"]
    assert bias["shape"][0] == 256 and max(bias["data"]) == 0.5


def many_numbers(served: Served) -> None:
    """As JSON, which is read element by element."""
    ids = {"name": "input_ids", "datatype": "INT32", "shape": [1, 400_000], "data": [1] * 400_000}
    for _ in range(3):
        answer = httpx.post(f"{served.root}/v2/models/tensorrt_llm/infer", json={"inputs": [ids]}, headers=A)
        assert answer.status_code == 400


def a_large_answer(served: Served, tokens: int = 20) -> None:
    """All log probabilities of 128 sequences, in one piece."""
    body = {"n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": tokens, "temperature": 1, "ignore_eos": True}
    messages = {"messages": [{"role": "user", "content": "a story"}]}
    answer = httpx.post(f"{served.url}/chat/completions", json=body | messages, headers=A, timeout=300)
    assert [len(choice["logprobs"]["content"]) for choice in answer.json()["choices"]] == [tokens] * 128


def endless_grammars(served: Served) -> None:
    """Whose compilation takes ever more memory. One client leaves, one waits for what becomes of it."""
    patterns = [{"pattern": f"[a-z]{{{i}}}.*[0-9]"} for i in range(1, 40)]
    body: dict[str, Any] = {"prompt": "x", "guided_json": {"type": "string", "allOf": patterns}}
    with suppress(httpx.ReadTimeout):
        httpx.post(f"{served.url}/completions", json=body, headers=A, timeout=1)
    body = {"prompt": "x", "guided_regex": "b((a{1000}){1000}){5}"}
    answer = httpx.post(f"{served.url}/completions", json=body, headers=A, timeout=120)
    assert answer.status_code == 400 and "compiling it takes more than" in answer.text


ATTACKS: tuple[Callable[[Served], None], ...] = (
    *(huge_shapes, many_words, many_numbers, a_large_answer),
    endless_grammars,
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_request_does_not_end_the_streams_of_others(served: Served, attack: Callable[[Served], None]) -> None:
    with Victim(served, B):
        attack(served)
    assert not [line for line in served.lines if "Traceback" in line]


@pytest.mark.thorough
@pytest.mark.parametrize("attack", [*ATTACKS, lambda served: a_large_answer(served, 500)])
def test_the_streams_of_others_do_not_pause(served: Served, attack: Callable[[Served], None]) -> None:
    with Victim(served, B) as victim:
        attack(served)
    assert victim.gap <= GAP


# --- What is sent and not read --------------------------------------------------------------------------------------


def test_requests_whose_answers_are_not_read_are_not_read_either(served: Served) -> None:
    """29 MB of them."""
    (process,) = served.pids["api"]
    before, asked = peak_memory(process), b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 1000
    with Victim(served, B), socket.create_connection(address_of(served)) as connection:
        connection.settimeout(1)
        with suppress(TimeoutError):
            for _ in range(1000):
                connection.sendall(asked)
            pytest.fail("all was taken")
    assert peak_memory(process) < before + 64


def test_without_a_key_no_message_is_read(served: Served, stub: Any) -> None:
    """Of the 512 MiB here, the connection's flow control lets a few in."""
    (process,) = served.pids["api"]
    before = peak_memory(process)
    large = pb.ModelInferRequest(model_name="ensemble", raw_input_contents=[b"x" * (32 * 2**20)])
    with Victim(served, B), ThreadPoolExecutor(4) as threads:
        for call in [threads.submit(stub.ModelInfer, large) for _ in range(16)]:
            error = call.exception()
            assert isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert stub.ServerLive(pb.ServerLiveRequest()).live
    assert peak_memory(process) < before + 128


@pytest.mark.thorough
def test_a_stream_that_is_not_read_does_not_grow(served: Served, stub: Any) -> None:
    (process,) = served.pids["api"]
    flags = {"stream": True, "return_log_probs": True}
    requests = [generation(str(number), 1500, **flags) for number in range(64)]
    before = peak_memory(process)
    call = stub.ModelStreamInfer(iter(requests), metadata=list(A.items()))
    next(call)
    with Victim(served, B):
        pass
    deadline = time.monotonic() + 200
    while not re.search(r"penstock:num_requests_running\{.*\} 0\.0", httpx.get(f"{served.root}/metrics").text):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert peak_memory(process) < before + 100
    call.cancel()


NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16)]
"""Options of a client that takes little before it is read from."""


def test_a_stream_that_is_not_read_ends() -> None:
    """With all its requests, each of whose responses repeats a long id."""
    with (
        Served("--num-gpu-blocks-override", "200", "--grpc-port", "0", "--client-timeout", "2") as server,
        grpc.insecure_channel(server.find(r"gRPC at (\S+)")[1], NARROW) as channel,
    ):
        left = threading.Event()

        def requests() -> Iterator[Any]:
            flags = {"stream": True, "return_log_probs": True}
            yield from (generation(f"{i}" + "x" * 20_000, 1500, **flags) for i in range(24))
            left.wait(60)

        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests())
        next(call)
        server.find("ModelStreamInfer id=.* error=timeout reason=.the client read nothing for 2 seconds")
        assert re.search(r"penstock:num_requests_open\{.*\} 0\.0", httpx.get(f"{server.root}/metrics").text)
        left.set()
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_stream_that_repeats_all_its_texts_ends_within_bounds(served: Served) -> None:
    """Which is 40 MB where each of its 60 steps repeats them; the last object has all of them."""
    body = {"prompt": "The sea. " * 550, "n": 128, "max_tokens": 60, "ignore_eos": True, "temperature": 1, "seed": 1}
    url, received = f"{served.root}/generate", 0
    with (
        Victim(served, B),
        httpx.stream("POST", url, json=body | {"stream": True}, headers=A, timeout=120) as answer,
    ):
        for line in answer.iter_lines():
            received += len(line)
    assert received < 1.4 * 2**24
    assert json.loads(line) == httpx.post(url, json=body, headers=A, timeout=120).json()


# --- What belongs to a key ------------------------------------------------------------------------------------------


def cached(url: str, key: dict[str, str], prompt: str, **more: str) -> int:
    body = {"prompt": prompt, "max_tokens": 1, **more}
    usage = httpx.post(f"{url}/completions", json=body, headers=key).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_each_key_has_its_own_cached_prefixes(served: Served) -> None:
    assert cached(served.url, A, LONG_PROMPT) == 0
    assert cached(served.url, A, LONG_PROMPT) > 0
    assert cached(served.url, B, LONG_PROMPT) == 0
    assert cached(served.url, B, LONG_PROMPT) > 0
    assert cached(served.url, A, LONG_PROMPT, cache_salt="x") == 0


def test_keys_share_cached_prefixes_where_the_server_says_so() -> None:
    with Served("--num-gpu-blocks-override", "200", "--share-prefix-cache", *KEYS) as shared:
        assert cached(shared.url, A, LONG_PROMPT) == 0
        assert cached(shared.url, B, LONG_PROMPT) > 0


def test_a_request_id_is_its_keys_alone(served: Served) -> None:
    """Another key may use it, too, and can neither see nor end the first one's."""
    body = {"text": "The sea", "req_id": "mine", "max_dec_len": 1500, "min_dec_len": 1500, "stream": True}
    url = f"{served.url}/chat/completions"
    named = {"x-request-id": "mine"}
    with httpx.stream("POST", url, json=body, headers=A | named, timeout=60) as first:
        lines = first.iter_lines()
        assert first.status_code == 200 and next(lines)
        again = httpx.post(url, json=body | {"stream": False}, headers=A)
        assert again.json()["error_code"] == 400 and "'mine' already exists" in again.text, again.text
        other = httpx.post(url, json=body | {"max_dec_len": 1, "min_dec_len": 1, "stream": False}, headers=B)
        assert not other.json()["error_code"], other.text
        for abort in ({"req_ids": ["mine"]}, {"abort_all": True}):
            result = httpx.post(f"{served.url}/abort_requests", json=abort, headers=B).json()["result"]
            assert not result["aborted"]
        httpx.post(f"{served.root}/abort_requests", json={"request_ids": ["mine"]}, headers=B)
        assert httpx.post(f"{served.url}/abort_requests", json={"req_ids": ["mine"]}, headers=A).json()["result"][
            "aborted"
        ]
        assert "cancelled" in "".join(lines)


def test_stop_ends_requests_of_its_own_key(served: Served, stub: Any) -> None:
    """Though both came over one connection, as through a proxy."""

    def answers(key: dict[str, str], *requests: Any) -> Iterator[Any]:
        return iter(stub.ModelStreamInfer(iter(requests), metadata=list(key.items())))

    def tokens(responses: Iterable[Any]) -> int:
        outputs = [output for response in responses for output in response.infer_response.outputs]
        return sum([output.shape[-1] for output in outputs if output.name == "output_log_probs"])

    mine = answers(A, generation("mine", 1500, stream=True, return_log_probs=True))
    first = next(mine)
    list(answers(B, generation("mine", 1, stop=True)))
    assert tokens([first, *mine]) == 1500


# --- The end of a connection, and of the server ---------------------------------------------------------------------


def completion(tokens: int, **more: Any) -> bytes:
    return json.dumps({"prompt": "The sea", "max_tokens": tokens, "ignore_eos": True, **more}).encode()


def sent(address: tuple[str, int], body: bytes) -> socket.socket:
    """A connection on which a completion is asked for."""
    connection = socket.create_connection(address, timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-a\r\ncontent-length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def heard(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(2**16), b""))


@pytest.mark.parametrize("stream", [False, True])
def test_who_sends_no_more_is_answered(served: Served, stream: bool) -> None:
    """The connection is half closed, and closed after the answer."""
    connection = sent(address_of(served), completion(5, stream=stream))
    connection.shutdown(socket.SHUT_WR)
    answer = heard(connection)
    assert answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in answer


def test_all_that_was_asked_for_before_is_answered(served: Served) -> None:
    with socket.create_connection(address_of(served), timeout=60) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 30)
        connection.shutdown(socket.SHUT_WR)
        assert heard(connection).count(b"HTTP/1.1 200") == 30


def test_who_leaves_altogether_is_not_answered(served: Served) -> None:
    at = len(served.lines)
    sent(address_of(served), completion(1900, n=32)).close()
    served.find(r"POST /v1/completions .*error=cancelled", after=at)


def test_clients_that_keep_connections_are_told_when_the_server_stops() -> None:
    """Each is answered on its connection until the answer that says that it is the last."""
    with Served("--num-gpu-blocks-override", "500") as stopping:
        told: list[str | None] = []
        asking = threading.Barrier(41)

        def ask(number: int) -> None:
            connection, first = http.client.HTTPConnection(*address_of(stopping), timeout=60), True
            while True:
                connection.request("POST", "/v1/completions", completion(2))
                answer = connection.getresponse()
                assert answer.status == 200 and answer.read()
                if first:
                    first = False
                    asking.wait()
                if answer.getheader("connection") == "close":
                    told.append("close")
                    return

        with ThreadPoolExecutor(40) as threads:
            clients = [threads.submit(ask, number) for number in range(40)]
            asking.wait()
            stopping.terminate()
            for client in clients:
                client.result()
        assert len(told) == 40
        assert stopping.ended() == 0


def test_a_stopped_engine_is_unhealthy_until_it_goes_on(served: Served) -> None:
    (engine,) = served.pids["engine"]

    def wait_for(status: int) -> None:
        while httpx.get(f"{served.root}/health").status_code != status:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    deadline = time.monotonic() + 30
    with Victim(served, B):
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_for(503)
            answer = httpx.get(f"{served.root}/health")
            refused = httpx.post(f"{served.url}/completions", content=completion(1), headers=A)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert "has not run for" in answer.text and refused.status_code == 503 and "retry-after" in refused.headers
        wait_for(200)
    assert served.pids["engine"] == [engine]


# --- What the machine lacks -----------------------------------------------------------------------------------------


class Unread(Served):
    """Nobody reads its log from when it is ready until ``read`` is set."""

    def __init__(self, *arguments: str) -> None:
        self.read = threading.Event()
        super().__init__(*arguments)

    def _read(self) -> None:
        for line in self._log:
            self.lines.append(line.decode().rstrip("\n"))
            with self._more:
                self._more.notify_all()
            if " ready: " in self.lines[-1]:
                fcntl.fcntl(self._log, fcntl.F_SETPIPE_SZ, 4096)
                self.read.wait()


def test_a_log_that_nobody_reads_holds_up_nothing() -> None:
    """And is there in full once somebody does."""
    with Unread("--num-gpu-blocks-override", "200") as unread:
        named = [f"number-{number}" for number in range(200)]
        with httpx.Client() as client:
            for name in named:
                answer = client.post(
                    f"{unread.url}/completions", content=completion(1), headers={"x-request-id": name}, timeout=20
                )
                assert answer.status_code == 200
        unread.read.set()
        unread.find(f"id={named[-1]} ")
        assert [name for name in named if not any(f"id={name} " in line for line in unread.lines)] == []


def test_lines_beyond_what_may_wait_are_dropped_and_counted() -> None:
    reader, writer = os.pipe()
    handler = LogHandler(writer)
    line = "x" * 999

    def log(message: str) -> None:
        handler.handle(logging.makeLogRecord({"msg": message}))

    for _ in range(3000):
        log(line)
    os.set_blocking(reader, True)
    heard = b""
    while len(heard) < 2**20:
        heard += os.read(reader, 2**16)
    log("the next")
    while not heard.endswith(b"the next\n"):
        heard += os.read(reader, 2**16)
    lines = heard.decode().splitlines()
    kept = lines.count(line)
    assert lines[kept:] == [
        f"{3000 - kept} log lines were dropped, as the reader of standard error was too slow",
        "the next",
    ]
    assert 1000 < kept < 2000


def test_folders_of_killed_servers_are_removed_by_the_next(tmp_path: Path) -> None:
    """Those of others are not."""
    mine = tmp_path / "penstock-of-mine"
    mine.mkdir()
    environment = {"TMPDIR": str(tmp_path)}
    with Served("--num-gpu-blocks-override", "200", environment=environment) as killed:
        os.kill(killed.pid, signal.SIGKILL)
        killed.ended()
        left = {*tmp_path.iterdir()} - {mine}
        assert len(left) == 2
    with Served("--num-gpu-blocks-override", "200", environment=environment):
        here = {*tmp_path.iterdir()} - {mine}
        assert len(here) == 2 and not here & left
        with TemporaryFolder() as folder:
            assert folder.path.is_dir()
        assert {*tmp_path.iterdir()} - {mine} == here
        files = [*tmp_path.glob("*/*.db"), *tmp_path.glob("*/*.heartbeat")]
        assert len(files) > 3 and all(file.stat().st_blocks * 512 >= file.stat().st_size for file in files), "sparse"
    assert [*tmp_path.iterdir()] == [mine]


def test_metrics_count_where_the_disk_has_no_room_for_them(tmp_path: Path) -> None:
    """The limit of a file's size stands for the disk's."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    values = AllocatedDict(str(tmp_path / "counter_1.db"))
    names = [f"{number} {'x' * 1000}" for number in range(400)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (INITIAL_SIZE, limits[1]))
    try:
        for name in names:
            assert values.read_value(name) == (0.0, 0.0)
            values.write_value(name, 2.0, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all(values.read_value(name) == (2.0, 1.0) for name in names)
    shared = {key: value for key, value, *_ in values.read_all_values()}
    assert 200 < len(shared) < 400 and {*shared.values()} == {2.0}
    values.close()
