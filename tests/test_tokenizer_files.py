"""Tokenizers of checkpoints without ``tokenizer.json``, against the libraries that their files belong to."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import assume, example, given
from hypothesis import strategies as st
from transformers import BertTokenizer

from penstock import demo
from penstock.core import PenstockError
from penstock.text import Tokenizer
from penstock.text.encoding import Texts
from penstock.text.from_tiktoken import WORDS
from penstock.text.vocabulary import byte_alphabet

TEXT = st.text(st.sampled_from("the river runs  to é 河流入海🙂\n'123") | st.characters(codec="utf-8"), max_size=40)
LINES = [
    "the river runs to the sea and the sea runs to the shore",
    "where does the river run, and who runs with it?",
    "河流入海，海水向东流。",
    "one, two, three, 1 2 3, 12, 123: it's over",
]


@pytest.fixture(scope="module", params=["bpe identity", "unigram identity", "bpe nmt_nfkc"])
def piece_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    folder = tmp_path_factory.mktemp("sentencepiece")
    kind, rule = request.param.split()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=330,
        byte_fallback=True,
        normalization_rule_name=rule,
        remove_extra_whitespaces=rule != "identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return processor, Tokenizer(folder)


@given(text=TEXT)
@example(text="\x85")
@example(text="  the\x85 \n river \n ")
def test_sentencepiece_models(piece_model: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str) -> None:
    theirs, ours = piece_model
    text = text.replace("\u2581", "_")  # the mark of a space is no text
    assume(not re.search("</?s>|<unk>", text))  # special tokens, which sentencepiece spells out
    expected = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == expected
    assert ours.encode(text) == [theirs.bos_id(), *expected]
    assert ours.decode(ours.encode(text)).lstrip(" ") == theirs.decode(expected).lstrip(" ")


def test_only_old_models_put_a_space_after_every_special_token(
    piece_model: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], tmp_path: Path
) -> None:
    theirs, old = piece_model
    (tmp_path / "tokenizer.model").write_bytes(theirs.serialized_model_proto())
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}')
    river, end = theirs.encode("river"), theirs.eos_id()
    assert old.encode("river</s>river", add_special_tokens=False) == [*river, end, *river]
    later = Tokenizer(tmp_path).encode("river</s>river", add_special_tokens=False)
    assert later[: len(river) + 1] == [*river, end]
    assert theirs.decode(later[len(river) + 1 :]) == "river"
    assert later[len(river) + 1 :] != river


def ranks() -> dict[bytes, int]:
    """The demo model's merges as tiktoken writes them."""
    merges = json.loads((demo.CHAT / "tokenizer.json").read_text())["model"]["merges"]
    alphabet = byte_alphabet()
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(alphabet[c] for c in a + b) for a, b in merges]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


@pytest.fixture(scope="module", params=["one digit", "three digits"])
def rank_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tiktoken.Encoding, Tokenizer]:
    folder, known, three = tmp_path_factory.mktemp("tiktoken"), ranks(), request.param == "three digits"
    if three:
        known |= {b"12": len(known), b"123": len(known) + 1}
    (folder / "qwen.tiktoken").write_bytes(
        b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in known.items())
    )
    added: dict[str, Any] = {str(len(known) + 2): {"content": "<|im_end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    pattern = WORDS % ("{1,3}" if three else "")
    return tiktoken.Encoding("demo", pat_str=pattern, mergeable_ranks=known, special_tokens={}), Tokenizer(folder)


@given(text=TEXT)
def test_tiktoken_files(rank_file: tuple[tiktoken.Encoding, Tokenizer], text: str) -> None:
    theirs, ours = rank_file
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == text


def test_added_tokens_have_their_own_ids(rank_file: tuple[tiktoken.Encoding, Tokenizer]) -> None:
    theirs, ours = rank_file
    end = theirs.n_vocab + 2
    assert ours.encode("the<|im_end|>") == [*theirs.encode("the"), end]
    assert ours.token_to_id("<|im_end|>") == end
    assert ours.decode([end]) == ""


@pytest.mark.parametrize("name", ["tokenizer.model", "x.tiktoken"])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x0a\xff\x01ab")
    with pytest.raises(PenstockError, match="cannot be read"):
        Tokenizer(tmp_path)


PIECES = "the river runs to sea r ##i ##ver ##s ##u ##n é e ##é 河 流 入 海 🙂 ' 1 ##2 ##3 T ##he".split()


@pytest.fixture(scope="module", params=["{}", '{"do_lower_case": false}', '{"strip_accents": false}'])
def word_pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    folder = tmp_path_factory.mktemp("wordpiece")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", *PIECES, "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) + "\n")
    (folder / "tokenizer_config.json").write_text(request.param)
    return BertTokenizer.from_pretrained(folder, **json.loads(request.param)), Tokenizer(folder)


@given(text=TEXT, second=TEXT.filter(bool))  # the library takes an empty second text for none
@example(text="The RIVER runs [MASK] to thé 河流", second="[SEP]")
def test_bert_s_vocab_txt(word_pieces: tuple[Any, Tokenizer], text: str, second: str) -> None:
    theirs, ours = word_pieces
    assert ours.encode(text) == theirs.encode(text)
    pair, expected = ours.encode_texts(Texts(text, second)), theirs(text, second)
    assert pair.token_ids == expected["input_ids"]
    assert pair.second_text == expected["token_type_ids"].index(1)


def test_a_vocab_txt_without_special_tokens_is_told(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("the\nriver\n")
    with pytest.raises(PenstockError, match=r"vocab.txt cannot be read: it lacks \[UNK\], \[CLS\], \[SEP\]"):
        Tokenizer(tmp_path)
