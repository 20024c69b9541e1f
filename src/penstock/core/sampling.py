"""Sampling parameters, under vLLM's names."""

from __future__ import annotations

import msgspec

from .errors import invalid
from .sampling_fields import SamplingFields

MAX_LOGPROBS = 20
"""Maximum of ``logprobs`` and ``prompt_logprobs``."""
MAX_SEQUENCES = 128
"""Maximum of ``n`` and ``best_of``."""
MAX_ENTRIES = {
    "logit_bias": 1024,
    "bad_word_ids": 1024,
    "bad_words": 512,
    "stop_token_ids": 1024,
    "stop": 128,
    "allowed_token_ids": 4096,
}
"""Maximum number of entries of a field that is checked in every step."""
EXCLUSIVE = {
    "guided_decoding": ("allowed_token_ids", "bad_words", "bad_word_ids", "min_tokens", "ignore_eos"),
    "tool_calls": (
        *("allowed_token_ids", "bad_words", "bad_word_ids", "min_tokens", "ignore_eos"),
        *("guided_decoding", "use_beam_search"),
    ),
    "reasoning_max_tokens": ("allowed_token_ids", "bad_words", "bad_word_ids"),
    "response_max_tokens": ("use_beam_search",),
    "use_beam_search": ("temperature", "top_k", "top_p", "min_p", "stop", "logprobs", "return_generation_logits"),
}
"""Options that each option excludes. ``use_beam_search`` does not support the excluded ones; other combinations could
leave no allowed token for a constraint or the end of the reasoning, or generate beyond the end of a constraint."""
NO_EFFECT: dict[str, tuple[object, ...]] = {"temperature": (0,), "top_k": (0, -1), "top_p": (1,), "logprobs": (None, 0)}
"""Values of an option that have no effect, and are accepted despite ``EXCLUSIVE``. Options that are not listed have no
effect if they are None, empty, 0 or False."""
MAX_BEAM_STOPS = 1024
"""Maximum of ``stop_token_ids`` times beams: the number of additional candidates of a beam search in each step."""
MAX_CHARACTERS = {"stop": 4096, "bad_words": 16_384}
"""Maximum total number of characters of a field's entries."""


class SamplingParams(SamplingFields, frozen=True, kw_only=True, omit_defaults=True):  # type: ignore[misc]
    """Parameters of sampling, and conditions that end a sequence.

    Raises ``PenstockError`` (``invalid``) if a value is out of range. The frontend handles text: it matches ``stop`` in
    the output, and converts ``bad_words`` to ``bad_word_ids`` for the engine.
    """

    stop: tuple[str, ...] = ()
    """Strings that end a sequence."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence."""
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    """Values added to logits, by token id, [-100, 100]."""
    bad_words: tuple[str, ...] = ()
    """Strings that are not generated."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are not generated."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Tokens that may be generated; None: all."""

    def __post_init__(self) -> None:
        for field in ("stop", "bad_words", "stop_token_ids", "bad_word_ids", "allowed_token_ids"):
            given = getattr(self, field)
            if isinstance(given, str | list):  # a string is one entry
                msgspec.structs.force_setattr(self, field, (given,) if isinstance(given, str) else tuple(given))
        if self.seed == -1:  # random, as in vLLM
            msgspec.structs.force_setattr(self, "seed", None)
        between("n", self.n, 1, MAX_SEQUENCES)
        between("temperature", self.temperature, 0, 100)
        between("top_k", self.top_k, -1, None)
        between("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise invalid("top_p", "must be above 0, is 0", 0)
        between("min_p", self.min_p, 0, 1)
        between("repetition_penalty", self.repetition_penalty, 0, None)
        if self.repetition_penalty == 0:
            raise invalid("repetition_penalty", "must be above 0, is 0", 0)
        between("presence_penalty", self.presence_penalty, -2, 2)
        between("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.max_tokens is not None:
            between("max_tokens", self.max_tokens, 1, None)
        between("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.reasoning_max_tokens is not None:
            between("reasoning_max_tokens", self.reasoning_max_tokens, 0, None)
        if self.response_max_tokens is not None:
            between("response_max_tokens", self.response_max_tokens, 1, None)
        for field in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, field)) is not None:
                between(field, count, 0, MAX_LOGPROBS)
        for field, limit in MAX_ENTRIES.items():
            if (count := len(getattr(self, field) or ())) > limit:
                raise invalid(field, f"must have at most {limit} entries, has {count}", limit)
        for field, limit in MAX_CHARACTERS.items():
            if (count := sum(map(len, getattr(self, field)))) > limit:
                raise invalid(field, f"must have at most {limit} characters in total, has {count}", limit)
        for bias in self.logit_bias.values():
            between("logit_bias", bias, -100, 100)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise invalid("allowed_token_ids", "must have at least one token; omit it to allow all tokens")
        if not all(self.bad_word_ids):
            raise invalid("bad_word_ids", "must not contain an empty sequence")
        if self.allowed_token_ids is not None and self.banned_token_ids.issuperset(self.allowed_token_ids):
            raise invalid("allowed_token_ids", "are all excluded by bad_word_ids; allow at least one more token")
        if not all(self.stop):
            raise invalid("stop", "must not contain an empty string")
        for field, excluded in EXCLUSIVE.items():
            if getattr(self, field) not in (None, False):
                for other in excluded:
                    if self.has_effect(other):
                        raise invalid(other, f"cannot be combined with {field}")
        self._check_beam_search()

    def _check_beam_search(self) -> None:
        if self.best_of is not None:
            between("best_of", self.best_of, self.n, MAX_SEQUENCES)
        between("length_penalty", self.length_penalty, -10, 10)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise invalid("early_stopping", f'must be true, false or "never", is {self.early_stopping!r:.50}')
        if not self.use_beam_search:
            if self.num_sequences > self.n and self.greedy:
                message = (
                    f"must be n ({self.n}) if temperature is 0, as all sequences would be equal; is {self.best_of}"
                )
                raise invalid("best_of", message, self.n)
            if self.length_penalty != 1:
                message = f"is {self.length_penalty}; values other than 1 require use_beam_search"
                raise invalid("length_penalty", message)
            if self.early_stopping:
                raise invalid("early_stopping", f"is {self.early_stopping!r}, which requires use_beam_search")
            return
        if self.num_sequences < 2:
            raise invalid("best_of", "best_of or n must be at least 2 with use_beam_search, is 1", 2)
        limit, count = MAX_BEAM_STOPS // self.num_sequences, len(self.stop_token_ids)
        if count > limit:
            message = f"must have at most {limit} entries with {self.num_sequences} beams, has {count}"
            raise invalid("stop_token_ids", message, limit)

    def has_effect(self, field: str) -> bool:
        """True if the option's value changes the output (``NO_EFFECT``)."""
        return getattr(self, field) not in NO_EFFECT.get(field, (None, (), 0, False))

    @property
    def needs_token_values(self) -> bool:
        """True if sampling needs the ids of all previous tokens: for bad words and penalties."""
        penalties = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return bool(self.bad_word_ids) or penalties

    @property
    def banned_token_ids(self) -> set[int]:
        """Tokens that are never sampled: entries of ``bad_word_ids`` with a single token."""
        return {word[0] for word in self.bad_word_ids if len(word) == 1}


def between(field: str, value: float, low: float, high: float | None) -> None:
    """Raise ``PenstockError`` (``invalid``) unless ``low <= value <= high`` (None: no upper bound)."""
    if not isinstance(value, int | float):
        raise invalid(field, f"must be a number, is {value!r:.100}")
    if not low <= value:
        raise invalid(field, f"must be at least {low}, is {value}", low)
    if high is not None and not value <= high:
        raise invalid(field, f"must be at most {high}, is {value}", high)
