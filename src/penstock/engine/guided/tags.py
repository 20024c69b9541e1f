"""Free text with tagged parts, as requests write it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from penstock.core import GuidedDecodingParams


class Tag(NamedTuple):
    trigger: str
    """With which ``begin`` starts; where it is written, a tag has begun."""
    begin: str
    schema: dict[str, Any]
    end: str


def read_tags(params: GuidedDecodingParams) -> list[Tag]:
    """The tagged parts of a structural tag, at least one. Raises ``ValueError`` where it is none."""
    found = json.loads(params.structural_tag)
    triggers, tags = found.get("triggers"), []
    for structure in found.get("structures") or ():
        begin, schema, end = structure.get("begin"), structure.get("schema", {}), structure.get("end", "")
        trigger = next((t for t in triggers or () if str(begin).startswith(t)), None)
        if not isinstance(begin, str) or not isinstance(end, str) or not trigger:
            raise ValueError(f"begin must be text that starts with a trigger, is {begin!r}")
        if not isinstance(schema, dict):
            raise ValueError(f"schema must be an object, is {schema!r}")
        tags.append(Tag(trigger, begin, schema, end))
    if not tags:
        raise ValueError("structures must name at least one")
    return tags
