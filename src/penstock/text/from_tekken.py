"""Conversion of Mistral's ``tekken.json`` to the ``tokenizers`` library."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer

from .from_tiktoken import from_ranks
from .tiktoken_formats import TiktokenFormat

SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files without the list ``special_tokens`` (versions up to 7)."""
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def convert(data: bytes, named: Mapping[str, str]) -> tuple[Tokenizer, dict[str, str]]:
    """Return the tokenizer and its special tokens by role.

    Args:
        named: special tokens by role from ``tokenizer_config.json`` and ``special_tokens_map.json``.
    """
    content = json.loads(data)
    config = content["config"]
    size, count = int(config["default_vocab_size"]), int(config["default_num_special_tokens"])
    listed = content.get("special_tokens")
    special = dict(enumerate(SPECIAL)) if listed is None else {int(t["rank"]): t["token_str"] for t in listed}
    tokens = [base64.b64decode(token["token_bytes"]) for token in content["vocab"][: size - count]]
    names = [special.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]
    tokenizer = from_ranks({token: i for i, token in enumerate(tokens)}, TiktokenFormat(config["pattern"]), names)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return tokenizer, {**{role: token for role, token in ROLES.items() if token in names}, **named}
