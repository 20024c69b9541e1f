"""Tokenizers in a separate process: harmful files are refused, and results equal a local tokenizer's."""

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


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("damage", HOSTILE, ids=lambda damage: damage.__name__)
def test_hostile_files_are_refused_in_one_sentence(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    with pytest.raises(PenstockError, match=HOSTILE[damage]) as refused:
        check_tokenizer(folder, limits=LIMITS)
    assert "\n" not in str(refused.value)
    assert not tokenizer_pids()


def tokenizer_pids() -> list[int]:
    """Ids of the tokenizer processes started by this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [
        int(pid) for pid in children if b"penstock.text.isolated_tokenizer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_checked_tokenizer_is_checked_again_only_after_change(folder: Path) -> None:
    change(
        folder / "tokenizer_config.json", some_field=str(folder)
    )  # unique content: no other test has checked this tokenizer
    check_tokenizer(folder)
    check_tokenizer(folder, limits=Limits(memory=1))  # would fail if the files were read again
    change(folder / "tokenizer_config.json", some_field="another")
    with pytest.raises(PenstockError, match="cannot be used within"):
        check_tokenizer(folder, limits=Limits(memory=1))


@pytest.fixture
def isolated() -> Iterator[IsolatedTokenizer]:
    tokenizer = IsolatedTokenizer(demo.CHAT)
    yield tokenizer
    tokenizer.close()


def test_isolated_tokenizer_matches_local_tokenizer(isolated: IsolatedTokenizer) -> None:
    local = Tokenizer(demo.CHAT)
    for text in ("", "the river runs  to the sea\n", "河流入海🙂<|im_end|>\x00", "x" * 300_000):
        for special in (True, False):
            assert isolated.encode(text, special) == local.encode(text, special)
    ids = local.encode("the river<|im_end|>")
    assert isolated.decode(ids) == local.decode(ids) and isolated.decode(ids, False) == local.decode(ids, False)
    assert isolated.vocabulary == local.vocabulary and isolated.special_ids == local.special_ids
    assert [isolated.id_to_token(i) for i in (*ids, 10**6)] == [local.id_to_token(i) for i in (*ids, 10**6)]
    assert isolated.token_to_id("<|im_end|>") == local.token_to_id("<|im_end|>")
    assert isolated.token_to_id("no token") is None
    assert isolated.to_json() == local.to_json() and isolated.special == local.special
    assert [isolated.decode_token(i) for i in (*ids, 10**6)] == [local.decode_token(i) for i in (*ids, 10**6)]
    for name in {name for name in (*vars(local), *dir(Tokenizer)) if not name.startswith("_")} - {"isolated"}:
        value = getattr(local, name)
        assert callable(value) or name.startswith("template") or getattr(isolated, name) == value, name
    messages = [{"role": "user", "content": "Hello!"}]
    assert isolated.render(messages) == local.render(messages)
    for tokenizer in (isolated, local):
        with pytest.raises(PenstockError, match="is not valid text"):
            tokenizer.encode("half a pair: \ud83d")


def test_killed_process_is_restarted_and_close_ends_process(isolated: IsolatedTokenizer) -> None:
    expected = isolated.encode("the river")
    (pid,) = tokenizer_pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PenstockError, match="restarts with the next request") as ended:
        isolated.encode("the river")
    assert ended.value.failure.retryable
    assert isolated.encode("the river") == expected
    isolated.close()
    assert not tokenizer_pids()
