"""``rank_pattern`` and ``alpha_pattern`` of an adapter: values by regular expressions for names of modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.core.errors import invalid
from penstock.quant.config_fields import pattern

MAX_EXPRESSIONS = 64
"""Keys that are more than a name. Each is tried on the name of every module."""
MAX_REPEATS = 3
"""Repetitions in one, whose time is a power of them."""
NAME = re.compile(r"[\w.]+")


class ValuesByPattern:
    """Looks values up as PEFT does: by the first key that matches a module's name, or its end behind a dot.

    Args:
        values: by key, in order.
        default: where no key matches.
        field: the request's field, for errors.

    Raises ``PenstockError``: ``invalid`` for keys that are no regular expressions, or more than there may be,
    ``unsupported`` for one that could take too long.
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
            words = f"an adapter's rank_pattern or alpha_pattern has {len(self._expressions)} regular expressions"
            raise invalid(field, f"{words}, and {MAX_EXPRESSIONS} are allowed", MAX_EXPRESSIONS)

    def __getitem__(self, name: str) -> Any:
        matches = [self._names[end] for end in _ends(name) if end in self._names]
        matches += [i for i, expression in self._expressions if expression.fullmatch(name)][:1]
        return self._values[min(matches)] if matches else self._default


def _ends(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.partition(".")[2]
