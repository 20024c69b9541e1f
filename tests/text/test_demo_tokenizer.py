"""The demo model's tokenizer: texts and bytes round-trip; digits and Chinese characters are separate tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from penstock import demo

MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


@settings(max_examples=500, deadline=None)
@given(text=st.text(max_size=200))
def test_any_unicode_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "👩‍👩‍👧‍👦 👍🏽 🇨🇦",
        "ᏣᎳᎩ ጤና ይስጥልኝ ᠮᠣᠩᠭᠣᠯ",
        "नमस्ते مرحبا שלום",
        "加拿大的首都是渥太华。",
        "a\u0301 \ufeff\u200b\r\n\t  x",
        "\x00\x7f",
    ],
)
def test_rare_scripts_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(data=st.binary(max_size=64))
def test_any_bytes_round_trip(tokenizer: PreTrainedTokenizerFast, data: bytes) -> None:
    """Every byte has a token, so invalid UTF-8 can be encoded; it is decoded to replacement characters."""
    symbols = bytes_to_unicode()
    ids = tokenizer.convert_tokens_to_ids([symbols[byte] for byte in data])
    assert None not in ids
    assert tokenizer.decode(ids) == data.decode(errors="replace")


@given(
    number=st.integers(0, 10**12), han=st.text(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), max_size=20)
)
def test_digits_and_chinese_characters_are_never_merged(
    tokenizer: PreTrainedTokenizerFast, number: int, han: str
) -> None:
    assert len(tokenizer.encode(str(number))) == len(str(number))
    assert tokenizer.encode(han) == [i for character in han for i in tokenizer.encode(character)]


def test_special_tokens_encode_to_one_id_and_are_skipped(tokenizer: PreTrainedTokenizerFast) -> None:
    assert 3000 <= len(tokenizer) <= 4000
    assert tokenizer.eos_token == "<|im_end|>"
    text = "".join(["<|im_start|>", *MARKS, "<|im_end|>", "<|endoftext|>"])
    assert len(tokenizer.encode(text)) == len(MARKS) + 3
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "".join(MARKS)


def test_draft_model_has_same_tokenizer_files() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (demo.CHAT / name).read_bytes() == (demo.DRAFT / name).read_bytes()
