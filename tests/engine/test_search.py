"""Searching for the likeliest: beams as transformers finds them, and the best of several samples."""

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
ASKED = [{"role": "user", "content": "Tell me about Anna, who lives in Paris."}]
BEAMS: dict[str, Any] = {"temperature": 0, "use_beam_search": True}


def searched(model: PreTrainedModel, prompt: list[int], params: SamplingParams) -> tuple[list[list[int]], list[float]]:
    """What transformers finds: sequences up to their end token, and what they are compared by."""
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


def draw(rng: Random) -> tuple[list[int], SamplingParams]:
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
def likely(model: PreTrainedModel, prompt: list[int], made: list[int]) -> list[float]:
    """The log probability of each token."""
    rows = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(made)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("config", ["qwen3", pytest.param("llama", marks=pytest.mark.thorough)])
def test_the_same_beams_as_transformers(config: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Alone; and together where there is no room for all, in short chunks, the same again."""
    folder, rng = tmp_path_factory.mktemp(config), Random(config)
    model = save(CONFIGS[config], folder)
    drawn = [draw(rng) for _ in range(30 if config == "llama" else 10)]
    options: dict[str, Any] = {"dtype": "float32", "block_size": 16, "weight_cache_dir": "none"}
    llm = LLM(folder, num_gpu_blocks_override=200, **options)
    for prompt, params in drawn:
        sequences, scores = searched(model, prompt, params)
        found = llm.generate(prompt, params, use_tqdm=False)[0].outputs
        assert [made.token_ids for made in found] == sequences
        for made, score in zip(found, scores, strict=True):
            compared = (made.cumulative_logprob or 0.0) / len(made.token_ids) ** params.length_penalty
            assert compared == pytest.approx(score, abs=1e-3, rel=1e-5)
            told = [position[token] for position, token in zip(made.logprobs or [], made.token_ids, strict=True)]
            assert sum(own.logprob for own in told) == pytest.approx(made.cumulative_logprob, abs=1e-3, rel=1e-5)
            if params.repetition_penalty == 1:
                assert [own.logprob for own in told] == pytest.approx(likely(model, prompt, made.token_ids), abs=1e-3)
    alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs for prompt, params in drawn]
    preemptions = 0
    for more in (
        {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 20},
        {"num_gpu_blocks_override": 20, "max_num_seqs": 5, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 40, "batch_scheduler_policy": "guaranteed_no_evict", "kv_cache_ratio": 0.5},
    ):
        pressed = LLM(folder, **{**options, **more})
        together = pressed.generate([prompt for prompt, _ in drawn], [params for _, params in drawn], use_tqdm=False)
        assert [output.outputs for output in together] == alone
        assert pressed.engine.scheduler.device_pool.num_free == pressed.engine.scheduler.device_pool.total
        preemptions += pressed.engine.scheduler.num_preemptions
        assert "batch_scheduler_policy" not in more or pressed.engine.scheduler.num_preemptions == 0
    assert preemptions


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_gpu_blocks_override=400, block_size=16)


def test_a_form_is_searched_within(llm: LLM) -> None:
    form = GuidedDecodingParams(choice=["Paris", "Rome", "Oslo", "Rio de Janeiro"])
    made = llm.chat(ASKED, SamplingParams(guided_decoding=form, n=3, max_tokens=20, **BEAMS), use_tqdm=False)[0].outputs
    assert len({m.text for m in made}) == 3 and {m.text for m in made} < set(form.choice or ())
    values = [m.cumulative_logprob or 0.0 for m in made]
    assert sorted((v / len(m.token_ids) for v, m in zip(values, made, strict=True)), reverse=True) == [
        v / len(m.token_ids) for v, m in zip(values, made, strict=True)
    ]


def test_a_search_that_runs_out_of_tokens_ends(llm: LLM) -> None:
    """With what it has found, as often as it takes; with an error where that is nothing."""
    few: dict[str, Any] = {"n": 3, "max_tokens": 4, "allowed_token_ids": (500, 501), **BEAMS}
    some = SamplingParams(bad_word_ids=((500, 500), (500, 501)), **few)
    none = SamplingParams(bad_word_ids=tuple((a, b) for a in (500, 501) for b in (500, 501)), **few)
    found, nothing = llm.generate([[5, 6, 7]] * 2, [some, none], use_tqdm=False)
    assert [made.finish_reason for made in found.outputs] == ["length"] * 3
    assert found.outputs[1].token_ids == found.outputs[2].token_ids
    assert [made.finish_reason for made in nothing.outputs] == ["error"] * 3


def test_the_best_of_several_samples(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, logprobs=0)
    every = llm.chat(ASKED, params.replace(n=6), use_tqdm=False)[0].outputs
    best = llm.chat(ASKED, params.replace(n=2, best_of=6, logprobs=None), use_tqdm=False)[0].outputs
    ranked = sorted(every, key=lambda made: -(made.cumulative_logprob or 0.0))[:2]
    assert [(m.text, m.cumulative_logprob) for m in best] == [(m.text, m.cumulative_logprob) for m in ranked]
    assert [m.index for m in best] == [0, 1] and best[0].logprobs is None
    told = llm.chat(ASKED, params.replace(n=2, best_of=6), use_tqdm=False)[0].outputs
    assert [m.logprobs for m in told] == [m.logprobs for m in ranked]


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
def test_what_does_not_go_together_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(PenstockError) as caught:
        SamplingParams(**given)
    assert caught.value.failure.field == field


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--num-gpu-blocks-override", "400", "--max-num-seqs", "8") as server:
        yield server


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0, "n": 2, "extra_body": {"use_beam_search": True, "best_of": 4, "length_penalty": 0.8}},
        {"temperature": 0.9, "seed": 5, "n": 2, "extra_body": {"best_of": 4}},
    ],
)
def test_over_http(served: Served, llm: LLM, asked: dict[str, Any]) -> None:
    """Streamed, what was found comes at the end."""
    client = openai.OpenAI(base_url=served.url, api_key="none")
    common: dict[str, Any] = {"model": "default", "messages": ASKED, "max_tokens": 24, **asked}
    whole = [choice.message.content for choice in client.chat.completions.create(**common).choices]
    pieces = ["", ""]
    for chunk in client.chat.completions.create(stream=True, **common):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    more = asked["extra_body"]
    params = SamplingParams(max_tokens=24, **{k: v for k, v in asked.items() if k != "extra_body"}, **more)
    here = [made.text for made in llm.chat(ASKED, params, use_tqdm=False)[0].outputs]
    assert whole == pieces == here
    text = {"model": "default", "prompt": "Once upon", "max_tokens": 8, **asked}
    assert len(client.completions.create(**text).choices) == 2


@pytest.mark.parametrize(
    ("given", "field"),
    [({"n": 9}, "n"), ({"best_of": 9}, "best_of"), ({"use_beam_search": True, "temperature": 1}, "temperature")],
)
def test_what_cannot_be_is_refused_over_http(served: Served, given: dict[str, Any], field: str) -> None:
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=ASKED, extra_body=given)  # type: ignore[call-overload]
    assert caught.value.param == field
