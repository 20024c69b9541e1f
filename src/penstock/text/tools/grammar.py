"""Calls that must be made: a grammar for guided decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.core.guided import STRICT

from .forms import Form

OPTIONS = STRICT | {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_of(
    form: Form, tools: Mapping[str, Mapping[str, Any]], id_of: Callable[[str], int | None], several: bool
) -> str:
    """A grammar of nothing but calls, as the model writes them by itself.

    Args:
        tools: names with the schemas of their arguments.
        id_of: the token of a text that is one.
        several: whether more than one call may come.
    """

    def written(text: str) -> str:
        """In Lark's notation; what is a token of its own comes as that token alone."""
        parts = re.split(f"({'|'.join(map(re.escape, form.tokens))})", text)
        ids = [id_of(part) if part in form.tokens else None for part in parts]
        return " ".join(
            json.dumps(part) if token is None else f"<[{token}]>"
            for part, token in zip(parts, ids, strict=True)
            if part
        )

    more = f"({written(form.between)} call)*" if several else ""
    rules = [
        f"start: {written(form.before)} call {more} {written(form.after)}",
        f"call: {' | '.join(f'tool_{i}' for i in range(len(tools)))}",
    ]
    # Each has a schema of its own, to which its references point.
    before, after = form.begin
    for i, (name, arguments) in enumerate(tools.items()):
        told = json.dumps(name, ensure_ascii=False) if '"name"' in before else name
        rules.append(f"tool_{i}: {written(before + told + after)} arguments_{i} {written(form.end)}")
        rules.append(f"arguments_{i}: %json {json.dumps({**arguments, 'x-guidance': OPTIONS})}")
    return "\n".join(rules) + "\n"
