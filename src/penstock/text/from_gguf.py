"""The tokenizer of a GGUF file as the files of a Hugging Face checkpoint.

Nothing of it is tried here: the files are then read as those of any checkpoint, which are not trusted either.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.planning.gguf_file import GGUFFile

from . import tiktoken_formats as patterns
from .from_sentencepiece import BPE, Kind
from .side_files import CONFIG, TEMPLATE
from .vocabulary import SPACE

logger = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")
ADDED = (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)
"""Kinds of tokens that are found in a text before it is split."""
END_OF_GENERATION = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|endoftext|> <|end_of_text|> <end_of_turn> <EOT>".split()
)
"""Tokens that end an answer, and are control tokens where the file takes them for text, as in llama.cpp."""
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
"""Special tokens by their role, and the word for it in GGUF, as it is spelled there."""


class PreTokenizer(NamedTuple):
    """How byte-level BPE splits a text before it merges."""

    patterns: tuple[str, ...]
    """Regular expressions, each of which splits what the ones before have left."""
    ignore_merges: bool = False
    add_bos: bool = False
    """Where the file does not say."""
    nfc: bool = False


LLAMA3 = PreTokenizer((patterns.GPT4,), ignore_merges=True, add_bos=True)
QWEN2 = PreTokenizer((patterns.QWEN2,), nfc=True)
DIGITS = PreTokenizer((r"\p{N}", patterns.GPT2))
PRE_TOKENIZERS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), LLAMA3),
    "smaug-bpe": LLAMA3._replace(ignore_merges=False, add_bos=False),
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2._replace(nfc=False),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-2": PreTokenizer((patterns.GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), DIGITS),
    "deepseek-coder": PreTokenizer(CODER),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", patterns.GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""By ``tokenizer.ggml.pre``, of the architectures that are served. Expressions are those of the models' makers."""
BY_ARCHITECTURE = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}
"""For files of before May 2024, which do not name any."""


class GGUFTokenizer:
    """The tokenizer of a GGUF file.

    Raises ``PenstockError`` (``invalid``) where its tokens are missing or broken.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._tokens = file.strings(f"{PREFIX}tokens")
        if not self._tokens:
            raise invalid("tokenizer", f"{file.path} has no tokens ({PREFIX}tokens)")
        kinds = file.numbers(f"{PREFIX}token_type") or [Kind.NORMAL] * len(self._tokens)
        if len(kinds) != len(self._tokens) or not set(kinds) <= set(Kind):
            raise self._broken("token_type")
        self._kinds = [
            Kind.CONTROL if kind == Kind.NORMAL and text in END_OF_GENERATION else Kind(kind)
            for text, kind in zip(self._tokens, kinds, strict=True)
        ]

    def files(self) -> dict[str, bytes]:
        """The files of a checkpoint by name: ``tokenizer.json`` or ``tokenizer.model``, configuration, chat template.

        Raises ``PenstockError``: ``unsupported`` for a kind of tokenizer, or a pre-tokenizer, that is not known;
        ``invalid`` where the metadata is broken.
        """
        model = self._file.require(f"{PREFIX}model", str)
        makers: dict[str, Callable[[], dict[str, bytes]]] = {"gpt2": self._bpe, "llama": self._sentencepiece}
        if model not in makers:
            raise self._unsupported(f"a tokenizer of type {model!r}; {', '.join(makers)} are read")
        files = makers[model]()
        if template := self._file.get("tokenizer.chat_template", str):
            files[TEMPLATE] = template.encode()
        return files

    def end_token_ids(self) -> list[int]:
        """The tokens that end an answer, those that the file names first."""
        named = (self._file.get(f"{PREFIX}{name}_token_id", int) for name in ("eos", "eot", "eom"))
        ids = [token_id for token_id in named if token_id is not None]
        ids += [i for i, text in enumerate(self._tokens) if text in END_OF_GENERATION and self._kinds[i] in ADDED]
        return list(dict.fromkeys(ids))

    # --- Byte-level BPE -----------------------------------------------------------------------------------------------

    def _bpe(self) -> dict[str, bytes]:
        whole = self._file.get("tokenizer.huggingface.json", str)
        pre = None if whole else self._pre_tokenizer()
        add_bos = self._file.get(f"{PREFIX}add_bos_token", bool, bool(pre and pre.add_bos))
        config = self._config(add_bos, self._file.get(f"{PREFIX}add_eos_token", bool, False))
        content = json.dumps(self._bpe_json(pre, config), ensure_ascii=False) if pre else whole
        return {"tokenizer.json": content.encode(), CONFIG: json.dumps(config, indent=2).encode()}

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._file.get(f"{PREFIX}pre", str)
        if name is None:
            name = BY_ARCHITECTURE.get(self._file.get("general.architecture", str, ""), "default")
            words = "%s does not name its pre-tokenizer (%spre), and is taken to split texts as %s"
            logger.warning(words, self._file.path, PREFIX, name)
        if name not in PRE_TOKENIZERS:
            raise self._unsupported(f"the pre-tokenizer {name!r}; known are {', '.join(PRE_TOKENIZERS)}")
        return PRE_TOKENIZERS[name]

    def _bpe_json(self, pre: PreTokenizer, config: dict[str, Any]) -> dict[str, Any]:
        """``tokenizer.json``."""
        used = {i: text for i, text in enumerate(self._tokens) if text and self._kinds[i] is not Kind.UNUSED}
        vocabulary = {text: i for i, text in used.items()}
        if len(vocabulary) < len(used):
            raise invalid("tokenizer", f"{self._file.path} has a token twice")
        merges = [merge.split(" ") for merge in self._file.strings(f"{PREFIX}merges")]
        if not merges or not all(len(merge) == 2 for merge in merges):
            raise self._broken("merges")
        isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
        splits = [isolated | {"pattern": {"Regex": pattern}} for pattern in pre.patterns]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {
            "version": "1.0",
            "added_tokens": [
                {"id": i, "content": text, "special": self._kinds[i] is not Kind.USER_DEFINED, **plain}
                for i, text in used.items()
                if self._kinds[i] in ADDED
            ],
            "normalizer": {"type": "NFC"} if pre.nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
            "post_processor": self._post_processor(config),
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": pre.ignore_merges},
        }

    def _post_processor(self, config: dict[str, Any]) -> dict[str, Any] | None:
        before, after = (config[f"{role}_token"] if config[f"add_{role}_token"] else None for role in ("bos", "eos"))
        if not before and not after:
            return None
        ids = {token: self._tokens.index(token) for token in (before, after) if token}

        def special(token: str | None) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": token, "type_id": 0}}] if token else []

        single = [*special(before), {"Sequence": {"id": "A", "type_id": 0}}, *special(after)]
        tokens = {token: {"id": token, "ids": [token_id], "tokens": [token]} for token, token_id in ids.items()}
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}

    # --- SentencePiece ------------------------------------------------------------------------------------------------

    def _sentencepiece(self) -> dict[str, bytes]:
        """A SentencePiece model as that library writes it, of which ``from_sentencepiece`` reads the fields."""
        scores = self._file.numbers(f"{PREFIX}scores")
        if len(scores) != len(self._tokens):
            raise self._broken("scores")
        if Kind.UNKNOWN not in self._kinds:
            raise invalid("tokenizer", f"{self._file.path} has no token of the kind that stands for unknown characters")
        texts = [  # user-defined ones have plain spaces there
            text.replace(" ", SPACE) if kind is Kind.USER_DEFINED else text
            for text, kind in zip(self._tokens, self._kinds, strict=True)
        ]
        pieces = b"".join(
            _field(1, _field(1, text.encode()) + _float(2, score) + _number(3, kind))
            for text, score, kind in zip(texts, scores, self._kinds, strict=True)
        )
        normalizer = _number(3, self._file.get(f"{PREFIX}add_space_prefix", bool, True))
        normalizer += _number(4, self._file.get(f"{PREFIX}remove_extra_whitespaces", bool, False))
        add_bos = self._file.get(f"{PREFIX}add_bos_token", bool, True)
        config = self._config(add_bos, self._file.get(f"{PREFIX}add_eos_token", bool, False)) | {"legacy": True}
        config["added_tokens_decoder"] = {  # which llama.cpp finds first, unlike SentencePiece
            str(i): {"content": text, "special": False}
            for i, text in enumerate(self._tokens)
            if self._kinds[i] is Kind.USER_DEFINED and not {" ", SPACE} & set(text)
        }
        model = pieces + _field(2, _number(3, BPE)) + _field(3, normalizer)
        return {"tokenizer.model": model, CONFIG: json.dumps(config, indent=2).encode()}

    # --- Both ---------------------------------------------------------------------------------------------------------

    def _config(self, add_bos: bool, add_eos: bool) -> dict[str, Any]:
        """``tokenizer_config.json``."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for role, word in ROLES.items():
            token_id = self._file.get(f"{PREFIX}{word}_token_id", int)
            if token_id is None:
                continue
            if not 0 <= token_id < len(self._tokens):
                raise self._broken(f"{word}_token_id")
            if token := self._tokens[token_id]:
                config[f"{role}_token"] = token
        for role, wanted in (("bos", add_bos), ("eos", add_eos)):
            config[f"add_{role}_token"] = wanted and f"{role}_token" in config
        return config

    def _broken(self, key: str) -> PenstockError:
        return invalid("tokenizer", f"{self._file.path}: {PREFIX}{key} does not fit its tokens")

    def _unsupported(self, what: str) -> PenstockError:
        return PenstockError(Code.UNSUPPORTED, f"{self._file.path} has {what}", "model")


# --- Protocol buffers -------------------------------------------------------------------------------------------------


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])
