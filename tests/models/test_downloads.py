"""Downloads: interrupted, concurrent, from broken and hostile servers, to full disks.

The hubs and web servers run on this machine. ``test_hub.py`` tests the protocol of the Hugging Face hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from test_hub import NEW, OFFLINE, OLD, UNWANTED, WANTED, WEIGHTS, Client, Hub, contents

from penstock import demo
from penstock.cli.main import main
from penstock.cli.serve import download_model
from penstock.config.options import Configuration, EngineOptions
from penstock.core import PenstockError
from penstock.frontend.hub import resolve

GGUF = {f"chat-{name}.gguf": os.urandom(5000) for name in ("Q4_K_M", "Q8_0", "UD-Q4_K_M")}
GGUF |= {f"big/chat-Q6_K-0000{part}-of-00002.gguf": os.urandom(3000) for part in (1, 2)}
GGUF |= {"mmproj-Q4_K_M.gguf": b"projector", "README.md": b"# GGUF"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.stop()


class Command:
    """``penstock download`` in a subprocess, with a separate home directory."""

    def __init__(self, home: Path, url: str = "") -> None:
        self.home = home
        self.environment = Client(url, home / "hf").environment
        self.environment |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "MODELSCOPE_ENDPOINT": url}

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "download", *arguments],
            env=self.environment | env,
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **env: str) -> tuple[int, str, str]:
        """Run the command; returns exit status, standard output and standard error."""
        process = self.start(*arguments, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.strip(), err

    def download(self, *arguments: str, **env: str) -> Path:
        status, out, err = self.run(*arguments, **env)
        assert status == 0, err
        return Path(out)

    def refused(self, *arguments: str, **env: str) -> str:
        """Run a command that must fail; returns its error message."""
        status, out, err = self.run(*arguments, **env)
        assert (status, out) == (2, ""), (out, err)
        return err.splitlines()[-1]


class InProcessCommand(Command):
    """``penstock download`` within this process, for sources other than the Hugging Face hub."""

    def __init__(self, home: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        super().__init__(home)
        self._patch = patch
        self._capture = capture
        patch.chdir(home)

    def run(self, *arguments: str, **env: str) -> tuple[int, str, str]:
        with self._patch.context() as patch:
            for name, value in (self.environment | env).items():
                patch.setenv(name, value)
            status = main(["download", *arguments])
        out, err = self._capture.readouterr()
        return status, out.strip(), err


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcessCommand:
    return InProcessCommand(tmp_path, monkeypatch, capsys)


@pytest.fixture
def command(hub: Hub, tmp_path: Path) -> Command:
    return Command(tmp_path, hub.url)


def has_recorded_ranges(folder: Path, ranges: int = 1) -> bool:
    """True if the journal of a partial file has at least this number of ranges."""
    for journal in folder.rglob("*.ranges"):
        with contextlib.suppress(FileNotFoundError):  # the file was completed meanwhile
            if len(journal.read_text().splitlines()) > ranges:
                return True
    return False


def partial_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith((".part", ".ranges", ".tmp"))]


def downloaded(folder: Path) -> dict[str, bytes]:
    """Files of a folder by path, without the downloader's internal files."""
    return {name: data for name, data in contents(folder).items() if not name.startswith(".penstock")}


# --- Interrupted and concurrent downloads -----------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("org/chat",), ("org/chat", "--dir", "here")])
def test_killed_download_resumes_after_the_recorded_ranges(
    hub: Hub, command: Command, arguments: tuple[str, ...]
) -> None:
    """The hub stalls within the transfer; when the journal has ranges, the process is killed."""
    weights = os.urandom(50_000_000)
    hub.files[NEW] = WANTED | UNWANTED | {WEIGHTS: weights}
    for place in sorted(random.Random(len(arguments)).sample(range(20_000_000, 45_000_000), 2)):
        hub.stalled.clear()
        hub.breaks = [(place, "stall")]
        process = command.start(*arguments)
        assert hub.stalled.wait(30)
        while not has_recorded_ranges(command.home):
            assert process.poll() is None
        process.kill()
        process.communicate()
        assert not list(command.home.rglob(WEIGHTS))
    hub.breaks = []
    folder = command.download(*arguments)
    assert downloaded(folder) == WANTED | {WEIGHTS: weights}
    assert not partial_files(command.home)
    first, second, third = (int(header.partition("=")[2].partition("-")[0]) for header in hub.ranges if header)
    assert first == 0 < second <= third and third % 2**20 == 0


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [("org/chat",), ("org/chat", "--dir", "here")])
def test_download_killed_at_40_random_moments_completes(hub: Hub, command: Command, arguments: tuple[str, ...]) -> None:
    """Some moments are while it lists, checks or renames files. The hub also breaks some connections."""
    shards = {f"model-{number}.safetensors": os.urandom(30_000_000) for number in range(3)}
    hub.files[NEW] = WANTED | shards | {WEIGHTS: os.urandom(70_000_000)}
    draw = random.Random(40)
    for _ in range(40):
        hub.breaks = [(draw.randrange(70_000_000), draw.choice(["reset", "close"]))]
        process = command.start(*arguments)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0.2, 2.5))
        process.kill()
        process.communicate()
        for path in command.home.rglob("*.safetensors"):  # a file with its final name is complete
            assert path.read_bytes() == hub.files[NEW][path.name]
            if draw.random() < 0.3:
                path.unlink()
    hub.breaks = []
    assert downloaded(command.download(*arguments)) == hub.files[NEW]
    assert not partial_files(command.home)


def test_concurrent_downloads_of_the_same_model_fetch_once(hub: Hub, command: Command) -> None:
    hub.breaks = [(100_000, "stall")]
    first = command.start("org/chat", "--dir", "here")
    assert hub.stalled.wait(30)
    second = command.start("org/chat", "--dir", "here")
    assert second.stderr
    assert "another process that downloads the same" in second.stderr.readline()
    first.kill()
    first.communicate()
    assert second.wait(30) == 0
    second.communicate()
    assert contents(command.home / "here").items() >= WANTED.items()
    assert len(hub.ranges) == 2


def test_folder_of_incomplete_download_is_refused_as_checkpoint(hub: Hub, command: Command) -> None:
    hub.breaks = [(100_000, "stall")]
    process = command.start("org/chat", "--dir", "here")
    assert hub.stalled.wait(30)
    process.kill()
    process.communicate()
    with pytest.raises(PenstockError, match=r"lacks .*, because its download is incomplete: run the same"):
        resolve(command.home / "here")
    command.download("org/chat", "--dir", "here")
    assert resolve(command.home / "here") == command.home / "here"


# --- Broken servers ---------------------------------------------------------------------------------------------------


def test_file_with_wrong_checksum_is_fetched_again(hub: Hub, command: Command) -> None:
    hub.breaks = [(-1, "garble"), (100_000, "close")]
    assert contents(command.download("org/chat")) == WANTED
    assert len(hub.ranges) == 3
    hub.breaks = [(-1, "garble")] * 3
    assert "has a wrong checksum" in command.refused("org/chat", "--dir", "here")
    assert not (command.home / "here" / WEIGHTS).exists()
    assert (command.download("org/chat", "--dir", "here") / WEIGHTS).exists()
    assert not partial_files(command.home)


@pytest.mark.parametrize(
    ("status", "after"), [(429, "1"), (503, ""), (500, "Thu, 01 Jan 2026 00:00:00 GMT"), (502, "soon")]
)
def test_busy_server_is_retried(hub: Hub, command: Command, status: int, after: str) -> None:
    hub.breaks = [(-1, f"{status} {after}")]
    assert contents(command.download("org/chat")) == WANTED
    assert len(hub.ranges) == 2


def test_retry_after_of_an_hour_fails_at_once(hub: Hub, command: Command) -> None:
    hub.breaks = [(-1, "429 3600")]
    assert "status 429" in command.refused("org/chat")
    assert len(hub.ranges) == 1


def test_bytes_beyond_the_requested_range_are_discarded(hub: Hub, command: Command) -> None:
    hub.breaks = [(-1, "more")]
    assert contents(command.download("org/chat")) == WANTED


@pytest.mark.parametrize(
    "path", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "a//b.json", ".penstock/x.json", "a\nb.json"]
)
def test_paths_outside_the_target_folder_are_refused(hub: Hub, command: Command, path: str) -> None:
    hub.files[NEW] = WANTED | {path: b"{}"}
    for arguments in (("org/chat",), ("org/chat", "--dir", "here")):
        assert "which is not a valid relative path" in command.refused(*arguments)
    assert not list(command.home.parent.rglob("evil*"))


def test_symlink_out_of_the_target_folder_is_refused(hub: Hub, command: Command) -> None:
    outside = command.home / "outside"
    outside.mkdir()
    (command.home / "here").mkdir()
    (command.home / "here" / "1_Pooling").symlink_to(outside)
    assert "outside of" in command.refused("org/chat", "--dir", "here")
    assert not list(outside.iterdir())


# --- Selection of files -----------------------------------------------------------------------------------------------


def test_quantization_in_name_selects_gguf_file(hub: Hub, command: Command) -> None:
    hub.files = {NEW: GGUF, OLD: GGUF}
    file = command.download("org/chat:q4_k_m")
    assert file.name == "chat-Q4_K_M.gguf" and file.read_bytes() == GGUF[file.name]
    assert contents(file.parent) == {file.name: GGUF[file.name]}
    assert command.download("org/chat:UD-Q4_K_M@v1").name == "chat-UD-Q4_K_M.gguf"
    parts = command.home / "here" / "big"
    assert command.download("hf://org/chat:Q6_K", "--dir", "here") == parts / "chat-Q6_K-00001-of-00002.gguf"
    assert len(list(parts.iterdir())) == 2
    for name in ("org/chat:Q5_K_M", "org/chat"):
        assert "Q4_K_M, Q6_K, Q8_0, UD-Q4_K_M" in command.refused(name)
    assert command.download("org/chat:Q4_K_M", HF_HUB_OFFLINE="0") == file


def test_target_folder_has_files_of_one_model_and_revision(hub: Hub, command: Command) -> None:
    """A remaining weight index of another revision or model would refer to other weights."""
    shards = {"model.safetensors.index.json": b"{}", "model-00001-of-00001.safetensors": b"older"}
    hub.files[OLD] = {"config.json": b"{}", **shards}
    here = command.download("org/chat@v1", "--dir", "here")
    assert downloaded(here) == hub.files[OLD]
    (here / "notes.json").write_bytes(b"mine")
    command.download("org/chat", "--dir", "here")
    assert downloaded(here) == WANTED | {"notes.json": b"mine"}
    message = "here already has 1_Pooling/config.json of org/chat: use another folder"
    assert message in command.refused("org/gated", "--dir", "here", HF_TOKEN="opens")
    assert downloaded(here) == WANTED | {"notes.json": b"mine"}


def test_pickled_weights_are_fetched_if_there_are_no_others(hub: Hub, command: Command) -> None:
    hub.files[NEW] = {"config.json": b"{}", "pytorch_model.bin": b"pickle", "training_args.bin": b"pickle"}
    assert set(contents(command.download("org/chat"))) == {"config.json", "pytorch_model.bin"}


def test_include_and_exclude_patterns_select_files(hub: Hub, command: Command) -> None:
    folder = command.download("org/chat", "--include", "*.json", "original/", "--exclude", "tokenizer*")
    assert set(contents(folder)) == {
        "config.json", "generation_config.json", "1_Pooling/config.json", "original/params.json"
    }  # fmt: skip
    assert "none of the 17 files of org/chat is selected" in command.refused("org/chat", "--include", "*.gguf")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ftp://host/model", "model: ftp:// is not supported; supported are hf://, modelscope://, s3://"),
        ("org/chat@v1@v2", "is neither an existing path nor a name on the hub"),
        ("file://host/model", "is not a local path: write file:///folder"),
        ("https://host/model.tar.gz", "https://host/model.tar.gz is an archive: unpack it"),
    ],
)
def test_invalid_model_name_is_refused(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", name]) == 2
    assert message in capsys.readouterr().err


def test_local_model_is_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", f"file://{demo.CHAT}"]) == 0
    assert capsys.readouterr().out.strip() == str(demo.CHAT)
    for arguments, message in (
        ([f"file://{tmp_path}/none"], f"{tmp_path}/none does not exist: give the folder"),
        ([f"file://{tmp_path}"], "is empty"),
        ([f"file://{demo.CHAT}", "--dir", str(tmp_path)], "is already on this machine: omit --dir"),
        ([str(demo.CHAT)], f"{demo.CHAT} is a local path, not a name: pass the path to the command"),
    ):
        assert main(["download", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_revision_in_both_name_and_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", "org/chat@v1", "--revision", "v2"]) == 2
    assert "revision: is v2, and the model's name has v1" in capsys.readouterr().err


def test_node_fetches_only_the_weights_of_its_stages(
    in_process: InProcessCommand, site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has two layers and two stages: each stage has one layer, and the embedding or the LM head."""
    places = {"model.embed_tokens.weight": "ends", "model.norm.weight": "ends", "model.layers.2.x": "mtp"}
    places |= {f"model.layers.{layer}.mlp.down_proj.weight": f"layer{layer}" for layer in (0, 1)}
    index = {"weight_map": {tensor: f"{file}.safetensors" for tensor, file in places.items()}}
    config = json.loads((demo.CHAT / "config.json").read_text()) | {"num_hidden_layers": 2}
    files = {f"{file}.safetensors": file.encode() for file in places.values()}
    files |= {"config.json": json.dumps(config).encode(), "model.safetensors.index.json": json.dumps(index).encode()}
    url = f"{site(web(files)).url}/models/chat"
    stages = ("--nnodes", "2", "--pipeline-parallel-size", "2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_process.home / "served"))
    for rank, expected in enumerate(({"ends", "layer0"}, {"ends", "layer1", "mtp"})):
        folder = in_process.download(url, "--dir", f"{rank}", *stages, "--node-rank", f"{rank}")
        assert {path.stem for path in folder.glob("*.safetensors")} == expected
        engine = EngineOptions(model=url, nnodes=2, node_rank=rank, pipeline_parallel_size=2)
        served = Path(download_model(Configuration(engine=engine)).engine.model)
        assert {path.stem for path in served.glob("*.safetensors")} >= expected
    both = ("--nnodes", "2", "--tensor-parallel-size", "2")
    assert {path.name: path.read_bytes() for path in in_process.download(url, "--dir", "all", *both).glob("m*")} == {
        name: data for name, data in files.items() if name.startswith("m")
    }
    assert "nnodes: 3 ranks" in in_process.refused(url, "--nnodes", "2", "--pipeline-parallel-size", "3")


# --- Full disks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk_is_reported(hub: Hub, command: Command, small_disk: Path) -> None:
    hub.files[NEW] = WANTED | {WEIGHTS: os.urandom(400_000)}
    for arguments in (("--dir", str(small_disk / "x")), ("--download-dir", str(small_disk))):
        error = command.refused("org/chat", *arguments)
        assert re.search(rf"download_dir: 40\d,\d+ bytes are needed, and \d+,\d+ are free in {small_disk}", error)
    assert not hub.ranges
    (small_disk / "other").write_bytes(bytes(150_000))
    hub.files[NEW] = WANTED | {WEIGHTS: os.urandom(40_000)}
    hub.fills = small_disk / "filler"
    error = command.refused("org/chat", "--dir", str(small_disk / "x"))
    assert "download_dir: cannot write" in error and "No space left on device" in error
    hub.fills.unlink()
    hub.fills = None
    command.download("org/chat", "--dir", str(small_disk / "x"))


# --- ModelScope -------------------------------------------------------------------------------------------------------


class Site(ThreadingHTTPServer):
    """A web server. ``answer`` returns status, headers and body for path, query and headers of a request."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnected clients: a traceback of this thread would be part of a command's output."""

    def __init__(self, answer: Callable[[str, dict[str, str], Any], tuple[int, dict[str, str], bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), SiteHandler)
        self.answer = answer
        self.requests: list[tuple[str, str]] = []
        """Path and ``Range`` header of each request."""
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class SiteHandler(BaseHTTPRequestHandler):
    """Sends the answers of a ``Site``. Answers with status 200 are cut to the requested range."""

    protocol_version = "HTTP/1.1"
    server: Site

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        requested = self.headers.get("Range", "")
        self.server.requests.append((unquote(split.path), requested))
        status, headers, body = self.server.answer(unquote(split.path), query, self.headers)
        if status == 200 and requested and "X-No-Ranges" not in headers:
            first, _, last = requested.removeprefix("bytes=").partition("-")
            status, total = 206, len(body)
            body = body[int(first) : int(last) + 1]
            headers |= {"Content-Range": f"bytes {first}-{int(first) + len(body) - 1}/{total}"}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "X-Endless" in headers:
            self.close_connection = True
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(body)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def site() -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def start(answer: Callable[..., Any]) -> Site:
        sites.append(Site(answer))
        return sites[-1]

    yield start
    for each in sites:
        each.shutdown()
        each.server_close()


def modelscope(files: dict[str, bytes], private: bool = False) -> Callable[..., tuple[int, dict[str, str], bytes]]:
    """ModelScope's API for the model ``org/chat`` with the revisions ``master`` and ``v1``."""

    def answer(path: str, query: dict[str, str], headers: Any) -> tuple[int, dict[str, str], bytes]:
        known = path.startswith("/api/v1/models/org/chat/") and query["Revision"] in ("master", "v1")
        if private and headers["Authorization"] != "Bearer opens":
            known = False
        if not known:
            return 404, {}, json.dumps({"Code": 10010205001, "Message": "not found", "Success": False}).encode()
        if path.endswith("/repo"):
            return 200, {}, files[query["FilePath"]]
        listed = [
            {"Path": name, "Name": name.rpartition("/")[2], "Type": "blob", "Size": len(data), "Revision": "1" * 40,
             "Sha256": hashlib.sha256(data).hexdigest(), "IsLFS": name == WEIGHTS}
            for name, data in files.items()
        ]  # fmt: skip
        listed.append({"Path": "1_Pooling", "Name": "1_Pooling", "Type": "tree", "Size": 0, "Revision": "1" * 40})
        return 200, {}, json.dumps({"Code": 200, "Data": {"Files": listed}, "Success": True}).encode()

    return answer


def test_modelscope_model_is_downloaded_and_updated(in_process: InProcessCommand, site: Callable[..., Site]) -> None:
    files = WANTED | UNWANTED
    server = site(modelscope(files))
    endpoint = {"MODELSCOPE_ENDPOINT": server.url}
    folder = in_process.download("modelscope://org/chat", **endpoint)
    assert folder.is_relative_to(in_process.home / "cache")
    assert downloaded(folder) == WANTED
    count = len(server.requests)
    assert in_process.download("org/chat", "--source", "modelscope", **endpoint) == folder
    assert len(server.requests) == count + 1  # only the files are listed again
    assert in_process.download("modelscope://org/chat@v1", **endpoint) != folder
    files["config.json"] = b'{"model_type": "qwen2"}'
    assert downloaded(in_process.download("modelscope://org/chat", **endpoint)) == WANTED | {
        "config.json": files["config.json"]
    }
    for name in ("modelscope://org/none", "modelscope://org/chat@v2"):
        assert "has no public model" in in_process.refused(name, **endpoint)
    assert "is neither an existing path nor a name on the hub" in in_process.refused("modelscope://chat", **endpoint)


@pytest.mark.row("vllm", "VLLM_USE_MODELSCOPE")
@pytest.mark.row("fastdeploy", "FD_MODEL_SOURCE", "FD_MODEL_CACHE")
def test_variables_of_compatible_systems_select_the_hub(command: Command, site: Callable[..., Site]) -> None:
    server = site(modelscope(WANTED))
    endpoint = {"MODELSCOPE_ENDPOINT": server.url}
    folder = command.download("org/chat", "--compat", "vllm", VLLM_USE_MODELSCOPE="True", **endpoint)
    fastdeploy = {"FD_MODEL_SOURCE": "MODELSCOPE", "FD_MODEL_CACHE": str(command.home / "elsewhere")}
    other = command.download("org/chat", "--compat", "fastdeploy", **fastdeploy, **endpoint)
    assert downloaded(folder) == downloaded(other) == WANTED
    assert other.is_relative_to(command.home / "elsewhere")
    assert "AI Studio is not supported" in command.refused("x/y", "--compat", "fastdeploy", FD_MODEL_SOURCE="AISTUDIO")
    hub = command.download("org/chat", "--compat", "vllm", VLLM_USE_MODELSCOPE="False", **endpoint)
    assert hub.is_relative_to(command.home / "hf")


def test_private_modelscope_model_needs_modelscope_token(
    in_process: InProcessCommand, site: Callable[..., Site]
) -> None:
    endpoint = {"MODELSCOPE_ENDPOINT": site(modelscope(WANTED, private=True)).url}
    error = in_process.refused("modelscope://org/chat", HF_TOKEN="opens", **endpoint)
    assert "MODELSCOPE_API_TOKEN" in error
    assert downloaded(in_process.download("modelscope://org/chat", MODELSCOPE_API_TOKEN="opens", **endpoint)) == WANTED


def test_cached_modelscope_model_is_used_offline(in_process: InProcessCommand, site: Callable[..., Site]) -> None:
    endpoint = {"MODELSCOPE_ENDPOINT": site(modelscope(WANTED)).url}
    folder = in_process.download("modelscope://org/chat", **endpoint)
    client = Client("", in_process.home / "hf")
    client.environment = in_process.environment | {"MODELSCOPE_ENDPOINT": "http://127.0.0.1:9"}
    assert client.resolve("org/chat", hub="modelscope", env=OFFLINE) == folder
    assert client.stderr == ""
    assert client.resolve("org/chat", hub="modelscope") == folder
    assert "which may be outdated" in client.stderr
    (folder / WEIGHTS).unlink()
    answer = client.ask("org/chat", hub="modelscope", env=OFFLINE)
    assert answer["code"] == "not_found" and "org/chat is not completely cached" in answer["message"]


# --- Web servers ------------------------------------------------------------------------------------------------------

SHARDS = {"model.safetensors.index.json": json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}})}
SHARDED = {name: text.encode() for name, text in SHARDS.items()} | {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "m-1.safetensors": os.urandom(3000),
    "m-2.safetensors": os.urandom(3000),
}


def web(files: dict[str, bytes], **headers: str) -> Callable[..., tuple[int, dict[str, str], bytes]]:
    """A web server with files at ``/models/chat``, and HTML pages at all other paths."""

    def answer(path: str, query: dict[str, str], request_headers: Any) -> tuple[int, dict[str, str], bytes]:
        name = path.removeprefix("/models/chat/")
        if name in files:
            etag = hashlib.sha256(files[name]).hexdigest()[:16]
            return 200, {"ETag": f'"{etag}"', "Content-Type": "application/octet-stream"} | headers, files[name]
        return 200, {"Content-Type": "text/html"}, b"<html>Not here</html>"

    return answer


@pytest.mark.parametrize("path", ["/models/chat", "/models/chat/", "/models/chat/model.safetensors.index.json"])
def test_web_server_folder_is_downloaded_and_updated(
    in_process: InProcessCommand, site: Callable[..., Site], path: str
) -> None:
    files = dict(SHARDED)
    server = site(web(files))
    folder = in_process.download(server.url + path)
    assert downloaded(folder) == files
    server.requests.clear()
    assert in_process.download(server.url + path) == folder
    assert not [header for _, header in server.requests if header not in ("", "bytes=0-0")]
    files["m-1.safetensors"] = os.urandom(4000)
    assert downloaded(in_process.download(server.url + path)) == files
    del files["tokenizer.json"]
    assert downloaded(in_process.download(server.url + path)) == files


def test_gguf_file_is_downloaded_from_server_without_ranges(
    in_process: InProcessCommand, site: Callable[..., Site]
) -> None:
    data = os.urandom(70_000_000)  # large enough for two parts
    server = site(web({"chat-Q8_0.gguf": data}, **{"X-No-Ranges": "1"}))
    file = in_process.download(f"{server.url}/models/chat/chat-Q8_0.gguf?key=secret")
    assert file.name == "chat-Q8_0.gguf" and file.read_bytes() == data
    assert not partial_files(in_process.home)


def test_web_address_without_model_is_refused(in_process: InProcessCommand, site: Callable[..., Site]) -> None:
    server = site(web(SHARDED))
    error = in_process.refused(f"{server.url.replace('//', '//user:secret@')}/models?key=secret")
    assert f"{server.url}/models has no config.json" in error and "secret" not in error
    hostile = json.dumps({"weight_map": {"a": "../../m-1.safetensors"}}).encode()
    server = site(web(SHARDED | {"model.safetensors.index.json": hostile}))
    assert "which is not a valid relative path" in in_process.refused(f"{server.url}/models/chat")
    assert "cannot be fetched" in in_process.refused("http://127.0.0.1:9/models/chat")


def test_endless_response_is_refused(in_process: InProcessCommand, site: Callable[..., Site]) -> None:
    server = site(web(SHARDED, **{"X-Endless": "1", "X-No-Ranges": "1"}))
    assert "sends config.json without its size" in in_process.refused(f"{server.url}/models/chat")
    endpoint = {
        "MODELSCOPE_ENDPOINT": site(lambda *request: (200, {"X-Endless": "1", "X-No-Ranges": "1"}, bytes(2**16))).url
    }
    assert "without a valid file list" in in_process.refused("modelscope://org/chat", **endpoint)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://127.0.0.1:{port}/again"])
def test_invalid_redirect_is_refused(in_process: InProcessCommand, site: Callable[..., Site], target: str) -> None:
    server = site(lambda path, query, headers: (302, {"Location": target.format(port=server.server_port)}, b""))
    assert "cannot be read" in in_process.refused(f"{server.url}/models/chat")


def test_file_that_changes_during_download_is_refused(in_process: InProcessCommand, site: Callable[..., Site]) -> None:
    """The first byte is from the old version, and all other bytes are from the new version."""
    changed = SHARDED | {"m-2.safetensors": os.urandom(3000)}

    def answer(path: str, query: dict[str, str], headers: Any) -> tuple[int, dict[str, str], bytes]:
        later = headers.get("Range", "bytes=0-0") != "bytes=0-0"
        return web(changed if later else SHARDED)(path, query, headers)

    error = in_process.refused(f"{site(answer).url}/models/chat", "--dir", "here")
    assert "m-2.safetensors has changed during the download" in error
    assert not (in_process.home / "here" / "m-2.safetensors").exists()
