"""Instances: engines of a model that routers reach over TCP."""

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
"""Files that a tokenizer is read from."""


def tokenizer_version(model: str) -> str:
    """A hash of the tokenizer in a model's folder (empty: the built-in model's), by which a router knows whether token
    ids mean the same at an instance; empty where there is none."""
    folder = Path(model) if model else demo.CHAT
    files = [folder / name for name in TOKENIZERS if (folder / name).is_file()]
    return hashlib.blake2b(files[0].read_bytes(), digest_size=16).hexdigest() if files else ""


class Instance(msgspec.Struct, frozen=True):
    """An engine as the supervisor of a router has found it, which the router uses as long as it stays as it is."""

    address: str
    """Where it is reached, as host:port."""
    role: str
    """Its option ``role``."""
    fingerprint: str
    weights_version: str

    def is_of(self, engine: Ready) -> bool:
        """Whether an engine at the address is still the same in what matters for results."""
        return (self.role, self.fingerprint, self.weights_version) == (
            engine.role,
            engine.fingerprint,
            engine.weights_version,
        )
