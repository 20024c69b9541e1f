"""Measured generation with a local engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .offline_options import OfflineOptions
from .prompts import token_ids
from .workload import Request

if TYPE_CHECKING:
    from penstock.core import SamplingParams
    from penstock.frontend.llm import LLM


class Generation(NamedTuple):
    """Time and tokens of a generation."""

    seconds: float
    input_tokens: int
    output_tokens: int


def generate(llm: LLM, requests: Sequence[Request], options: OfflineOptions, show: bool = False) -> Generation:
    """Generate the outputs of all requests at once."""
    vocabulary = llm.engine.info.vocab_size
    prompts: list[Any] = [request.text or token_ids(request.parts, 0, vocabulary) for request in requests]
    params = [_sampling(request.output_len, options) for request in requests]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=show)
    seconds = time.perf_counter() - started
    input_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    output_tokens = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    return Generation(seconds, input_tokens, output_tokens)


def _sampling(output_len: int, options: OfflineOptions) -> SamplingParams:
    from penstock.core import SamplingParams

    if options.use_beam_search:
        chosen: dict[str, Any] = {"use_beam_search": True, "n": options.n, "temperature": 0}
    else:
        chosen = {"n": options.n, "temperature": 1 if options.n > 1 else 0}
    return SamplingParams(max_tokens=output_len, ignore_eos=True, detokenize=options.detokenize, **chosen)
