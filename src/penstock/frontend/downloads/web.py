"""Downloads from web servers (``http://`` and ``https://``): a folder with a checkpoint, or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx2
import msgspec

from penstock.checkpoint.stored_tensors import INDEX, Index
from penstock.config.secrets import public_url
from penstock.core.errors import Code, PenstockError, invalid
from penstock.core.numbers import read_decimal
from penstock.text import side_files, tokenizer_files

from .downloader import MAX_WORKERS
from .http import MAX_SIZE, HTTPRanges, content_range, get_json, status_of, without_secrets
from .names import ModelName
from .remote import InterruptedTransferError, Listing, RemoteFile, check_paths, unavailable
from .selection import SHARD

CONFIG, SINGLE = "config.json", "model.safetensors"
OPTIONAL = (
    "generation_config.json",
    *tokenizer_files.NAMES,
    *(name for name in side_files.NAMES if name != CONFIG),
    *("qwen.tiktoken", "hy.tiktoken", "tiktoken.model"),
    *("additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja"),
    "video_preprocessor_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "modules.json",
    "1_Pooling/config.json",
    INDEX,
)
"""Optional files of a checkpoint. They are probed, since web servers have no machine-readable listing."""
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip", ".7z")
CHECKPOINT_SUFFIXES = (".json", ".safetensors")
MAX_INDEX_BYTES = 2**26
ABSENT = (403, 404, 410)
"""Status codes of missing files; object stores return 403."""


class Web:
    """``Source``: the URL of a checkpoint's folder, of a file in that folder (``config.json``, ``model.safetensors`` or
    ``model.safetensors.index.json``), or of a GGUF file.

    Raises ``PenstockError`` (``invalid``) for an archive.
    """

    def __init__(self, name: ModelName, max_workers: int = MAX_WORKERS) -> None:
        try:
            address = httpx2.URL(name.path)
        except httpx2.InvalidURL as error:
            message = f"{public_url(name.path)} is not a valid URL ({error}): write https://host/path"
            raise invalid("model", message) from error
        self.name = without_secrets(name.path)
        path = address.path
        if path.lower().endswith(ARCHIVES):
            raise invalid("model", f"{self.name} is an archive: unpack it, and give the folder of the checkpoint")
        is_file = path.lower().endswith((*CHECKPOINT_SUFFIXES, ".gguf"))
        folder, _, self._file = path.rpartition("/") if is_file else (path.rstrip("/"), "/", "")
        self._folder = address.copy_with(path=f"{folder}/")
        self._max_workers = max_workers
        self._ranges = HTTPRanges(max_connections=max_workers)

    def list_files(self) -> Listing:
        if self._file.lower().endswith(".gguf"):
            return Listing(self._required(_gguf_parts(self._file)))
        files = self._required([CONFIG]) + self._present(OPTIONAL)
        if any(file.path == INDEX for file in files):
            return Listing(files + self._required(self._shards()))
        return Listing(files + self._required([SINGLE]))

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        etag = file.version if file.version.startswith(('"', "W/")) else ""
        return self._ranges.read(self._url(file.path), start, end, file.size, etag)

    def _url(self, path: str) -> str:
        return str(self._folder.copy_with(path=self._folder.path + quote(path)))

    def _shards(self) -> Sequence[str]:
        """Weight files listed in the index."""
        try:
            _, index = get_json(self._ranges, self._url(INDEX), MAX_INDEX_BYTES)
            names = sorted(set(msgspec.convert(index, type=Index).weight_map.values()))
        except InterruptedTransferError as error:
            raise unavailable(self.name, error) from error
        except msgspec.ValidationError as error:
            message = f"{INDEX} of {self.name} is malformed ({error}): correct the file on the server"
            raise invalid("model", message) from error
        check_paths([RemoteFile(name, 0) for name in names], f"{INDEX} of {self.name}")
        return names

    def _required(self, paths: Sequence[str]) -> list[RemoteFile]:
        files = self._present(paths)
        if missing := set(paths) - {file.path for file in files}:
            advice = "give the URL of a folder with a Hugging Face checkpoint, or of a GGUF file"
            raise PenstockError(Code.NOT_FOUND, f"model: {self.name} has no {min(missing)}: {advice}", "model")
        return files

    def _present(self, paths: Sequence[str]) -> list[RemoteFile]:
        """Files of ``paths`` that exist on the server."""
        with ThreadPoolExecutor(self._max_workers) as pool:
            return [file for file in pool.map(self._probe, paths) if file]

    def _probe(self, path: str) -> RemoteFile | None:
        """Get size and version of a file; None if it is missing. Requests its first byte, as signed URLs of object
        stores do not allow HEAD."""
        try:
            with self._ranges.open(self._url(path), {"Range": "bytes=0-0"}) as response:
                return self._probed(path, response)
        except InterruptedTransferError as error:
            raise unavailable(self.name, error) from error

    def _probed(self, path: str, response: httpx2.Response) -> RemoteFile | None:
        if response.status_code in ABSENT or "html" in response.headers.get("Content-Type", ""):
            return None  # an HTML page is a directory listing or an error page
        _, size = content_range(response)
        length = read_decimal(response.headers.get("Content-Length", ""), MAX_SIZE)
        if response.status_code == 200 and length is not None:
            size = length
        elif response.status_code not in (200, 206, 416):
            raise unavailable(self.name, status_of(response))
        if size is None:
            problem = f"{self.name} sends {path} without its size, so truncation could not be detected"
            raise invalid("model", f"{problem}: use a server that sends Content-Length")
        version = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        return RemoteFile(path, size, version=version)


def _gguf_parts(file: str) -> list[str]:
    """Names of all parts of a GGUF file, given the name of one part."""
    if not (shard := SHARD.search(file)):
        return [file]
    base, total = file[: shard.start()], int(shard[2])
    if total > 1000:
        raise invalid("model", f"{file} has {total} parts; at most 1000 are supported")
    return [f"{base}-{number:05}-of-{shard[2]}.gguf" for number in range(1, total + 1)]
