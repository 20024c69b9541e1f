"""Checkpoints whose chat template does harm for certain messages: the API process and its other clients go on."""

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

from penstock import LLM, AsyncLLM, demo
from penstock.core import PenstockError
from penstock.frontend.llm import SamplingParams
from penstock.text.isolated_template import IsolatedTemplate, TemplatePool

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HARM = (
    "{%- set said = messages[-1].content | string %}"
    "{%- if said == 'loop' %}" + LOOP + "{% endif %}"
    "{%- if said == 'power' %}{{ 9 ** (9 ** (4 + said | length)) }}{% endif %}"
    "{%- if said == 'memory' %}{{ 'x' * 10 ** (5 + said | length) }}{% endif %}"
    "{%- if said == 'growing' %}{% set all = namespace(text='x') %}"
    "{% for a in range(99) %}{% set all.text = all.text + all.text %}{% endfor %}{% endif %}"
    "{%- if said == 'lists' %}{{ range(9999) | list * 10 ** (2 + said | length) }}{% endif %}"
)
"""What the template does before it renders, by the last message; nothing in it is constant, as constants are computed
when it is compiled."""
KINDS = ("loop", "power", "memory", "growing", "lists")
REFUSED = "takes longer than 2 seconds of processor time, or more than 1 GiB of memory|cannot render"


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
"""Paths that render a chat, with the body for a message."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(demo.CHAT, tmp_path_factory.mktemp("hostile") / "model")
    path = folder / "chat_template.jinja"
    path.write_text(HARM + path.read_text())
    return folder


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Served]:
    with Served(str(checkpoint), "--num-gpu-blocks-override", "400") as server:
        assert len(server.pids["template"]) == 1, "one is started before the first chat needs it"
        yield server


class OtherClient:
    """A client whose stream must go on: its chunks are counted by a thread."""

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
            aim = self._count + count
            assert self._more.wait_for(lambda: self._count >= aim, 60), "the stream stands still"

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


def resident(pid: int) -> int:
    """Bytes of the largest resident memory that a process had."""
    status = (Path("/proc") / str(pid) / "status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def harm(server: Served, path: str, kinds: tuple[str, ...]) -> None:
    """Harmful messages are refused while another client's stream goes on, and ordinary chats are answered after."""
    (api,) = server.pids["api"]
    before = resident(api)
    with OtherClient(server) as other, ThreadPoolExecutor() as pool:
        asked = [pool.submit(httpx.post, server.root + path, json=ROUTES[path](kind)) for kind in kinds]
        other.wait_for_chunks(3)
        for answer in (each.result() for each in asked):
            assert answer.status_code == 400, answer.text
            assert any(words in answer.text for words in REFUSED.split("|")), answer.text
        assert httpx.post(server.root + path, json=ROUTES[path]("Hello!")).status_code == 200
        other.wait_for_chunks(3)
    assert server.pids["api"] == [api]
    assert resident(api) - before < 2**28


def test_harmful_message_is_refused_and_other_stream_goes_on(served: Served) -> None:
    harm(served, "/v1/chat/completions", ("loop", "growing"))


@pytest.mark.thorough
@pytest.mark.parametrize("path", ROUTES)
def test_every_route_that_renders_refuses_harmful_messages(served: Served, path: str) -> None:
    harm(served, path, KINDS)


@pytest.mark.thorough
def test_slow_templates_do_not_hold_up_other_chats(served: Served) -> None:
    """More endless messages than processes; a chat that comes after them is answered before they are all refused."""
    with ThreadPoolExecutor(12) as pool:
        body = ROUTES["/v1/chat/completions"]
        asked = [pool.submit(httpx.post, f"{served.url}/chat/completions", json=body("loop")) for _ in range(3)]
        assert httpx.post(f"{served.url}/chat/completions", json=body("Hello!") | {"max_tokens": 1}).status_code == 200
        assert not all(each.done() for each in asked)
        assert {each.result().status_code for each in asked} == {400}


def test_slow_chats_of_one_client_leave_others_their_turns() -> None:
    """Another client's chat is rendered after at most one turn of each place, however many slow ones came first; chats
    with many messages take no place of quick ones."""

    async def run() -> None:
        pool, special = TemplatePool(), {"bos_token": "", "eos_token": ""}
        slow = IsolatedTemplate(LOOP, special, pool)
        quick = IsolatedTemplate("{{ messages | length }}", special, pool)
        try:
            assert await quick.render_async(_user("Hello!"), 6, "other") == "1"
            for messages in (_user("loop"), _user("loop") * 3000):
                asked = [asyncio.create_task(slow.render_async(messages, 100, "slow")) for _ in range(12)]
                await asyncio.sleep(0)
                assert await quick.render_async(_user("Hello!"), 6, "other") == "1"
                assert not any(task.done() for task in asked), "all were refused, or some, before it had its turn"
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
                assert await quick.render_async(_user("Hello!"), 6, "slow") == "1", "a smaller chat may be quick"
                for process in pool_processes():
                    os.kill(process, signal.SIGKILL)
                assert await quick.render_async(_user("Hello!") * 3000, 100, "slow") == "3000", "begun again"
        finally:
            pool.close()

    asyncio.run(run())


def test_client_that_leaves_does_not_end_the_process(served: Served) -> None:
    """The rendering of a client that has left ends by itself; its process is used again."""
    body = ROUTES["/v1/chat/completions"]
    assert httpx.post(f"{served.url}/chat/completions", json=body("Hello!") | {"max_tokens": 1}).status_code == 200
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{served.url}/chat/completions", json=body("loop"), timeout=0.1)
    assert httpx.post(f"{served.url}/chat/completions", json=body("Hello!") | {"max_tokens": 1}).status_code == 200


def test_killed_template_process_is_started_again(served: Served) -> None:
    body = ROUTES["/v1/chat/completions"]
    for _ in range(2):
        assert httpx.post(f"{served.url}/chat/completions", json=body("Hello!") | {"max_tokens": 1}).status_code == 200
        for pid in served.pids["template"]:
            os.kill(pid, signal.SIGKILL)


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
    assert not any("template_process" in (Path("/proc") / str(pid) / "cmdline").read_text() for pid in _own_children())


def pool_processes() -> list[int]:
    """The template processes of this one."""
    pids = children(os.getpid())
    return [pid for pid in pids if "template_process" in (Path("/proc") / str(pid) / "cmdline").read_text()]


def _own_children() -> list[int]:
    """Child processes of this one, after those that are not used any more have ended."""
    import gc

    gc.collect()
    return children(os.getpid())


def test_api_process_that_hangs_is_restarted_and_others_go_on() -> None:
    arguments = ("--api-server-count", "2", "--api-process-timeout", "6", "--num-gpu-blocks-override", "100")
    with Served(*arguments) as server:
        hung, other = server.pids["api"]
        os.kill(hung, signal.SIGSTOP)
        server.find(rf"API process \(process {hung}\) has not answered for 6 seconds: killed")
        server.find(rf"API process \d \(process {hung}\) ended")
        server._welcome()
        pids = server.pids["api"]
        assert other in pids and hung not in pids
        body = {"prompt": "One, two,", "max_tokens": 2}
        assert httpx.post(f"{server.url}/completions", json=body).status_code == 200
