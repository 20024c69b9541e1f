"""Attacks by one client: streams of other clients continue without errors or changes, and the attacker gets errors."""

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
"""Maximum pause of another client's stream during an attack, in seconds, on an otherwise idle machine."""
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


def bytes_tensor(name: str, *elements: bytes) -> dict[str, Any]:
    data = [element.decode() for element in elements]
    return {"name": name, "datatype": "BYTES", "shape": [1, len(data)], "data": data}


def generation(request_id: str, tokens: int, **flags: bool) -> Any:
    """Return a generation request of KServe's streaming gRPC protocol."""
    request = pb.ModelInferRequest(model_name="ensemble", id=request_id)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"The sea")
    request.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1]).contents.int_contents.append(tokens)
    request.inputs.add(name="end_id", datatype="INT32", shape=[1, 1]).contents.int_contents.append(-1)
    for name, value in flags.items():
        request.inputs.add(name=name, datatype="BOOL", shape=[1, 1]).contents.bool_contents.append(value)
    return request


# --- One request that takes much time in the server -----------------------------------------------------------------


def huge_shapes(served: Served) -> None:
    """Send a tensor shape whose element count has a million digits."""
    shape = ",".join(["1" + "0" * 19] * 49_000)
    body = f'{{"inputs":[{{"name":"text_input","datatype":"BYTES","shape":[{shape}],"data":["a"]}}]}}'
    answer = httpx.post(f"{served.root}/v2/models/ensemble/infer", content=body, headers=A)
    assert answer.status_code == 400 and "49000 dimensions" in answer.json()["error"]
    body = '{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[9223372036854775808],"data":["a"]}]}'
    answer = httpx.post(f"{served.root}/v2/models/ensemble/infer", content=body, headers=A)
    assert answer.status_code == 400 and "dimension larger than" in answer.json()["error"]


def long_stop_words_and_bias(served: Served) -> None:
    """Send stop words up to the request size limit, and an embedding bias over the vocabulary for each of 256 rows."""
    long_stop_words = [
        bytes_tensor("QUERY", b"x"),
        {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": [1, 1], "data": [1]},
        bytes_tensor("STOP_WORDS_DICT", *[b"w blah kjh askjdh " * 45] * 1000),
    ]
    rows = [256, 1]
    biased: list[dict[str, Any]] = [
        {"name": "QUERY", "datatype": "BYTES", "shape": rows, "data": ["x"] * 256},
        {"name": "REQUEST_OUTPUT_LEN", "datatype": "INT32", "shape": rows, "data": [1] * 256},
        {"name": "EMBEDDING_BIAS_WORDS", "datatype": "BYTES", "shape": rows, "data": ["a"] * 256},
        {"name": "EMBEDDING_BIAS_WEIGHTS", "datatype": "FP32", "shape": rows, "data": [0.5] * 256},
    ]
    for inputs in (long_stop_words, biased):
        answer = httpx.post(
            f"{served.root}/v2/models/preprocessing/infer", json={"inputs": inputs}, headers=A, timeout=60
        )
        outputs = {output["name"]: output for output in answer.json()["outputs"]}
    bias = outputs["EMBEDDING_BIAS"]
    assert bias["shape"][0] == 256 and max(bias["data"]) == 0.5


def many_numbers(served: Served) -> None:
    """Send 400,000 token ids as JSON."""
    ids = {"name": "input_ids", "datatype": "INT32", "shape": [1, 400_000], "data": [1] * 400_000}
    for _ in range(3):
        answer = httpx.post(f"{served.root}/v2/models/tensorrt_llm/infer", json={"inputs": [ids]}, headers=A)
        assert answer.status_code == 400


def large_answer(served: Served, tokens: int = 20) -> None:
    """Request logprobs of 128 sequences in one response."""
    body = {"n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": tokens, "temperature": 1, "ignore_eos": True}
    messages = {"messages": [{"role": "user", "content": "a story"}]}
    answer = httpx.post(f"{served.url}/chat/completions", json=body | messages, headers=A, timeout=300)
    assert [len(choice["logprobs"]["content"]) for choice in answer.json()["choices"]] == [tokens] * 128


def endless_grammars(served: Served) -> None:
    """Send grammars that exceed the compilation limits. One client disconnects, one waits for the error."""
    patterns = [{"pattern": f"[a-z]{{{i}}}.*[0-9]"} for i in range(1, 40)]
    body: dict[str, Any] = {"prompt": "x", "guided_json": {"type": "string", "allOf": patterns}}
    with suppress(httpx.ReadTimeout):
        httpx.post(f"{served.url}/completions", json=body, headers=A, timeout=1)
    body = {"prompt": "x", "guided_regex": "b((a{1000}){1000}){5}"}
    answer = httpx.post(f"{served.url}/completions", json=body, headers=A, timeout=120)
    assert answer.status_code == 400 and "compiling it takes more than" in answer.text


ATTACKS: tuple[Callable[[Served], None], ...] = (
    *(huge_shapes, long_stop_words_and_bias, many_numbers, large_answer),
    endless_grammars,
)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_does_not_end_streams_of_others(served: Served, attack: Callable[[Served], None]) -> None:
    with Victim(served, B):
        attack(served)
    assert not [line for line in served.lines if "Traceback" in line]


@pytest.mark.thorough
@pytest.mark.parametrize("attack", [*ATTACKS, lambda served: large_answer(served, 500)])
def test_attack_does_not_pause_streams_of_others(served: Served, attack: Callable[[Served], None]) -> None:
    with Victim(served, B) as victim:
        attack(served)
    assert victim.gap <= GAP


# --- Clients that do not read ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_server_stops_reading_from_client_with_unread_responses(served: Served) -> None:
    """The client pipelines 29 MB of requests and reads no response."""
    (process,) = served.pids["api"]
    before, requests = peak_memory(process), b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 1000
    with Victim(served, B), socket.create_connection(address_of(served)) as connection:
        connection.settimeout(1)
        with suppress(TimeoutError):
            for _ in range(1000):
                connection.sendall(requests)
            pytest.fail("the server read all requests")
    assert peak_memory(process) < before + 64


@pytest.mark.slow
def test_grpc_messages_without_key_are_not_read(served: Served, stub: Any) -> None:
    """Flow control admits only a small part of the 512 MiB."""
    (process,) = served.pids["api"]
    before = peak_memory(process)
    large = pb.ModelInferRequest(model_name="ensemble", raw_input_contents=[b"x" * (32 * 2**20)])
    with Victim(served, B), ThreadPoolExecutor(4) as threads:
        for call in [threads.submit(stub.ModelInfer, large) for _ in range(16)]:
            error = call.exception()
            assert isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert stub.ServerLive(pb.ServerLiveRequest()).live
    assert peak_memory(process) < before + 64


@pytest.mark.thorough
def test_unread_grpc_stream_uses_bounded_memory(served: Served, stub: Any) -> None:
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


SMALL_BUFFERS = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2**16)]
"""Channel options that limit the client's receive buffers."""


@pytest.mark.slow
def test_unread_stream_is_ended_after_timeout() -> None:
    """All requests of the stream end. Each response repeats a long request id, which fills the buffers."""
    with (
        Served("--num-gpu-blocks-override", "200", "--grpc-port", "0", "--client-timeout", "2") as server,
        grpc.insecure_channel(server.find(r"gRPC at (\S+)")[1], SMALL_BUFFERS) as channel,
    ):
        finished = threading.Event()

        def requests() -> Iterator[Any]:
            flags = {"stream": True, "return_log_probs": True}
            yield from (generation(f"{i}" + "x" * 20_000, 1500, **flags) for i in range(24))
            finished.wait(60)

        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests())
        next(call)
        server.find("ModelStreamInfer id=.* error=timeout reason=.the client read nothing for 2 seconds")
        assert re.search(r"penstock:num_requests_open\{.*\} 0\.0", httpx.get(f"{server.root}/metrics").text)
        finished.set()
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.slow
def test_generate_stream_of_many_sequences_has_bounded_size(served: Served) -> None:
    """Only the last object contains all texts. Repeating them in each of the 60 steps would take 40 MB."""
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


# --- Separation of API keys -----------------------------------------------------------------------------------------


def cached_tokens(url: str, key: dict[str, str], prompt: str, **fields: str) -> int:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    usage = httpx.post(f"{url}/completions", json=body, headers=key).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_api_keys_do_not_share_cached_prefixes(served: Served) -> None:
    assert cached_tokens(served.url, A, LONG_PROMPT) == 0
    assert cached_tokens(served.url, A, LONG_PROMPT) > 0
    assert cached_tokens(served.url, B, LONG_PROMPT) == 0
    assert cached_tokens(served.url, B, LONG_PROMPT) > 0
    assert cached_tokens(served.url, A, LONG_PROMPT, cache_salt="x") == 0


@pytest.mark.slow
def test_share_prefix_cache_shares_prefixes_between_keys() -> None:
    with Served("--num-gpu-blocks-override", "200", "--share-prefix-cache", *KEYS) as shared:
        assert cached_tokens(shared.url, A, LONG_PROMPT) == 0
        assert cached_tokens(shared.url, B, LONG_PROMPT) > 0


def test_request_id_belongs_to_its_api_key(served: Served) -> None:
    """Another API key may use the same request id, but can neither detect nor abort the first key's request."""
    body = {"text": "The sea", "req_id": "mine", "max_dec_len": 1500, "min_dec_len": 1500, "stream": True}
    url = f"{served.url}/chat/completions"
    id_header = {"x-request-id": "mine"}
    with httpx.stream("POST", url, json=body, headers=A | id_header, timeout=60) as first:
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


@pytest.mark.slow
def test_grpc_stop_ends_only_requests_of_same_key(served: Served, stub: Any) -> None:
    """Both requests use one connection, as through a proxy."""

    def answers(key: dict[str, str], *requests: Any) -> Iterator[Any]:
        return iter(stub.ModelStreamInfer(iter(requests), metadata=list(key.items())))

    def tokens(responses: Iterable[Any]) -> int:
        outputs = [output for response in responses for output in response.infer_response.outputs]
        return sum([output.shape[-1] for output in outputs if output.name == "output_log_probs"])

    first_stream = answers(A, generation("mine", 1500, stream=True, return_log_probs=True))
    first = next(first_stream)
    list(answers(B, generation("mine", 1, stop=True)))
    assert tokens([first, *first_stream]) == 1500


# --- The end of a connection, and of the server ---------------------------------------------------------------------


def completion(tokens: int, **fields: Any) -> bytes:
    return json.dumps({"prompt": "The sea", "max_tokens": tokens, "ignore_eos": True, **fields}).encode()


def send_completion(address: tuple[str, int], body: bytes) -> socket.socket:
    """Connect and send a completion request; return the connection."""
    connection = socket.create_connection(address, timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key-a\r\ncontent-length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def receive_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(2**16), b""))


@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_connection_is_answered(served: Served, stream: bool) -> None:
    """The client closes its sending side. The server closes the connection after the response."""
    connection = send_completion(address_of(served), completion(5, stream=stream))
    connection.shutdown(socket.SHUT_WR)
    answer = receive_all(connection)
    assert answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in answer


def test_pipelined_requests_before_half_close_are_answered(served: Served) -> None:
    with socket.create_connection(address_of(served), timeout=60) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 30)
        connection.shutdown(socket.SHUT_WR)
        assert receive_all(connection).count(b"HTTP/1.1 200") == 30


def test_closed_connection_cancels_request(served: Served) -> None:
    line_count = len(served.lines)
    send_completion(address_of(served), completion(1900, n=32)).close()
    served.find(r"POST /v1/completions .*error=cancelled", after=line_count)


@pytest.mark.slow
def test_stopping_server_closes_kept_connections_after_response() -> None:
    """Each connection is answered until a response has ``connection: close``."""
    with Served("--num-gpu-blocks-override", "500") as stopping:
        closed: list[str | None] = []
        all_connected = threading.Barrier(41)

        def ask(number: int) -> None:
            connection, first = http.client.HTTPConnection(*address_of(stopping), timeout=60), True
            while True:
                connection.request("POST", "/v1/completions", completion(2))
                answer = connection.getresponse()
                assert answer.status == 200 and answer.read()
                if first:
                    first = False
                    all_connected.wait()
                if answer.getheader("connection") == "close":
                    closed.append("close")
                    return

        with ThreadPoolExecutor(40) as threads:
            clients = [threads.submit(ask, number) for number in range(40)]
            all_connected.wait()
            stopping.terminate()
            for client in clients:
                client.result()
        assert len(closed) == 40
        assert stopping.ended() == 0


@pytest.mark.slow
def test_stopped_engine_is_unhealthy_until_continued(served: Served) -> None:
    """A request that arrives meanwhile waits."""
    (engine,) = served.pids["engine"]

    def wait_for(status: int) -> None:
        while httpx.get(f"{served.root}/health").status_code != status:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    deadline = time.monotonic() + 30
    with Victim(served, B), ThreadPoolExecutor(1) as threads:
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_for(503)
            answer = httpx.get(f"{served.root}/health")
            send = lambda: httpx.post(f"{served.url}/completions", content=completion(1), headers=A, timeout=60)  # noqa: E731
            waiting = threads.submit(send)
            with pytest.raises(TimeoutError):
                waiting.result(0.5)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert "has not run for" in answer.text and waiting.result().status_code == 200
        wait_for(200)
    assert served.pids["engine"] == [engine]


# --- Resources of the machine ---------------------------------------------------------------------------------------


class ServedWithUnreadLog(Served):
    """Server whose log output is not read from the ready line until ``read.set()`` is called."""

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


@pytest.mark.slow
def test_unread_log_does_not_block_requests() -> None:
    """No log line is missing when the log is read later."""
    with ServedWithUnreadLog("--num-gpu-blocks-override", "200") as server:
        request_ids = [f"number-{number}" for number in range(200)]
        with httpx.Client() as client:
            for request_id in request_ids:
                answer = client.post(
                    f"{server.url}/completions", content=completion(1), headers={"x-request-id": request_id}, timeout=20
                )
                assert answer.status_code == 200
        server.read.set()
        server.find(f"id={request_ids[-1]} ")
        assert [
            request_id for request_id in request_ids if not any(f"id={request_id} " in line for line in server.lines)
        ] == []


def test_log_lines_beyond_buffer_are_dropped_and_counted() -> None:
    reader, writer = os.pipe()
    handler = LogHandler(writer)
    line = "x" * 999

    def log(message: str) -> None:
        handler.handle(logging.makeLogRecord({"msg": message}))

    for _ in range(3000):
        log(line)
    os.set_blocking(reader, True)
    output = b""
    while len(output) < 2**20:
        output += os.read(reader, 2**16)
    log("the next")
    while not output.endswith(b"the next\n"):
        output += os.read(reader, 2**16)
    lines = output.decode().splitlines()
    kept = lines.count(line)
    assert lines[kept:] == [
        f"{3000 - kept} log lines were dropped, as the reader of standard error was too slow",
        "the next",
    ]
    assert 1000 < kept < 2000


@pytest.mark.slow
def test_next_server_removes_folders_of_killed_servers(tmp_path: Path) -> None:
    """Unrelated folders are kept."""
    unrelated = tmp_path / "penstock-of-mine"
    unrelated.mkdir()
    environment = {"TMPDIR": str(tmp_path)}
    with Served("--num-gpu-blocks-override", "200", environment=environment) as killed:
        os.kill(killed.pid, signal.SIGKILL)
        killed.ended()
        stale = {*tmp_path.iterdir()} - {unrelated}
        assert len(stale) == 3, "the server's record, its metrics and its engine"
    with Served("--num-gpu-blocks-override", "200", environment=environment):
        current = {*tmp_path.iterdir()} - {unrelated}
        assert len(current) == 3 and not current & stale
        with TemporaryFolder() as folder:
            assert folder.path.is_dir()
        assert {*tmp_path.iterdir()} - {unrelated} == current
        files = [*tmp_path.glob("*/*.db"), *tmp_path.glob("*/*.heartbeat")]
        assert len(files) > 3 and all(file.stat().st_blocks * 512 >= file.stat().st_size for file in files), (
            "files must not be sparse"
        )
    assert [*tmp_path.iterdir()] == [unrelated]


def test_metrics_count_in_memory_if_disk_is_full(tmp_path: Path) -> None:
    """A limit on file sizes simulates the full disk."""
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
