"""Fields of a checkpoint's ``quantization_config``, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

MAX_GROUP = 2**20
"""More inputs, or outputs, than any matrix has."""
MAX_REPEATS = 5
"""Repetitions in a regular expression of a checkpoint. With more, or with one of a group, matching could take
exponential time."""


def unsupported(what: str) -> PenstockError:
    """The error for a quantized checkpoint that is not read."""
    return PenstockError(Code.UNSUPPORTED, f"checkpoints quantized as {what} are not read", "model")


def integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number. Raises ``PenstockError`` (``invalid``) for anything else."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int:
        raise invalid("model", f"{name} in the quantization_config of config.json is {value!r}, and not a whole number")
    return value


def count(value: Any, what: str) -> int:
    """A number of inputs or outputs. Raises ``PenstockError`` (``invalid``) for anything else."""
    if type(value) is not int or not 1 <= value <= MAX_GROUP:
        raise invalid("model", f"{what} in config.json is {value!r:.40}, and not a number from 1 to {MAX_GROUP}")
    return value


def group_size(config: Mapping[str, Any], default: int | None = None, name: str = "group_size") -> int:
    """Inputs that share a scale; 0 for all, which checkpoints write as -1.

    Raises ``PenstockError``: ``invalid`` where there is no such size, ``unsupported`` for one that no kernel has.
    """
    size = integer(config, name, default)
    if size == -1:
        return 0
    if not 1 <= size <= MAX_GROUP:
        words = f"{name} in the quantization_config of config.json is {size}, and from 1 to {MAX_GROUP}, or -1"
        raise invalid("model", words)
    if size % 8:
        raise unsupported(f"groups of {size} inputs, which is no multiple of 8,")
    return size


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """An object. Raises ``PenstockError`` (``invalid``) for anything else."""
    if not isinstance(value, Mapping):
        raise invalid("model", f"{name} in config.json is {value!r:.60}, and not an object")
    return value


def pattern(
    text: str, where: str = "config.json", field: str = "model", max_repeats: int = MAX_REPEATS
) -> re.Pattern[str]:
    """A regular expression of a checkpoint or adapter, for names of modules.

    Args:
        where, field: the file and the option or field of a request that names it, for errors.

    Raises ``PenstockError``: ``invalid`` where it is none, ``unsupported`` where it could take too long.
    """
    plain = re.sub(r"\\.|\[[^]]*\]", "x", text)
    if len(re.findall(r"[*+{]", plain)) > max_repeats or re.search(r"\)[*+{]", plain):
        raise PenstockError(Code.UNSUPPORTED, f"{where} has a pattern of too many repetitions: {text!r:.80}", field)
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise invalid(field, f"{where} has a pattern that is none: {text!r:.80} ({error})") from error
