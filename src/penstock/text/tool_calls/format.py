"""What all formats of tool calls have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from .parser import ToolCallParser

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool → JSON schema of its arguments."""


@dataclass(frozen=True, kw_only=True)
class ToolCallFormat(ABC):
    """How a family of models writes tool calls. A call begins with a start marker."""

    parsers: tuple[str, ...]
    """Names of ``--tool-call-parser``, which are vLLM's."""
    template_markers: tuple[str, ...]
    """Texts by which the family's chat templates are recognized; all of them must be present."""
    excluded_markers: tuple[str, ...] = ()
    """Texts that must not be present."""
    start_markers: tuple[str, ...]
    """Each of them begins a call; none contains another."""
    end_markers: tuple[str, ...] = ()
    """Texts that may follow a call and belong to it."""
    marker_tokens: tuple[str, ...]
    """Texts of this format that may be special tokens; they are detokenized nevertheless."""
    allow_unmarked: bool = False
    """Whether a call at the beginning of an answer needs no start marker."""

    # How a forced call is written:
    call_id: tuple[str, int] = ("call_", 24)
    """Prefix of a call's id, and number of characters after it; some templates accept no others."""
    prefix: str = ""
    """Text before the first call."""
    call_start: tuple[str, str]
    """Text before and after a call's name."""
    call_end: str = ""
    """Text after a call's arguments."""
    separator: str = ""
    """Text between two calls."""
    suffix: str = ""
    """Text after the last call."""

    @abstractmethod
    def parser(self, schemas: Schemas) -> ToolCallParser:
        """A parser of one answer.

        Args:
            schemas: those of the tools that are known; formats whose values have no types need them.
        """

    @abstractmethod
    def arguments_format(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a forced call as a format of a structural tag.

        Raises ``PenstockError`` (``unsupported``) where they cannot follow the schema in this format.
        """

    def written_name(self, name: str) -> str:
        """A tool's name as it stands between ``call_start``."""
        return name

    def matches(self, template: str) -> bool:
        """Whether a chat template uses this format."""
        present = all(text in template for text in self.template_markers)
        return present and not any(text in template for text in self.excluded_markers)

    def new_id(self) -> str:
        """A new id for a call."""
        prefix, length = self.call_id
        return prefix + uuid4().hex[:length]
