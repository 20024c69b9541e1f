"""Screens of ``penstock top`` and ``penstock chat`` in a terminal, and their pictures in docs/.

The environment variable ``PENSTOCK_TERMINAL_PICTURES=docs`` updates the pictures of docs/terminal.md.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from serving import Served, Servers
from terminal import Terminal, render_svg

PENSTOCK = (sys.executable, "-m", "penstock.cli.main")
QUESTIONS = ["Tell me a story about a fox.", "What is the capital of Canada?", "Write a poem about rain."]


def save_picture(terminal: Terminal, name: str, folder: Path) -> str:
    """Save the screen as SVG in ``folder``, or in the folder of ``PENSTOCK_TERMINAL_PICTURES``; return its text."""
    picture = render_svg(terminal.screen)
    (Path(os.environ.get("PENSTOCK_TERMINAL_PICTURES") or folder) / name).write_text(picture, encoding="utf-8")
    return picture


@contextmanager
def busy(server: Served) -> Iterator[None]:
    """Keep the server busy with three clients within the context."""
    ended = threading.Event()

    def send_chats(question: str) -> None:
        body = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 900,
            "min_tokens": 900,
            "stream": True,
        }
        while not ended.is_set():
            with httpx.stream("POST", f"{server.url}/chat/completions", json=body, timeout=60) as response:
                for _ in response.iter_lines():
                    if ended.is_set():
                        break

    threads = [threading.Thread(target=send_chats, args=(question,)) for question in QUESTIONS]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_top_shows_running_requests(servers: Servers, tmp_path: Path) -> None:
    server = servers.get("--num-gpu-blocks-override", "400")
    terminal = Terminal(
        *PENSTOCK, "top", "--url", server.root, "--interval", "0.5", columns=100, lines=26, folder=tmp_path
    )
    try:
        with busy(server):
            shown = terminal.wait_for(
                lambda screen: all(text in screen for text in ("running 3", "last steps", "between tokens"))
            )
    finally:
        terminal.close()
    assert "of 400 blocks" in shown and shown.count(" running ") == 3
    assert save_picture(terminal, "terminal-top.svg", tmp_path).count("<text") >= 8


def test_chat_shows_answers(servers: Servers, tmp_path: Path) -> None:
    server = servers.get("--num-gpu-blocks-override", "400")
    arguments = ("chat", "--url", server.url, "--temperature", "0")
    terminal = Terminal(*PENSTOCK, *arguments, columns=100, lines=20, folder=tmp_path)
    try:
        terminal.wait_for(lambda screen: screen.rstrip().endswith(">"))
        for count, question in enumerate(["What is the capital of Canada?", "What is the capital of France?"], 1):
            terminal.type(question + "\n")
            shown = terminal.wait_for(
                lambda s, count=count: s.count("tokens/s") + s.count("tok/s") >= count and s.rstrip().endswith(">")
            )
    finally:
        terminal.close()
    assert "Ottawa" in shown
    assert save_picture(terminal, "terminal-chat.svg", tmp_path).count("<text") > 4
