"""Results of ``LLM.beam_search``, with vLLM's class and field names."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core import LoRARequest, PenstockError
from penstock.text import Tokenizer

from .outputs import RequestOutput


@dataclass(slots=True)
class BeamSearchSequence:
    """One result of a beam search."""

    tokens: list[int]
    """Token ids of the prompt and the output."""
    text: str
    """Text of ``tokens``."""
    cum_logprob: float
    """Log probability (natural logarithm) of the output."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """Results of a beam search, the best first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def of(cls, output: RequestOutput, tokenizer: Tokenizer, skip_special_tokens: bool) -> BeamSearchOutput:
        """Convert an output. Raises ``PenstockError`` if the request failed."""
        sequences = []
        for one in output.outputs:
            if one.failure:
                raise PenstockError.of(one.failure)
            tokens = [*output.prompt_token_ids, *one.token_ids]
            text, logprob = tokenizer.decode(tokens, skip_special_tokens), one.cumulative_logprob or 0.0
            end = one.finish_reason, one.stop_reason
            sequences.append(BeamSearchSequence(tokens, text, logprob, *end, output.lora_request))
        return cls(sequences)
