"""Validation of fields of a checkpoint's ``quantization_config``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

MAX_GROUP = 2**20
"""Maximum number of inputs or outputs in a group; no known matrix has more."""
MAX_REPEATS = 5
"""Maximum number of repetitions in a regular expression of a checkpoint. Matching could take exponential time with more
repetitions, or with a repeated group."""


def unsupported(variant: str) -> PenstockError:
    """The error for an unsupported kind of quantized checkpoint."""
    return PenstockError(Code.UNSUPPORTED, f"unsupported quantization of the checkpoint: {variant}", "model")


def integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return an integer field. Raises ``PenstockError`` (``invalid``) for any other type."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int:
        message = f"{name} in the quantization_config of config.json is {value!r:.60}; it must be an integer"
        raise invalid("model", message)
    return value


def count(value: Any, name: str) -> int:
    """Check a number of inputs or outputs, and return it. Raises ``PenstockError`` (``invalid``) unless it is an
    integer from 1 to ``MAX_GROUP``."""
    if type(value) is not int or not 1 <= value <= MAX_GROUP:
        raise invalid("model", f"{name} in config.json is {value!r:.40}; it must be an integer from 1 to {MAX_GROUP}")
    return value


def group_size(config: Mapping[str, Any], default: int | None = None, name: str = "group_size") -> int:
    """Return the number of inputs that share a scale; 0: all inputs of a row (-1 in the checkpoint).

    Raises ``PenstockError``: ``invalid`` for a size out of range, ``unsupported`` for a size without kernels.
    """
    size = integer(config, name, default)
    if size == -1:
        return 0
    if not 1 <= size <= MAX_GROUP:
        message = f"{name} in the quantization_config of config.json is {size}; it must be -1, or from 1 to {MAX_GROUP}"
        raise invalid("model", message)
    if size % 8:
        raise unsupported(f"groups of {size} inputs; the group size must be a multiple of 8")
    return size


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Check that a value is a JSON object, and return it. Raises ``PenstockError`` (``invalid``) if not."""
    if not isinstance(value, Mapping):
        raise invalid("model", f"{name} in config.json is {value!r:.60}; it must be an object")
    return value


def pattern(
    text: str, where: str = "config.json", field: str = "model", max_repeats: int = MAX_REPEATS
) -> re.Pattern[str]:
    """Compile a regular expression for module names from a checkpoint or adapter.

    Args:
        where: file that contains the expression, for error messages.
        field: option or request field that names the file, for error messages.

    Raises ``PenstockError``: ``invalid`` for a malformed expression, ``unsupported`` if matching could take too long.
    """
    plain = re.sub(r"\\.|\[[^]]*\]", "x", text)
    if len(re.findall(r"[*+{]", plain)) > max_repeats or re.search(r"\)[*+{]", plain):
        message = f"{where} has a regular expression with nested repetitions, or more than {max_repeats}: {text!r:.80}"
        raise PenstockError(Code.UNSUPPORTED, message, field)
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise invalid(field, f"{where} has an invalid regular expression: {text!r:.80} ({error})") from error
