"""Beam search, compared with transformers, and selection of the best of several samples."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import openai
import pytest
import torch
from checkpoints import SMALL, save
from serving import Served
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from penstock import LLM, GuidedDecodingParams, PenstockError, SamplingParams

CONFIGS = {"qwen3": Qwen3Config(**SMALL, head_dim=32, sliding_window=None), "llama": LlamaConfig(**SMALL)}
MESSAGES = [{"role": "user", "content": "Tell me about Anna, who lives in Paris."}]
BEAMS: dict[str, Any] = {"temperature": 0, "use_beam_search": True}


def search_with_transformers(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams
) -> tuple[list[list[int]], list[float]]:
    """Return transformers' sequences, cut after their end token, and their scores."""
    stops = list(params.stop_token_ids)
    found = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=params.max_tokens,
        num_beams=params.num_sequences,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=stops,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    made = [tokens[len(prompt) :] for tokens in found.sequences.tolist()]
    ends = [next((i for i, token in enumerate(tokens) if token in stops), len(tokens) - 1) for tokens in made]
    return [tokens[: end + 1] for tokens, end in zip(made, ends, strict=True)], found.sequences_scores.tolist()


def random_request(rng: Random) -> tuple[list[int], SamplingParams]:
    width = rng.choice((2, 3, 4))
    return [rng.randrange(2, 300) for _ in range(rng.randint(1, 30))], SamplingParams(
        n=rng.randint(1, width),
        best_of=width,
        length_penalty=rng.choice((1.0, 0.0, 2.0, -1.0)),
        early_stopping=rng.choice((False, True, "never")),
        max_tokens=rng.randint(1, 40),
        stop_token_ids=tuple(rng.randrange(2, 300) for _ in range(rng.choice((1, 2, 40)))),
        ignore_eos=True,
        repetition_penalty=rng.choice((1.0, 1.2)),
        logprobs=0,
        **BEAMS,
    )


@torch.inference_mode()
def token_logprobs(model: PreTrainedModel, prompt: list[int], made: list[int]) -> list[float]:
    """Return the logprob of each generated token."""
    rows = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(made)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("config", ["qwen3", pytest.param("llama", marks=pytest.mark.thorough)])
def test_beams_equal_beams_of_transformers(config: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Requests run alone, and then in a batch with small KV caches and short chunks."""
    folder, rng = tmp_path_factory.mktemp(config), Random(config)
    model = save(CONFIGS[config], folder)
    drawn = [random_request(rng) for _ in range(30 if config == "llama" else 10)]
    options: dict[str, Any] = {"dtype": "float32", "block_size": 16, "weight_cache_dir": "none"}
    llm = LLM(folder, num_gpu_blocks_override=200, **options)
    for prompt, params in drawn:
        sequences, scores = search_with_transformers(model, prompt, params)
        found = llm.generate(prompt, params, use_tqdm=False)[0].outputs
        assert [made.token_ids for made in found] == sequences
        for made, score in zip(found, scores, strict=True):
            compared = (made.cumulative_logprob or 0.0) / len(made.token_ids) ** params.length_penalty
            assert compared == pytest.approx(score, abs=1e-3, rel=1e-5)
            entries = [position[token] for position, token in zip(made.logprobs or [], made.token_ids, strict=True)]
            logprobs = [entry.logprob for entry in entries]
            assert sum(logprobs) == pytest.approx(made.cumulative_logprob, abs=1e-3, rel=1e-5)
            if params.repetition_penalty == 1:
                assert logprobs == pytest.approx(token_logprobs(model, prompt, made.token_ids), abs=1e-3)
    alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs for prompt, params in drawn]
    preemptions = 0
    for more in (
        {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 20},
        {"num_gpu_blocks_override": 20, "max_num_seqs": 5, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 40, "batch_scheduler_policy": "guaranteed_no_evict", "kv_cache_ratio": 0.5},
    ):
        small = LLM(folder, **{**options, **more})
        together = small.generate([prompt for prompt, _ in drawn], [params for _, params in drawn], use_tqdm=False)
        assert [output.outputs for output in together] == alone
        assert small.engine.scheduler.device_pool.num_free == small.engine.scheduler.device_pool.total
        preemptions += small.engine.scheduler.num_preemptions
        assert "batch_scheduler_policy" not in more or small.engine.scheduler.num_preemptions == 0
    assert preemptions


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_gpu_blocks_override=400, block_size=16)


def test_beam_search_satisfies_constraint(llm: LLM) -> None:
    constraint = GuidedDecodingParams(choice=["Paris", "Rome", "Oslo", "Rio de Janeiro"])
    made = llm.chat(MESSAGES, SamplingParams(guided_decoding=constraint, n=3, max_tokens=20, **BEAMS), use_tqdm=False)[
        0
    ].outputs
    assert len({m.text for m in made}) == 3 and {m.text for m in made} < set(constraint.choice or ())
    values = [m.cumulative_logprob or 0.0 for m in made]
    assert sorted((v / len(m.token_ids) for v, m in zip(values, made, strict=True)), reverse=True) == [
        v / len(m.token_ids) for v, m in zip(values, made, strict=True)
    ]


def test_beam_search_without_allowed_tokens_ends(llm: LLM) -> None:
    """The beams found so far are returned, the last one repeated up to ``n``. Without any beam, it is an error."""
    few: dict[str, Any] = {"n": 3, "max_tokens": 4, "allowed_token_ids": (500, 501), **BEAMS}
    some = SamplingParams(bad_word_ids=((500, 500), (500, 501)), **few)
    none = SamplingParams(bad_word_ids=tuple((a, b) for a in (500, 501) for b in (500, 501)), **few)
    found, nothing = llm.generate([[5, 6, 7]] * 2, [some, none], use_tqdm=False)
    assert [made.finish_reason for made in found.outputs] == ["length"] * 3
    assert found.outputs[1].token_ids == found.outputs[2].token_ids
    assert [made.finish_reason for made in nothing.outputs] == ["error"] * 3


def test_best_of_returns_most_likely_samples(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, logprobs=0)
    samples = llm.chat(MESSAGES, params.replace(n=6), use_tqdm=False)[0].outputs
    best = llm.chat(MESSAGES, params.replace(n=2, best_of=6, logprobs=None), use_tqdm=False)[0].outputs
    ranked = sorted(samples, key=lambda made: -(made.cumulative_logprob or 0.0))[:2]
    assert [(m.text, m.cumulative_logprob) for m in best] == [(m.text, m.cumulative_logprob) for m in ranked]
    assert [m.index for m in best] == [0, 1] and best[0].logprobs is None
    with_logprobs = llm.chat(MESSAGES, params.replace(n=2, best_of=6), use_tqdm=False)[0].outputs
    assert [m.logprobs for m in with_logprobs] == [m.logprobs for m in ranked]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "temperature": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"use_beam_search": True, "n": 2}, "temperature"),
        ({**BEAMS}, "best_of"),
        ({**BEAMS, "n": 2, "top_k": 5}, "top_k"),
        ({**BEAMS, "n": 2, "top_p": 0.5}, "top_p"),
        ({**BEAMS, "n": 2, "logprobs": 1}, "logprobs"),
        ({**BEAMS, "n": 2, "return_generation_logits": True}, "return_generation_logits"),
        ({**BEAMS, "n": 2, "stop": ["x"]}, "stop"),
        ({**BEAMS, "n": 2, "early_stopping": "soon"}, "early_stopping"),
        ({**BEAMS, "n": 100, "stop_token_ids": tuple(range(20))}, "stop_token_ids"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_incompatible_params_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(PenstockError) as caught:
        SamplingParams(**given)
    assert caught.value.failure.field == field


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--num-gpu-blocks-override", "400", "--max-num-seqs", "8") as server:
        yield server


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "n": 2, "extra_body": {"use_beam_search": True, "best_of": 4, "length_penalty": 0.8}},
        {"temperature": 0.9, "seed": 5, "n": 2, "extra_body": {"best_of": 4}},
    ],
)
def test_search_over_http_gives_results_of_llm(served: Served, llm: LLM, fields: dict[str, Any]) -> None:
    """A stream sends the results at its end."""
    client = openai.OpenAI(base_url=served.url, api_key="none")
    common: dict[str, Any] = {"model": "default", "messages": MESSAGES, "max_tokens": 24, **fields}
    texts = [choice.message.content for choice in client.chat.completions.create(**common).choices]
    streamed = ["", ""]
    for chunk in client.chat.completions.create(stream=True, **common):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    more = fields["extra_body"]
    params = SamplingParams(max_tokens=24, **{k: v for k, v in fields.items() if k != "extra_body"}, **more)
    expected = [made.text for made in llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs]
    assert texts == streamed == expected
    text = {"model": "default", "prompt": "Once upon", "max_tokens": 8, **fields}
    assert len(client.completions.create(**text).choices) == 2


@pytest.mark.parametrize(
    ("given", "field"),
    [({"n": 9}, "n"), ({"best_of": 9}, "best_of"), ({"use_beam_search": True, "temperature": 1}, "temperature")],
)
def test_invalid_search_is_refused_over_http(served: Served, given: dict[str, Any], field: str) -> None:
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=MESSAGES, extra_body=given)  # type: ignore[call-overload]
    assert caught.value.param == field
