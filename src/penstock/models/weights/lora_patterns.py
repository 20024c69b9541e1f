"""``rank_pattern`` and ``alpha_pattern`` of an adapter: regular expressions of module names → values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.core.errors import invalid
from penstock.quant.config_fields import pattern

MAX_EXPRESSIONS = 64
"""Maximum number of keys that are regular expressions. Each expression is tried on every module name."""
MAX_REPEATS = 3
"""Maximum number of repetitions in an expression. The matching time grows exponentially with this number."""
NAME = re.compile(r"[\w.]+")


class ValuesByPattern:
    """Lookup of values as in PEFT: by the first key that matches a module's name, or its end after a dot.

    Args:
        values: value of each key, in order.
        default: value if no key matches.
        field: field of the request, for error messages.

    Raises ``PenstockError``: ``invalid`` for invalid regular expressions, or more than ``MAX_EXPRESSIONS`` of them;
    ``unsupported`` for expressions that could take too long to match.
    """

    def __init__(self, values: Mapping[str, Any], default: Any, field: str) -> None:
        self._values = list(values.values())
        self._default = default
        self._names: dict[str, int] = {}
        self._expressions: list[tuple[int, re.Pattern[str]]] = []
        for i, key in enumerate(values):
            if NAME.fullmatch(key):
                self._names[key] = i
                continue
            pattern(key, "adapter_config.json", field, MAX_REPEATS)
            self._expressions.append((i, re.compile(rf"(.*\.)?({key})")))
        if len(self._expressions) > MAX_EXPRESSIONS:
            message = f"rank_pattern or alpha_pattern of the adapter has {len(self._expressions)} regular expressions"
            raise invalid(field, f"{message}; at most {MAX_EXPRESSIONS} are allowed", MAX_EXPRESSIONS)

    def __getitem__(self, name: str) -> Any:
        matches = [self._names[end] for end in _ends(name) if end in self._names]
        matches += [i for i, expression in self._expressions if expression.fullmatch(name)][:1]
        return self._values[min(matches)] if matches else self._default


def _ends(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.partition(".")[2]
