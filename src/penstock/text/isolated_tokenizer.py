"""Tokenizer files read in a process with limits (``python -m penstock.text.isolated_tokenizer DESCRIPTOR``).

Checkpoints are not trusted, and the ``tokenizers`` library has no limits: a small file can take all memory, or minutes.
``check_tokenizer`` loads the files in a child process before a serving process does; files that passed are not checked
again. ``IsolatedTokenizer`` keeps the tokenizer in the child process: loading 150,000 tokens holds the GIL for half a
second, which would delay the streams of other models.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import resource
import signal
import socket
import sys
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from penstock.config.user_folders import cache_home
from penstock.core import Code, Failure, PenstockError
from penstock.core.errors import invalid

from . import side_files, tokenizer_files
from .chat_template import ChatTemplate
from .control_tokens import ControlTokens
from .encoding import Encoded, Texts
from .isolated_process import IsolatedProcess, receive, send
from .side_files import choose_template
from .tokenizer import Tokenizer

ENCODE_TIMEOUT = 30.0
"""Maximum time to encode one prompt, in seconds."""
PROBES = (
    *(character * 4096 for character in "a 1\n-"),
    "a" * 4096 + "!",
    "的" * 2048,
    "🙂" * 1024,
    "The river, it's 3.5 km; (x_1) -> `y`\n\n" * 50,
)
"""Texts that the tokenizer must encode within the limits; they detect slow regular expressions."""
MAX_TEMPLATE_SIZE = 2**19
"""Maximum number of characters of a chat template."""
PROBE_MESSAGES = ({"role": "user", "content": "Hello!"},)
PROBE_TOOLS = ({"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}},)


class Limits(msgspec.Struct, frozen=True):
    """Limits for loading a tokenizer."""

    memory: int = 2 * 2**30
    """Address space in bytes."""
    cpu: float = 20.0
    """Processor time in seconds. The limit on elapsed time is four times this."""


class Load(msgspec.Struct, frozen=True):
    """The first message to the child process."""

    folder: str
    chat_template: str | None
    limits: Limits
    keep_running: bool
    """True: encode texts after loading; False: only check the files."""


class Loaded(msgspec.Struct, frozen=True):
    """The reply to ``Load``: a failure, or, with ``keep_running``, the data that ``IsolatedTokenizer`` needs."""

    failure: Failure | None = None
    json: str = ""
    vocabulary: list[bytes] = []
    vocab_size: int = 0
    tokens: list[str] = []
    special_ids: list[int] = []
    special: dict[str, str] = {}
    templates: dict[str, str] = {}
    control_tokens: ControlTokens = ControlTokens()
    info: dict[str, Any] = {}


def check_tokenizer(folder: Path, chat_template: str | None = None, limits: Limits | None = None) -> None:
    """Load and test a checkpoint's tokenizer and chat template in a child process.

    Files that passed are remembered by a hash of their content; the next check takes a few milliseconds.

    Raises ``PenstockError`` (``invalid``) if the files cannot be used within the limits.
    """
    marker = _passed_marker(folder, chat_template)
    with contextlib.suppress(OSError):
        if marker.lstat().st_uid in (os.geteuid(), 0):
            return
    process, _ = _start(Load(str(folder), chat_template, limits or Limits(), keep_running=False))
    process.close()
    with contextlib.suppress(OSError):
        marker.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker.touch()


class IsolatedTokenizer(Tokenizer):
    """A tokenizer that encodes in a child process. The process is restarted if it dies; ``close`` ends it.

    Raises ``PenstockError`` (``invalid``) if the files cannot be used within the limits.
    """

    isolated = True

    def __init__(self, folder: Path, chat_template: str | None = None, limits: Limits | None = None) -> None:
        self._load = Load(str(folder), chat_template, limits or Limits(), keep_running=True)
        self._init_caches(folder, chat_template)
        self._lock = threading.Lock()
        self._process: IsolatedProcess | None
        self._process, self._loaded = _start(self._load)
        self._ids = {token: token_id for token_id, token in enumerate(self._loaded.tokens) if token}
        self.special = self._loaded.special
        self.templates = self._loaded.templates
        self.info = self._loaded.info

    def encode(self, text: str, add_special_tokens: bool = True, has_breaks: bool = False) -> list[int]:
        texts = Texts(text, add_special_tokens=add_special_tokens, has_breaks=has_breaks)
        return self.encode_texts(texts).token_ids

    def encode_texts(self, texts: Texts) -> Encoded:
        try:
            request = msgspec.msgpack.encode(texts)
        except UnicodeEncodeError as error:
            raise invalid("prompt", f"is not valid text: {error}") from error
        with self._lock:
            if self._process is None:
                self._process, _ = _start(self._load)
            try:
                return msgspec.msgpack.decode(self._process.request(request, ENCODE_TIMEOUT), type=Encoded)
            except OSError as error:
                self._process.close()
                self._process = None
                if isinstance(error, TimeoutError):
                    message = f"takes the tokenizer longer than {ENCODE_TIMEOUT:g} seconds to encode: shorten it"
                    raise invalid("prompt", message, ENCODE_TIMEOUT) from error
                message = "the tokenizer process ended unexpectedly and restarts with the next request: try again"
                raise PenstockError(Code.UNAVAILABLE, message) from error

    def close(self) -> None:
        super().close()
        with self._lock:
            if self._process:
                self._process.close()
                self._process = None

    def to_json(self) -> str:
        return self._loaded.json

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def id_to_token(self, token_id: int) -> str:
        return self._loaded.tokens[token_id] if token_id < len(self._loaded.tokens) else ""

    @cached_property
    def vocabulary(self) -> list[bytes]:
        return self._loaded.vocabulary

    @property
    def vocab_size(self) -> int:
        return self._loaded.vocab_size

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._loaded.special_ids)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        return self._loaded.control_tokens


def _start(load: Load) -> tuple[IsolatedProcess, Loaded]:
    """Start a process that loads the files, and return it with its reply. Raises ``PenstockError`` (``invalid``) if
    the files cannot be used."""
    process = IsolatedProcess("penstock.text.isolated_tokenizer")
    try:
        loaded = msgspec.msgpack.decode(process.request(msgspec.msgpack.encode(load), 4 * load.limits.cpu), type=Loaded)
        if loaded.failure:
            raise PenstockError.of(loaded.failure)
        return process, loaded
    except OSError as error:
        process.close()
        limits = f"{load.limits.memory / 2**30:.2g} GiB of memory and {load.limits.cpu:g} s of processor time"
        message = f"the tokenizer or chat template in {load.folder} cannot be used within {limits}"
        raise invalid("tokenizer", message) from error
    except BaseException:
        process.close()
        raise


def _passed_marker(folder: Path, chat_template: str | None) -> Path:
    """Path of the marker file that exists if this content passed the check."""
    digest = hashlib.sha256(f"{tokenizers.__version__} {Limits()} {chat_template!r}".encode())
    for path in tokenizer_files.paths(folder):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        digest.update(side_files.read(path))
    return cache_home() / "penstock" / "tokenizers" / digest.hexdigest()


# --- In the child process --------------------------------------------------------------------------------------------


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        load = msgspec.msgpack.decode(receive(connection), type=Load)
        resource.setrlimit(resource.RLIMIT_AS, (load.limits.memory, load.limits.memory))
        signal.setitimer(signal.ITIMER_PROF, load.limits.cpu)  # after this time SIGPROF ends the process
        tokenizer, loaded = _loaded(load)
        reply = msgspec.msgpack.encode(loaded)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, reply)
        with contextlib.suppress(OSError):  # the parent has closed the socket
            while tokenizer and load.keep_running:
                texts = msgspec.msgpack.decode(receive(connection), type=Texts)
                send(connection, msgspec.msgpack.encode(tokenizer.encode_texts(texts)))


def _loaded(load: Load) -> tuple[Tokenizer | None, Loaded]:
    try:
        tokenizer = Tokenizer(Path(load.folder), load.chat_template)
        templates = [_compiled(tokenizer, tools is not None) for tools in (None, PROBE_TOOLS)]
        vocabulary, control_tokens = tokenizer.vocabulary, tokenizer.control_tokens
        for text in PROBES:
            tokenizer.encode(text)
        for template, tools in zip(templates, (None, PROBE_TOOLS), strict=True):
            if template:
                _try_template(template, tools)
        if not load.keep_running:
            return tokenizer, Loaded()
        tokens = [tokenizer.id_to_token(token_id) for token_id in range(len(vocabulary))]
        return tokenizer, Loaded(
            json=tokenizer.to_json(),
            vocabulary=vocabulary,
            vocab_size=tokenizer.vocab_size,
            tokens=tokens,
            special_ids=sorted(tokenizer.special_ids),
            special=tokenizer.special,
            templates=tokenizer.templates,
            control_tokens=control_tokens,
            info=tokenizer.info,
        )
    except PenstockError as error:
        return None, Loaded(error.failure)
    except MemoryError:
        raise
    except Exception as error:  # tokenizers can raise any exception for a damaged file
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise
        message = f"the tokenizer or chat template in {load.folder} cannot be used: {error!r:.200}"
        return None, Loaded(invalid("model", message).failure)


def _compiled(tokenizer: Tokenizer, tools: bool) -> ChatTemplate | None:
    """The template for chats with or without tools; None if absent. Raises ``PenstockError`` (``invalid``) for a
    template that is too long or does not compile."""
    source = choose_template(tokenizer.templates, tools)
    if source is None:
        return None
    if len(source) > MAX_TEMPLATE_SIZE:
        message = f"has {len(source)} characters; the limit is {MAX_TEMPLATE_SIZE}"
        raise invalid("chat_template", message, MAX_TEMPLATE_SIZE)
    return ChatTemplate(source, tokenizer.special)


def _try_template(template: ChatTemplate, tools: Any) -> None:
    """Render a probe conversation. A template may refuse it, but must not run out of memory."""
    try:
        template.render(PROBE_MESSAGES, tools=tools)
    except PenstockError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from error


if __name__ == "__main__":
    main()
