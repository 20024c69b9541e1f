"""Conversion of ``vocab.json`` and ``merges.txt`` to the ``tokenizers`` library.

The two files do not contain the pre-tokenizer; it is chosen by tokenizer class or model type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.core import Code, PenstockError

from .side_files import SideFiles
from .tiktoken_formats import QWEN2, QWEN2_TYPES, QWEN3_5, QWEN3_5_TYPES

GPT2, GPT_NEOX, QWEN, NEW_QWEN, ROBERTA = "GPT-2", "GPT-NeoX", "Qwen2", "Qwen3.5", "RoBERTa"
PATTERNS = {QWEN: QWEN2, NEW_QWEN: QWEN3_5}
"""Pre-tokenizer regular expressions of families; the other families use GPT-2's."""
BY_CLASS = {
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer", "WhisperTokenizer"), GPT2),
    "GPTNeoXTokenizer": GPT_NEOX,
    "Qwen2Tokenizer": QWEN,
    "Qwen3_5Tokenizer": NEW_QWEN,
    **dict.fromkeys(("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer"), ROBERTA),
}
"""Family by ``tokenizer_class`` in ``tokenizer_config.json``, without the suffix ``Fast``."""
BY_MODEL_TYPE = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "gpt_neo", "opt", "codegen", "phi", "starcoder2", "whisper"), GPT2),
    **dict.fromkeys(("gpt_neox", "olmo", "olmoe"), GPT_NEOX),
    **dict.fromkeys(QWEN2_TYPES, QWEN),
    **dict.fromkeys(QWEN3_5_TYPES, NEW_QWEN),
    **dict.fromkeys(("roberta", "bart", "longformer", "led"), ROBERTA),
}
"""Family by ``model_type`` in ``config.json``, used if the tokenizer class is absent or unknown."""
DEFAULTS: Mapping[str, Mapping[str, str]] = {
    GPT2: dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    GPT_NEOX: {
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
        "pad_token": "<|padding|>",
    },
    **dict.fromkeys((QWEN, NEW_QWEN), dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")),
    ROBERTA: {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "cls_token": "<s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
"""Default special tokens of each family."""


def convert(vocabulary: bytes, merges: bytes, side_files: SideFiles) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer and its special tokens by role.

    Raises ``PenstockError`` (``unsupported``) for an unknown tokenizer class.
    """
    family, config = _family(side_files), side_files.config
    special = {**DEFAULTS[family], **side_files.special}
    pairs = [line.split(" ") for line in merges.decode().splitlines() if line and not line.startswith("#version")]
    tokenizer = Tokenizer(models.BPE(json.loads(vocabulary), [(left, right) for left, right in pairs]))
    prefix = bool(config.get("add_prefix_space"))
    if family in (GPT_NEOX, QWEN, NEW_QWEN):
        tokenizer.normalizer = normalizers.NFC()
    if family in PATTERNS:
        split: list[Any] = [pre_tokenizers.Split(Regex(PATTERNS[family]), "isolated")]
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_only])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    if family == ROBERTA:
        ids = tokenizer.get_vocab()
        end, begin = ((special[role], ids[special[role]]) for role in ("sep_token", "cls_token"))
        tokenizer.post_processor = processors.RobertaProcessing(end, begin, add_prefix_space=prefix)
    return tokenizer, special


def _family(side_files: SideFiles) -> str:
    name = str(side_files.config.get("tokenizer_class") or "").removesuffix("Fast")
    if name in BY_CLASS:
        return BY_CLASS[name]
    if side_files.model_type in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[side_files.model_type]
    raise PenstockError(
        Code.UNSUPPORTED,
        f"tokenizer: vocab.json and merges.txt do not contain the pre-tokenizer, and the tokenizer is unknown "
        f"(tokenizer_class {name[:60] or 'absent'}, model_type {side_files.model_type[:60] or 'absent'}): "
        "add its tokenizer.json",
        "tokenizer",
    )
