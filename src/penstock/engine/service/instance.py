"""Instances: engines that routers reach over TCP."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from penstock import demo

from .messages import Ready

TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tiktoken.model", "qwen.tiktoken", "hy.tiktoken", "tekken.json"),
    *("vocab.json", "vocab.txt"),
)
"""Names of tokenizer files, in order of precedence."""


def tokenizer_version(model: str) -> str:
    """Hash of the tokenizer file in a model's folder; empty without such a file. Routers compare hashes to check that
    token ids have the same meaning at an instance.

    Args:
        model: folder of the model; empty: the built-in model.
    """
    folder = Path(model) if model else demo.CHAT
    files = [folder / name for name in TOKENIZERS if (folder / name).is_file()]
    return hashlib.blake2b(files[0].read_bytes(), digest_size=16).hexdigest() if files else ""


class Instance(msgspec.Struct, frozen=True):
    """An engine found by a router's supervisor. The router uses the engine as long as ``matches`` is true for it."""

    address: str
    """Address of the engine, host:port."""
    role: str
    """Role of the engine: ``mixed``, ``prefill`` or ``decode``."""
    fingerprint: str
    weights_version: str

    def matches(self, engine: Ready) -> bool:
        """True if the engine at the address still has this role, fingerprint and weights."""
        found = engine.role, engine.fingerprint, engine.weights_version
        return (self.role, self.fingerprint, self.weights_version) == found
