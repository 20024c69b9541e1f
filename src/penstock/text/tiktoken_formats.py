"""Pre-tokenizer patterns and special tokens of models with a tiktoken file. The file itself contains only ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.core import Code, PenstockError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
"""The pattern of GPT-4, but each digit is separate."""
QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of Qwen2, but combining marks are part of words."""
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of GPT-4, but words are also split before capitals and include contractions ("don't" is one word)."""
_NO_HAN = r"&&[^\p{Han}]"
KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]*[{_LOWER}{_NO_HAN}]+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NO_HAN}]+[{_LOWER}{_NO_HAN}]*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of GPT-4o, but Chinese characters are split from other letters."""


class TiktokenFormat(NamedTuple):
    """Settings of a tiktoken tokenizer that its file does not contain."""

    pattern: str
    """Regular expression of the pre-tokenizer: each match is encoded separately."""
    nfc: bool = False
    """Normalize texts to NFC before encoding."""
    special: tuple[str, ...] = ()
    """Special tokens with the ids after the last rank, used if ``tokenizer_config.json`` lists no added tokens."""
    placeholder: str = "<|unused_{}|>"
    """Token for an unused id; ``{}`` is replaced by the id."""
    prefix: tuple[str, ...] = ()
    """Tokens before each text, used if ``tokenizer_config.json`` has no ``add_bos_token``."""


_KIMI = TiktokenFormat(KIMI, placeholder="<|reserved_token_{}|>")
_LLAMA3 = TiktokenFormat(
    GPT4,
    special=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        *(f"<|reserved_special_token_{i}|>" for i in range(2, 247)),
    ),
    prefix=("<|begin_of_text|>",),
)
_GLM4 = TiktokenFormat(GPT4, prefix=("[gMASK]", "<sop>"))
_EXTRAS = tuple(f"<|extra_{i}|>" for i in range(205))
_QWEN = TiktokenFormat(QWEN2, nfc=True, special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_EXTRAS))
_QWEN3_5 = TiktokenFormat(QWEN3_5, nfc=True)
_HUNYUAN = TiktokenFormat(
    QWEN2,
    nfc=True,
    special=("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *_EXTRAS[:204]),
    prefix=("<|startoftext|>",),
)
_GPT4, _GPT4O, _GPT2 = TiktokenFormat(GPT4), TiktokenFormat(GPT4O), TiktokenFormat(GPT2)

QWEN2_TYPES = tuple(
    "qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen2_5_omni qwen2_audio qwen3 qwen3_moe qwen3_vl qwen3_vl_moe qwen3_next "
    "qwen3_omni_moe qwen3_asr".split()
)
"""``model_type`` of models with Qwen2's tokenizer."""
QWEN3_5_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""``model_type`` of models with Qwen3.5's tokenizer."""
BY_CLASS = {
    "TikTokenTokenizer": _KIMI,
    "QWenTokenizer": _QWEN,
    "Qwen2Tokenizer": _QWEN,
    "Qwen2TokenizerFast": _QWEN,
    "Qwen3_5Tokenizer": _QWEN3_5,
    "HYTokenizer": _HUNYUAN,
    "ChatGLM4Tokenizer": _GLM4,
    "Phi3SmallTokenizer": _GPT4,
    "GPT2Tokenizer": _GPT2,
    "GPT2TokenizerFast": _GPT2,
}
"""Format by tokenizer class (``auto_map`` or ``tokenizer_class`` in ``tokenizer_config.json``)."""
BY_MODEL_TYPE = {
    **dict.fromkeys(("kimi_k2", "kimi_k25", "kimi_linear", "kimi_vl"), _KIMI),
    **dict.fromkeys(("llama", "mllama"), _LLAMA3),
    **dict.fromkeys(("qwen", *QWEN2_TYPES), _QWEN),
    **dict.fromkeys(QWEN3_5_TYPES, _QWEN3_5),
    **dict.fromkeys(("hunyuan", "hunyuan_v1_moe"), _HUNYUAN),
    **dict.fromkeys(("chatglm", "glm", "glm4", "glm4_moe"), _GLM4),
    **dict.fromkeys(("gpt_oss", "llama4", "llama4_text"), _GPT4O),
    "phi3small": _GPT4,
    "gpt2": _GPT2,
}
"""Format by ``model_type`` in ``config.json``, used if the class is not in ``BY_CLASS``."""
BY_FILE = {
    "qwen.tiktoken": _QWEN,
    "hy.tiktoken": _HUNYUAN,
    "cl100k_base.tiktoken": _GPT4,
    "o200k_base.tiktoken": _GPT4O,
    **dict.fromkeys(("gpt2.tiktoken", "r50k_base.tiktoken", "p50k_base.tiktoken"), _GPT2),
}
"""Format by file name."""


def tiktoken_format(config: Mapping[str, Any], model_type: str, file_name: str) -> TiktokenFormat:
    """Find the format of a model's tiktoken file: by tokenizer class, then model type, then file name.

    Args:
        config: ``tokenizer_config.json``.
        model_type: ``model_type`` in ``config.json``; empty if absent.

    Raises ``PenstockError`` (``unsupported``) for an unknown model: a wrong pattern would give tokens that the model
    was not trained with.
    """
    classes = [_mapped_class(config), str(config.get("tokenizer_class") or "")]
    named = ((BY_CLASS, name) for name in classes)
    for formats, name in (*named, (BY_MODEL_TYPE, model_type), (BY_FILE, file_name)):
        if name in formats:
            return formats[name]
    found = ", ".join(
        [*(name[:60] for name in classes if name), *([f"model_type {model_type[:60]}"] if model_type else [])]
    )
    raise PenstockError(
        Code.UNSUPPORTED,
        f"tokenizer: {file_name} does not contain the pattern that splits texts, and the model is unknown "
        f"({found or 'no tokenizer_class, no model_type'}): add its tokenizer.json",
        "tokenizer",
    )


def _mapped_class(config: Mapping[str, Any]) -> str:
    """Class name in ``auto_map`` (``module.Class``, a list of slow and fast class, or a dictionary of these)."""
    mapped = config.get("auto_map")
    if isinstance(mapped, Mapping):
        mapped = mapped.get("AutoTokenizer")
    if isinstance(mapped, list):
        mapped = next((name for name in mapped if name), None)
    return mapped.rpartition(".")[2] if isinstance(mapped, str) else ""
