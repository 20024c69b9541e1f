"""MCP tools in the Responses API, with MCP servers of the official package and OpenAI's client."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from repository import TESTS
from scripted_model import scripted_model, tool_call
from serving import Served, free_ports

TOOLS = str(TESTS / "support/mcp_tools.py")
REPLIES = (
    "I add. " + tool_call("tools__add", a=2, b=3),
    tool_call("tools__add", a=5, b=40),
    "The sum is 45.",
    # 3
    tool_call("tools__delete", file="a.txt"),
    "I have asked you.",
    # 5
    "\n".join([tool_call("tools__add", a=1, b=1), tool_call("tools__fail"), tool_call("tools__nothing")]),
    "unused",
    "unused",
    "One call of three worked.",
    # 9
    tool_call("tools__secret") + "\n" + tool_call("get_weather", city="Paris"),
    "unused",
    "It is sunny.",
    # 12
    tool_call("tools__big", size=3000) + "\n" + tool_call("tools__picture"),
    "unused",
    "That was too much.",
    # 15
    tool_call("tools__wait"),
    # 16
    tool_call("web_search__add", a=6, b=6),
    "12",
    # 18
    tool_call("tools__add", a=7, b=7),
)
"""Replies of the model; ``first_reply`` selects the first one, and each tool result the next. The last one repeats."""
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mcp")


@pytest.fixture(scope="module")
def mcp_url(folder: Path) -> Iterator[str]:
    """URL of an MCP server."""
    (port,) = free_ports(1)
    process = subprocess.Popen([sys.executable, TOOLS, str(port), str(folder)])
    try:
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port))):
                break
            assert time.monotonic() < deadline and process.poll() is None
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def served(folder: Path, mcp_url: str) -> Iterator[Served]:
    stdio = {"command": sys.executable, "args": [TOOLS, "stdio", str(folder)], "env": {"SECRET": "of-the-process"}}
    servers = {
        "tools": stdio,
        "remote": {"type": "http", "url": mcp_url, "headers": {"X-Secret": "of-the-configuration"}},
        "web_search": stdio,
        "broken": {"command": "/does/not/exist"},
    }
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    model = scripted_model(folder / "model", *REPLIES)
    flags = ("--mcp-config", str(folder / "mcp.json"), "--mcp-max-rounds", "3", "--mcp-max-result-size", "1000")
    storage = ("--storage-dir", str(folder / "storage"))
    with Served("--model", str(model), "--served-model-name", "scripted", *flags, *storage) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)


@pytest.fixture
def calls(folder: Path) -> Path:
    """The record of the calls that the MCP servers have executed in this test."""
    (folder / "calls").write_text("")
    return folder / "calls"


def mcp(label: str = "tools", **more: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, "require_approval": "never", **more}


def request(first: int, *tools: Any, **more: Any) -> dict[str, Any]:
    body = {"chat_template_kwargs": {"first_reply": first}}
    return {"model": "scripted", "input": "Go!", "tools": list(tools) or [mcp()], "extra_body": body, **more}


def whole(client: openai.OpenAI, **fields: Any) -> Response:
    return client.responses.create(**fields)


def streamed(client: openai.OpenAI, **fields: Any) -> Response:
    """Return the final response of a stream, after checking that its events add up to it."""
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1].response
    for index, item in enumerate(last.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item == item
        kinds = [event.type.removeprefix("response.") for event in own[1:-1]]
        if item.type == "mcp_list_tools":
            assert kinds == ["mcp_list_tools.in_progress", "mcp_list_tools.completed"]
        elif item.type == "mcp_call":
            deltas = kinds.count("mcp_call_arguments.delta")
            end = "completed" if item.error is None else "failed"
            assert kinds == [
                "mcp_call.in_progress",
                *["mcp_call_arguments.delta"] * deltas,
                "mcp_call_arguments.done",
                f"mcp_call.{end}",
            ]
            assert "".join(event.delta for event in own if event.type.endswith(".delta")) == item.arguments
        elif item.type == "mcp_approval_request":
            assert kinds == []
    return last


BOTH = pytest.mark.parametrize("ask", [whole, streamed])


def kinds(response: Response) -> list[str]:
    return [item.type for item in response.output]


@BOTH
def test_loop_calls_tools_until_the_answer(client: openai.OpenAI, calls: Path, ask: Any) -> None:
    response = ask(client, **request(0))
    print(response.model_dump_json(exclude={"tools"})[:3000])
    assert kinds(response) == ["mcp_list_tools", "message", "mcp_call", "mcp_call", "message"]
    listed, _, first, second, _ = response.output
    assert [tool.name for tool in listed.tools][:2] == ["add", "delete"]
    assert listed.tools[0].input_schema["required"] == ["a", "b"]
    assert (first.server_label, first.name, json.loads(first.arguments)) == ("tools", "add", {"a": 2, "b": 3})
    assert [(call.output, call.error, call.status) for call in (first, second)] == [
        ("5", None, "completed"),
        ("45", None, "completed"),
    ]
    assert response.output_text == "I add. The sum is 45."
    assert (response.status, calls.read_text()) == ("completed", "add 2 3\nadd 5 40\n")
    once = ask(client, **request(2))
    assert response.usage.input_tokens > 3 * once.usage.input_tokens
