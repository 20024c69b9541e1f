"""Tokenizers of checkpoints without ``tokenizer.json``, against sentencepiece, tiktoken and transformers."""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import BertTokenizer

from penstock import demo
from penstock.core import Code, PenstockError
from penstock.text import Tokenizer
from penstock.text.encoding import Texts
from penstock.text.vocabulary import byte_alphabet

TEXT = st.text(st.sampled_from("the river runs  to é 河流入海🙂\n'123") | st.characters(codec="utf-8"), max_size=40)
LINES = [
    "the river runs to the sea and the sea runs to the shore",
    "where does the river run, and who runs with it?",
    "河流入海，海水向东流。",
    "one, two, three, 1 2 3, 12, 123: it's over",
]


SPACE = "\u2581"
DEFINED = {"": [], "defined": [SPACE * 2, SPACE * 4, f"<b>{SPACE}", "<tag>", "ver", "\n\n", "s t"]}
"""User-defined pieces, which SentencePiece never splits. ``s t`` is never found, as spaces are replaced before."""


@pytest.fixture(
    scope="module",
    params=["bpe identity", "unigram identity", "bpe nmt_nfkc", "bpe identity defined", "unigram identity defined"],
)
def piece_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    folder = tmp_path_factory.mktemp("sentencepiece")
    kind, rule, *defined = request.param.split()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=330,
        byte_fallback=True,
        normalization_rule_name=rule,
        remove_extra_whitespaces=rule != "identity",
        hard_vocab_limit=False,
        user_defined_symbols=DEFINED[defined[0] if defined else ""],
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return processor, Tokenizer(folder)


@given(text=TEXT)
@example(text="\x85")
@example(text="the river runs to")
@example(text="  the\x85 \n river \n ")
@example(text="     river<tag>river   <b>  over\n\n\n    ")
def test_sentencepiece_model_matches_sentencepiece(
    piece_model: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str
) -> None:
    theirs, ours = piece_model
    text = text.replace("\u2581", "_")  # U+2581 stands for a space in SentencePiece
    assume(not re.search("</?s>|<unk>", text))  # sentencepiece would encode special tokens as text
    if json.loads(ours.to_json())["model"]["type"] == "Unigram" and theirs.piece_to_id("<tag>") != theirs.unk_id():
        assume("   " not in f" {text}")  # three spaces have two segmentations with equal scores
    expected = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == expected
    assert ours.encode(text) == [theirs.bos_id(), *expected]
    assert ours.decode(ours.encode(text)).lstrip(" ") == theirs.decode(expected).lstrip(" ")


def test_model_with_whitespace_as_suffix_is_refused(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=100,
        hard_vocab_limit=False,
        treat_whitespace_as_suffix=True,
        minloglevel=2,
    )
    with pytest.raises(PenstockError, match="treat_whitespace_as_suffix") as refused:
        Tokenizer(tmp_path)
    assert refused.value.failure.code is Code.UNSUPPORTED


@pytest.mark.parametrize("normalized", [False, True])
def test_added_tokens_extend_sentencepiece_model(
    piece_model: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], tmp_path: Path, normalized: bool
) -> None:
    """The added tokens are new tokens, and a token that renames a piece of the model."""
    theirs, old = piece_model
    (tmp_path / "tokenizer.model").write_bytes(theirs.serialized_model_proto())
    size, renamed = theirs.get_piece_size(), theirs.piece_to_id("<0x41>")
    added = {str(size): "<|im_end|>", str(size + 1): "<think>", str(renamed): "[IMG]"}
    flags = {"normalized": normalized, "special": True}
    config = {"added_tokens_decoder": {token_id: {"content": token, **flags} for token_id, token in added.items()}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer(tmp_path)
    for token_id, token in added.items():
        assert ours.encode(f"river{token}", False) == [*old.encode("river", False), int(token_id)]
        assert ours.decode([int(token_id)], skip_special_tokens=False) == token


@pytest.mark.parametrize("legacy", [None, True])
def test_null_legacy_means_legacy_behaviour(
    piece_model: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], tmp_path: Path, legacy: bool | None
) -> None:
    theirs, old = piece_model
    (tmp_path / "tokenizer.model").write_bytes(theirs.serialized_model_proto())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
    assert Tokenizer(tmp_path).encode("river</s>river") == old.encode("river</s>river")


def test_only_legacy_models_add_space_after_special_tokens(
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
    """The demo model's tokens and ranks, as in a tiktoken file."""
    merges = json.loads((demo.CHAT / "tokenizer.json").read_text())["model"]["merges"]
    alphabet = byte_alphabet()
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(alphabet[c] for c in a + b) for a, b in merges]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


GPT4 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
QWEN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"""
    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
KIMI = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
"""Patterns copied from the models' tokenizers."""
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, bool]] = {
    "Kimi-K2": (
        "tiktoken.model",
        {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}},
        {"model_type": "kimi_k2"},
        KIMI,
        False,
    ),
    "Moonlight": (
        "tiktoken.model",
        {"tokenizer_class": "TikTokenTokenizer"},
        {"model_type": "deepseek_v3"},
        KIMI,
        False,
    ),
    "Kimi without a configuration": ("tiktoken.model", {}, {"model_type": "kimi_k2"}, KIMI, False),
    "Qwen": ("qwen.tiktoken", {}, {}, QWEN, True),
    "Qwen3": ("tokenizer.model", {"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "qwen3"}, QWEN, True),
    "Llama 3": ("tokenizer.model", {"add_bos_token": False}, {"model_type": "llama"}, GPT4, False),
    "GLM-4": ("tokenizer.model", {"tokenizer_class": "ChatGLM4Tokenizer"}, {"model_type": "chatglm"}, GPT4, False),
    "Hunyuan": ("hy.tiktoken", {"auto_map": ["tokenization_hy.HYTokenizer", None]}, {}, QWEN, True),
}
"""File name, ``tokenizer_config.json``, ``config.json``, pattern, and True if texts are NFC-normalized, by model."""
HARD = st.text(
    st.sampled_from("don't DON'Tt  he'Ll X河流abc入海 éé12345678 ./\r\n\t\u0301\u0915\u093f\u3042ß“”_-🙂\u00a0")
    | st.characters(codec="utf-8"),
    max_size=40,
)


def rank_lines(known: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in known.items())


@pytest.fixture(scope="module", params=MODELS)
def rank_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tiktoken.Encoding, Tokenizer, bool]:
    folder, known = tmp_path_factory.mktemp("tiktoken"), ranks()
    for token in (b"12", b"123", b"do", b"n'", b"'t", b"don", b"don'", b"don't", "河流".encode()[:4], "河流".encode()):
        known.setdefault(token, len(known))
    name, tokenizer_config, config, pattern, nfc = MODELS[request.param]
    (folder / name).write_bytes(rank_lines(known))
    added: dict[str, Any] = {str(len(known) + 2): {"content": "<|im_end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config | {"added_tokens_decoder": added}))
    (folder / "config.json").write_text(json.dumps(config))
    return tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=known, special_tokens={}), Tokenizer(folder), nfc


@given(text=HARD)
@settings(deadline=None)
@example(text="I don't KNOW: DON'T 1234 河流abc入海 x\u0301\u0915\u093f  \n\n /\n he's")
def test_tiktoken_file_is_split_with_the_pattern_of_its_model(
    rank_file: tuple[tiktoken.Encoding, Tokenizer, bool], text: str
) -> None:
    theirs, ours, nfc = rank_file
    text = unicodedata.normalize("NFC", text) if nfc else text
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)
    assert ours.decode(ours.encode(text, add_special_tokens=False)) == text


def test_added_tokens_keep_configured_ids(rank_file: tuple[tiktoken.Encoding, Tokenizer, bool]) -> None:
    theirs, ours, _ = rank_file
    end = theirs.n_vocab + 2
    assert ours.encode("the<|im_end|>") == [*theirs.encode("the"), end]
    assert ours.token_to_id("<|im_end|>") == end
    assert ours.decode([end]) == ""


@pytest.mark.parametrize(
    ("tokenizer_config", "config", "message"),
    [
        ({}, {}, "no tokenizer_class, no model_type"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "new_model"}, "model_type new_model"),
        ({"auto_map": {"AutoTokenizer": ["x.NewTokenizer", None]}}, {}, "NewTokenizer"),
    ],
)
def test_tiktoken_file_of_an_unknown_model_is_refused(
    tmp_path: Path, tokenizer_config: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    (tmp_path / "tiktoken.model").write_bytes(rank_lines(ranks()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PenstockError, match=message) as refused:
        Tokenizer(tmp_path)
    assert refused.value.failure.code is Code.UNSUPPORTED


@pytest.mark.parametrize(
    ("config", "before", "token"),
    [
        ({"model_type": "llama"}, ["<|begin_of_text|>"], "<|eot_id|>"),
        ({"model_type": "hunyuan_v1_moe"}, ["<|startoftext|>"], "<|extra_203|>"),
        ({"model_type": "qwen"}, [], "<|im_end|>"),
    ],
)
def test_special_tokens_defined_only_in_model_code_are_known(
    tmp_path: Path, config: dict[str, Any], before: list[str], token: str
) -> None:
    known = ranks()
    (tmp_path / "tokenizer.model").write_bytes(rank_lines(known))
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = Tokenizer(tmp_path)
    first = [ours.token_to_id(name) for name in before]
    assert ours.encode(f"a{token}") == [*first, known[b"a"], ours.token_to_id(token)]
    assert min(ours.special_ids) == len(known)


@pytest.mark.parametrize("name", ["tokenizer.model", "x.tiktoken"])
def test_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
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


@given(text=TEXT, second=TEXT.filter(bool))  # transformers treats an empty second text as absent
@example(text="The RIVER runs [MASK] to thé 河流", second="[SEP]")
def test_bert_vocab_txt_matches_transformers(word_pieces: tuple[Any, Tokenizer], text: str, second: str) -> None:
    theirs, ours = word_pieces
    assert ours.encode(text) == theirs.encode(text)
    pair, expected = ours.encode_texts(Texts(text, second)), theirs(text, second)
    assert pair.token_ids == expected["input_ids"]
    assert pair.second_text == expected["token_type_ids"].index(1)


def test_vocab_txt_without_special_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("the\nriver\n")
    with pytest.raises(
        PenstockError, match=r"vocab.txt cannot be read: the tokens \[UNK\], \[CLS\], \[SEP\] are missing"
    ):
        Tokenizer(tmp_path)
