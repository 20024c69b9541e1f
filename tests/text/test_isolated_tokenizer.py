"""Tokenizer files that do harm are refused in one sentence, and another process encodes as this one would."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import demo
from penstock.core import PenstockError
from penstock.text import Tokenizer
from penstock.text.isolated_tokenizer import IsolatedTokenizer, Limits, check_tokenizer

LIMITS = Limits(memory=2**30, cpu=2)
REFUSED = r"cannot be used within 1 GiB of memory and 2 s of processor time"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(demo.CHAT, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "model"


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def token_of_huge_id(folder: Path) -> None:
    path = folder / "tokenizer.json"
    model = json.loads(path.read_text())["model"]
    change(path, model=model | {"vocab": model["vocab"] | {"another": 10**9}})


def token_of_huge_id_in_the_configuration(folder: Path) -> None:
    change(folder / "tokenizer_config.json", added_tokens_decoder={"1000000000": {"content": "<|x|>"}})
    with (folder / "tokenizer.model").open("wb") as file:
        file.write(b"YQ== 0\nYg== 1\n")
    (folder / "tokenizer.json").unlink()


def growing_text(folder: Path) -> None:
    twice = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    change(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [twice] * 40})


def huge_file(folder: Path) -> None:
    os.truncate(folder / "tokenizer.json", 2**40)


def huge_configuration(folder: Path) -> None:
    os.truncate(folder / "tokenizer_config.json", 2**30)


def deep_configuration(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[" * 10**6)


def endless_template(folder: Path) -> None:
    loop = "{% for a in range(99999) %}"
    (folder / "chat_template.jinja").write_text(loop * 3 + "{% endfor %}" * 3)


def huge_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 'a' * 10**12 }}")


HOSTILE: dict[Callable[[Path], None], str] = {
    token_of_huge_id: "has a token with id 1000000000; the limit is 4194304",
    token_of_huge_id_in_the_configuration: "has an added token with id 1000000000; the limit is 4194304",
    growing_text: REFUSED,
    huge_file: r"tokenizer.json has 1048576 MiB; the limit is 128 MiB",
    huge_configuration: r"tokenizer_config.json has 1024 MiB; the limit is 16 MiB",
    deep_configuration: "tokenizer_config.json is not JSON",
    endless_template: REFUSED,
    huge_template: REFUSED,
}


@pytest.mark.parametrize("spoil", HOSTILE, ids=lambda spoil: spoil.__name__)
def test_hostile_files_are_refused_in_one_sentence(folder: Path, spoil: Callable[[Path], None]) -> None:
    spoil(folder)
    with pytest.raises(PenstockError, match=HOSTILE[spoil]) as refused:
        check_tokenizer(folder, limits=LIMITS)
    assert "\n" not in str(refused.value)
    assert not left()


def left() -> list[int]:
    """Processes that read tokenizers for this one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [
        int(pid) for pid in children if b"penstock.text.isolated_tokenizer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_what_was_found_good_is_not_read_again_until_it_changes(folder: Path) -> None:
    change(folder / "tokenizer_config.json", some_field=str(folder))  # a content that no other test has
    check_tokenizer(folder)
    check_tokenizer(folder, limits=Limits(memory=1))  # with which nothing can be read
    change(folder / "tokenizer_config.json", some_field="another")
    with pytest.raises(PenstockError, match="cannot be used within"):
        check_tokenizer(folder, limits=Limits(memory=1))


@pytest.fixture
def isolated() -> Iterator[IsolatedTokenizer]:
    tokenizer = IsolatedTokenizer(demo.CHAT)
    yield tokenizer
    tokenizer.close()


def test_another_process_encodes_the_same(isolated: IsolatedTokenizer) -> None:
    own = Tokenizer(demo.CHAT)
    for text in ("", "the river runs  to the sea\n", "河流入海🙂<|im_end|>\x00", "x" * 300_000):
        for special in (True, False):
            assert isolated.encode(text, special) == own.encode(text, special)
    ids = own.encode("the river<|im_end|>")
    assert isolated.decode(ids) == own.decode(ids) and isolated.decode(ids, False) == own.decode(ids, False)
    assert isolated.vocabulary == own.vocabulary and isolated.special_ids == own.special_ids
    assert [isolated.id_to_token(i) for i in (*ids, 10**6)] == [own.id_to_token(i) for i in (*ids, 10**6)]
    assert isolated.token_to_id("<|im_end|>") == own.token_to_id("<|im_end|>")
    assert isolated.token_to_id("no token") is None
    assert isolated.to_json() == own.to_json() and isolated.special == own.special
    messages = [{"role": "user", "content": "Hello!"}]
    assert isolated.render(messages) == own.render(messages)
    for tokenizer in (isolated, own):
        with pytest.raises(PenstockError, match="is not valid text"):
            tokenizer.encode("half a pair: \ud83d")


def test_a_killed_process_is_started_again_and_a_closed_one_is_gone(isolated: IsolatedTokenizer) -> None:
    expected = isolated.encode("the river")
    (pid,) = left()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PenstockError, match="is restarted") as ended:
        isolated.encode("the river")
    assert ended.value.failure.retryable
    assert isolated.encode("the river") == expected
    isolated.close()
    assert not left()
