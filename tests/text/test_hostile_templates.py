"""Chat templates that loop or exhaust memory for certain messages: the API process and other clients continue."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Served, children

from penstock import LLM, AsyncLLM, SamplingParams, demo
from penstock.core import PenstockError
from penstock.text.isolated_template import IsolatedTemplate, TemplatePool

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HARM = (
    "{%- set last_text = messages[-1].content | string %}"
    "{%- if last_text == 'loop' %}" + LOOP + "{% endif %}"
    "{%- if last_text == 'power' %}{{ 9 ** (9 ** (4 + last_text | length)) }}{% endif %}"
    "{%- if last_text == 'memory' %}{{ 'x' * 10 ** (5 + last_text | length) }}{% endif %}"
    "{%- if last_text == 'growing' %}{% set all = namespace(text='x') %}"
    "{% for a in range(99) %}{% set all.text = all.text + all.text %}{% endfor %}{% endif %}"
    "{%- if last_text == 'lists' %}{{ range(9999) | list * 10 ** (2 + last_text | length) }}{% endif %}"
)
"""Harmful template code, selected by the last message. No expression is constant: Jinja would compute constant
expressions when it compiles the template."""
KINDS = ("loop", "power", "memory", "growing", "lists")
REFUSED = "takes more than 2 seconds of processor time or 1 GiB of memory|cannot render"


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ROUTES: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"messages": _user(text)},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": _user(text), "max_tokens": 5},
    "/v1/messages/count_tokens": lambda text: {"messages": _user(text)},
    "/api/chat": lambda text: {"model": "default", "messages": _user(text), "stream": False},
    "/apply-template": lambda text: {"messages": _user(text)},
    "/tokenize": lambda text: {"messages": _user(text)},
}
"""Paths of routes that render a chat, with a function that creates the request body for a message."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(demo.CHAT, tmp_path_factory.mktemp("hostile") / "model")
    path = folder / "chat_template.jinja"
    path.write_text(HARM + path.read_text())
    return folder


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Served]:
    with Served(str(checkpoint), "--num-gpu-blocks-override", "400") as server:
        assert len(server.pids["template"]) == 1, "a template process must start before the first chat"
        yield server


class OtherClient:
    """Client that reads streams and counts their chunks in a thread."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._ended = threading.Event()
        self._more = threading.Condition()
        self._count = 0
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> OtherClient:
        self._thread.start()
        self.wait_for_chunks(2)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def wait_for_chunks(self, count: int) -> None:
        with self._more:
            target = self._count + count
            assert self._more.wait_for(lambda: self._count >= target, 60), "no more chunks of the stream within 60 s"

    def _read(self) -> None:
        body = {"prompt": "One, two,", "stream": True, "max_tokens": 1500, "ignore_eos": True}
        while not self._ended.is_set():
            with httpx.stream("POST", f"{self._server.url}/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if self._ended.is_set():
                        return
                    with self._more:
                        self._count += bool(line)
                        self._more.notify_all()


def peak_resident(pid: int) -> int:
    """Peak resident memory of a process in bytes."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def check_harm_is_contained(server: Served, path: str, kinds: tuple[str, ...]) -> None:
    """Check that harmful messages are refused while another client's stream continues, and normal chats still work."""
    (api,) = server.pids["api"]
    before = peak_resident(api)
    with OtherClient(server) as other, ThreadPoolExecutor() as pool:
        responses = [pool.submit(httpx.post, server.root + path, json=ROUTES[path](kind)) for kind in kinds]
        other.wait_for_chunks(3)
        for answer in (response.result() for response in responses):
            assert answer.status_code == 400, answer.text
            assert any(message in answer.text for message in REFUSED.split("|")), answer.text
        assert httpx.post(server.root + path, json=ROUTES[path]("Hello!")).status_code == 200
        other.wait_for_chunks(3)
    assert server.pids["api"] == [api]
    assert peak_resident(api) - before < 2**28


@pytest.mark.slow
def test_harmful_message_is_refused_and_other_stream_continues(served: Served) -> None:
    check_harm_is_contained(served, "/v1/chat/completions", ("loop", "growing"))


@pytest.mark.thorough
@pytest.mark.parametrize("path", ROUTES)
def test_every_rendering_route_refuses_harmful_messages(served: Served, path: str) -> None:
    check_harm_is_contained(served, path, KINDS)


@pytest.mark.thorough
def test_slow_templates_do_not_delay_other_chats(served: Served) -> None:
    """More chats whose template loops endlessly are sent than there are template processes: a later chat is answered
    before all of them are refused."""
    with ThreadPoolExecutor(12) as pool:
        body = ROUTES["/v1/chat/completions"]
        slow = [pool.submit(httpx.post, f"{served.url}/chat/completions", json=body("loop")) for _ in range(3)]
        assert httpx.post(f"{served.url}/chat/completions", json=body("Hello!") | {"max_tokens": 1}).status_code == 200
        assert not all(each.done() for each in slow)
        assert {each.result().status_code for each in slow} == {400}


@pytest.mark.slow
def test_slow_chats_of_one_client_do_not_starve_others() -> None:
    """Another client's chat waits for at most one rendering per process, however many slow chats are queued. Chats with
    many messages do not delay quick chats."""

    async def run() -> None:
        pool, special = TemplatePool(), {"bos_token": "", "eos_token": ""}
        slow = IsolatedTemplate(LOOP, special, pool)
        quick = IsolatedTemplate("{{ messages | length }}", special, pool)
        try:
            assert await quick.render_async(_user("Hello!"), 6, "other") == "1"
            for messages in (_user("loop"), _user("loop") * 3000):
                waiting = [asyncio.create_task(slow.render_async(messages, 100, "slow")) for _ in range(12)]
                await asyncio.sleep(0)
                assert await quick.render_async(_user("Hello!"), 6, "other") == "1"
                assert not any(task.done() for task in waiting), (
                    "the other client's chat waited until a slow chat was refused"
                )
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                assert await quick.render_async(_user("Hello!"), 6, "slow") == "1", "a smaller chat was not rendered"
                for process in pool_processes():
                    os.kill(process, signal.SIGKILL)
                assert await quick.render_async(_user("Hello!") * 3000, 100, "slow") == "3000", (
                    "the chat was not rendered again in a new process"
                )
        finally:
            pool.close()

    asyncio.run(run())


def test_chats_are_rendered_after_client_disconnects(served: Served) -> None:
    """The disconnected client's rendering ends at its limit; its process is used again."""
    body = ROUTES["/v1/chat/completions"]
    assert httpx.post(f"{served.url}/chat/completions", json=body("Hello!") | {"max_tokens": 1}).status_code == 200
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{served.url}/chat/completions", json=body("loop"), timeout=0.1)
    assert httpx.post(f"{served.url}/chat/completions", json=body("Hello!") | {"max_tokens": 1}).status_code == 200


def test_killed_template_process_is_restarted(served: Served) -> None:
    body = ROUTES["/v1/chat/completions"]
    for _ in range(2):
        assert httpx.post(f"{served.url}/chat/completions", json=body("Hello!") | {"max_tokens": 1}).status_code == 200
        for pid in served.pids["template"]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_python_interfaces_refuse_harmful_messages(checkpoint: Path) -> None:
    once = SamplingParams(max_tokens=2, temperature=0)
    llm = LLM(str(checkpoint), num_gpu_blocks_override=50)
    with pytest.raises(PenstockError, match=REFUSED):
        llm.chat(_user("loop"), once)
    assert llm.chat(_user("Hello!"), once)[0].outputs[0].token_ids

    async def chats() -> None:
        async with AsyncLLM(str(checkpoint), num_gpu_blocks_override=50) as engine:
            refused = asyncio.create_task(anext(engine.chat(_user("loop"), once)))
            async for output in engine.chat(_user("Hello!"), once):
                last = output
            assert last.finished and not refused.done()
            with pytest.raises(PenstockError, match=REFUSED):
                await refused

    asyncio.run(chats())
    assert not any(
        "template_process" in (Path("/proc") / str(pid) / "cmdline").read_text() for pid in _children_after_gc()
    )


def pool_processes() -> list[int]:
    """Template processes started by this process."""
    pids = children(os.getpid())
    return [pid for pid in pids if "template_process" in (Path("/proc") / str(pid) / "cmdline").read_text()]


def _children_after_gc() -> list[int]:
    """Child processes of this process, after garbage collection has ended unused ones."""
    import gc

    gc.collect()
    return children(os.getpid())


@pytest.mark.slow
def test_hung_api_process_is_restarted_and_others_continue() -> None:
    arguments = ("--api-server-count", "2", "--api-process-timeout", "6", "--num-gpu-blocks-override", "100")
    with Served(*arguments) as server:
        hung, other = server.pids["api"]
        os.kill(hung, signal.SIGSTOP)
        server.find(rf"API process \(process {hung}\) has not answered for 6 seconds: killed")
        server.find(rf"API process \d \(process {hung}\) ended")
        server._wait_ready()
        pids = server.pids["api"]
        assert other in pids and hung not in pids
        body = {"prompt": "One, two,", "max_tokens": 2}
        assert httpx.post(f"{server.url}/completions", json=body).status_code == 200
