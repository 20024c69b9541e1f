"""The engine process: invalid messages from clients, and a failed device."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from executors import FailingDevice, engine_options

from penstock import demo
from penstock.config.options import LogOptions
from penstock.core import (
    Code,
    EngineRequest,
    FinishReason,
    GuidedDecodingParams,
    SamplingParams,
    TokenDelta,
    Vocabulary,
)
from penstock.engine.service import messages as engine_messages

OPTIONS = engine_options(num_gpu_blocks_override=200, block_size=16, max_model_len=512)
COMMAND = (sys.executable, "-m", "penstock.engine.service.server")


class Client:
    """A client with its own engine process."""

    def __init__(self, folder: Path) -> None:
        address = f"ipc://{folder}/engine"
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdin and self.process.stdout
        with self.process.stdin as stdin:
            stdin.write(msgspec.json.encode(engine_messages.Start(OPTIONS, LogOptions(), os.getpid())))
        assert isinstance(engine_messages.decode_start_report(self.process.stdout.readline()), engine_messages.Ready)
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(address)
        self._last_keep_alive = 0.0

    def send(self, data: bytes) -> None:
        self._socket.send(data)

    def add(self, name: str, **params: Any) -> None:
        sampling = SamplingParams(**{"ignore_eos": True} | params)
        self.send(
            engine_messages.encode(
                engine_messages.Add(EngineRequest(request_id=name, prompt=[1, 2, 3], sampling=sampling))
            )
        )

    def _send_keep_alive(self) -> None:
        if time.monotonic() - self._last_keep_alive > engine_messages.KEEP_ALIVE_INTERVAL:
            self._last_keep_alive = time.monotonic()
            self.send(engine_messages.encode(engine_messages.KeepAlive()))

    def deltas(self, enough: Callable[[list[TokenDelta]], bool], limit: float = 60.0) -> list[TokenDelta]:
        """Receive deltas until ``enough`` returns True; return all of them."""
        found: list[TokenDelta] = []
        deadline = time.monotonic() + limit
        self._send_keep_alive()
        while not enough(found):
            assert time.monotonic() < deadline, found
            self._send_keep_alive()
            if self._socket.poll(100):
                message = engine_messages.decode_from_engine(self._socket.recv())
                found += message.deltas if isinstance(message, engine_messages.Deltas) else []
        return found

    def find(self, text: str, limit: float = 60.0) -> None:
        """Wait until the engine's log contains a text."""
        deadline = time.monotonic() + limit
        while text not in (log := self._log.read_text()):
            assert time.monotonic() < deadline, log
            self.deltas(lambda found: True)  # the call sends keep-alive messages
            time.sleep(0.05)

    def close(self) -> None:
        self._socket.close(linger=0)
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


def ended(*names: str) -> Callable[[list[TokenDelta]], bool]:
    return lambda found: {delta.request_id for delta in found if delta.finished} >= set(names)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = Client(tmp_path_factory.mktemp("engine"))
    yield client
    client.close()


def encoded_add(name: Any, sampling: Any, **fields: Any) -> bytes:
    return msgspec.msgpack.encode(
        {"type": "Add", "request": {"request_id": name, "prompt": [1], "sampling": sampling} | fields}
    )


def nested(depth: int) -> bytes:
    """Encode empty arrays nested to a depth, as msgpack."""
    return b"\x91" * depth + b"\x90"


UNREADABLE = {
    "out of range": encoded_add("bad", {"temperature": -1, "n": 3}),
    "wrong type": encoded_add("bad", {"temperature": "hot"}),
    "invalid schema": encoded_add("bad", {"guided_decoding": {"json": "{"}}),
    "too deeply nested schema": encoded_add("bad", {"guided_decoding": {"json": "[" * 100_000}}),
    "unknown type of prompt": encoded_add("bad", {}, prompt="text"),
    "empty prompt": encoded_add("bad", {}, prompt=[]),
    "negative EOS token": encoded_add("bad", {"min_tokens": 2}, eos_token_ids=[-5]),
    "too many sequences": encoded_add("bad", {"n": 10**15, "best_of": "x"}),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_invalid_request_does_not_affect_other_request(engine: Client, kind: str) -> None:
    engine.add("good", max_tokens=4)
    engine.send(UNREADABLE[kind])
    found = engine.deltas(ended("good", "bad"))
    bad = [delta for delta in found if delta.request_id == "bad"]
    assert all(delta.finished is FinishReason.ERROR and delta.failure for delta in bad)
    assert {delta.failure.code for delta in bad if delta.failure} == {Code.INVALID}
    assert [delta.sequence for delta in bad] == list(range(3 if kind == "out of range" else 1))
    assert sum(len(delta.token_ids) for delta in found if delta.request_id == "good") == 4


def test_invalid_message_is_ignored(engine: Client) -> None:
    for data in (
        b"",
        b"\xc1",
        b"\x00" * 100,
        nested(100_000),
        msgspec.msgpack.encode({"type": "Add"}),
        encoded_add(7, {}),
    ):
        engine.send(data)
    for message in ({"type": "Abort", "request_id": 5}, {"type": "Nothing"}, {"type": "Stop"}, ["Add"], {"type": []}):
        engine.send(msgspec.msgpack.encode(message))
    engine.add("after", max_tokens=4)
    assert sum(len(delta.token_ids) for delta in engine.deltas(ended("after"))) == 4
    assert engine.process.poll() is None


def test_vocabulary_is_read_before_first_guided_request(engine: Client) -> None:
    """The idle engine reads the vocabulary in advance, because reading it later would delay running requests."""
    engine.send(
        engine_messages.encode(
            engine_messages.SetVocabulary(Vocabulary((demo.CHAT / "tokenizer.json").read_text(), [0]))
        )
    )
    engine.find("guided decoding has read the vocabulary")
    constraint = GuidedDecodingParams(regex="[ab]{3}")
    engine.add("guided", guided_decoding=constraint, ignore_eos=False)
    assert engine.deltas(ended("guided"))[-1].finished is FinishReason.STOP


@pytest.mark.slow
def test_failed_device_ends_process_but_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients send the requests to the next engine."""
    device = FailingDevice(tmp_path, monkeypatch)
    client = Client(tmp_path)
    try:
        client.add("running", max_tokens=500)
        client.deltas(lambda found: len(found) > 2)
        device.fail()
        client.add("more", max_tokens=5)
        found = client.deltas(lambda _: client.process.poll() is not None)
        failed = {delta.request_id: delta.failure for delta in found if delta.finished}
        assert failed in ({}, {"more": engine_messages.ENGINE_STOPPING}), "more may arrive after the failure"
        assert client.process.returncode == 1
    finally:
        client.close()
