"""Default sampling parameters and EOS tokens of a checkpoint (``generation_config.json``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.checkpoint.config_bounds import GENERATION_BOUNDS, out_of_bounds
from penstock.core.errors import invalid
from penstock.core.json_files import read_json_file
from penstock.text import Tokenizer

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class GenerationConfig:
    """EOS tokens and default sampling parameters."""

    eos_token_ids: tuple[int, ...]
    """``eos_token_id`` of ``generation_config.json`` (if absent, of ``config.json``), and the tokenizer's EOS token:
    these files of a chat fine-tune may still have the base model's EOS token."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Default values of ``SamplingParams``."""


def read_generation_config(folder: Path, tokenizer: Tokenizer, other: Path | None = None) -> GenerationConfig:
    """Read the generation config of a checkpoint.

    Args:
        other: folder with a ``generation_config.json`` to use instead of the checkpoint's.

    Raises ``PenstockError`` (``invalid``) if a file is not JSON or has a value out of bounds, or ``other`` has no
    ``generation_config.json``.
    """
    path = (other or folder) / "generation_config.json"
    if other and not path.exists():
        raise invalid("generation_config", f"{path} does not exist: give the folder of the file, auto, or vllm")
    generation, config = _read(path), _read(folder / "config.json")
    ends = next((f["eos_token_id"] for f in (generation, config) if f.get("eos_token_id") is not None), None)
    configured = ends if isinstance(ends, list) else [ends]
    tokenizer_eos = tokenizer.token_to_id(tokenizer.special.get("eos_token", ""))
    ids = tuple(dict.fromkeys(token_id for token_id in (*configured, tokenizer_eos) if token_id is not None))
    sampling = {name: generation[name] for name in SAMPLING if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        sampling = {"temperature": 0.0}
    return GenerationConfig(ids, sampling)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    result = read_json_file(path)
    if not isinstance(result, dict):
        raise invalid("model", f"{path} is not a JSON object: download it again")
    if problem := next(out_of_bounds(result, GENERATION_BOUNDS), ""):
        raise invalid("model", f"{path}: {problem}")
    return result
