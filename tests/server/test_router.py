"""A router and its instances as processes: answers equal to a single server's; instances join, leave and fail."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import zmq
from serving import Served, free_ports, run_in_process, usage_error
from tcp_proxy import TcpProxy
from test_kserve_grpc import address
from test_lora import demo_adapters as demo_adapters  # imported so that pytest finds the fixture
from test_weights import perturbed
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from penstock import PenstockError, demo
from penstock.cli.main import main
from penstock.cluster.http import REGISTER_PATH, call
from penstock.engine.service import messages
from penstock.engine.service.client import EngineClient
from penstock.engine.service.curve import frames, secure_client, secure_server
from penstock.serve.http.middleware import RESUMED_HEADER

ALLOWED = ("--allowed-local-weights-path",)
BLOCKS = ("--num-gpu-blocks-override", "120")
LONG = {"prompt": "One two three", "max_tokens": 1900, "ignore_eos": True, "temperature": 0, "stream": True}
PROMPT = "A story about the sea, its ships and its harbours. " * 30
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 3}),
    ("completions", {"prompt": PROMPT, "max_tokens": 12, "n": 3, "seed": 7}),
    ("completions", {"prompt": PROMPT, "max_tokens": 8, "n": 2, "use_beam_search": True, "temperature": 0}),
    ("completions", {"prompt": "The sea", "max_tokens": 3, "echo": True, "logprobs": 2, "temperature": 0}),
    ("completions", {"prompt": ["a", "The"], "max_tokens": 9, "seed": 1, "stop": ["e"]}),
    ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20, "guided_json": SCHEMA}),
    ("embeddings", {"input": [PROMPT, "The sea"]}),
]


class Deployment:
    """A router and the instances registered with it.

    Args:
        folder: folder of the cluster secret file.
        flags: additional flags of the router.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        secret = folder / "secret"
        secret.write_text("of this deployment alone")
        secret.chmod(0o600)
        self.secret = ("--cluster-secret-file", str(secret))
        self.stack = ExitStack()
        self._ready = False
        (self.port,) = free_ports(1)
        self.router = Served("--role", "router", "--port", str(self.port), *self.secret, *flags)
        self.router.find("waiting for instances")

    def instances(self, *roles: str, flags: tuple[str, ...] = ()) -> list[Served]:
        """Start an instance per role, and wait until all of them serve. The first call also waits for the router."""
        address = ("--router-address", f"127.0.0.1:{self.port}")
        started = [Served("--role", role, *BLOCKS, *address, *self.secret, *flags) for role in roles]
        entered = [self.stack.enter_context(server) for server in started]
        if not self._ready:
            self.stack.enter_context(self.router)
            self._ready = True
        return entered

    def __enter__(self) -> Deployment:
        self.stack.callback(self.router.kill)
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    @property
    def states(self) -> dict[str, tuple[str, str]]:
        """(role, state) of each instance, by address of its engine."""
        instances = httpx.get(f"http://127.0.0.1:{self.port}/penstock/instances").json()["instances"]
        return {instance["address"]: (instance["role"], instance["state"]) for instance in instances}

    def has(self, *roles: str) -> bool:
        """Return True if the registered instances have exactly these roles and are all ready."""
        return sorted(self.states.values()) == sorted((role, "ready") for role in roles)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    flags = ("--pd-min-prefill-tokens", "100", "--allow-runtime-lora-updating")
    with Deployment(tmp_path_factory.mktemp("router"), *flags) as deployment:
        until(lambda: httpx.get(f"http://127.0.0.1:{deployment.port}/ready").text.find("no instance") > 0)
        early = httpx.post(f"http://127.0.0.1:{deployment.port}/v1/completions", json={"prompt": "x"})
        assert early.status_code == 503 and "no instance is available to answer" in early.text
        lora = ("--enable-lora",)
        deployment.prefill, *deployment.decode = deployment.instances("prefill", "decode", "decode", flags=lora)
        until(lambda: deployment.has("prefill", "decode", "decode"))
        yield deployment


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if condition():
                return
        except (httpx.TransportError, KeyError):
            pass
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answer(served: Served, path: str, body: dict[str, Any]) -> Any:
    """Return the part of a response that does not depend on id and time: its choices or its data."""
    response = httpx.post(f"{served.url}/{path}", json=body)
    assert response.status_code == 200, response.text
    document = response.json()
    return document.get("choices", document.get("data"))


class Stream:
    """A long streamed completion whose first chunk has been received."""

    def __init__(self, served: Served) -> None:
        self._response = httpx.stream("POST", f"{served.url}/completions", json=LONG)
        self._lines = (line for line in self._response.__enter__().iter_lines() if line)
        self._first = next(self._lines)

    def rest(self) -> tuple[str, dict[str, Any] | None]:
        """Read the stream to its end; return (text, error or None)."""
        data = [line.removeprefix("data: ") for line in (self._first, *self._lines)]
        self._response.__exit__(None, None, None)
        chunks = [json.loads(chunk) for chunk in data if chunk != "[DONE]"]
        error = chunks.pop()["error"] if "error" in chunks[-1] else None
        return "".join(chunk["choices"][0]["text"] for chunk in chunks), error


@pytest.mark.row("fastdeploy", "/registered_number")
def test_router_answers_equal_single_server(deployment: Deployment) -> None:
    expected = [answer(deployment.prefill, *request) for request in REQUESTS]
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        answers = list(threads.map(lambda request: answer(deployment.router, *request), REQUESTS))
    assert answers == expected
    assert not deployment.router.pids["engine"]
    numbers = {"mixed": 0, "prefill": 1, "decode": 2}
    assert httpx.get(f"{deployment.router.root}/registered_number").json() == numbers, "must equal FastDeploy's"
    assert httpx.get(f"{deployment.prefill.root}/registered_number").status_code == 404
    page = httpx.get(f"{deployment.router.root}/metrics").text
    assert page.count("penstock:replica_kv_blocks{") == 3

    def transferred() -> bool:
        page = httpx.get(f"{deployment.router.root}/metrics").text
        (count,) = re.findall(r"penstock:kv_transfer_completed_total{.*} (\S+)", page)
        return float(count) > 0

    until(transferred)


def test_every_log_contains_request_id(deployment: Deployment) -> None:
    """The logs of router, prefill instance and decode instance contain the client's request id."""
    request = {"prompt": "Another story. " * 60, "max_tokens": 2}
    response = httpx.post(f"{deployment.router.url}/completions", json=request, headers={"X-Request-Id": "traced-0"})
    assert response.status_code == 200
    deployment.router.find("id=traced-0 status=200")
    transfer = deployment.prefill.find(r"request traced-0: transfer (\w+): \d+ tokens")[1]
    text = f"request traced-0: transfer {transfer}:"
    until(lambda: any(text in line for served in deployment.decode for line in served.lines))


def test_adapter_is_loaded_in_all_instances(deployment: Deployment, demo_adapters: Path) -> None:
    adapter = {"lora_name": "a", "lora_path": str(demo_adapters / "a")}
    request = {"model": "a", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    assert httpx.post(f"{deployment.router.url}/load_lora_adapter", json=adapter).status_code == 200
    expected = answer(deployment.prefill, "completions", request)
    assert expected != answer(deployment.prefill, "completions", request | {"model": "default"})
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: answer(deployment.router, "completions", request), range(4)))
    assert answers == [expected] * 4
    assert httpx.post(f"{deployment.router.root}/reset_prefix_cache").status_code == 200
    assert answer(deployment.router, "completions", request) == expected
    assert httpx.post(f"{deployment.router.url}/unload_lora_adapter", json={"lora_name": "a"}).status_code == 200
    for served in (deployment.router, deployment.prefill, *deployment.decode):
        assert httpx.post(f"{served.url}/completions", json=request).status_code == 404


def test_peer_without_cluster_secret_is_refused(deployment: Deployment) -> None:
    base, body = f"127.0.0.1:{deployment.port}", b'{"name": "x", "engines": []}'
    with pytest.raises(PenstockError, match="401: the request must be signed with the secret"):
        call(base, REGISTER_PATH, b"another secret, long enough", body)
    assert httpx.post(f"http://{base}{REGISTER_PATH}", content=body).status_code == 401
    assert httpx.get(f"{deployment.prefill.root}/penstock/instance").status_code == 401
    address = next(iter(deployment.states))

    async def connected() -> str:
        client = EngineClient(
            f"tcp://{address}",
            lambda deltas: None,
            lambda failure: None,
            None,
            lambda request_ids: None,
            secret=b"another secret, long enough",
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with pytest.raises(PenstockError) as refusal:
                client.require_engine()
            if "another cluster secret" in str(refusal.value):
                break
            await asyncio.sleep(0.02)
        await client.close()
        return str(refusal.value)

    assert f"the engine at {address} refuses the connection" in asyncio.run(connected())


def test_engine_closes_unauthenticated_connection_with_large_frame(deployment: Deployment) -> None:
    """ZeroMQ would buffer the whole frame before the sender is authenticated."""
    host, _, port = next(iter(deployment.states)).rpartition(":")
    with socket.create_connection((host, int(port)), 10) as stranger:
        stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32))
        with suppress(ConnectionError):
            stranger.sendall(b"\x06" + (2**33).to_bytes(8))  # header of a command of 8 GiB
            while stranger.recv(4096):
                pass


def test_message_of_several_frames_arrives_complete() -> None:
    secret, message = b"a secret of sixteen", os.urandom(5 * 2**20 + 1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as client:
        secure_server(server, secret)
        secure_client(client, secret)
        client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
        client.send_multipart(frames(message))
        _, *parts = server.recv_multipart()
        assert b"".join(parts) == message


def test_engine_of_another_version_is_refused() -> None:
    """The engine reports its protocol version to each client that connects."""
    secret, context = b"a secret of sixteen", zmq.Context()
    other = context.socket(zmq.ROUTER)
    secure_server(other, secret)
    port = other.bind_to_random_port("tcp://127.0.0.1")
    ready = messages.Ready(1, 100, 100, 10, 64, "kernels", True, {}, protocol=99, version="9.9")

    async def refusal() -> str:
        nothing: Callable[[Any], None] = lambda _: None  # noqa: E731
        client = EngineClient(f"tcp://127.0.0.1:{port}", nothing, nothing, None, nothing, secret=secret)
        while True:
            with suppress(zmq.Again):
                identity, *_ = other.recv_multipart(zmq.NOBLOCK)
                other.send_multipart((identity, messages.encode(ready)))
            await asyncio.sleep(0.02)
            with pytest.raises(PenstockError) as refused:
                client.require_engine()
            if "9.9" in str(refused.value):
                await client.close()
                return str(refused.value)

    assert "install the same version on all hosts" in asyncio.run(asyncio.wait_for(refusal(), 60))
    context.destroy(0)


@pytest.mark.slow
def test_change_of_kernels_is_named_in_answer_and_log(tmp_path: Path) -> None:
    """With ``--resume-across-fingerprints`` requests continue on an instance with another fingerprint: it is named in a
    header of whole answers, in a comment of streams, and in gRPC's trailing metadata. Other answers name none."""
    flags = ("--allow-fingerprint-mismatch", "--resume-across-fingerprints", "--grpc-port", "0")
    with Deployment(tmp_path, *flags) as deployment:
        (other,) = deployment.instances("decode")
        (lost,) = deployment.instances("decode", flags=("--kv-cache-dtype", "int8"))
        until(lambda: deployment.has("decode", "decode"))
        (engine,) = other.pids["engine"]
        os.kill(engine, signal.SIGSTOP)  # all requests are sent to the other instance
        until(lambda: any("was lost" in state for _, state in deployment.states.values()))
        router = deployment.router
        body = {name: value for name, value in LONG.items() if name != "stream"} | {"max_tokens": 1500}
        request = pb.ModelInferRequest(model_name="ensemble")
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"A story")
        request.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1]).contents.int_contents.append(1500)
        request.inputs.add(name="min_length", datatype="INT32", shape=[1, 1]).contents.int_contents.append(1500)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(address(router)))

        def whole() -> str:
            return httpx.post(f"{router.url}/completions", json=body, timeout=90).headers.get(RESUMED_HEADER, "")

        def streamed() -> str:
            with httpx.stream("POST", f"{router.url}/completions", json=body | {"stream": True}, timeout=90) as answer:
                (comment,) = [line for line in answer.iter_lines() if line.startswith(": resumed across: ")]
                assert RESUMED_HEADER not in answer.headers
                return comment.removeprefix(": resumed across: ")

        def inferred() -> str:
            _, call = stub.ModelInfer.with_call(request, timeout=90)
            return str(dict(call.trailing_metadata()).get(RESUMED_HEADER, ""))

        with ThreadPoolExecutor(6) as threads:
            answers = [threads.submit(ask) for ask in (whole, inferred, streamed, streamed)]
            first_tokens = 'penstock:time_to_first_token_seconds_count{model_name="penstock-demo"}'
            until(lambda: f"{first_tokens} 4.0" in httpx.get(f"{router.root}/metrics").text)
            os.kill(engine, signal.SIGCONT)
            lost.kill()
            named = {answer.result() for answer in answers}
        (name,) = named
        fingerprint = other.find(r"kernels (\S+) \(batch-invariant\)")[1]
        assert name.startswith(f"kernels {fingerprint}, weights ")
        router.find(f"tokens were computed again; the results of the other engine may differ: {re.escape(name)}")
        assert not whole()


@pytest.mark.slow
def test_requests_of_killed_engine_continue_on_other_instance(deployment: Deployment) -> None:
    """All answers are those of an undisturbed engine. The instance is used again after its engine has restarted."""
    complete = Stream(deployment.decode[0]).rest()[0]
    streams = [Stream(deployment.router) for _ in range(4)]
    (engine,) = deployment.decode[0].pids["engine"]
    os.kill(engine, signal.SIGKILL)
    request = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: answer(deployment.router, "completions", request), range(8)))
    assert answers.count(answers[0]) == 8
    assert [stream.rest() for stream in streams] == [(complete, None)] * 4
    deployment.router.find(r"was lost.*: [1-9]\d* of its \d+ requests continue on another engine")
    assert httpx.get(f"{deployment.router.root}/health").status_code == 200
    until(lambda: deployment.has("prefill", "decode", "decode"))


def test_requests_continue_over_new_connection_to_living_engine(deployment: Deployment) -> None:
    """The router's TCP connection to an engine is reset. The router sends its requests again over a new connection,
    also one whose id must be unique, which the engine still computes for the lost connection."""
    roles = {role: address for address, (role, _) in deployment.states.items()}
    paddle = {"text": PROMPT, "req_id": "mine", "stream": True, "seed": 3, "temperature": 0.8, "max_dec_len": 900}
    paddle |= {"min_dec_len": 900}

    def ask(server: Served, on_line: Callable[[int], None] = lambda count: None) -> tuple[str, dict[str, Any]]:
        text, last = "", dict[str, Any]()
        with httpx.stream("POST", f"{server.url}/chat/completions", json=paddle, timeout=60) as response:
            for count, line in enumerate(filter(None, response.iter_lines())):
                last = json.loads(line)
                assert not last["error_code"], last
                text += last["token"]
                on_line(count)
        return text, last

    expected = ask(deployment.decode[0])[0]
    with TcpProxy(int(roles["decode"].rpartition(":")[2])) as proxy:
        flags = ("--role", "router", "--decode-instances", f"127.0.0.1:{proxy.port}")
        with Served(*flags, *deployment.secret) as router:
            stream = Stream(router)

            def reset(count: int) -> None:
                if count in (20, 200):
                    assert proxy.reset()

            assert ask(router, reset)[0] == expected
            assert stream.rest() == Stream(deployment.decode[0]).rest()
            router.find(r"was lost.*: 2 of its 2 requests continue")


def test_leaving_instance_answers_its_requests(deployment: Deployment) -> None:
    streams = [Stream(deployment.router) for _ in range(4)]
    leaving, staying = deployment.decode
    leaving.terminate()
    deployment.router.find(r"the instance at \S+ left")
    assert answer(deployment.router, "completions", {"prompt": "The sea", "max_tokens": 3})
    ends = [stream.rest() for stream in streams]
    assert not [error for _, error in ends if error]
    assert len({text for text, _ in ends}) == 1
    assert leaving.ended() == 0
    until(lambda: deployment.has("prefill", "decode"))
    deployment.decode = [staying]


@pytest.mark.slow
def test_instance_with_other_fingerprint_is_refused_or_reported(deployment: Deployment, tmp_path: Path) -> None:
    """The first router rejects the instance, the second allows it by ``--allow-fingerprint-mismatch``."""
    before = deployment.states
    roles = {role: address for address, (role, _) in before.items()}
    with Served(
        "--role",
        "mixed",
        "--engine-address",
        "127.0.0.1:0",
        "--kv-cache-dtype",
        "int8",
        *BLOCKS,
        *deployment.secret,
        "--router-address",
        f"127.0.0.1:{deployment.port}",
    ) as other:
        line = deployment.router.find(
            r"instance at (\S+) is not used: its results differ bitwise: its kernels are ([^\s,]+)"
        )
        assert "kv8" in line[2] and deployment.states == before
        addresses = f"{roles['decode']},{other.root},{roles['prefill']}"
        flags = ("--decode-instances", addresses, "--allow-fingerprint-mismatch")
        with Served("--role", "router", *flags, *deployment.secret) as second:
            until(lambda: "x-penstock-fingerprint-mismatch" in httpx.get(f"{second.root}/health").headers)
            response = httpx.post(f"{second.url}/completions", json={"prompt": "The sea", "max_tokens": 2})
            assert response.status_code == 200 and line[2] in response.headers["x-penstock-fingerprint-mismatch"]
            second.find(f"{roles['prefill']} is not used: its role is prefill, but it is configured as decode or mixed")


def test_router_with_another_tokenizer_uses_no_instance(deployment: Deployment, tmp_path: Path) -> None:
    """With another tokenizer, the same token ids would mean other texts."""
    for file in demo.CHAT.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text((demo.CHAT / "tokenizer.json").read_text() + " ")
    flags = ("--role", "router", "--model", str(tmp_path), "--decode-instances", deployment.decode[-1].root)
    router = Served(*flags, *deployment.secret)
    try:
        router.find("is not used: its tokenizer differs from the tokenizer of this router's model")
        router.terminate()
        assert router.ended() == 0
    finally:
        router.kill()


def test_address_in_use_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = (sys.executable, "-m", "penstock.cli.main", "serve", "--role", "decode", "--port", "0")
        environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path)}
        arguments = [*command, "--engine-address", address]
        result = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    message = f"cannot listen on {address}: address already in use; try another address or port"
    expected = f"penstock serve: engine_address: {message}"
    assert result.stderr.splitlines()[-1] == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--role router --router-address 127.0.0.1:1", "router_address: a router does not register with other routers"),
        ("--role router --engine-address 127.0.0.1:1", "engine_address: a router has no engine"),
        ("--role decode --decode-instances 127.0.0.1:1", "decode_instances: requires --role router"),
        ("--role prefill --prefill-instances 127.0.0.1:1", "prefill_instances: requires --role router or decode"),
        ("--role decode --router-address here", "router_address: 'here' is not an address: write host:port"),
        ("--role prefill --kv-advertised-address x", "kv_advertised_address: 'x' is not an address"),
        ("--engine-address 127.0.0.1:x", "engine_address: '127.0.0.1:x' is not an address"),
        ('--role router --models {"a":"b"}', "models: routers and their instances have one model"),
        ("--role both", "argument --role: invalid choice: 'both'"),
    ],
)
def test_contradictory_flags_are_refused(flags: str, message: str) -> None:
    assert message in usage_error(*flags.split())


@pytest.mark.thorough  # ZeroMQ takes seconds to notice a stopped process
def test_full_queues_return_429_and_stopped_engine_is_avoided(tmp_path: Path) -> None:
    """If all queues are full, a request gets 429. Requests that a stopped engine has not started run elsewhere."""
    with Deployment(tmp_path) as deployment:
        flags = ("--max-num-seqs", "2", "--max-waiting", "2")
        _, stopped = deployment.instances("decode", "decode", flags=flags)
        until(lambda: deployment.has("decode", "decode"))
        long = {key: value for key, value in LONG.items() if key != "stream"} | {"max_tokens": 600}
        short = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}

        def status(body: dict[str, Any]) -> int:
            return httpx.post(f"{deployment.router.url}/completions", json=body).status_code

        with ThreadPoolExecutor(20) as threads:
            statuses = list(threads.map(status, [long] * 20))
        assert set(statuses) == {200, 429} and statuses.count(200) >= 8
        (engine,) = stopped.pids["engine"]
        os.kill(engine, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(4) as threads:
                assert list(threads.map(status, [short] * 4)) == [200] * 4
            until(lambda: any("was lost" in state for _, state in deployment.states.values()))
            start = time.monotonic()
            assert status(short) == 200 and time.monotonic() - start < 2
        finally:
            os.kill(engine, signal.SIGCONT)
        until(lambda: deployment.has("decode", "decode"))


@pytest.mark.thorough  # starts each instance twice
def test_replacing_every_instance_under_load_fails_no_request(tmp_path: Path) -> None:
    """All requests are answered, and all answers are equal."""
    with Deployment(tmp_path, "--pd-min-prefill-tokens", "100", "--api-server-count", "2") as deployment:
        running = deployment.instances("prefill", "decode", "decode")
        until(lambda: deployment.has("prefill", "decode", "decode"))
        body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
        expected = answer(running[0], "completions", body)
        ended = threading.Event()

        def load(number: int) -> list[Any]:
            answers = []
            while not ended.is_set():
                answers.append(
                    answer(deployment.router, "completions", {**body, "cache_salt": f"{number} {len(answers)}"})
                )
            return answers

        with ThreadPoolExecutor(4) as threads:
            loads = [threads.submit(load, number) for number in range(4)]
            try:
                for old, role in zip(running, ("prefill", "decode", "decode"), strict=True):
                    deployment.instances(role)
                    until(lambda: len(deployment.states) == 4)
                    old.terminate()
                    assert old.ended() == 0
                    until(lambda: deployment.has("prefill", "decode", "decode"))
            finally:
                ended.set()
            all_answers = [result for load in loads for result in load.result()]
        assert len(all_answers) > 20 and all(result == expected for result in all_answers)


@pytest.mark.thorough
def test_router_uses_only_instances_with_equal_weights(tmp_path: Path) -> None:
    """Instances change their weights one after another. The router uses only instances whose weights match."""
    other = perturbed(demo.CHAT, tmp_path / "other")
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    with Deployment(tmp_path, "--pd-min-prefill-tokens", "100") as deployment:
        instances = deployment.instances(
            "prefill", "decode", "decode", flags=("--server-dev-mode", *ALLOWED, str(tmp_path))
        )
        until(lambda: deployment.has("prefill", "decode", "decode"))

        def ask() -> httpx.Response:
            return httpx.post(f"http://127.0.0.1:{deployment.port}/v1/completions", json=fields, timeout=60)

        def change(instance: Served) -> str:
            answer = httpx.post(f"{instance.root}/v1/weights/reload", json={"path": str(other)}, timeout=60)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["version"])

        before = ask().headers["x-weights-version"]
        prefill, first, second = instances
        after = change(first)
        until(lambda: deployment.has("prefill", "decode"))
        assert {ask().headers["x-weights-version"] for _ in range(4)} == {before}
        change(second)
        until(lambda: ask().status_code == 503)
        change(prefill)
        until(lambda: deployment.has("prefill", "decode", "decode"))
        answer = ask()
        assert answer.headers["x-weights-version"] == after
        alone = httpx.post(f"{first.root}/v1/completions", json=fields, timeout=60)
        assert answer.json()["choices"] == alone.json()["choices"]
        refused = httpx.post(f"http://127.0.0.1:{deployment.port}/sleep")
        assert refused.status_code == 404  # the router was started without --server-dev-mode
        httpx.post(f"{second.root}/sleep", timeout=60)
        assert {ask().status_code for _ in range(4)} == {200}
        httpx.post(f"{first.root}/sleep", timeout=60)
        until(lambda: ask().status_code == 503)
        httpx.post(f"{second.root}/wake_up", timeout=60)
        until(lambda: ask().status_code == 200)


@pytest.mark.slow
def test_pd_command_starts_and_shows_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, "-m", "penstock.cli.main", "pd")
    (port,) = free_ports(1)
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # running servers are found by files in this folder
    started = subprocess.Popen(
        [*command, "--port", str(port), *BLOCKS, "--pd-min-prefill-tokens", "10"],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert started.stdout
        printed = [started.stdout.readline() for _ in range(5)]
        assert [line.split()[0] for line in printed[1:4]] == ["router", "prefill-0", "decode-0"]
        assert f"requests: http://127.0.0.1:{port}/v1" in printed[4]
        request = {"prompt": PROMPT, "max_tokens": 3}
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=request).status_code == 200

        def transferred() -> bool:
            result = run_in_process(main, "pd", "status", "--once")
            header, *rows = result.stdout.splitlines()
            assert header.split()[:3] == ["ROLE", "ADDRESS", "STATE"] and len(rows) == 2
            return any(row.startswith("decode") and " 1  " in row for row in rows)

        until(transferred)
        assert run_in_process(main, "pd", "status", "--url", "http://127.0.0.1:9", "--once").returncode == 2
        pids = [int(line.split()[1]) for line in printed[1:4]]
        (listed,) = json.loads(run_in_process(main, "ps", "--json").stdout)
        assert (listed["pid"], listed["role"], listed["state"]) == (started.pid, "pd", "ready")
        assert listed["url"] == f"http://127.0.0.1:{port}" and [*listed["models"].values()] == ["ready"]
        assert run_in_process(main, "stop", str(port)).returncode == 0
        assert started.wait(60) == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    finally:
        started.kill()
        started.wait()


def test_wrong_options_of_pd_command_are_refused() -> None:
    assert "prefill: must be at least 1" in run_in_process(main, "pd", "--prefill", "0").stderr
    assert "role: is set by penstock pd" in run_in_process(main, "pd", "--role", "decode").stderr
