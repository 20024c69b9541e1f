"""A checkpoint's ``generation_config.json``: default sampling parameters and EOS tokens."""

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
    """From ``generation_config.json``.

    A text ends with the tokens named there, or else in ``config.json``, and always with the tokenizer's own end: those
    who fine-tune for chat may leave the base model's in the other files.
    """

    eos_token_ids: tuple[int, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of ``SamplingParams``."""


def read_generation_config(folder: Path, tokenizer: Tokenizer, other: Path | None = None) -> GenerationConfig:
    """Read the generation config of the model in a folder.

    Args:
        other: folder of the ``generation_config.json`` to read in place of the model's.

    Raises ``PenstockError`` (``invalid``) where a file is not JSON, has a value out of bounds, or ``other`` has none.
    """
    path = (other or folder) / "generation_config.json"
    if other and not path.exists():
        raise invalid("generation_config", f"{path} is not there; give its folder, auto or vllm")
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
        raise invalid("model", f"{path} does not hold an object")
    if sentence := next(out_of_bounds(result, GENERATION_BOUNDS), ""):
        raise invalid("model", f"{path}: {sentence}")
    return result
