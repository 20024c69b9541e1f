"""Engines with random weights, their outputs, and the time of their steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from shapes import FORMATS, Model, Scale

from penstock.config.options import EngineOptions
from penstock.core import EngineRequest, SamplingParams
from penstock.engine.engine import Engine


@contextmanager
def engine(shape: Model, scale: Scale, format: str = "bf16", **options: Any) -> Iterator[Engine]:
    """Context with an engine of a model with this shape; its memory is freed at the end."""
    with TemporaryDirectory() as folder:
        fixed: dict[str, Any] = {
            "model": str(shape.save(Path(folder))),
            "load_format": "dummy",
            "device": scale.device,
            "ops": scale.ops,
            "dtype": scale.dtype,
            "quantization": FORMATS[format],
            "weight_cache_dir": "none",
            "guided_decoding_backend": "off",
        }
        one = Engine(EngineOptions(**fixed | scale.options | options))
        try:
            yield one
        finally:
            one.close()
            del one
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def prompts(model: Model, count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = Random(f"{seed} {length}")
    return [[rng.randrange(2, model.vocab) for _ in range(length)] for _ in range(count)]


def request(name: str, prompt: list[int], tokens: int, salt: str = "", **sampling: Any) -> EngineRequest:
    """Create a request. Requests with different ``salt`` share no prefix cache."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True} | sampling)
    return EngineRequest(request_id=name, prompt=prompt, sampling=params, cache_salt=salt)


@dataclass
class Answer:
    """Output of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, str, int]] = field(default_factory=list)
    """Token id, exact logprob (``float.hex``), and rank."""
    context_logits: bytes = b""
    cached_tokens: int = 0


def answers(one: Engine, requests: Sequence[EngineRequest]) -> dict[str, Answer]:
    """Run requests together. Raises ``RuntimeError`` if one fails."""
    found = {each.request_id: Answer() for each in requests}
    for each in requests:
        one.add(each)
    while one.busy:
        for delta in one.step():
            if delta.failure:
                raise RuntimeError(f"{delta.request_id}: {delta.failure.message}")
            answer = found[delta.request_id]
            answer.token_ids += delta.token_ids
            for row in delta.logprobs or ():
                answer.logprobs += [(entry.token_id, entry.logprob.hex(), entry.rank) for entry in row]
            answer.context_logits += delta.context_logits or b""
            answer.cached_tokens = max(answer.cached_tokens, delta.cached_tokens)
    return found


@dataclass
class Decoding:
    """Timed steps in which all sequences decode."""

    sequences: int
    steps: float
    seconds: float
    context: float
    """Average number of tokens per sequence."""

    @property
    def step(self) -> float:
        """Seconds per step."""
        return self.seconds / self.steps


def time_decoding(one: Engine, given: Sequence[list[int]], steps: int, step_tokens: int) -> Decoding:
    """Time steps in which all prompts decode: from the last prompt's first token to the end of the first sequence.

    Args:
        step_tokens: ``max_num_batched_tokens``. Prefill takes several steps, during which other sequences decode.
    """
    length = len(given[0])
    tokens = steps + 3 + 2 * len(given) * length // step_tokens
    counts: dict[str, int] = {}
    for i, prompt in enumerate(given):
        one.add(request(f"d{i}", prompt, tokens))
    begun, before, ended, after = 0.0, 0, 0.0, 0
    while one.busy:
        for delta in one.step():
            if delta.failure:
                raise RuntimeError(delta.failure.message)
            counts[delta.request_id] = counts.get(delta.request_id, 0) + len(delta.token_ids)
        now = time.perf_counter()
        if not begun and len(counts) == len(given):
            begun, before = now, sum(counts.values())
        elif begun and not ended and max(counts.values()) >= tokens - 1:
            ended, after = now, sum(counts.values())
    done = (after - before) / len(given)
    if not ended or done < 1:
        raise RuntimeError("no step decoded all sequences together: increase the number of steps")
    return Decoding(len(given), done, ended - begun, length + before / len(given) + done / 2)


def time_prefill(one: Engine, given: Sequence[list[int]]) -> list[float]:
    """Time to first token of each prompt in seconds, one prompt at a time."""
    taken = []
    for i, prompt in enumerate(given):
        begun = time.perf_counter()
        answers(one, [request(f"p{i}", prompt, 1)])
        taken.append(time.perf_counter() - begun)
    return taken
