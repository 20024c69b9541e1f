"""Faults within an engine: a failing request ends the affected sequences only; a failed device ends the engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoints import SMALL, save
from executors import FailingDevice, engine_options
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from penstock.core import Code, EngineRequest, Failure, FinishReason, PenstockError, SamplingParams
from penstock.engine.engine import Engine
from penstock.engine.spec_decode.speculation import MAX_FAILURES
from penstock.engine.spec_decode.suffix import SuffixDrafter

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

NAN_TOKEN = 299
"""Token with an embedding of NaN. All logits of a prompt that contains it are NaN."""
LONGEST, SIZE, BLOCKS = 128, 16, 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save(Qwen3Config(**SMALL | {"tie_word_embeddings": False}, head_dim=32, sliding_window=None), folder)
    set_embeddings_to_nan(folder, slice(NAN_TOKEN, None))
    return folder


def set_embeddings_to_nan(folder: Path, tokens: slice) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][tokens] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def start(checkpoint: Path, **options: Any) -> Engine:
    fixed = {"model": str(checkpoint), "dtype": "float32", "weight_cache_dir": "none", "max_model_len": LONGEST}
    return Engine(engine_options(**fixed | {"num_gpu_blocks_override": BLOCKS, "block_size": SIZE} | options))


def request(name: str, prompt: list[int], **params: Any) -> EngineRequest:
    sampling = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 1} | params)
    return EngineRequest(request_id=name, prompt=prompt, sampling=sampling)


class Output(NamedTuple):
    """Collected output of one sequence."""

    token_ids: list[int]
    logprobs: list[Any]
    finished: FinishReason | None
    failure: Failure | None
    cached_tokens: int = 0

    @property
    def bits(self) -> tuple[Any, ...]:
        return self.token_ids, self.logprobs, self.finished


def run(engine: Engine, requests: Iterable[EngineRequest]) -> dict[tuple[str, int], Output]:
    """Run requests to their end; return the outputs by (request id, sequence index)."""
    for one in requests:
        engine.add(one)
    found: dict[tuple[str, int], Output] = {}
    while engine.busy:
        for delta in engine.step():
            known = found.setdefault(
                (delta.request_id, delta.sequence), Output([], [], None, None, delta.cached_tokens)
            )
            known.token_ids.extend(delta.token_ids)
            known.logprobs.extend(delta.logprobs or [delta.cumulative_logprob] * bool(delta.cumulative_logprob))
            found[delta.request_id, delta.sequence] = known._replace(finished=delta.finished, failure=delta.failure)
    assert engine.scheduler.device_pool.num_free == engine.scheduler.device_pool.total, "not every block was freed"
    return found


def bits(found: dict[tuple[str, int], Output], prefix: str = "") -> dict[tuple[str, int], Any]:
    """Return the parts of the outputs that must not depend on other requests, for all request ids with the prefix."""
    return {name: output.bits for name, output in found.items() if name[0].startswith(prefix)}


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.7, "n": 2},
    {"temperature": 0, "use_beam_search": True, "best_of": 3},
]


@pytest.mark.parametrize("speculative", ["", '{"method": "ngram", "prompt_lookup_min": 1, "adaptive": false}'])
def test_nan_logits_fail_their_sequence_only(checkpoint: Path, speculative: str) -> None:
    """Results of other requests in the batch, and of later requests that use the freed blocks, are bit-identical to
    those of each request alone."""
    good = [request(f"good {i}", [5, 6, 7, 8] * 4 + [i], **params) for i, params in enumerate(PARAMS)]
    bad = [request(f"bad {i}", [i, NAN_TOKEN] * 20, **params) for i, params in enumerate(PARAMS)]
    engine = start(checkpoint, speculative_config=speculative)
    alone: dict[tuple[str, int], Any] = {}
    for one in good:
        alone |= bits(run(engine, [one]))
    together = run(engine, [one for pair in zip(bad, good, strict=True) for one in pair])
    again = run(engine, [request(f"bad again {i}", [i, NAN_TOKEN] * 20) for i in range(3)])
    assert bits(together, "good") == alone
    assert bits(run(engine, good)) == alone
    failed = [output for name, output in (together | again).items() if name[0].startswith("bad")]
    assert len(failed) == 9
    for output in failed:
        assert output.failure and output.failure.code is Code.INTERNAL and "are not finite" in output.failure.message
        assert output.cached_tokens == 0, "blocks with NaN were found in the prefix cache"


def test_draft_token_that_makes_logits_nan_does_not_change_output(checkpoint: Path) -> None:
    """The model has generated the token in an answer that repeats another token; the next answer repeats it longer."""
    engine = start(checkpoint, speculative_config='{"method": "suffix", "adaptive": false}')
    params = {"allowed_token_ids": (7, NAN_TOKEN), "logit_bias": {7: 10.0}, "temperature": 5.0}
    answer: list[int] = []
    for seed in range(100):
        answer = run(engine, [request("nan", [3], **params | {"seed": seed})])["nan", 0].token_ids
        if len(answer) > 8 and answer[-1] == NAN_TOKEN:
            break
    assert engine.speculation and answer[-1] == NAN_TOKEN
    drafts = engine.speculation.stats.drafts
    (found,) = run(engine, [request("longer", [4], allowed_token_ids=(7,), temperature=0)]).values()
    assert (found.token_ids, found.failure) == ([7] * 20, None)
    assert engine.speculation.stats.drafts > drafts


def test_sequence_without_allowed_token_fails(checkpoint: Path) -> None:
    """The failure occurs at the second token: each allowed token is then the end of a bad word."""
    params = {"allowed_token_ids": (5, 6), "bad_word_ids": ((6, 5), (5, 5), (5, 6), (6, 6))}
    other = request("other", [7, 8])
    engine = start(checkpoint)
    alone = run(engine, [other])
    for temperature in (0, 1.0):
        found = run(engine, [request("none", [1, 2, 3], temperature=temperature, **params), other])
        assert bits(found, "other") == bits(alone)
        output = found["none", 0]
        assert output.token_ids[0] in (5, 6) and output.failure
        assert output.failure.code is Code.INVALID and "no token can be sampled" in output.failure.message


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"allowed_token_ids": (5, 6), "bad_word_ids": ((6,), (7,), (5,))}, "allowed_token_ids"),
        ({"bad_word_ids": tuple((token,) for token in range(300))}, "bad_word_ids"),
        ({"allowed_token_ids": (5, 6), "bad_word_ids": ((6,),), "min_tokens": 1, "stop_token_ids": (5,)}, "min_tokens"),
    ],
)
def test_params_allowing_no_token_are_refused(checkpoint: Path, params: dict[str, Any], field: str) -> None:
    engine = start(checkpoint)
    with pytest.raises(PenstockError) as refused:
        engine.add(request("none", [1], **params))
    assert refused.value.failure.field == field


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailingDevice:
    return FailingDevice(tmp_path, monkeypatch)


EXECUTORS = pytest.mark.parametrize("backend", ["uni", "mp"])


@pytest.mark.slow_after(1)
@EXECUTORS
def test_failed_step_ends_its_requests_only(checkpoint: Path, device: FailingDevice, backend: str) -> None:
    engine = start(checkpoint, max_num_seqs=2, distributed_executor_backend=backend)
    waiting = request("waiting", [9, 9, 9])
    alone = run(engine, [waiting])
    for number in range(2):
        engine.add(request(str(number), [1, 2, 3, number]))
    engine.step()
    engine.add(waiting)
    device.fail(1)
    failed = engine.step()
    assert {delta.request_id for delta in failed} == {"0", "1"}
    assert all(delta.failure and delta.failure.code is Code.INTERNAL for delta in failed)
    assert engine.failure is None
    assert bits(run(engine, [])) == bits(alone)


@pytest.mark.slow_after(1)
@EXECUTORS
def test_failed_device_ends_all_requests_and_engine(checkpoint: Path, device: FailingDevice, backend: str) -> None:
    engine = start(checkpoint, max_num_seqs=2, distributed_executor_backend=backend)
    for number in range(4):
        engine.add(request(str(number), [1, 2, 3, number], n=2))
    device.fail()
    ended = engine.step()
    assert sorted((delta.request_id, delta.sequence) for delta in ended) == [
        (str(number), sequence) for number in range(4) for sequence in range(2)
    ]
    assert all(delta.failure and delta.failure.retryable for delta in ended if delta.request_id != "0")
    assert not engine.busy and engine.scheduler.device_pool.num_free == engine.scheduler.device_pool.total
    with pytest.raises(PenstockError, match="has to be restarted") as refused:
        engine.add(request("more", [1]))
    assert refused.value.failure.code is Code.UNAVAILABLE


def test_failing_draft_model_fails_no_request(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All weights of the draft model are NaN. Drafting stops after ``MAX_FAILURES`` failures, until a restart."""
    save(Qwen3Config(**SMALL, head_dim=32, sliding_window=None), tmp_path)
    set_embeddings_to_nan(tmp_path, slice(None))
    requests = [request(str(i), [3, 4, 5, i], **PARAMS[i % 4]) for i in range(MAX_FAILURES + 4)]
    config = json.dumps({"model": str(tmp_path), "adaptive": False})
    alone, drafting = start(checkpoint), start(checkpoint, speculative_config=config)
    with caplog.at_level(logging.ERROR):
        for one in requests:
            assert bits(run(drafting, [one])) == bits(run(alone, [one]))
    assert "drafting failed" in caplog.text and "until the engine restarts" in caplog.text
    assert len(caplog.records) == MAX_FAILURES


def test_failed_draft_ends_drafting_of_its_sequence(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [request(str(i), [3, 4, 3, 4, i, 3, 4], temperature=0) for i in range(5, 8)]
    plain = run(start(checkpoint), requests)
    propose = SuffixDrafter.propose

    def failing_propose(self: SuffixDrafter, sequence: Any, state: Any) -> Any:
        if sequence.request.request_id == "6":
            raise IndexError("out of reach")
        return propose(self, sequence, state)

    monkeypatch.setattr(SuffixDrafter, "propose", failing_propose)
    engine = start(checkpoint, speculative_config='{"method": "ngram", "prompt_lookup_min": 1, "adaptive": false}')
    assert bits(run(engine, requests)) == bits(plain)
    assert engine.speculation and engine.speculation.stats.drafts > 0
    assert len(caplog.records) == 1 and "for the affected sequences" in caplog.text


def test_failed_sampling_accepts_no_draft(checkpoint: Path) -> None:
    """A draft exists for the second generated token, but no token is allowed there."""
    params = {"allowed_token_ids": (5, 6), "bad_word_ids": ((6, 5), (5, 5), (5, 6), (6, 6))}
    engine = start(checkpoint, speculative_config='{"method": "ngram", "prompt_lookup_min": 1, "adaptive": false}')
    found = run(engine, [request("none", [5, 6] * 8, temperature=0, return_perf_metrics=True, **params)])
    assert found["none", 0].failure and engine.speculation
    counts = engine.speculation.stats
    assert (counts.drafts, counts.accepted_tokens) == (1, 0)
