"""Downloads that are killed, meet each other, or meet hostile, broken and full places; from hubs and web servers on
this machine. ``test_hub.py`` has the Hugging Face hub's own rules."""

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
    """``penstock download`` as typed, in a home of its own."""

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
        """Exit status, standard output and standard error."""
        process = self.start(*arguments, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.strip(), err

    def download(self, *arguments: str, **env: str) -> Path:
        status, out, err = self.run(*arguments, **env)
        assert status == 0, err
        return Path(out)

    def refused(self, *arguments: str, **env: str) -> str:
        """The sentence of a command that fails."""
        status, out, err = self.run(*arguments, **env)
        assert (status, out) == (2, ""), (out, err)
        return err.splitlines()[-1]


class Typed(Command):
    """The same within this process, for what asks no Hugging Face hub."""

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
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(tmp_path, monkeypatch, capsys)


@pytest.fixture
def command(hub: Hub, tmp_path: Path) -> Command:
    return Command(tmp_path, hub.url)


def has_noted(folder: Path, ranges: int = 1) -> bool:
    """Whether the journal of a file has so many ranges."""
    for journal in folder.rglob("*.ranges"):
        with contextlib.suppress(FileNotFoundError):  # of a file that is whole by now
            if len(journal.read_text().splitlines()) > ranges:
                return True
    return False


def partial_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith((".part", ".ranges", ".tmp"))]


def downloaded(folder: Path) -> dict[str, bytes]:
    """A folder's files without those of the download itself."""
    return {name: data for name, data in contents(folder).items() if not name.startswith(".penstock")}


# --- Killed, and several at once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("org/chat",), ("org/chat", "--dir", "here")])
def test_killed_at_any_moment_it_goes_on_where_it_was(hub: Hub, command: Command, arguments: tuple[str, ...]) -> None:
    """The hub stops within the transfer, after bytes that the journal has noted, and the process is killed there."""
    weights = os.urandom(50_000_000)
    hub.files[NEW] = WANTED | UNWANTED | {WEIGHTS: weights}
    for place in sorted(random.Random(len(arguments)).sample(range(20_000_000, 45_000_000), 2)):
        hub.stalled.clear()
        hub.breaks = [(place, "stall")]
        process = command.start(*arguments)
        assert hub.stalled.wait(30)
        while not has_noted(command.home):
            assert process.poll() is None
        process.kill()
        process.communicate()
        assert not list(command.home.rglob(WEIGHTS))
    hub.breaks = []
    folder = command.download(*arguments)
    assert downloaded(folder) == WANTED | {WEIGHTS: weights}
    assert not partial_files(command.home)
    first, second, third = (int(asked.partition("=")[2].partition("-")[0]) for asked in hub.ranges if asked)
    assert first == 0 < second <= third and third % 2**20 == 0


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [("org/chat",), ("org/chat", "--dir", "here")])
def test_killed_at_40_drawn_moments(hub: Hub, command: Command, arguments: tuple[str, ...]) -> None:
    """Also while it lists, checks and names files; the hub breaks a few connections besides."""
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
        for path in command.home.rglob("*.safetensors"):  # what has its name is whole
            assert path.read_bytes() == hub.files[NEW][path.name]
            if draw.random() < 0.3:
                path.unlink()
    hub.breaks = []
    assert downloaded(command.download(*arguments)) == hub.files[NEW]
    assert not partial_files(command.home)


def test_two_that_fetch_the_same_fetch_it_once(hub: Hub, command: Command) -> None:
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


def test_a_folder_whose_download_has_not_ended_is_no_checkpoint(hub: Hub, command: Command) -> None:
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


def test_wrong_bytes_are_fetched_again(hub: Hub, command: Command) -> None:
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
def test_a_busy_server_is_asked_again(hub: Hub, command: Command, status: int, after: str) -> None:
    hub.breaks = [(-1, f"{status} {after}")]
    assert contents(command.download("org/chat")) == WANTED
    assert len(hub.ranges) == 2


def test_a_server_that_wants_an_hour_is_given_up_at_once(hub: Hub, command: Command) -> None:
    hub.breaks = [(-1, "429 3600")]
    assert "status 429" in command.refused("org/chat")
    assert len(hub.ranges) == 1


def test_more_bytes_than_announced_are_not_taken(hub: Hub, command: Command) -> None:
    hub.breaks = [(-1, "more")]
    assert contents(command.download("org/chat")) == WANTED


@pytest.mark.parametrize(
    "path", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "a//b.json", ".penstock/x.json", "a\nb.json"]
)
def test_paths_that_lead_elsewhere_are_refused(hub: Hub, command: Command, path: str) -> None:
    hub.files[NEW] = WANTED | {path: b"{}"}
    for arguments in (("org/chat",), ("org/chat", "--dir", "here")):
        assert "which is not a valid relative path" in command.refused(*arguments)
    assert not list(command.home.parent.rglob("evil*"))


def test_a_link_that_leads_out_of_the_folder_is_not_followed(hub: Hub, command: Command) -> None:
    outside = command.home / "outside"
    outside.mkdir()
    (command.home / "here").mkdir()
    (command.home / "here" / "1_Pooling").symlink_to(outside)
    assert "outside of" in command.refused("org/chat", "--dir", "here")
    assert not list(outside.iterdir())


# --- What is fetched --------------------------------------------------------------------------------------------------


def test_a_quantization_picks_a_gguf_file(hub: Hub, command: Command) -> None:
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


def test_a_folder_has_the_files_of_one_model(hub: Hub, command: Command) -> None:
    """An index of weights that another revision, or another model, has left there would lead to its weights."""
    shards = {"model.safetensors.index.json": b"{}", "model-00001-of-00001.safetensors": b"older"}
    hub.files[OLD] = {"config.json": b"{}", **shards}
    here = command.download("org/chat@v1", "--dir", "here")
    assert downloaded(here) == hub.files[OLD]
    (here / "notes.json").write_bytes(b"mine")
    command.download("org/chat", "--dir", "here")
    assert downloaded(here) == WANTED | {"notes.json": b"mine"}
    words = "here already has 1_Pooling/config.json of org/chat: use another folder"
    assert words in command.refused("org/gated", "--dir", "here", HF_TOKEN="opens")
    assert downloaded(here) == WANTED | {"notes.json": b"mine"}


def test_pickles_are_fetched_only_where_there_is_nothing_else(hub: Hub, command: Command) -> None:
    hub.files[NEW] = {"config.json": b"{}", "pytorch_model.bin": b"pickle", "training_args.bin": b"pickle"}
    assert set(contents(command.download("org/chat"))) == {"config.json", "pytorch_model.bin"}


def test_patterns(hub: Hub, command: Command) -> None:
    folder = command.download("org/chat", "--include", "*.json", "original/", "--exclude", "tokenizer*")
    assert set(contents(folder)) == {
        "config.json", "generation_config.json", "1_Pooling/config.json", "original/params.json"
    }  # fmt: skip
    assert "none of the 17 files of org/chat is selected" in command.refused("org/chat", "--include", "*.gguf")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ftp://host/model", "model: ftp:// is not supported; supported are hf://, modelscope://, s3://"),
        ("org/chat@v1@v2", "is neither an existing path nor a name on the hub"),
        ("file://host/model", "is not a local path: write file:///folder"),
        ("https://host/model.tar.gz", "https://host/model.tar.gz is an archive: unpack it"),
    ],
)
def test_names_that_are_none(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", name]) == 2
    assert words in capsys.readouterr().err


def test_what_is_on_this_machine_is_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", f"file://{demo.CHAT}"]) == 0
    assert capsys.readouterr().out.strip() == str(demo.CHAT)
    for arguments, words in (
        ([f"file://{tmp_path}/none"], f"{tmp_path}/none does not exist: give the folder"),
        ([f"file://{tmp_path}"], "is empty"),
        ([f"file://{demo.CHAT}", "--dir", str(tmp_path)], "is already on this machine: omit --dir"),
        ([str(demo.CHAT)], f"{demo.CHAT} is a local path, not a name: pass the path to the command"),
    ):
        assert main(["download", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_two_revisions_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", "org/chat@v1", "--revision", "v2"]) == 2
    assert "revision: is v2, and the model's name has v1" in capsys.readouterr().err


def test_a_node_fetches_the_weights_of_its_stages(
    typed: Typed, site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers in two stages: of the model's ends both stages have some, of the layers each its own."""
    places = {"model.embed_tokens.weight": "ends", "model.norm.weight": "ends", "model.layers.2.x": "mtp"}
    places |= {f"model.layers.{layer}.mlp.down_proj.weight": f"layer{layer}" for layer in (0, 1)}
    index = {"weight_map": {tensor: f"{file}.safetensors" for tensor, file in places.items()}}
    config = json.loads((demo.CHAT / "config.json").read_text()) | {"num_hidden_layers": 2}
    files = {f"{file}.safetensors": file.encode() for file in places.values()}
    files |= {"config.json": json.dumps(config).encode(), "model.safetensors.index.json": json.dumps(index).encode()}
    url = f"{site(web(files)).url}/models/chat"
    stages = ("--nnodes", "2", "--pipeline-parallel-size", "2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(typed.home / "served"))
    for rank, own in enumerate(({"ends", "layer0"}, {"ends", "layer1", "mtp"})):
        folder = typed.download(url, "--dir", f"{rank}", *stages, "--node-rank", f"{rank}")
        assert {path.stem for path in folder.glob("*.safetensors")} == own
        engine = EngineOptions(model=url, nnodes=2, node_rank=rank, pipeline_parallel_size=2)
        served = Path(download_model(Configuration(engine=engine)).engine.model)
        assert {path.stem for path in served.glob("*.safetensors")} >= own
    both = ("--nnodes", "2", "--tensor-parallel-size", "2")
    assert {path.name: path.read_bytes() for path in typed.download(url, "--dir", "all", *both).glob("m*")} == {
        name: data for name, data in files.items() if name.startswith("m")
    }
    assert "nnodes: 3 ranks" in typed.refused(url, "--nnodes", "2", "--pipeline-parallel-size", "3")


# --- Room on the disk -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_without_room_is_one_sentence(hub: Hub, command: Command, small_disk: Path) -> None:
    hub.files[NEW] = WANTED | {WEIGHTS: os.urandom(400_000)}
    for arguments in (("--dir", str(small_disk / "x")), ("--download-dir", str(small_disk))):
        said = command.refused("org/chat", *arguments)
        assert re.search(rf"download_dir: 40\d,\d+ bytes are needed, and \d+,\d+ are free in {small_disk}", said)
    assert not hub.ranges
    (small_disk / "other").write_bytes(bytes(150_000))
    hub.files[NEW] = WANTED | {WEIGHTS: os.urandom(40_000)}
    hub.fills = small_disk / "filler"
    said = command.refused("org/chat", "--dir", str(small_disk / "x"))
    assert "download_dir: cannot write" in said and "No space left on device" in said
    hub.fills.unlink()
    hub.fills = None
    command.download("org/chat", "--dir", str(small_disk / "x"))


# --- ModelScope -------------------------------------------------------------------------------------------------------


class Site(ThreadingHTTPServer):
    """A web server whose answers a function gives: of path, query and headers, status, headers and body."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave are no errors, and what this thread prints would be in a command's output."""

    def __init__(self, answer: Callable[[str, dict[str, str], Any], tuple[int, dict[str, str], bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.answer = answer
        self.asked: list[tuple[str, str]] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answering(BaseHTTPRequestHandler):
    """Sends ranges of what the site answers with 200."""

    protocol_version = "HTTP/1.1"
    server: Site

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(split.query).items()}
        wanted = self.headers.get("Range", "")
        self.server.asked.append((unquote(split.path), wanted))
        status, headers, body = self.server.answer(unquote(split.path), query, self.headers)
        if status == 200 and wanted and "X-No-Ranges" not in headers:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
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
        """Keeps quiet."""


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
    """ModelScope's API for the model ``org/chat``, whose only revision besides ``master`` is ``v1``."""

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


def test_a_model_of_modelscope(typed: Typed, site: Callable[..., Site]) -> None:
    files = WANTED | UNWANTED
    server = site(modelscope(files))
    there = {"MODELSCOPE_ENDPOINT": server.url}
    folder = typed.download("modelscope://org/chat", **there)
    assert folder.is_relative_to(typed.home / "cache")
    assert downloaded(folder) == WANTED
    asked = len(server.asked)
    assert typed.download("org/chat", "--source", "modelscope", **there) == folder
    assert len(server.asked) == asked + 1  # the listing
    assert typed.download("modelscope://org/chat@v1", **there) != folder
    files["config.json"] = b'{"model_type": "qwen2"}'
    assert downloaded(typed.download("modelscope://org/chat", **there)) == WANTED | {
        "config.json": files["config.json"]
    }
    for name in ("modelscope://org/none", "modelscope://org/chat@v2"):
        assert "has no public model" in typed.refused(name, **there)
    assert "is neither an existing path nor a name on the hub" in typed.refused("modelscope://chat", **there)


@pytest.mark.row("vllm", "VLLM_USE_MODELSCOPE")
@pytest.mark.row("fastdeploy", "FD_MODEL_SOURCE", "FD_MODEL_CACHE")
def test_the_hub_that_another_systems_variable_names(command: Command, site: Callable[..., Site]) -> None:
    server = site(modelscope(WANTED))
    there = {"MODELSCOPE_ENDPOINT": server.url}
    folder = command.download("org/chat", "--compat", "vllm", VLLM_USE_MODELSCOPE="True", **there)
    fastdeploy = {"FD_MODEL_SOURCE": "MODELSCOPE", "FD_MODEL_CACHE": str(command.home / "elsewhere")}
    other = command.download("org/chat", "--compat", "fastdeploy", **fastdeploy, **there)
    assert downloaded(folder) == downloaded(other) == WANTED
    assert other.is_relative_to(command.home / "elsewhere")
    assert "AI Studio is not supported" in command.refused("x/y", "--compat", "fastdeploy", FD_MODEL_SOURCE="AISTUDIO")
    hub = command.download("org/chat", "--compat", "vllm", VLLM_USE_MODELSCOPE="False", **there)
    assert hub.is_relative_to(command.home / "hf")


def test_a_private_model_of_modelscope(typed: Typed, site: Callable[..., Site]) -> None:
    there = {"MODELSCOPE_ENDPOINT": site(modelscope(WANTED, private=True)).url}
    said = typed.refused("modelscope://org/chat", HF_TOKEN="opens", **there)
    assert "MODELSCOPE_API_TOKEN" in said
    assert downloaded(typed.download("modelscope://org/chat", MODELSCOPE_API_TOKEN="opens", **there)) == WANTED


def test_modelscope_offline(typed: Typed, site: Callable[..., Site]) -> None:
    there = {"MODELSCOPE_ENDPOINT": site(modelscope(WANTED)).url}
    folder = typed.download("modelscope://org/chat", **there)
    client = Client("", typed.home / "hf")
    client.environment = typed.environment | {"MODELSCOPE_ENDPOINT": "http://127.0.0.1:9"}
    assert client.resolve("org/chat", hub="modelscope", env=OFFLINE) == folder
    assert client.said == ""
    assert client.resolve("org/chat", hub="modelscope") == folder
    assert "which may be outdated" in client.said
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
    """A web server with files at ``/models/chat``, and pages for all else."""

    def answer(path: str, query: dict[str, str], asked: Any) -> tuple[int, dict[str, str], bytes]:
        name = path.removeprefix("/models/chat/")
        if name in files:
            etag = hashlib.sha256(files[name]).hexdigest()[:16]
            return 200, {"ETag": f'"{etag}"', "Content-Type": "application/octet-stream"} | headers, files[name]
        return 200, {"Content-Type": "text/html"}, b"<html>Not here</html>"

    return answer


@pytest.mark.parametrize("path", ["/models/chat", "/models/chat/", "/models/chat/model.safetensors.index.json"])
def test_a_folder_of_a_web_server(typed: Typed, site: Callable[..., Site], path: str) -> None:
    files = dict(SHARDED)
    server = site(web(files))
    folder = typed.download(server.url + path)
    assert downloaded(folder) == files
    server.asked.clear()
    assert typed.download(server.url + path) == folder
    assert not [asked for _, asked in server.asked if asked not in ("", "bytes=0-0")]
    files["m-1.safetensors"] = os.urandom(4000)
    assert downloaded(typed.download(server.url + path)) == files
    del files["tokenizer.json"]
    assert downloaded(typed.download(server.url + path)) == files


def test_a_gguf_file_of_a_web_server_that_knows_no_ranges(typed: Typed, site: Callable[..., Site]) -> None:
    data = os.urandom(70_000_000)  # in two parts
    server = site(web({"chat-Q8_0.gguf": data}, **{"X-No-Ranges": "1"}))
    file = typed.download(f"{server.url}/models/chat/chat-Q8_0.gguf?key=secret")
    assert file.name == "chat-Q8_0.gguf" and file.read_bytes() == data
    assert not partial_files(typed.home)


def test_addresses_without_a_model(typed: Typed, site: Callable[..., Site]) -> None:
    server = site(web(SHARDED))
    said = typed.refused(f"{server.url.replace('//', '//user:secret@')}/models?key=secret")
    assert f"{server.url}/models has no config.json" in said and "secret" not in said
    hostile = json.dumps({"weight_map": {"a": "../../m-1.safetensors"}}).encode()
    server = site(web(SHARDED | {"model.safetensors.index.json": hostile}))
    assert "which is not a valid relative path" in typed.refused(f"{server.url}/models/chat")
    assert "cannot be fetched" in typed.refused("http://127.0.0.1:9/models/chat")


def test_bodies_without_end(typed: Typed, site: Callable[..., Site]) -> None:
    server = site(web(SHARDED, **{"X-Endless": "1", "X-No-Ranges": "1"}))
    assert "sends config.json without its size" in typed.refused(f"{server.url}/models/chat")
    there = {
        "MODELSCOPE_ENDPOINT": site(lambda *asked: (200, {"X-Endless": "1", "X-No-Ranges": "1"}, bytes(2**16))).url
    }
    assert "without a valid file list" in typed.refused("modelscope://org/chat", **there)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://127.0.0.1:{port}/again"])
def test_redirects_that_lead_nowhere(typed: Typed, site: Callable[..., Site], target: str) -> None:
    server = site(lambda path, query, headers: (302, {"Location": target.format(port=server.server_port)}, b""))
    assert "cannot be read" in typed.refused(f"{server.url}/models/chat")


def test_a_file_that_changes_while_it_is_fetched(typed: Typed, site: Callable[..., Site]) -> None:
    """Its first byte is asked for in the first version, the rest in the second."""
    changed = SHARDED | {"m-2.safetensors": os.urandom(3000)}

    def answer(path: str, query: dict[str, str], headers: Any) -> tuple[int, dict[str, str], bytes]:
        later = headers.get("Range", "bytes=0-0") != "bytes=0-0"
        return web(changed if later else SHARDED)(path, query, headers)

    said = typed.refused(f"{site(answer).url}/models/chat", "--dir", "here")
    assert "m-2.safetensors has changed during the download" in said
    assert not (typed.home / "here" / "m-2.safetensors").exists()
