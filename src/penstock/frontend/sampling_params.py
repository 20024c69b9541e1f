"""Parameter classes of the Python interface, under vLLM's names. ``frozen`` converts them to those of the engine."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Self

import msgspec

from penstock import core
from penstock.core import Code, GuidedDecodingParams, PenstockError
from penstock.core.errors import invalid
from penstock.core.guided import disallow_additional_properties, schema_to_json
from penstock.core.named_parameters import NamedParameters
from penstock.core.requests import readable
from penstock.core.sampling_fields import SamplingFields

SEQUENCES = ("stop", "bad_words", "stop_token_ids", "bad_word_ids", "allowed_token_ids")
"""Fields with several entries."""


class RequestOutputKind(Enum):
    """Outputs that ``AsyncLLM`` yields for a request."""

    CUMULATIVE = 0
    """After each step, everything generated so far."""
    DELTA = 1
    """After each step, what the step has generated."""
    FINAL_ONLY = 2
    """Only the finished output."""


class StructuredOutputsParams(msgspec.Struct, metaclass=NamedParameters, repr_omit_defaults=True):
    """A constraint on the whole output. Raises ``PenstockError`` unless exactly one constraint is given."""

    json: str | dict[str, Any] | type | None = None
    """A JSON Schema (draft 2020-12): text, an object, or a pydantic model."""
    regex: str | None = None
    """A regular expression for the whole output, in the syntax of Rust's ``regex``, without lookaround."""
    choice: Sequence[str] | None = None
    """Allowed outputs."""
    grammar: str | None = None
    """A context-free grammar in Lark or GBNF syntax."""
    json_object: bool | None = None
    """Allow any JSON object."""
    disable_any_whitespace: bool = False
    """Generate JSON without whitespace between tokens."""
    disable_additional_properties: bool = False
    """Disallow properties that the schema does not list."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between JSON tokens."""
    structural_tag: str | dict[str, Any] | None = None
    """Structural tags, as ``GuidedDecodingParams.structural_tag``."""

    def __post_init__(self) -> None:
        self.frozen()

    def frozen(self) -> GuidedDecodingParams:
        """The engine's parameters. Raises ``PenstockError`` (``invalid``) for wrong values."""
        field = "structured_outputs"
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) not in (None, False)}
        if given.pop("disable_additional_properties", False) and self.json is not None:
            schema = msgspec.json.decode(schema_to_json(field, self.json))
            given["json"] = disallow_additional_properties(schema)
        if isinstance(given.get("choice"), Collection) and not isinstance(self.choice, str):
            given["choice"] = tuple(given["choice"])
        return GuidedDecodingParams(**given, source_field=field)


class SamplingParams(SamplingFields, kw_only=True, metaclass=NamedParameters, repr_omit_defaults=True):
    """Parameters of sampling, and conditions that end a sequence. Attributes can be changed; each request uses their
    values at the call.

    Raises ``PenstockError`` (``invalid``) for a wrong value or name, also at the call.
    """

    stop: str | Sequence[str] | None = msgspec.field(default_factory=list)
    """Strings that end a sequence."""
    stop_token_ids: Sequence[int] | None = msgspec.field(default_factory=list)
    """Tokens that end a sequence."""
    logit_bias: Mapping[int, float] | None = msgspec.field(default_factory=dict)
    """Values added to logits, by token id, [-100, 100]."""
    bad_words: str | Sequence[str] | None = msgspec.field(default_factory=list)
    """Strings that are not generated."""
    bad_word_ids: Sequence[Sequence[int]] | None = msgspec.field(default_factory=list)
    """Token sequences that are not generated."""
    allowed_token_ids: Sequence[int] | None = None
    """Tokens that may be generated; None: all."""
    structured_outputs: StructuredOutputsParams | None = None
    """Constraint on the output, as ``guided_decoding``; set only one of the two."""
    thinking_token_budget: int | None = None
    """vLLM's name of ``reasoning_max_tokens``; -1: no limit."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Outputs that ``AsyncLLM`` yields."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "extra_args": "there are no custom logits processors",
        "flat_logprobs": "read outputs[0].logprobs, a dict per token",
        "logits_processors": "use logit_bias, bad_words, allowed_token_ids or structured_outputs",
        "logprob_token_ids": "use logprobs, with up to 20 tokens per position",
        "prompt_logprob_start": "use prompt_logprobs, which has all positions",
        "prompt_logprob_token_ids": "use prompt_logprobs, with up to 20 tokens per position",
        "repetition_detection": "use repetition_penalty or frequency_penalty",
        "routed_experts_prompt_start": "the experts of a token are not returned",
        "skip_clone": "omit it; parameters are copied at each call",
        "skip_reading_prefix_cache": "use a cache_salt of the prompt",
        "stream_interval": "omit it; AsyncLLM yields after each step",
        "trace_decode_token_ids": "use prompt_logprobs for the log probabilities of given tokens",
        "truncate_prompt_tokens": "shorten the prompt's token ids",
        "watermarking": "outputs have no watermark",
    }

    def __post_init__(self) -> None:
        for name in SEQUENCES:
            value = _as_list(name, getattr(self, name))
            setattr(self, name, [] if value is None and name != "allowed_token_ids" else value)
        self.logit_bias = {} if self.logit_bias is None else self.logit_bias
        if self.seed == -1:  # random, as in vLLM
            self.seed = None
        self.frozen()

    @classmethod
    def of(cls, sampling: core.SamplingParams) -> Self:
        """Convert the engine's parameters."""
        return cls(**{name: getattr(sampling, name) for name in sampling.__struct_fields__})

    def clone(self) -> Self:
        """An independent copy."""
        return copy.deepcopy(self)

    def frozen(self) -> core.SamplingParams:
        """The engine's parameters. Raises ``PenstockError`` (``invalid``) for wrong values."""
        given = {name: getattr(self, name) for name in core.SamplingParams.__struct_fields__}
        for name in SEQUENCES:
            given[name] = _as_list(name, given[name])
            if given[name] is None and name != "allowed_token_ids":
                given[name] = []
        given["logit_bias"] = {} if self.logit_bias is None else self.logit_bias
        given["guided_decoding"] = self._constraint()
        if self.thinking_token_budget not in (None, -1):
            given["reasoning_max_tokens"] = self.thinking_token_budget
        if not isinstance(self.output_kind, RequestOutputKind):
            names = ", ".join(f"RequestOutputKind.{kind.name}" for kind in RequestOutputKind)
            raise invalid("output_kind", f"must be one of {names}, is {self.output_kind!r:.50}")
        for name in ("logprobs", "prompt_logprobs"):
            if given[name] == -1:
                maximum = core.sampling.MAX_LOGPROBS
                message = f"{name}: is -1 (the whole vocabulary), which is not supported: give at most {maximum}"
                raise PenstockError(Code.UNSUPPORTED, message, name, maximum)
        return convert(given, core.SamplingParams)

    def _constraint(self) -> GuidedDecodingParams | None:
        given = self.structured_outputs
        if given is None:
            if not isinstance(self.guided_decoding, GuidedDecodingParams | None):
                raise _wrong_type("guided_decoding", self.guided_decoding, "GuidedDecodingParams(json=…)")
            return self.guided_decoding
        if self.guided_decoding is not None:
            raise invalid("structured_outputs", "cannot be combined with guided_decoding: set only one")
        if isinstance(given, GuidedDecodingParams):
            return given
        if not isinstance(given, StructuredOutputsParams):
            raise _wrong_type("structured_outputs", given, "StructuredOutputsParams(json=…)")
        return given.frozen()


class BeamSearchParams(msgspec.Struct, metaclass=NamedParameters, repr_omit_defaults=True):
    """Parameters of ``LLM.beam_search``. Raises ``PenstockError`` (``invalid``) for a wrong value."""

    beam_width: int
    """Number of beams, and of the sequences that are returned."""
    max_tokens: int
    """Maximum number of tokens to generate."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence tokens."""
    temperature: float = 0.0
    """Must be 0: beams are ranked by the model's log probabilities."""
    length_penalty: float = 1.0
    """Exponent of the length by which a beam's log probability is divided; above 0 favours longer beams."""
    include_stop_str_in_output: bool = False
    """Has no effect, as a beam search has no stop strings."""
    structured_outputs: StructuredOutputsParams | None = None
    """Constraint on the output."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    allowed_token_ids: Sequence[int] | None = None
    """Tokens that may be generated; None: all."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {"watermarking": "outputs have no watermark"}

    def __post_init__(self) -> None:
        self.sampling()

    def sampling(self) -> SamplingParams:
        """Sampling parameters of the search; one beam is greedy sampling."""
        if self.temperature != 0:
            message = f"temperature: is {self.temperature}, but beam search is greedy: set 0"
            raise PenstockError(Code.UNSUPPORTED, message, "temperature", 0)
        core.sampling.between("beam_width", self.beam_width, 1, core.sampling.MAX_SEQUENCES)
        one = self.beam_width == 1
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=not one,
            logprobs=0 if one else None,
            temperature=0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=1.0 if one else self.length_penalty,
            structured_outputs=self.structured_outputs,
            skip_special_tokens=self.skip_special_tokens,
            allowed_token_ids=self.allowed_token_ids,
        )


def convert(given: Mapping[str, Any], schema: type[core.SamplingParams]) -> core.SamplingParams:
    """Create ``schema`` from fields by name. Raises ``PenstockError`` (``invalid``), with the field, for a value of a
    wrong type."""
    try:
        return msgspec.convert(given, schema)
    except msgspec.ValidationError as error:
        found = re.search(r"`\$\.(\w+)", str(error))
        name = found[1] if found else "sampling_params"
        raise invalid(name, f"{readable(error)}: {given.get(name)!r:.80}") from error


def _as_list(name: str, value: Any) -> list[Any] | None:
    """A field's entries; a string is one entry."""
    if value is None:
        return None
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Collection) or isinstance(value, Mapping | bytes):
        raise _wrong_type(name, value, f"a list, such as {name}=[…]")
    return list(value)


def _wrong_type(name: str, value: Any, expected: str) -> PenstockError:
    return invalid(name, f"must be {expected}, is {type(value).__name__} {value!r:.50}")
