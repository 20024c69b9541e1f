"""What a request may ask of sampling, under the names that vLLM's users know."""

from __future__ import annotations

from typing import Literal, Self

import msgspec

from .errors import Code, PenstockError, invalid
from .guided import GuidedDecodingParams

MOST_LOGPROBS = 20
"""Alternatives a position may list; the widest any dialect offers."""
MOST_SEQUENCES = 128
MOST = {
    "logit_bias": 1024,
    "bad_word_ids": 1024,
    "bad_words": 512,
    "stop_token_ids": 1024,
    "stop": 128,
    "allowed_token_ids": 4096,
}
"""Entries of what is looked through at every step."""
NOT_TOGETHER = {
    "guided_decoding": ("allowed_token_ids", "bad_words", "bad_word_ids", "min_tokens", "ignore_eos"),
    "reasoning_max_tokens": ("allowed_token_ids", "bad_words", "bad_word_ids"),
    "response_max_tokens": ("use_beam_search",),
    "use_beam_search": ("temperature", "top_k", "top_p", "min_p", "stop", "logprobs", "return_generation_logits"),
}
"""What a request cannot ask for along with each of these: what might leave no token that a form or the end of a thought
allows, or go on where a form has ended; and what a search for the likeliest sequences does without."""
NOTHING: dict[str, tuple[object, ...]] = {"temperature": (0,), "top_k": (0, -1), "top_p": (1,), "logprobs": (None, 0)}
"""Values that ask for nothing."""
MOST_CONTINUATIONS = 1024
"""Beams by stop tokens: so many continuations a search may have to look at beyond those it goes on with."""
MOST_CHARACTERS = {"stop": 4096, "bad_words": 16_384}
"""Of all entries together."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when to stop.

    Raises ``PenstockError`` (``invalid``) where a value is out of range. Text (``stop``, ``bad_words``) is handled
    above the engine: stop strings abort a request, bad words reach the engine as ``bad_word_ids``.
    """

    n: int = 1
    """Sequences to return, 1 to 128."""
    best_of: int | None = None
    """Sequences to make, from ``n`` to 128, of which the ``n`` likeliest are returned; None is ``n``."""
    use_beam_search: bool = False
    """Search for the likeliest sequences with ``best_of`` beams, as transformers does. Greedy only."""
    length_penalty: float = 1.0
    """Power of the length by which a beam's log probability is divided: above 0 favours longer ones, [-10, 10]."""
    early_stopping: bool | Literal["never"] = False
    """When a search ends: False once the best beam is unlikely to come before those found, True as soon as there are
    ``best_of``, ``never`` once no beam can."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Tokens to choose among; 0 (or -1) is all."""
    top_p: float = 1.0
    """Smallest set of tokens with this probability, (0, 1]."""
    min_p: float = 0.0
    """Least probability relative to the likeliest token, [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides the scores of tokens seen in prompt or output where positive, multiplies where negative; > 0."""
    presence_penalty: float = 0.0
    """Taken from the score of every token in the output, [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken from a token's score for each time it is in the output, [-2, 2]."""
    seed: int | None = None
    """Makes the draw repeatable; None or -1 takes a random one."""

    max_tokens: int | None = 16
    """Tokens to generate at most; None is as many as the context holds."""
    min_tokens: int = 0
    """Tokens before which neither a stop token nor a stop string ends the sequence."""
    reasoning_max_tokens: int | None = None
    """Tokens of a chat's thought after which it is made to end, and the answer begins; None is any."""
    response_max_tokens: int | None = None
    """Tokens of a chat's answer after its thought; None is any."""
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False

    logit_bias: dict[int, float] = {}
    """Added to the scores of these token ids, [-100, 100]."""
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not come out."""
    allowed_token_ids: tuple[int, ...] | None = None
    guided_decoding: GuidedDecodingParams | None = None
    """The form that the output has."""

    logprobs: int | None = None
    """Likeliest alternatives to give with each generated token, besides its own; 0 gives its own only."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    temp_scaled_logprobs: bool = False
    """Give log probabilities of generated tokens at the request's temperature."""
    top_p_normalized_logprobs: bool = False
    """Give them among the tokens that top_p leaves."""

    return_context_logits: bool = False
    """Give the scores of what may follow each prompt token, as the model makes them."""
    return_generation_logits: bool = False
    """The same scores that each generated token was chosen by, before anything is applied to them."""
    return_perf_metrics: bool = False
    """Give what each sequence has taken: KV blocks, draft tokens, and when it ran first."""

    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        for field in ("stop", "bad_words", "stop_token_ids", "bad_word_ids", "allowed_token_ids"):
            given = getattr(self, field)
            if isinstance(given, str | list):  # one string is one, and lists are what callers write
                msgspec.structs.force_setattr(self, field, (given,) if isinstance(given, str) else tuple(given))
        if self.seed == -1:  # as vLLM has it
            msgspec.structs.force_setattr(self, "seed", None)
        between("n", self.n, 1, MOST_SEQUENCES)
        between("temperature", self.temperature, 0, 100)
        between("top_k", self.top_k, -1, None)
        between("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise invalid("top_p", "must be above 0", 0)
        between("min_p", self.min_p, 0, 1)
        between("repetition_penalty", self.repetition_penalty, 0, None)
        if self.repetition_penalty == 0:
            raise invalid("repetition_penalty", "must be above 0", 0)
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
            if (wanted := getattr(self, field)) is not None:
                between(field, wanted, 0, MOST_LOGPROBS)
        for field, most in MOST.items():
            if len(getattr(self, field) or ()) > most:
                raise invalid(field, f"must hold at most {most} entries", most)
        for field, most in MOST_CHARACTERS.items():
            if sum(map(len, getattr(self, field))) > most:
                raise invalid(field, f"must have at most {most} characters together", most)
        for bias in self.logit_bias.values():
            between("logit_bias", bias, -100, 100)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise invalid("allowed_token_ids", "must name at least one token")
        if not all(self.bad_word_ids):
            raise invalid("bad_word_ids", "must not hold an empty sequence")
        if self.allowed_token_ids is not None and self.never_tokens.issuperset(self.allowed_token_ids):
            raise invalid("allowed_token_ids", "are all among the bad words: no token may come")
        if not all(self.stop):
            raise invalid("stop", "must not hold an empty string")
        for field, others in NOT_TOGETHER.items():
            if getattr(self, field) not in (None, False) and (
                wrong := [other for other in others if self._asks(other)]
            ):
                raise invalid(wrong[0], f"does not go with {field}")
        self._check_search()
        if not self.spaces_between_special_tokens:
            raise PenstockError(Code.UNSUPPORTED, "must be true", "spaces_between_special_tokens")

    def _check_search(self) -> None:
        if self.best_of is not None:
            between("best_of", self.best_of, self.n, MOST_SEQUENCES)
        between("length_penalty", self.length_penalty, -10, 10)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise invalid("early_stopping", 'must be true, false or "never"')
        if not self.use_beam_search:
            if self.width > self.n and self.greedy:
                raise invalid("best_of", "must be n where temperature is 0, as all would be the same", self.n)
            if self.length_penalty != 1:
                raise invalid("length_penalty", "goes with use_beam_search only")
            if self.early_stopping:
                raise invalid("early_stopping", "goes with use_beam_search only")
            return
        if self.width < 2:
            raise invalid("best_of", "must be at least 2 with use_beam_search, or n", 2)
        most = MOST_CONTINUATIONS // self.width
        if len(self.stop_token_ids) > most:
            raise invalid("stop_token_ids", f"must hold at most {most} entries with {self.width} beams", most)

    def _asks(self, field: str) -> bool:
        """Whether the value of a field asks for anything."""
        return getattr(self, field) not in NOTHING.get(field, (None, (), 0, False))

    @property
    def width(self) -> int:
        """Sequences that are made."""
        return self.best_of or self.n

    @property
    def told(self) -> int:
        """Of these, those whose tokens are told: the engine chooses among beams, who sees texts among others."""
        return self.n if self.use_beam_search else self.width

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def never_tokens(self) -> set[int]:
        """Tokens that are bad words by themselves."""
        return {word[0] for word in self.bad_word_ids if len(word) == 1}

    def replace(self, **changes: object) -> Self:
        """The same parameters but for ``changes``, checked anew."""
        return msgspec.structs.replace(self, **changes)


def between(field: str, value: float, low: float, high: float | None) -> None:
    """Raise unless ``low <= value <= high`` (``high`` None: no upper bound). Not-a-number is never between."""
    if not isinstance(value, int | float):
        raise invalid(field, f"must be a number, is {value!r}")
    if not low <= value:
        raise invalid(field, f"must be at least {low}, is {value}", low)
    if high is not None and not value <= high:
        raise invalid(field, f"must be at most {high}, is {value}", high)
