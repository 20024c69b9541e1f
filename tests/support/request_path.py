"""Files of the package with functions that one streaming chat calls, in the API process and in the engine process.

``python tests/support/request_path.py`` prints the files and functions, and updates the list in
docs/architecture/request.md.

The server runs unmodified: a ``sitecustomize`` module on ``PYTHONPATH`` sets a profile function in every thread of the
two processes. It records the functions called from the request until its line in the access log. Before, warm-up
requests import modules and fill caches. The result is the intersection over several requests. It omits a file if all of
its recorded functions are also called while the server is idle: heartbeats, statistics and other periodic work.
"""

from __future__ import annotations

import json
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
from repository import ROOT
from serving import Served

import penstock

PACKAGE = Path(penstock.__file__).parent
PROCESSES = {"api": "penstock.serve.process.api_process", "engine": "penstock.engine.service.server"}
WARM_UPS, REQUESTS = 2, 5
IDLE_TIME = 3.0
"""Seconds without requests in which idle work is recorded; periodic work runs at least once a second."""
RECORDER = '''
import json, os, socket, sys, threading

FOLDER, PACKAGE, PROCESSES = {folder!r}, {package!r}, {processes!r}
name = next((name for name, module in PROCESSES.items() if module in sys.orig_argv), None)
called = set()


def profile(frame, event, argument):
    if event == "call":
        called.add(frame.f_code)


def answer():
    """Send to each connection the functions called since the connection before."""
    while True:
        connection, _ = listener.accept()
        known = list(called)
        called.clear()
        found = [(code.co_filename, code.co_qualname) for code in known if code.co_filename.startswith(PACKAGE)]
        with connection:
            connection.sendall(json.dumps(found).encode())


if name:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(FOLDER, name))
    listener.listen()
    threading.Thread(target=answer, daemon=True).start()
    threading.setprofile(profile)
    sys.setprofile(profile)
'''

Called = dict[str, set[str]]
"""Names of the called functions by file, relative to the package."""
PAGE = ROOT / "docs/architecture/request.md"
BEGIN, END = "<!-- The list is made by python tests/support/request_path.py -->", "<!-- End of the list -->"


def streamed_chat() -> dict[str, Called]:
    """Functions called for one streaming chat, by process: ``api`` and ``engine``."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = RECORDER.format(folder=folder, package=str(PACKAGE), processes=PROCESSES)
        (Path(folder) / "sitecustomize.py").write_text(recorder)
        with Served(environment={"PYTHONPATH": folder}) as server:
            for number in range(WARM_UPS):
                _send_chat(server, number)
            numbers = range(WARM_UPS, WARM_UPS + REQUESTS)
            recorded = [_record(Path(folder), partial(_send_chat, server, number)) for number in numbers]
            idle = _record(Path(folder), partial(time.sleep, IDLE_TIME))
    return {name: _files(set.intersection(*(each[name] for each in recorded)), idle[name]) for name in PROCESSES}


def _record(folder: Path, action: Callable[[], None]) -> dict[str, set[tuple[str, str]]]:
    """Functions called during ``action``, by process."""
    for name in PROCESSES:
        _called(folder / name)  # discards the functions that were called before
    action()
    return {name: _called(folder / name) for name in PROCESSES}


def _called(address: Path) -> set[tuple[str, str]]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(address))
        return {(path, name) for path, name in json.load(connection.makefile())}


def _send_chat(server: Served, number: int) -> None:
    messages = [{"role": "user", "content": f"What is {number} plus {number}?"}]
    body = {"model": server.name, "messages": messages, "stream": True, "temperature": 0, "max_tokens": 16}
    response = httpx.post(f"{server.url}/chat/completions", json=body)
    assert response.is_success and response.text.endswith("data: [DONE]\n\n"), response.text
    server.find(f"id={response.headers['x-request-id']} ")  # the access log is written after the last event


def _files(called: set[tuple[str, str]], idle: set[tuple[str, str]]) -> Called:
    files: Called = {}
    request_files = {path for path, _ in called - idle}
    for path, name in called:
        if path in request_files:
            function = re.split(r"\.<locals>|\.?<", name)[0]
            files.setdefault(Path(path).relative_to(PACKAGE).as_posix(), set()).add(function or "(module)")
    return dict(sorted(files.items()))


def report(processes: dict[str, Called]) -> Iterator[str]:
    """Lines with the files and functions of each process, and totals."""
    for name, files in processes.items():
        yield f"{name}: {len(files)} files, {sum(map(len, files.values()))} functions"
        for path, functions in files.items():
            yield f"  {path:45} {len(functions):3}  {', '.join(sorted(functions))}"
    everything = set().union(*processes.values())
    yield f"together: {len(everything)} files"


def page_with(processes: dict[str, Called]) -> str:
    """Text of docs/architecture/request.md with the list of the files of ``processes``."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(f"{BEGIN}\n")
    _, _, after = rest.partition(END)
    rows = ["", "| files | API process | engine process |", "|---|---|---|", _row("in all", _counts(processes))]
    folders = sorted({str(Path(path).parent) for files in processes.values() for path in files})
    for folder in folders:
        columns = [
            ", ".join(f"`{Path(path).name}`" for path in files if str(Path(path).parent) == folder)
            for files in processes.values()
        ]
        rows.append(_row(f"`{folder}/`", columns))
    return "".join([before, BEGIN, "\n", *(f"{row}\n" for row in rows), "\n", END, after])


def _counts(processes: dict[str, Called]) -> list[str]:
    return [str(len(files)) for files in processes.values()]


def _row(name: str, columns: list[str]) -> str:
    return f"| {name} | {' | '.join(columns)} |"


if __name__ == "__main__":
    found = streamed_chat()
    print("\n".join(report(found)))
    PAGE.write_text(page_with(found), encoding="utf-8")
