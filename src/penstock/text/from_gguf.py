"""Conversion of a GGUF file's tokenizer to the tokenizer files of a Hugging Face checkpoint.

This module only writes the files. They are then read and checked like the files of any untrusted checkpoint.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.checkpoint.gguf_file import GGUFFile
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from . import tiktoken_formats as patterns
from .from_sentencepiece import Kind, Piece, Settings, tokenizer_json
from .side_files import CONFIG, TEMPLATE, TEMPLATES
from .tokenizer_files import FULL, WORDPIECE
from .vocabulary import SPACE

logger = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥\u0800-一가-\ud7ff]+",
    r"\p{N}+",
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SEED_CODER = patterns.QWEN2.replace(r"]+[\r\n]*", r"\r\n]+")
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", patterns.GPT4O)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")
ADDED = (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)
"""Kinds of tokens that are matched in a text before it is split (``added_tokens``)."""
END_OF_GENERATION = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|endoftext|> <|end_of_text|> <end_of_turn> <EOT> _<EOT> [EOT] [EOS] "
    "<|return|> <|call|> <end_of_utterance> <｜end▁of▁sentence｜> [e~[".split()
)
"""Tokens that end an answer. As in llama.cpp, they are control tokens even if the file marks them as normal."""
HARMONY_ENDS, HARMONY_MESSAGE_END = frozenset(("<|return|>", "<|call|>")), "<|end|>"
"""End tokens of OpenAI's Harmony format: tokens that end an answer, and the token that ends a message within it."""
TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
"""Role of a special token in Hugging Face's files → name in GGUF (the spelling ``seperator`` is GGUF's)."""


class PreTokenizer(NamedTuple):
    """How a text is split before byte-level BPE."""

    patterns: tuple[str, ...]
    """Regular expressions; each splits the parts left by the previous one."""
    ignore_merges: bool = False
    add_bos: bool = False
    """Used if the file has no ``add_bos_token``."""
    nfc: bool = False


LLAMA3 = PreTokenizer((patterns.GPT4,), ignore_merges=True, add_bos=True)
GPT4 = PreTokenizer((patterns.GPT4,))
QWEN2 = PreTokenizer((patterns.QWEN2,), nfc=True)
DIGITS = PreTokenizer((r"\p{N}", patterns.GPT2))
PRE_TOKENIZERS = {
    **dict.fromkeys("llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2".split(), LLAMA3),
    **dict.fromkeys("smaug-bpe dbrx chatglm-bpe".split(), GPT4),
    **dict.fromkeys(("glm4", "glm5"), GPT4._replace(ignore_merges=True)),
    **dict.fromkeys(("qwen2", "megrez", "hunyuan"), QWEN2),
    **dict.fromkeys("deepseek-r1-qwen kormo f2llmv2 stablelm2 solar-open".split(), QWEN2._replace(nfc=False)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(
        "gpt-2 roberta-bpe phi-2 olmo mpt jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum".split(),
        PreTokenizer((patterns.GPT2,)),
    ),
    "modern-bert": PreTokenizer((patterns.GPT2,), nfc=True),
    **dict.fromkeys("smollm starcoder refact command-r codeshell exaone minerva-7b".split(), DIGITS),
    **dict.fromkeys("gpt-4o llama4 kanana2 minimax-m2".split(), PreTokenizer((patterns.GPT4O,))),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer(TINY_AYA)),
    "deepseek-llm": PreTokenizer(DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(CODER),
    **dict.fromkeys("deepseek-v3 hunyuan-dense joyai-llm".split(), PreTokenizer(DEEPSEEK_V3)),
    "kimi-k2": PreTokenizer((patterns.KIMI,)),
    "seed-coder": PreTokenizer((SEED_CODER,)),
    **dict.fromkeys("poro-chat bloom gpt3-finnish".split(), PreTokenizer((BLOOM,))),
    "viking": PreTokenizer((BLOOM, r"\p{N}")),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", patterns.GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""Pre-tokenizer by ``tokenizer.ggml.pre``, with the regular expressions of each model's original tokenizer."""
BY_ARCHITECTURE = {
    "llama": "llama-bpe",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2",
    "qwen3": "qwen2",
    "command-r": "command-r",
}
"""Pre-tokenizer name by architecture. Files from before May 2024 lack ``tokenizer.ggml.pre``."""


class GGUFTokenizer:
    """The tokenizer of a GGUF file.

    Raises ``PenstockError`` (``invalid``) if tokens are missing or inconsistent.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._tokens = file.strings(f"{PREFIX}tokens")
        if not self._tokens:
            raise invalid("tokenizer", f"{file.path} has no tokens ({PREFIX}tokens): convert the model again")
        kinds = file.numbers(f"{PREFIX}token_type") or [Kind.NORMAL] * len(self._tokens)
        if len(kinds) != len(self._tokens) or not set(kinds) <= set(Kind):
            raise self._mismatch("token_type")
        self._kinds = [
            Kind.CONTROL if kind == Kind.NORMAL and text in END_OF_GENERATION else Kind(kind)
            for text, kind in zip(self._tokens, kinds, strict=True)
        ]

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer files by name: the vocabulary, ``tokenizer_config.json`` and the chat templates.

        Raises ``PenstockError``: ``unsupported`` for an unknown type of tokenizer or pre-tokenizer; ``invalid`` for
        inconsistent metadata.
        """
        model = self._file.require(f"{PREFIX}model", str)
        converters: dict[str, Callable[[], dict[str, bytes]]] = {
            "gpt2": self._bpe,
            "llama": lambda: self._sentencepiece(is_bpe=True),
            "t5": lambda: self._sentencepiece(is_bpe=False),
            "bert": self._wordpiece,
        }
        if model not in converters:
            raise self._unsupported(f"a tokenizer of type {model!r}; supported: {', '.join(converters)}")
        files = converters[model]()
        if template := self._file.get("tokenizer.chat_template", str):
            files[TEMPLATE] = template.encode()
        for name in self._file.strings("tokenizer.chat_templates"):
            if TEMPLATE_NAME.fullmatch(name) and (template := self._file.get(f"tokenizer.chat_template.{name}", str)):
                files[f"{TEMPLATES}/{name}.jinja"] = template.encode()
        return files

    def end_token_ids(self) -> list[int]:
        """Ids of the tokens that end an answer: first those named by the file, then other known end tokens."""
        named = (self._file.get(f"{PREFIX}{name}_token_id", int) for name in ("eos", "eot", "eom"))
        ids = [token_id for token_id in named if token_id is not None]
        ends = END_OF_GENERATION - ({HARMONY_MESSAGE_END} if set(self._tokens) >= HARMONY_ENDS else set())
        ids += [i for i, text in enumerate(self._tokens) if text in ends and self._kinds[i] in ADDED]
        return list(dict.fromkeys(ids))

    # --- Byte-level BPE -----------------------------------------------------------------------------------------------

    def _bpe(self) -> dict[str, bytes]:
        embedded = self._file.get("tokenizer.huggingface.json", str)
        pre = None if embedded else self._pre_tokenizer()
        add_bos = self._file.get(f"{PREFIX}add_bos_token", bool, bool(pre and pre.add_bos))
        config = self._config(add_bos, self._file.get(f"{PREFIX}add_eos_token", bool, False))
        content = _json(self._bpe_json(pre, config)) if pre else embedded.encode()
        return {FULL: content, CONFIG: json.dumps(config, indent=2).encode()}

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._file.get(f"{PREFIX}pre", str)
        if name is None:
            name = BY_ARCHITECTURE.get(self._file.get("general.architecture", str, ""), "default")
            message = "%s does not name its pre-tokenizer (%spre); using %s. Convert it again if texts look wrong"
            logger.warning(message, self._file.path, PREFIX, name)
        if name not in PRE_TOKENIZERS:
            raise self._unsupported(f"pre-tokenizer {name!r}; supported: {', '.join(PRE_TOKENIZERS)}")
        return PRE_TOKENIZERS[name]

    def _bpe_json(self, pre: PreTokenizer, config: dict[str, Any]) -> dict[str, Any]:
        """Content of ``tokenizer.json``."""
        used = {i: text for i, text in enumerate(self._tokens) if text and self._kinds[i] is not Kind.UNUSED}
        vocabulary = {text: i for i, text in used.items()}
        if len(vocabulary) < len(used):
            text = next(text for i, text in used.items() if vocabulary[text] != i)
            raise invalid("tokenizer", f"{self._file.path} has token {text!r:.60} twice: convert the model again")
        merges = [merge.split(" ") for merge in self._file.strings(f"{PREFIX}merges")]
        if not merges or not all(len(merge) == 2 for merge in merges):
            raise self._mismatch("merges")
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

    def _sentencepiece(self, is_bpe: bool) -> dict[str, bytes]:
        """``tokenizer.json`` and ``tokenizer_config.json`` of a SentencePiece model."""
        scores = self._file.numbers(f"{PREFIX}scores")
        if len(scores) != len(self._tokens):
            raise self._mismatch("scores")
        unknown = self._file.get(f"{PREFIX}unknown_token_id", int, -1)
        if Kind.UNKNOWN not in self._kinds and 0 <= unknown < len(self._tokens):
            self._kinds[unknown] = Kind.UNKNOWN  # Gemma's files mark it as a control token
        if Kind.UNKNOWN not in self._kinds:
            message = f"{self._file.path} has no unknown token (token_type {Kind.UNKNOWN}), required by SentencePiece"
            raise invalid("tokenizer", message)
        pieces = [  # user-defined tokens in GGUF have plain spaces
            Piece(text.replace(" ", SPACE) if kind is Kind.USER_DEFINED else text, score, kind)
            for text, score, kind in zip(self._tokens, scores, self._kinds, strict=True)
        ]
        settings = Settings(
            is_bpe=is_bpe,
            charsmap=bytes(number & 0xFF for number in self._file.numbers(f"{PREFIX}precompiled_charsmap")),
            add_space_prefix=self._file.get(f"{PREFIX}add_space_prefix", bool, True),
            remove_extra_spaces=self._file.get(f"{PREFIX}remove_extra_whitespaces", bool, False),
            user_defined_first=True,
        )
        add_bos = self._file.get(f"{PREFIX}add_bos_token", bool, is_bpe)
        config = self._config(add_bos, self._file.get(f"{PREFIX}add_eos_token", bool, not is_bpe))
        content = tokenizer_json(pieces, settings) | {"post_processor": self._post_processor(config)}
        config = {"bos_token": "<s>", "eos_token": "</s>"} | config
        return {FULL: _json(content), CONFIG: json.dumps(config, indent=2).encode()}

    # --- WordPiece ----------------------------------------------------------------------------------------------------

    def _wordpiece(self) -> dict[str, bytes]:
        """``vocab.txt`` and ``tokenizer_config.json``. GGUF marks the first token of a word with U+2581, WordPiece
        marks all following tokens of a word with ``##``."""
        if any({"\r", "\n"} & set(text) for text in self._tokens):
            raise self._mismatch("tokens")
        lines = [
            text if kind is Kind.CONTROL else text[1:] if text.startswith(SPACE) else f"##{text}"
            for text, kind in zip(self._tokens, self._kinds, strict=True)
        ]
        lower_case = self._file.get(f"{PREFIX}normalizer.lowercase", bool, True)
        config = self._config(add_bos=False, add_eos=False) | {
            "do_lower_case": lower_case,
            "strip_accents": self._file.get(f"{PREFIX}normalizer.strip_accents", bool, lower_case),
        }
        if "bos_token" in config:
            config["cls_token"] = config["bos_token"]
        return {WORDPIECE: "\n".join(lines).encode(), CONFIG: json.dumps(config, indent=2).encode()}

    # --- Shared ------------------------------------------------------------------------------------------------------

    def _config(self, add_bos: bool, add_eos: bool) -> dict[str, Any]:
        """Content of ``tokenizer_config.json``."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for role, name in ROLES.items():
            token_id = self._file.get(f"{PREFIX}{name}_token_id", int)
            if token_id is None:
                continue
            if not 0 <= token_id < len(self._tokens):
                raise self._mismatch(f"{name}_token_id")
            if token := self._tokens[token_id]:
                config[f"{role}_token"] = token
        for role, wanted in (("bos", add_bos), ("eos", add_eos)):
            config[f"add_{role}_token"] = wanted and f"{role}_token" in config
        return config

    def _mismatch(self, key: str) -> PenstockError:
        message = f"{PREFIX}{key} does not match the {len(self._tokens)} entries of {PREFIX}tokens"
        return invalid("tokenizer", f"{self._file.path}: {message}; convert the model again")

    def _unsupported(self, feature: str) -> PenstockError:
        return PenstockError(Code.UNSUPPORTED, f"{self._file.path} has {feature}", "model")


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
