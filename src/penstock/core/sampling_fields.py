"""Fields that the users' and the engine's sampling parameters share."""

from __future__ import annotations

from typing import Literal, Self

import msgspec

from .guided import GuidedDecodingParams
from .tool_calls import ToolCallParams


class SamplingFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Fields of ``core.SamplingParams``, which is immutable, and of the users' ``penstock.SamplingParams``, which is
    mutable. Fields with several entries have different types in the two classes, and are defined there."""

    n: int = 1
    """Number of sequences to return, 1 to 128."""
    best_of: int | None = None
    """Number of sequences to generate, ``n`` to 128; the ``n`` most likely are returned. None: ``n``."""
    use_beam_search: bool = False
    """Beam search with ``best_of`` beams, as in transformers. Greedy only."""
    length_penalty: float = 1.0
    """Exponent of the length by which a beam's log probability is divided, [-10, 10]; above 0 favours longer beams."""
    early_stopping: bool | Literal["never"] = False
    """End of a beam search. True: as soon as ``best_of`` sequences are complete; False: once the best beam is unlikely
    to beat them; ``never``: once no beam can beat them."""
    temperature: float = 1.0
    """Sampling temperature; 0: greedy."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 or -1: all."""
    top_p: float = 1.0
    """Total probability of the smallest set of most likely tokens to sample from, (0, 1]."""
    min_p: float = 0.0
    """Minimum probability of a token relative to the most likely one, [0, 1]."""
    repetition_penalty: float = 1.0
    """Factor that divides positive and multiplies negative logits of tokens in the prompt or output; above 0."""
    presence_penalty: float = 0.0
    """Value subtracted from the logit of each token that occurs in the output, [-2, 2]."""
    frequency_penalty: float = 0.0
    """Value subtracted from a token's logit for each occurrence in the output, [-2, 2]."""
    seed: int | None = None
    """Seed for reproducible sampling; None or -1: random."""

    max_tokens: int | None = 16
    """Maximum number of tokens to generate; None: limited by the context only."""
    min_tokens: int = 0
    """Number of tokens to generate before a stop token or stop string may end the sequence."""
    reasoning_max_tokens: int | None = None
    """Maximum number of reasoning tokens of a chat, after which the end of the reasoning is forced. None: no limit."""
    response_max_tokens: int | None = None
    """Maximum number of tokens of a chat's answer after the reasoning; None: no limit."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    """Include the stop string in the output."""

    guided_decoding: GuidedDecodingParams | None = None
    """Constraint on the output."""
    tool_calls: ToolCallParams | None = None
    """Constraint on the tool calls in the output, which may also be text."""

    logprobs: int | None = None
    """Number of most likely alternatives to return with the logprob of each generated token; None: no logprobs."""
    prompt_logprobs: int | None = None
    """Number of most likely alternatives to return with the logprob of each prompt token; None: no logprobs."""
    temp_scaled_logprobs: bool = False
    """Compute the logprobs of generated tokens at the request's temperature."""
    top_p_normalized_logprobs: bool = False
    """Normalize the logprobs of generated tokens over the tokens kept by ``top_p``."""

    return_context_logits: bool = False
    """Return the model's logits after each prompt token."""
    return_generation_logits: bool = False
    """Return the model's logits of each generated token, before penalties, masks and temperature."""
    return_perf_metrics: bool = False
    """Return the time of each sequence's first step, and its numbers of KV blocks and draft tokens."""

    detokenize: bool = True
    """Return text; False: token ids only."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    spaces_between_special_tokens: bool = True
    """Accepted for compatibility with vLLM; must be True."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences to generate: ``best_of``, or ``n`` if it is None."""
        return self.best_of or self.n

    @property
    def num_returned(self) -> int:
        """Number of sequences that the engine returns: ``n`` in beam search, otherwise all generated ones."""
        return self.n if self.use_beam_search else self.num_sequences

    @property
    def greedy(self) -> bool:
        """True if each step takes the most likely token."""
        return self.temperature == 0

    def replace(self, **changes: object) -> Self:
        """Return a validated copy with ``changes``."""
        return msgspec.structs.replace(self, **changes)
