"""Parameters of constrained tool calls: free text up to a trigger, from there the grammar of the model's calls."""

from __future__ import annotations

import msgspec

from .guided import GuidedDecodingParams


class ToolCallParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the tool calls of an answer that may also be text.

    The text is free up to the first trigger outside the reasoning. From the trigger on, it follows ``constraint``.
    """

    constraint: GuidedDecodingParams
    """Constraint on the text from the beginning of the trigger to the end of the answer."""
    triggers: tuple[str, ...]
    """Texts that begin a call. No trigger contains another one."""
    start_trigger: str = ""
    """Text that begins a call, or an answer that is no call, at the beginning of the answer; empty: none."""
    escape: str = ""
    """Regular expression for the shortest text from a start trigger on that is certainly no call. The text after it is
    free again."""
    unknown: str = ""
    """Regular expression for the shortest text from a start trigger on that calls an unknown tool, which is an error.
    """
    reasoning: tuple[str, str] | None = None
    """Texts before and after the reasoning; None: the model has no reasoning."""
    header: tuple[tuple[str, ...], str] | None = None
    """If triggers count only in the headers of messages (Harmony): texts that begin a header, and the text that ends
    it."""
    required: bool = False
    """Fail without a grammar, instead of generating unconstrained calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are searched for in the output."""
        header = (*self.header[0], self.header[1]) if self.header else ()
        return (*self.triggers, *(self.reasoning or ()), *header)
