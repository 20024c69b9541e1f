"""Conversion of BERT's ``vocab.txt`` (one token per line) to the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
"""Default special tokens by role."""


def convert(data: bytes, config: Mapping[str, Any], named: Mapping[str, str]) -> tuple[Tokenizer, dict[str, str]]:
    """Return BERT's WordPiece tokenizer (Wu et al., 2016) and its special tokens by role. Token ids are line numbers.

    Args:
        config: ``tokenizer_config.json``; ``do_lower_case``, ``strip_accents`` and ``tokenize_chinese_chars`` are read.
        named: special tokens by role from ``tokenizer_config.json`` and ``special_tokens_map.json``.

    Raises ``ValueError`` if the file lacks the unknown, CLS or SEP token.
    """
    lines = data.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
    vocabulary = {token: number for number, token in enumerate(lines)}
    special = {**SPECIAL, **named}
    unknown, begin, end = (special[name] for name in ("unk_token", "cls_token", "sep_token"))
    if missing := [token for token in (unknown, begin, end) if token not in vocabulary]:
        raise ValueError(f"the tokens {', '.join(missing)} are missing")
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case") is not False,
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=config.get("tokenize_chinese_chars") is not False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin}:0 $A:0 {end}:0",
        pair=f"{begin}:0 $A:0 {end}:0 $B:1 {end}:1",
        special_tokens=[(token, vocabulary[token]) for token in (begin, end)],
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special.values() if token in vocabulary])
    return tokenizer, special
