"""Reasoning before an answer (``<think>…</think>``): formats, and an incremental parser."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from .markers import split_at_marker
from .message import MessagePart, TextPart


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a model family marks its reasoning."""

    parsers: tuple[str, ...]
    """Names for ``--reasoning-parser`` (those of vLLM)."""
    template_markers: tuple[str, ...]
    """Texts that identify the family's chat templates; all must be present."""
    start_marker: str = "<think>"
    end_marker: str = "</think>"
    answer_markers: tuple[str, ...] = ()
    """Markers around the answer, which are removed from it."""
    implicit_start: bool = False
    """True if an answer begins with reasoning even without the start marker."""
    channels: bool = False
    """True if answers are in channels (``harmony.py``); the start marker begins the reasoning channel."""
    begin: str = ""
    """First token of the reasoning if the start marker has several tokens; "": the start marker is one token."""
    before_answer: str = "\n\n"
    """Text between the end marker and the answer."""
    before_call: str = "\n\n"
    """Text between the end marker and a tool call."""


REASONING_FORMATS = (
    ReasoningFormat(
        parsers=("openai_gptoss",),
        template_markers=("<|channel|>analysis", "<|message|>"),
        start_marker="<|channel|>analysis<|message|>",
        end_marker="<|end|>",
        channels=True,
        begin="<|channel|>",
        before_answer="<|start|>assistant<|channel|>final<|message|>",
        before_call="<|start|>assistant",
    ),
    ReasoningFormat(
        parsers=("ernie",),
        template_markers=("</think>", "<response>"),
        answer_markers=("<response>", "</response>"),
    ),
    ReasoningFormat(
        parsers=("deepseek_r1", "minimax_m2", "step3"),
        template_markers=("</think>", "<｜Assistant｜>"),
        implicit_start=True,
    ),
    ReasoningFormat(
        parsers=("hunyuan_a13b",),
        template_markers=("</think>", "<answer>"),
        answer_markers=("<answer>", "</answer>"),
    ),
    ReasoningFormat(
        parsers=("cohere_command3",),
        template_markers=("<|START_THINKING|>",),
        start_marker="<|START_THINKING|>",
        end_marker="<|END_THINKING|>",
        answer_markers=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningFormat(
        parsers=("seed_oss",),
        template_markers=("<seed:think>",),
        start_marker="<seed:think>",
        end_marker="</seed:think>",
    ),
    ReasoningFormat(
        parsers=("granite",),
        template_markers=("Here is my thought process:",),
        start_marker="Here is my thought process:",
        end_marker="Here is my response:",
    ),
    ReasoningFormat(
        parsers=("mistral",),
        template_markers=("[THINK]",),
        start_marker="[THINK]",
        end_marker="[/THINK]",
    ),
    ReasoningFormat(
        parsers=("qwen3", "glm45", "glm47", "kimi_k2", "deepseek_v3", "mimo", "olmo3"), template_markers=("</think>",)
    ),
)
"""In this order: gpt-oss (channels); ERNIE 4.5 and X1 (answer in ``<response>``); DeepSeek R1 and V3.1 (may omit
``<think>``); Hunyuan, Command A, Seed-OSS, Granite 3 and Magistral (special markers); Qwen3 and all other families that
write ``<think>…</think>`` or have ``<think>`` at the end of the prompt."""


def reasoning_format(parser: str, template: str) -> ReasoningFormat | None:
    """Find a format by parser name; ``auto``: by the markers in the chat template. None if no format matches."""
    if parser == "auto":
        recognized = (form for form in REASONING_FORMATS if all(text in template for text in form.template_markers))
        return next(recognized, None)
    return next((form for form in REASONING_FORMATS if parser in form.parsers), None)


class ReasoningStage(Enum):
    """Position of the next text relative to the reasoning. ``ReasoningPhase`` is the engine's equivalent for tokens."""

    BEFORE = auto()  # the reasoning, or an answer without reasoning, begins next
    WITHIN = auto()
    AFTER = auto()  # the reasoning has ended or is absent


def initial_stage(form: ReasoningFormat, prompt: str, continued: str = "") -> ReasoningStage:
    """Return the stage at which the answer to a prompt begins.

    Args:
        prompt: the rendered prompt, or its end.
        continued: text of the last message if the answer continues it.
    """
    if continued:
        return (
            ReasoningStage.WITHIN
            if continued.rfind(form.start_marker) > continued.rfind(form.end_marker)
            else ReasoningStage.AFTER
        )
    end = prompt.rstrip()
    if end.endswith(form.start_marker):
        return ReasoningStage.WITHIN
    if end.endswith(form.before_answer if form.channels else form.end_marker):
        return ReasoningStage.AFTER
    return ReasoningStage.WITHIN if form.implicit_start else ReasoningStage.BEFORE


class ReasoningParser:
    """Splits text into reasoning and answer, without the markers and the line breaks around them.

    Args:
        continued: the answer continues a message, so that no start marker is expected.
    """

    def __init__(self, form: ReasoningFormat, stage: ReasoningStage, continued: bool = False) -> None:
        self.stage = stage
        self._form = form
        self._held = ""
        self._expect_start = stage is not ReasoningStage.AFTER and not continued
        """True if the start marker may follow."""
        self._skip_newlines = self._expect_start
        """True after a marker: the line breaks after it are removed."""
        self.found = stage is ReasoningStage.WITHIN
        """True if reasoning has begun."""

    @property
    def in_reasoning(self) -> bool:
        """True while reasoning is being generated."""
        return self.stage is ReasoningStage.WITHIN

    def add(self, text: str, last: bool = False) -> list[MessagePart]:
        """Parse a chunk. Returns its reasoning and content. With ``last`` nothing is held back."""
        self._held += text
        if self._expect_start and not self._read_start(last):
            return []
        if self.stage is ReasoningStage.AFTER:
            return [self._take_answer()]
        self._strip_newlines()
        result = split_at_marker(self._held, [self._form.end_marker], last, space="\n")
        self._held = result.rest
        if result.marker is None:
            return [TextPart("reasoning", result.before)]
        self.stage, self._skip_newlines = ReasoningStage.AFTER, True
        return [TextPart("reasoning", result.before), self._take_answer()]

    def _read_start(self, last: bool) -> bool:
        """Read the start marker, if present. Returns False if more text is needed."""
        start_marker, ahead = self._form.start_marker, self._held.lstrip()
        if not last and start_marker.startswith(ahead):
            return False
        self._expect_start = False
        if ahead.startswith(start_marker):
            self.stage, self._held = ReasoningStage.WITHIN, ahead[len(start_marker) :]
        elif self.stage is ReasoningStage.BEFORE:
            self.stage, self._skip_newlines = ReasoningStage.AFTER, False
        self.found = self.stage is ReasoningStage.WITHIN
        return True

    def _take_answer(self) -> TextPart:
        self._strip_newlines()
        answer, self._held = self._held, ""
        return TextPart("content", answer)

    def _strip_newlines(self) -> None:
        if self._skip_newlines:
            self._held = self._held.lstrip("\n")
            self._skip_newlines = not self._held
