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
    """Names for ``--reasoning-parser`` (those of vLLM and SGLang)."""
    template_markers: tuple[str, ...]
    """Texts that identify the family's chat templates; all must be present."""
    excluded_markers: tuple[str, ...] = ()
    """Texts that must be absent from the chat template."""
    start_marker: str = "<think>"
    end_marker: str = "</think>"
    answer_markers: tuple[str, ...] = ()
    """Markers around the answer, which are removed from it."""
    marker_tokens: tuple[str, ...] = ()
    """Special tokens that are part of markers of several tokens, and must be detokenized."""
    interrupts: tuple[str, ...] = ()
    """Texts that begin a tool call and end the reasoning without the end marker."""
    implicit_start: bool = False
    """True if an answer begins with reasoning even without the start marker."""
    channels: bool = False
    """True if answers are in channels (``harmony.py``); the start marker begins the reasoning channel."""
    begin: str = ""
    """First token of the reasoning if the start marker has several tokens; "": the start marker is one token."""
    end: str = ""
    """First token of the end marker if it has several tokens; "": the end marker is one token."""
    before_answer: str = "\n\n"
    """Text between the end marker and the answer."""
    before_call: str = "\n\n"
    """Text between the end marker and a tool call."""

    def matches(self, template: str) -> bool:
        """Check whether a chat template uses this format."""
        present = all(text in template for text in self.template_markers)
        return present and not any(text in template for text in self.excluded_markers)


REASONING_FORMATS = (
    ReasoningFormat(
        parsers=("openai_gptoss", "gpt-oss"),
        template_markers=("<|channel|>analysis", "<|message|>"),
        start_marker="<|channel|>analysis<|message|>",
        end_marker="<|end|>",
        channels=True,
        begin="<|channel|>",
        before_answer="<|start|>assistant<|channel|>final<|message|>",
        before_call="<|start|>assistant",
    ),
    ReasoningFormat(
        parsers=("ernie", "ernie45"),
        template_markers=("</think>", "<response>"),
        excluded_markers=("<minimax:tool_call>",),  # MiniMax-M2 has <response> around the results of tools
        answer_markers=("<response>", "</response>"),
    ),
    ReasoningFormat(
        parsers=("deepseek_r1", "deepseek-r1", "minimax_m2", "step3"),
        template_markers=("</think>", "<｜Assistant｜>"),
        excluded_markers=("thinking",),  # with this variable, V3.1 and later write <think> or </think> to the prompt
        implicit_start=True,
    ),
    ReasoningFormat(
        parsers=("hunyuan_a13b", "hunyuan"),
        template_markers=("</think>", "<answer>"),
        answer_markers=("<answer>", "</answer>"),
    ),
    ReasoningFormat(
        parsers=("hy_v3",),
        template_markers=("<think:opensource>",),
        start_marker="<think:opensource>",
        end_marker="</think:opensource>",
        before_answer="",
        before_call="",
    ),
    ReasoningFormat(
        parsers=("cohere_command3", "cohere_command4"),
        template_markers=("<|START_THINKING|>",),
        start_marker="<|START_THINKING|>",
        end_marker="<|END_THINKING|>",
        answer_markers=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
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
        parsers=("gemma4",),
        template_markers=("<|channel>", "<channel|>"),
        start_marker="<|channel>thought\n",
        end_marker="<channel|>",
        marker_tokens=("<|channel>",),
        begin="<|channel>",
        before_answer="",
        before_call="",
    ),
    ReasoningFormat(
        parsers=("minimax_m1", "minimax"),
        template_markers=("<beginning_of_sentence>", "<tool_calls>"),
        before_answer="\n",
        before_call="\n",
    ),
    ReasoningFormat(
        parsers=("minimax_m3", "minimax-m3"),
        template_markers=("<mm:think>",),
        start_marker="<mm:think>",
        end_marker="</mm:think>",
        before_answer="",
        before_call="",
    ),
    ReasoningFormat(
        parsers=("kimi_k3",),
        template_markers=("<|open|>", "<|sep|>"),
        start_marker="<|open|>think<|sep|>",
        end_marker="<|close|>think<|sep|>",
        answer_markers=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        marker_tokens=("<|open|>", "<|close|>", "<|sep|>"),
        interrupts=("<|open|>tools<|sep|>",),
        begin="<|open|>",
        end="<|close|>",
        before_answer="<|open|>response<|sep|>",
        before_call="<|open|>response<|sep|><|close|>response<|sep|>",
    ),
    ReasoningFormat(
        parsers=("apertus", "apertus2509"),
        template_markers=("<|inner_prefix|>",),
        start_marker="<|inner_prefix|>",
        end_marker="<|inner_suffix|>",
        interrupts=("<|tools_prefix|>",),
        before_answer="",
        before_call="",
    ),
    ReasoningFormat(
        parsers=("solar_open2",),
        template_markers=("<|think:start|>",),
        start_marker="<|think:start|>",
        end_marker="<|think:end|>",
        before_answer="",
        before_call="",
    ),
    ReasoningFormat(
        parsers=("solar_open",),
        template_markers=("<|think|>", "<|begin|>assistant"),
        start_marker="<|think|>",
        end_marker="<|end|>",
        answer_markers=("<|begin|>assistant", "<|content|>", "<|end|>"),
        marker_tokens=("<|begin|>", "<|content|>"),
        before_answer="<|begin|>assistant<|content|>",
        before_call="<|begin|>assistant",
    ),
    ReasoningFormat(
        parsers=("longcat",),
        template_markers=("<longcat_think>",),
        start_marker="<longcat_think>",
        end_marker="</longcat_think>",
        before_answer="\n",
        before_call="\n",
    ),
    ReasoningFormat(
        parsers=("inkling",),
        template_markers=("<|content_thinking|>",),
        start_marker="<|content_thinking|>",
        end_marker="<|end_message|>",
        answer_markers=("<|message_model|>", "<|content_text|>", "<|end_message|>", "<|content_model_end_sampling|>"),
        before_answer="<|message_model|><|content_text|>",
        before_call="<|message_model|>",
    ),
    ReasoningFormat(
        parsers=("k2_horizon",),
        template_markers=("<ifm|think>",),
        start_marker="<ifm|think>",
        end_marker="</ifm|think>",
        before_answer="\n",
        before_call="\n",
    ),
    ReasoningFormat(
        parsers=("kimi",),
        template_markers=("◁think▷",),
        start_marker="◁think▷",
        end_marker="◁/think▷",
    ),
    ReasoningFormat(
        parsers=("kimi_k2",),
        template_markers=("</think>", "<|tool_calls_section_begin|>"),
        interrupts=("<|tool_calls_section_begin|>",),
    ),
    ReasoningFormat(
        parsers=(
            *(
                "qwen3",
                "qwen3-thinking",
                "glm45",
                "glm47",
                "deepseek_v3",
                "deepseek-v3",
                "deepseek_v4",
                "deepseek-v4",
                "mimo",
                "olmo3",
                "hy_v3",
            ),
            *("nemotron_v3", "nemotron_3", "step3p5", "holo2", "poolside_v1", "interns1"),
        ),
        template_markers=("</think>",),
    ),
)
"""In this order: gpt-oss (channels); ERNIE 4.5 and X1 (answer in ``<response>``); DeepSeek R1 (may omit ``<think>``);
families with special markers; Kimi-K2 (may call tools within the reasoning); Qwen3 and all other families that write
``<think>…</think>`` or have ``<think>`` at the end of the prompt."""


def reasoning_format(parser: str, template: str) -> ReasoningFormat | None:
    """Find a format by parser name; ``auto``: by the markers in the chat template. None if no format matches."""
    formats = [form for form in REASONING_FORMATS if parser in ("auto", *form.parsers)]
    result = next((form for form in formats if form.matches(template)), None)
    return result if result or parser == "auto" or not formats else formats[-1]


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
    if end.endswith(form.start_marker.rstrip()):
        return ReasoningStage.WITHIN
    answer = form.before_answer.strip()
    if (answer and end.endswith(answer)) or (not form.channels and end.endswith(form.end_marker)):
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
        form = self._form
        result = split_at_marker(self._held, [form.end_marker, *form.interrupts], last, space="\n")
        self._held = result.rest
        if result.marker is None:
            return [TextPart("reasoning", result.before)]
        self.stage, self._skip_newlines = ReasoningStage.AFTER, result.marker == form.end_marker
        if result.marker != form.end_marker:
            self._held = result.marker + self._held
        return [TextPart("reasoning", result.before), self._take_answer()]

    def _read_start(self, last: bool) -> bool:
        """Read the start marker, if present. Returns False if more text is needed."""
        start_marker, end_marker, ahead = self._form.start_marker, self._form.end_marker, self._held.lstrip()
        before = self.stage is ReasoningStage.BEFORE
        if not last and (start_marker.startswith(ahead) or (before and end_marker.startswith(ahead))):
            return False
        self._expect_start = False
        if before and ahead.startswith(end_marker):  # MiniMax-M3 writes this before an answer without reasoning
            self.stage, self._held, self._skip_newlines = ReasoningStage.AFTER, ahead[len(end_marker) :], True
            return True
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
