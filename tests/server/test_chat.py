"""``penstock chat`` through a pipe and in a terminal, with a local engine and with a server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from image_checkpoints import plain, save_colours
from repository import TESTS
from scripted_model import scripted_model, tool_call
from serving import Served
from terminal import LIMIT, Terminal

LOCAL = ("--num-gpu-blocks-override", "200", "--temperature", "0")
KEY = "a-key-for-tests"
CHAT = [sys.executable, "-m", "penstock.cli.main", "chat"]
LIGHT = """
import sys
from penstock.cli.main import main

status = main()
sys.exit(99 if {"torch", "prompt_toolkit"} & set(sys.modules) else status)
"""
WEATHER = {
    "name": "get_weather",
    "description": "查询城市的天气",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
IN_PARIS = "巴黎今天天气怎么样？"
CURSOR_UP, CURSOR_LEFT = "\x1b[A", "\x1b[D"
NAME_QUESTIONS = ["My name is Anna.", "What is my name?"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--num-gpu-blocks-override", "200", "--api-key", KEY) as server:
        yield server


def run_piped(*arguments: str, lines: list[str], command: list[str] = CHAT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OPENAI_API_KEY": KEY}
    stdin = "".join(f"{line}\n" for line in lines)
    return subprocess.run([*command, *arguments], input=stdin, capture_output=True, text=True, env=environment)


class Person(Terminal):
    """User of a chat command in a terminal that is large enough for the whole conversation."""

    def __init__(
        self, home: Path, *arguments: str, command: Sequence[str] = CHAT, environment: Mapping[str, str] = {}
    ) -> None:
        environment = {"OPENAI_API_KEY": KEY, **environment}
        super().__init__(*command, *arguments, columns=200, lines=4000, folder=home, environment=environment)
        self._from = 0

    @property
    def seen(self) -> str:
        """Lines of the screen from the line of the last ``type`` on."""
        cursor, lines = self.screen.cursor, []
        for row in range(self._from, max((row for row, cells in self.screen.buffer.items() if cells), default=0) + 1):
            cells = [self.screen.buffer[row][column].data for column in range(self.screen.columns)]
            typed = cursor.x if row == cursor.y else 0
            lines.append("".join(cells[:typed]) + "".join(cells[typed:]).rstrip())
        return "\n".join(lines).rstrip("\n")

    def type(self, text: str) -> None:
        self._from = self.screen.cursor.y
        super().type(text)

    def see(self, pattern: str, limit: float = LIMIT) -> re.Match[str]:
        """Wait until the screen from the line of the last ``type`` on matches ``pattern``; return the match."""
        deadline = time.monotonic() + limit
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert self.read(deadline), f"no {pattern!r} in {self.seen!r}"
        return found

    def leave(self, key: str) -> int:
        """Press a key that ends the command; return its exit status."""
        self.type(key)
        deadline = time.monotonic() + LIMIT
        while self.read(deadline):
            pass
        return self.process.wait(LIMIT)


def test_commands_undo_save_and_load_conversation(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "conversation.json"
    lines = [
        *NAME_QUESTIONS,
        "/undo",
        f"/save {file}",
        "/clear",
        NAME_QUESTIONS[1],
        f"/load {file}",
        NAME_QUESTIONS[1],
        "/set temperature 1",
    ]
    lines += ["/set seed 3", "/retry", "/retry", "/info", "/exit", "never asked"]
    result = run_piped("--url", served.url, "--temperature", "0", "--system", "You are kind.", lines=lines)
    assert result.returncode == 0, result.stderr
    answers = result.stdout.splitlines()
    assert "Anna" in answers[1]
    assert "Anna" not in answers[2]
    assert answers[3] == answers[1]
    assert answers[4] == answers[5], "equal seed and messages must give equal answers"
    assert answers[6].startswith("model     penstock-demo")
    assert re.fullmatch(r"context   \d+ of 2048 tokens after the last answer", answers[7])
    assert re.fullmatch(r"answers   6, \d+ tokens, .* tokens/s", answers[8])
    assert len(answers) == 9
    messages = json.loads(file.read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == NAME_QUESTIONS[0]


@pytest.mark.slow
def test_wrong_input_is_reported_and_chat_continues(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text('[{"role": "stranger", "content": "Hi"}]')
    messages = {
        "/retrx": "did you mean retry",
        "/undo": "there is no message yet",
        "/set temprature 1": "did you mean temperature",
        "/set top_p much": "top_p: Expected `float`",
        "/set min_p 2": "min_p: must be at most 1",
        f"/load {tmp_path / 'none.json'}": "cannot be read",
        f"/load {tmp_path / 'odd.json'}": "is not a list of messages",
        f"/save {tmp_path}": "cannot be written",
        "/save": "needs a file",
        "What is this? "
        * 20: "the context is full; /undo removes the last turn, /reset starts a new conversation (prompt: has",
    }
    short = ("--max-model-len", "60")
    result = run_piped(*LOCAL, *short, lines=[*messages, "/set ignore_eos true", "Hi"])
    assert result.returncode == 1
    assert " engine: " not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("penstock chat: ")]
    for message, line in zip([*messages.values(), "the context is full; /undo"], errors, strict=True):
        assert line.startswith("penstock chat: ")
        assert message in line
    assert len(result.stdout) > 20


@pytest.mark.slow
@pytest.mark.parametrize("remote", [False, True])
def test_answer_is_streamed_and_ctrl_c_stops_answer(
    remote: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue("served") if remote else None
    arguments = ("--url", server.url, "--temperature", "0") if server else LOCAL
    with Person(tmp_path, *arguments) as person:
        person.see(r"penstock-demo .*/help lists.*> ")
        assert re.search("[⠋⠙⠹]", person.received) and " engine: " not in person.received
        person.type("half a question")
        person.see("half a question")
        person.type("\x03")
        person.see("half a question\n> ")
        person.type("\x03")
        person.see(r"press Ctrl-C again.*\n> ")
        person.type("/set ignore_eos true\n")
        person.see("\n.*> ")
        person.type("Tell me a story.\n")
        person.see(r"story\.\n.*\w{3,} \w+ .* \w+ .* \w+ ")
        person.type("\x03")
        person.see("\n.*> ")
        person.type(f"/save {tmp_path / 'saved.json'}\n")
        person.see("\n.*> ")
        question, answer = json.loads((tmp_path / "saved.json").read_text())
        assert question["content"] == "Tell me a story."
        assert 10 < len(answer["content"]) < 5000, "the answer must be stopped long before the context is full"
        person.type('/clear\n/set ignore_eos\n"""What is the\ncapital of Canada?"""\n')
        person.see(r"Ottawa\..*tokens/s.*> ")
        statistics = r"\x1b\[2m\d+ tokens, [\d.]+ tokens/s, first token after [\d.]+ s\x1b\[0m"
        assert re.search(rf"The capital of Canada is Ottawa\.\r\n{statistics}", person.received)
        person.type("/retry\n")
        person.see(r"Ottawa\..*tokens/s.*> ")
        person.type("What is the capital\\\nof Canada?\n")
        person.see(r"tokens/s.*> ")
        person.type(f"/save {tmp_path / 'saved.json'}\n")
        person.see("\n.*> ")
        questions = [message["content"] for message in json.loads((tmp_path / "saved.json").read_text())[::2]]
        assert questions == ["What is the\ncapital of Canada?", "What is the capital\nof Canada?"]
        if remote:
            person.type("\x03")
            person.see(r"press Ctrl-C again.*\n> ")
        assert person.leave("\x03" if remote else "\x04") == 0


@pytest.mark.slow
def test_piped_lines_continue_one_conversation(served: Served) -> None:
    lines = [
        *NAME_QUESTIONS,
        "",
        "/clear",
        NAME_QUESTIONS[1],
        "/set max_tokens 2",
        "你好",
        "What is this? " * 1000,
        "Hi",
        "/info",
    ]
    local = run_piped(*LOCAL, lines=lines, command=[sys.executable, "-c", LIGHT, "chat"])
    remote = run_piped("--url", served.url, "--temperature", "0", lines=lines)
    assert local.returncode == remote.returncode == 1, local.stderr + remote.stderr
    answers = local.stdout.splitlines()
    assert len(answers) == 8
    assert "Anna" in answers[1]
    assert "Anna" not in answers[2]
    assert "\x1b" not in local.stdout
    assert answers[:5] == remote.stdout.splitlines()[:5]
    assert f"penstock-demo at {served.url}" in remote.stdout
    assert "of 2048 tokens" in remote.stdout
    for errors in (local.stderr, remote.stderr):  # the wording differs between local and remote
        assert re.match(r"penstock chat: the context is full; /undo .*\b(2047|2048)\b", errors.splitlines()[-1])


@pytest.mark.slow
def test_refusal_of_server_prints_one_sentence(served: Served) -> None:
    cases = [
        (["--url", served.url, "--api-key", "wrong"], "returned status 401: an API key is missing or wrong"),
        (["--url", f"{served.root}/v2"], "returned status 404"),
        (["--url", "http://127.0.0.1:9/v1"], "does not respond"),
        (["--url", served.url, "a-model"], "use --model-name"),
        (["--temperature", "-1"], "temperature: must be at least 0"),
    ]
    for arguments, message in cases:
        result = run_piped(*arguments, lines=["Hi"])
        assert result.returncode == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    result = run_piped("--url", served.url, "--model-name", "other", lines=["Hi", "/set top_k -7"])
    assert result.returncode == 1
    assert "the model 'other' does not exist" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("remote", [False, True])
def test_tool_calls_run_command_or_ask_for_result(remote: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue("served") if remote else None
    arguments = ("--url", server.url, "--temperature", "0") if server else LOCAL
    file, script = tmp_path / "tools.json", tmp_path / "weather.py"
    file.write_text(json.dumps([WEATHER]))
    script.write_text(
        "import json, sys\n"
        "result = {'degrees': 21, 'city': json.load(sys.stdin)['city'], 'asked': sys.argv[1]}\n"
        "print(json.dumps(result, ensure_ascii=False))\n"
    )
    command = f"{sys.executable} {script}"
    with Person(tmp_path, *arguments, "--tools", str(file), "--tool-command", command) as person:
        person.see(r"/help lists.*> ")
        person.type(f"{IN_PARIS}\n")
        person.see(r'tool call: get_weather\(\{"city": "巴黎"\}\).*run .*weather\.py get_weather\? \[y/N\] ')
        person.type("y\n")
        person.see(
            r'result: \{"degrees": 21, "city": "巴黎", "asked": "get_weather"\}.*21.*tokens/s, first token after.*> '
        )
        person.type("/regenerate\n")
        person.see(r"\[y/N\] ")
        person.type("n\n")
        person.see("result: ")
        person.type('{"degrees": 35}\n')
        person.see(r"35.*tokens/s.*> ")
        person.type(f"/save {tmp_path / 'saved.json'}\n")
        person.see("\n.*> ")
        roles = [message["role"] for message in json.loads((tmp_path / "saved.json").read_text())]
        assert roles == ["user", "assistant", "tool", "assistant"]
        person.type("/regenerate\n")
        person.see(r"\[y/N\] ")
        person.type("\x03")
        person.see(f"calls have no result; removed the message: {IN_PARIS}.*> ")
        person.type(f"/load {tmp_path / 'saved.json'}\n/tools\n")
        person.see("get_weather +查询城市的天气")
        person.type("Thanks. What is the capital of Canada?\n")
        person.see(r"tokens/s.*> ")


def test_mcp_tools_are_called_after_confirmation(tmp_path: Path) -> None:
    call = tool_call("tools__add", a=2, b=3)
    model = scripted_model(tmp_path / "model", call, "That is all.", max_model_len=8192)
    tools = {"command": sys.executable, "args": [str(TESTS / "support/mcp_tools.py"), "stdio", str(tmp_path)]}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"tools": tools}}))
    saved = tmp_path / "saved.json"
    lines = ["Go!", "y", "Go!", "n", "six", "Go!", "a", "Go!", f"/save {saved}", "/tools"]
    arguments = (str(model), "--num-gpu-blocks-override", "600", "--mcp-config", str(tmp_path / "mcp.json"))
    result = run_piped(*arguments, lines=lines)
    assert result.returncode == 0, result.stderr
    shown = result.stdout.splitlines()
    assert shown[:8] == ['tool call: tools__add({"a": 2, "b": 3})', "That is all."] * 4
    assert shown[8].split(maxsplit=1) == ["tools__add", "Add two numbers."]
    results = [message["content"] for message in json.loads(saved.read_text()) if message["role"] == "tool"]
    assert results == ["5", "six", "5", "5"]
    assert (tmp_path / "calls").read_text() == "add 2 3\n" * 3
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"broken": {"command": "/does/not/exist"}}}))
    result = run_piped(*arguments, lines=lines)
    assert result.returncode != 0
    assert "the MCP server broken cannot be used: /does/not/exist No such file or directory" in result.stderr


def test_piped_line_after_tool_call_is_its_result(served: Served, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": WEATHER}]))
    (tmp_path / "none.json").write_text('[{"function": {"description": "?"}}]')
    tools = f"/tools {tmp_path / 'tools.json'}"
    lines = [tools, IN_PARIS, '{"degrees": 35}', f"/tools {tmp_path / 'none.json'}", IN_PARIS]
    result = run_piped("--url", served.url, "--temperature", "0", lines=lines)
    assert result.returncode == 1
    listed, call, answer, last = result.stdout.splitlines()
    assert listed.startswith("get_weather")
    assert call == last == 'tool call: get_weather({"city": "巴黎"})'
    assert "35" in answer
    assert re.search(r"has no tools in OpenAI's format: .*`name`.*\n.*1 tool calls have no result", result.stderr)


def test_reasoning_is_dimmed_or_folded_on_terminal(served: Served, tmp_path: Path) -> None:
    question = "What is 12 + 30?"
    with Person(tmp_path, "--url", served.url, "--temperature", "0") as person:
        person.see(r"/help lists.*> ")
        person.type('/set chat_template_kwargs {"enable_thinking": true}\n')
        person.see("\n.*> ")
        person.type(f"{question}\n")
        person.see(r"\d+ tokens.*> ")
        dimmed = r"((?:\x1b\[2m[^\x1b]*\x1b\[0m)+)"
        shown = re.search(rf"{dimmed}([^\x1b]+)\x1b\[2m\d+ tokens", person.received)
        assert shown
        reasoning = re.sub(r"\x1b\[\d+m", "", shown[1]).strip()
        assert len(reasoning) > 5
        assert "42" in shown[2]
        person.type("/reasoning fold\n")
        person.see("\n.*> ")
        person.type("/regenerate\n")
        folded = person.see(r"thinking \(/reasoning shows it\)(.*)\n\d+ tokens.*> ")
        assert "42" in folded[1]
        assert reasoning not in folded[1]
        person.type("/reasoning\n")
        person.see(re.escape(reasoning.splitlines()[0]))


@pytest.mark.slow
def test_images_are_attached_from_paths(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_colours(folder)
    paths = [tmp_path / name for name in ("a red one.png", "green.png")]
    for path in paths:
        plain(path.stem.split()[-2] if " " in path.stem else path.stem).save(path)
    arguments = ("--model", str(folder), "--max-tokens", "1", "--num-gpu-blocks-override", "32")
    with Person(tmp_path, *arguments) as person:
        person.see(r"/help lists.*> ")
        quoted = str(paths[0]).replace(" ", "\\ ")
        person.type(f"Which colour? {quoted}\n")
        person.see(r"image: .*a red one\.png.*\n.*red\n.*1 tokens, .*first token after.*> ")
        person.type(f"/reset\n/image {paths[1]}\n")
        person.see("will be sent with the next message.*> ")
        person.type("Which colour?\n")
        person.see(r"\ngreen\n.*> ")
        person.type(f"/reset\n'{paths[0]}'\n")
        person.see("type a message to send.*> ")
        person.type("Which colour?\n")
        person.see(r"\nred\n.*> ")
        person.type(f"/image {tmp_path / 'none.png'}\n/image {folder / 'config.json'}\n")
        person.see("none.png cannot be read: No such file.*config.json is not an image")
    with Served("--model", str(folder), "--num-gpu-blocks-override", "32") as server:
        result = run_piped("--url", server.url, "--image", str(paths[1]), "--max-tokens", "1", lines=["Which colour?"])
    assert result.stdout == "green\n", result.stderr


def test_paste_line_breaks_and_wide_characters_are_edited(served: Served, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    with Person(tmp_path, "--url", served.url, "--max-tokens", "1") as person:
        person.see("/help lists.*> ")
        person.type(f"\x1b[200~one\ntwo\x1b[201~\x1b\r中文字{CURSOR_LEFT}\x08\r")
        person.see("> one\n. two\n. 中字\n.*tokens/s.*> ")
        person.type(f"天气{CURSOR_LEFT}\x7f热\r")
        person.see("> 热气\n.*tokens/s.*> ")
        person.type(f"/save {saved}\r")
        person.see("\n> ")
    questions = [message["content"] for message in json.loads(saved.read_text())[::2]]
    assert questions == ["one\ntwo\n中字", "热气"]


@pytest.mark.slow
def test_history_is_searched_and_private(served: Served, tmp_path: Path) -> None:
    history = tmp_path / "penstock" / "chat_history"
    history.parent.mkdir()
    history.write_text("".join(f"\n+message {number}\n" for number in range(1500)))
    with Person(tmp_path, "--url", served.url) as person:
        person.see("/help lists.*> ")
        person.type(CURSOR_UP)
        person.see("> message 1499$")
        person.type("\x15/system 一\x1b\r二\r")
        person.see("\n> ")
        assert person.leave("\x04") == 0
    assert history.stat().st_mode & 0o777 == 0o600
    kept = history.read_text().splitlines()
    assert "+message 501" in kept and "+message 499" not in kept
    with Person(tmp_path, "--url", served.url) as person:
        person.see("/help lists.*> ")
        person.type("\x12一")
        person.see("> /system 一\n. 二")
        person.type("\r\x03")
        person.see("> $")
        assert person.leave("\x04") == 0


def test_commands_and_arguments_are_completed(served: Served, tmp_path: Path) -> None:
    (tmp_path / "图 片.png").touch()
    with Person(tmp_path, "--url", served.url) as person:
        person.see("/help lists.*> ")
        person.type("/re\t")
        person.see("/reset .*start a new conversation.*/reasoning .*/regenerate ")
        person.type("g\t")
        person.see("> /regenerate$")
        person.type("\x15/set freq\t")
        person.see("> /set frequency_penalty$")
        person.type("\x15/reasoning f\t")
        person.see("> /reasoning fold$")
        person.type(f"\x15/image {tmp_path}/图\t")
        person.see("图 片.png$")
        person.type("\r")
        person.see("will be sent.*\n> ")


def test_plain_terminal_gets_no_escapes(served: Served, tmp_path: Path) -> None:
    plain_terminal = {"TERM": "dumb", "NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    with Person(tmp_path, "--url", served.url, "--temperature", "0", environment=plain_terminal) as person:
        person.see(r"connecting to http.*/help lists.*> ")
        person.type("/system 加拿大\n/help\n")
        person.see(r"/regenerate .*> ")
        person.type("What is the capital of Canada?\n")
        person.see(r"The capital of Canada is Ottawa\.\n\d+ tokens, [\d.]+ tokens/s, first token after [\d.]+ s\n> ")
        assert "\x1b" not in person.received


@pytest.mark.slow
def test_ctrl_c_ends_piped_chat() -> None:
    process = subprocess.Popen(
        [*CHAT, *LOCAL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(b"/set ignore_eos true\nTell me a story.\n")
    process.stdin.flush()
    assert process.stdout.read(20)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"Traceback" not in errors
