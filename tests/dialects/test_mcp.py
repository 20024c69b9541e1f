"""MCP tools in the Responses API, with MCP servers of the official package and OpenAI's client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    tool_call("local__wait"),
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
def flags(folder: Path, mcp_url: str) -> list[str]:
    """Flags of a server with the model, MCP servers and small limits."""
    stdio = {"command": sys.executable, "args": [TOOLS, "stdio", str(folder)], "env": {"SECRET": "of-the-process"}}
    servers = {
        "tools": {"type": "http", "url": mcp_url, "headers": {"X-Secret": "of-the-configuration"}},
        "local": stdio,
        "web_search": stdio,
        "broken": {"command": "/does/not/exist"},
    }
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    model = scripted_model(folder / "model", *REPLIES)
    (folder / "calls").touch()
    flags = ["--mcp-config", str(folder / "mcp.json"), "--model", str(model), "--served-model-name", "scripted"]
    return [*flags, "--mcp-max-rounds", "3", "--mcp-max-result-size", "1000", "--mcp-timeout", "600"]


@pytest.fixture(scope="module")
def served(flags: list[str], folder: Path) -> Iterator[Served]:
    with Served(*flags, "--storage-dir", str(folder / "storage")) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def unconstrained_client(flags: list[str]) -> Iterator[openai.OpenAI]:
    """Client of a server whose model can call tools that do not exist."""
    with Served(*flags, "--tool-strictness", "off") as server:
        yield openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


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


@pytest.mark.row("responses", "mcp", "mcp_list_tools", "mcp_call")
@BOTH
def test_loop_calls_tools_until_the_answer(client: openai.OpenAI, calls: Path, ask: Any) -> None:
    response = ask(client, **request(0))
    assert kinds(response) == ["mcp_list_tools", "message", "mcp_call", "mcp_call", "message"]
    listed, _, first, second, _ = response.output
    assert [tool.name for tool in listed.tools][:2] == ["add", "delete"]
    assert listed.tools[0].input_schema["required"] == ["a", "b"]
    assert (first.server_label, first.name, json.loads(first.arguments)) == ("tools", "add", {"a": 2, "b": 3})
    assert [(call.output, call.error, call.status) for call in (first, second)] == [
        ("5", None, "completed"),
        ("45", None, "completed"),
    ]
    assert response.output_text == "I add.The sum is 45."
    assert (response.status, calls.read_text()) == ("completed", "add 2 3\nadd 5 40\n")
    once = ask(client, **request(2))
    assert response.usage.input_tokens > 3 * once.usage.input_tokens


@pytest.mark.parametrize("kind", ["process", "http", "url"])
def test_server_gets_its_configuration(client: openai.OpenAI, mcp_url: str, kind: str) -> None:
    """Environment variables of a process; headers of a server with HTTP, also if a client names it by its URL."""
    tools = {
        "process": mcp("local"),
        "http": mcp("tools"),
        "url": mcp("mine", server_url=mcp_url, headers={"X-Other": "of-the-client"}, authorization="of-the-client"),
    }
    label = tools[kind]["server_label"]
    wanted = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": label, "name": "secret"}
    approved = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
    items = [{"role": "user", "content": "Go!"}, wanted | {"arguments": "{}"}, approved]
    response = client.responses.create(**request(1, tools[kind], input=items))
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "message"]
    assert response.output[0].server_label == label
    assert response.output[1].output == ("of-the-process" if kind == "process" else "of-the-configuration")
    assert "of-the-client" not in response.model_dump_json()


@pytest.mark.row("responses", "mcp_approval_request", "mcp_approval_response")
@BOTH
def test_call_is_executed_after_approval_only(client: openai.OpenAI, calls: Path, ask: Any) -> None:
    tool = {"type": "mcp", "server_label": "tools"}
    asked = ask(client, **request(3, tool))
    assert kinds(asked) == ["mcp_list_tools", "mcp_approval_request"]
    wanted = asked.output[1]
    assert (wanted.server_label, wanted.name, json.loads(wanted.arguments)) == ("tools", "delete", {"file": "a.txt"})
    assert calls.read_text() == ""
    response = {"type": "mcp_approval_response", "approval_request_id": wanted.id}
    history = [{"role": "user", "content": "Go!"}, *[item.model_dump() for item in asked.output]]

    approved = ask(client, **request(3, tool, input=[*history, {**response, "approve": True}]))
    assert kinds(approved) == ["mcp_call", "message"], "the tools are not listed again"
    call = approved.output[0]
    assert (call.output, call.approval_request_id, calls.read_text()) == ("deleted a.txt", wanted.id, "delete a.txt\n")
    assert approved.output_text == "I have asked you."
    done = [*history, {**response, "approve": True}, *[item.model_dump() for item in approved.output]]
    assert ask(client, **request(1, WEATHER, input=done)).output_text, "an executed call needs no MCP server"

    rejected = ask(client, **request(3, tool, input=[*history, {**response, "approve": False, "reason": "Never!"}]))
    assert (kinds(rejected), rejected.output_text) == (["message"], "I have asked you.")
    assert calls.read_text() == "delete a.txt\n"
    for items, more in (
        (history, "has no mcp_approval_response"),
        ([history[0], {**response, "approve": True}], "there is no mcp_approval_request"),
    ):
        with pytest.raises(openai.BadRequestError, match=more):
            ask(client, **request(3, tool, input=items))
    with pytest.raises(openai.BadRequestError, match="whose call was approved"):
        ask(client, **request(3, WEATHER, input=[*history, {**response, "approve": True}]))


def test_approval_in_stored_conversations(client: openai.OpenAI, calls: Path) -> None:
    tool = {"type": "mcp", "server_label": "tools", "require_approval": {"never": {"tool_names": ["add"]}}}
    asked = client.responses.create(**request(3, tool))
    items: Any = [{"type": "mcp_approval_response", "approval_request_id": asked.output[1].id, "approve": True}]
    approved = client.responses.create(**request(3, tool, input=items, previous_response_id=asked.id))
    assert (approved.output[0].output, approved.output_text) == ("deleted a.txt", "I have asked you.")

    conversation = client.conversations.create().id
    asked = client.responses.create(**request(3, tool, conversation=conversation))
    items = [{"type": "mcp_approval_response", "approval_request_id": asked.output[1].id, "approve": True}]
    approved = client.responses.create(**request(3, tool, input=items, conversation=conversation))
    assert (kinds(approved), approved.output_text) == (["mcp_call", "message"], "I have asked you.")
    again = client.responses.create(**request(2, tool, input="And?", conversation=conversation))
    assert kinds(again) == ["message"]
    assert calls.read_text() == "delete a.txt\n" * 2
    listed = [item.type for item in client.conversations.items.list(conversation, order="asc")]
    assert listed == [
        "message",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "message",
        "message",
        "message",
    ]


@BOTH
def test_failed_calls_are_items_that_the_model_sees(unconstrained_client: openai.OpenAI, calls: Path, ask: Any) -> None:
    response = ask(unconstrained_client, **request(5))
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "mcp_call", "mcp_call", "message"]
    _, add, fail, nothing, _ = response.output
    assert (add.output, add.error) == ("2", None)
    assert (fail.output, fail.status) == (None, "failed")
    assert "fail" in fail.error
    assert "has no tool nothing" in nothing.error
    assert response.output_text == "One call of three worked."


@BOTH
def test_result_beyond_limit_is_an_error(client: openai.OpenAI, ask: Any) -> None:
    big, picture = ask(client, **request(12)).output[1:3]
    assert (big.output, big.status) == (None, "failed")
    assert "3000 bytes; the maximum is 1000 (mcp_max_result_size)" in big.error
    assert picture.output == "[image: image/png is not shown]"


@BOTH
def test_functions_of_the_client_end_the_loop(client: openai.OpenAI, ask: Any) -> None:
    tools = mcp(), WEATHER
    response = ask(client, **request(9, *tools))
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "function_call"]
    _, secret, weather = response.output
    assert (secret.output, weather.name) == ("of-the-configuration", "get_weather")
    output = {"type": "function_call_output", "call_id": weather.call_id, "output": "sunny"}
    history = [{"role": "user", "content": "Go!"}, *[item.model_dump() for item in response.output], output]
    assert ask(client, **request(9, *tools, input=history)).output_text == "It is sunny."


def test_allowed_tools_and_tool_choice(client: openai.OpenAI, unconstrained_client: openai.OpenAI, calls: Path) -> None:
    for allowed in (["add"], {"tool_names": ["add", "delete"], "read_only": True}):
        fields = request(3, mcp(allowed_tools=allowed))
        response = unconstrained_client.responses.create(**fields)
        assert [tool.name for tool in response.output[0].tools] == ["add"]
        assert "has no tool delete" in response.output[1].error
        assert client.responses.create(**fields).output[1].name == "add"
    assert "delete" not in calls.read_text()
    choice: Any = {"type": "mcp", "server_label": "tools", "name": "fail"}
    forced = client.responses.create(**request(0, tool_choice=choice, max_output_tokens=400))
    assert forced.output[1].name == "fail"


@pytest.mark.row("responses", "max_tool_calls")
@BOTH
def test_loop_ends_at_its_limits(client: openai.OpenAI, calls: Path, ask: Any) -> None:
    endless = ask(client, **request(18))
    assert (endless.status, endless.incomplete_details.reason) == ("incomplete", "max_tool_calls")
    assert (kinds(endless), len(calls.read_text().splitlines())) == (["mcp_list_tools", *["mcp_call"] * 3], 3)
    limited = ask(client, **request(18, max_tool_calls=1))
    assert [item.status for item in limited.output[1:]] == ["completed", "failed", "failed"]
    assert "the maximum of 1 tool calls is reached" in limited.output[2].error
    short = ask(client, **request(18, max_output_tokens=3))
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert len(calls.read_text().splitlines()) == 4


@pytest.mark.row("responses", "web_search")
def test_web_search_uses_the_configured_server(client: openai.OpenAI, calls: Path) -> None:
    response = client.responses.create(**request(16, {"type": "web_search"}))
    assert (kinds(response), response.output_text) == (["mcp_list_tools", "mcp_call", "message"], "12")
    assert calls.read_text() == "add 6 6\n"
    with pytest.raises(openai.BadRequestError, match="code_interpreter is not supported"):
        client.responses.create(**request(16, {"type": "code_interpreter", "container": {"type": "auto"}}))


def test_background_response_runs_the_loop(client: openai.OpenAI) -> None:
    response = client.responses.create(**request(0), background=True)
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        response = client.responses.retrieve(response.id)
    assert (response.status, response.output_text) == ("completed", "I add.The sum is 45.")
    response = streamed(client, **request(0), background=True)
    assert (response.status, response.output_text) == ("completed", "I add.The sum is 45.")


@pytest.mark.slow
def test_disconnect_ends_call_and_server_process(client: openai.OpenAI, folder: Path, calls: Path) -> None:
    with client.responses.create(**request(15, mcp("local")), stream=True) as stream:
        assert next(event for event in stream if event.type == "response.mcp_call_arguments.done")
        wait_until(lambda: calls.read_text() == "wait\n")
        assert processes_of(folder)
    wait_until(lambda: calls.read_text() == "wait\nend\n" and not processes_of(folder))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline


def processes_of(folder: Path) -> list[str]:
    """Command lines of the running MCP servers that the server has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_text())
    return [line for line in found if f"stdio\0{folder}" in line]


def test_input_tokens_include_mcp_tools(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="scripted", input="Go!", tools=[mcp()])  # type: ignore[list-item]
    assert counted.input_tokens == client.responses.create(**request(2)).usage.input_tokens


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"server_label": "other"}, "'other' is not configured .*configured: tools, local, web_search, broken"),
        ({"server_label": "o", "server_url": "http://127.0.0.1:9/mcp"}, "only URLs of configured MCP servers"),
        ({"server_label": "o", "connector_id": "connector_gmail"}, "connector_id: connectors are OpenAI's"),
        ({"server_label": "o/o", "server_url": "http://a"}, "server_label: must be 1 to 64 letters"),
        ({"server_label": "local", "headers": {"A": "b"}}, "is a process"),
        ({"server_label": "tools", "headers": {"x-secret": "b"}}, "is set by the server's configuration"),
        ({"server_label": "tools", "headers": {"Host": "b"}}, "Host cannot be set"),
        ({"server_label": "tools", "headers": {"A": "b\r\nC: d"}}, "must consist of printable ASCII"),
        ({}, "server_label: is missing"),
    ],
)
def test_wrong_server_is_refused(client: openai.OpenAI, tool: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**request(0, {"type": "mcp", **tool}))


@BOTH
def test_unreachable_server_fails_the_request(client: openai.OpenAI, ask: Any) -> None:
    with pytest.raises(openai.InternalServerError, match="tools of the MCP server 'broken' cannot be listed") as failed:
        ask(client, **request(0, mcp("broken")))
    assert failed.value.status_code == 503


def test_other_pages_cannot_use_tools(served: Served) -> None:
    headers = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    body = {"model": "scripted", "input": "Go!", "tools": [mcp()]}
    assert httpx.post(f"{served.url}/responses", json=body, headers=headers).status_code == 401


@pytest.mark.slow
def test_tools_are_not_called_again_after_the_end_of_a_process(
    served: Served, client: openai.OpenAI, calls: Path
) -> None:
    """Another process does not continue a background response that may have called tools."""
    response = client.responses.create(**request(15, mcp("local")), background=True)
    wait_until(lambda: calls.read_text() == "wait\n")
    os.kill(served.pids["api"][0], signal.SIGKILL)

    def has_failed() -> bool:
        nonlocal response
        with suppress(openai.APIConnectionError, openai.InternalServerError):
            response = client.responses.retrieve(response.id)
        return response.status == "failed"

    wait_until(has_failed)
    assert "may have called tools of MCP servers, which are not called again" in response.error.message
    assert calls.read_text().count("wait") == 1
