"""Sampling parameters from the inputs of TensorRT-LLM's models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.core import GuidedDecodingParams, PenstockError, SamplingParams
from penstock.core.errors import invalid
from penstock.core.sampling import between

from ..model import ModelCall

ALIASES = {
    "prompt": "text_input",
    "min_tokens": "min_length",
    "seed": "random_seed",
    "n": "num_return_sequences",
    "best_of": "beam_width",
    "stop": "stop_words",
    "stop_token_ids": "stop_words",
    "ignore_eos": "end_id",
    "bad_word_ids": "bad_words",
    "logprobs": "return_log_probs",
    "logit_bias": "embedding_bias_weights",
    "guided_decoding": "guided_decoding_guide",
}
"""Internal parameter name → TensorRT-LLM's input name, if the names differ."""
GUIDED_INPUTS = {
    "json": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""``guided_decoding_guide_type`` → field of ``GuidedDecodingParams``."""


class InputNames:
    """The names of a model's inputs.

    Args:
        renamed: input name of the model ``ensemble`` → input name of this model, if the names differ.
    """

    def __init__(self, renamed: Mapping[str, str]) -> None:
        self._renamed = renamed

    def of(self, name: str) -> str:
        """The name in this model of the input ``name`` of ``ensemble``."""
        return self._renamed.get(name, name)

    def value(self, call: ModelCall, index: int, name: str) -> Any:
        """The value of a scalar input in one row; None if the input is absent."""
        result = call.row(self.of(name), index)
        return result[0] if result else None

    def renamed(self, error: PenstockError) -> PenstockError:
        """Replace the internal parameter name in an error with the input name of this model."""
        failure = error.failure
        parameter = self.of(ALIASES.get(failure.field, failure.field))
        message = failure.message
        if message.startswith(f"{failure.field}: "):
            message = f"{parameter}{message[len(failure.field) :]}"
        return PenstockError(failure.code, message, parameter, failure.limit, failure.value)


def sampling_of(call: ModelCall, index: int, names: InputNames, vocab_size: int, **overrides: Any) -> SamplingParams:
    """The sampling parameters of one row, with TensorRT-LLM's defaults: greedy without ``top_k`` and ``top_p``, seed 0.

    Args:
        vocab_size: vocabulary size of the model.
        overrides: parameters from inputs that differ between text and token models.

    Raises ``PenstockError`` (``invalid``), with internal parameter names.
    """

    def value(name: str) -> Any:
        return names.value(call, index, name)

    given: dict[str, Any] = {"max_tokens": value("max_tokens"), "seed": value("random_seed") or 0}
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if (penalty := value(name)) is not None:
            given[name] = penalty
    if (minimum := value("min_length")) is not None:
        given["min_tokens"] = minimum
    beams, returned = value("beam_width"), value("num_return_sequences")
    if beams is not None and beams < 1:
        raise invalid("best_of", f"must be at least 1, is {beams}", 1)
    if beams and beams > 1:
        given |= {"use_beam_search": True, "best_of": beams, "n": beams if returned is None else returned}
        given |= {"temperature": 0.0, "length_penalty": value("length_penalty") or 0.0}
        given["early_stopping"] = bool(value("early_stopping"))
    else:
        given |= _truncation(value("temperature"), value("top_k"), value("top_p"))
        given["n"] = 1 if returned is None else returned
    if value("return_log_probs"):
        given["logprobs"] = 0
    for name in ("return_context_logits", "return_generation_logits", "return_perf_metrics"):
        given[name] = bool(value(name))
    end = value("end_id")
    if end is not None:
        given["ignore_eos"] = True
        if end >= 0:
            check_ids("ignore_eos", [end], vocab_size)
            overrides["stop_token_ids"] = (*overrides.get("stop_token_ids", ()), end)
    return SamplingParams(**given, **overrides)


def check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise ``PenstockError`` (``invalid``) for token ids beyond the vocabulary."""
    wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise invalid(name, f"token ids must be from 0 to {vocab_size - 1}, has {wrong}", vocab_size - 1)


def guided_of(call: ModelCall, index: int, names: InputNames) -> dict[str, Any]:
    """The guided decoding parameters of one row; empty without ``guided_decoding_guide_type``."""
    kind = names.value(call, index, "guided_decoding_guide_type")
    guide = names.value(call, index, "guided_decoding_guide")
    if not kind:
        if guide:
            raise invalid("guided_decoding_guide_type", "is missing; guided_decoding_guide requires it")
        return {}
    if (field := GUIDED_INPUTS.get(kind.decode(errors="replace"))) is None:
        message = f"must be one of {', '.join(GUIDED_INPUTS)}, is {kind.decode(errors='replace')[:50]!r}"
        raise invalid("guided_decoding_guide_type", message)
    if field == "json_object":
        return {"guided_decoding": GuidedDecodingParams(json_object=True, source_field="guided_decoding_guide")}
    if not guide:
        raise invalid("guided_decoding_guide", f"is missing; the guide type {kind.decode()} requires it")
    text = guide.decode(errors="replace")
    return {"guided_decoding": GuidedDecodingParams(**{field: text}, source_field="guided_decoding_guide")}


def logit_bias_of(entries: Sequence[tuple[Sequence[int], float]]) -> dict[str, Any]:
    """Sum the weights of words per token. ``entries``: token ids and weight of each word."""
    result: dict[int, float] = {}
    for token_ids, weight in entries:
        for token_id in token_ids:
            result[token_id] = result.get(token_id, 0.0) + weight
    return {"logit_bias": result} if result else {}


def _truncation(temperature: float | None, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    for name, value, maximum in (("temperature", temperature, 100), ("top_k", top_k, None), ("top_p", top_p, 1)):
        between(name, 0 if value is None else value, 0, maximum)
    if top_k == 1 or not (top_k or top_p) or temperature == 0:
        return {"temperature": 0.0}
    return {"temperature": 1.0 if temperature is None else temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
