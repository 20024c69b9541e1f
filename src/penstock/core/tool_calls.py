"""Parameters of constrained tool calls: free text up to a trigger, from there the grammar of the model's calls."""

from __future__ import annotations

import msgspec

from .guided import GuidedDecodingParams


class MessageHeader(msgspec.Struct, frozen=True, array_like=True):
    """Texts around the header of a message, if an answer consists of messages."""

    starts: tuple[str, ...]
    """Texts that end a message, and begin the header of the next one."""
    first_starts: tuple[str, ...]
    """Texts with which the header of the first message begins."""
    end: str
    """Text between a header and the message's text."""


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
    header: MessageHeader | None = None
    """Headers of messages, if triggers count only in headers (Harmony)."""
    required: bool = False
    """Fail without a grammar, instead of generating unconstrained calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are searched for in the output."""
        header = (*self.header.starts, *self.header.first_starts, self.header.end) if self.header else ()
        return tuple(dict.fromkeys((*self.triggers, *(self.reasoning or ()), *header)))
