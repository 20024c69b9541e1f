"""``LLM`` with the bundled demo model: answers equal to transformers', sampling defaults, stop strings, errors."""

from __future__ import annotations

import math
import os
import shutil
import signal
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from corpus import Check, Conversation
from evaluate import Local, Penstock, held_out
from transformers import AutoModelForCausalLM

from penstock import LLM, PenstockError, SamplingParams, demo
from penstock.core import Code

QUESTIONS = int(os.environ.get("PENSTOCK_QUESTIONS", "1"))
"""Number of evaluation questions per skill."""
GREEDY = SamplingParams(temperature=0, max_tokens=40)
CANADA = [{"role": "user", "content": "What is the capital of Canada?"}]


@cache
def questions() -> list[Conversation]:
    drawn = held_out(count=QUESTIONS, seed=3)
    return [c for cs in drawn.values() for c in cs if c.check is not Check.FREE]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_gpu_blocks_override=400)


@pytest.mark.slow
def test_answers_equal_transformers() -> None:
    """Greedy answers in float32 equal those of transformers to the last character."""
    ours, theirs = (backend(demo.CHAT, "float32").ask(questions()) for backend in (Penstock, Local))
    assert ours == theirs


@pytest.mark.slow
def test_int8_kv_cache_keeps_95_percent_of_answers() -> None:
    exact, rounded = (Penstock(demo.CHAT, kv_cache_dtype=dtype).ask(questions()) for dtype in ("auto", "int8"))
    same = sum(a == b for a, b in zip(exact, rounded, strict=True))
    assert same >= 0.95 * len(exact), f"{same} of {len(exact)}"


def test_default_sampling_params_come_from_generation_config(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.4, top_k=20, top_p=0.95)
    for options in ({"generation_config": "vllm"}, {"compat": "ascend-vllm"}):
        assert LLM(num_gpu_blocks_override=50, **options).get_default_sampling_params() == SamplingParams()
    vllm_options = {"enforce_eager": True, "trust_remote_code": True, "tensor_parallel_size": 1, "dtype": "float"}
    changed = LLM(num_gpu_blocks_override=50, **vllm_options, override_generation_config={"temperature": 0.5})  # type: ignore[arg-type]
    assert changed.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=20, top_p=0.95)
    with pytest.raises(PenstockError, match=r"generation_config: missing/generation_config\.json does not exist"):
        LLM(generation_config="missing")


def test_generation_config_folder_sets_sampling_params(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 5, "eos_token_id": 0}')
    llm = LLM(num_gpu_blocks_override=50, generation_config=str(tmp_path))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=5)
    tokens = SamplingParams(temperature=0, max_tokens=1, logit_bias={0: 100})
    (output,) = llm.generate("Once upon a time", tokens, use_tqdm=False)
    assert output.outputs[0].token_ids == [0] and output.outputs[0].finish_reason == "stop", (
        "its EOS token must end the output"
    )


def test_request_without_max_tokens_gets_max_output_len() -> None:
    llm = LLM(num_gpu_blocks_override=50, max_output_len=5)
    assert llm.get_default_sampling_params().max_tokens == 5
    (output,) = llm.generate("Once upon a time", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


def test_vocabulary_sketch_does_not_change_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    expected = Penstock(demo.CHAT).ask(questions()[:9])
    monkeypatch.setattr(cpu.sketch, "MIN_SKETCH_OUTPUTS", 64)
    assert Penstock(demo.CHAT).ask(questions()[:9]) == expected


@torch.inference_mode()
def test_bfloat16_error_is_close_to_transformers() -> None:
    """The reference is transformers in float32. The RMS error of prompt logprobs is at most 1.2 times that of
    transformers in bfloat16, and the most likely token is equal at 99.5 % of the answers' positions."""
    exact, rough = (AutoModelForCausalLM.from_pretrained(demo.CHAT, dtype=d) for d in (torch.float32, torch.bfloat16))
    llm = LLM(dtype="bfloat16", num_gpu_blocks_override=400)
    render = partial(llm.get_tokenizer().apply_chat_template, tokenize=False, add_generation_prompt=True)
    chosen = questions()[::3]
    options = [{"tools": c.tools, "enable_thinking": c.thinking} for c in chosen]
    texts = [render(c.messages, **arguments) for c, arguments in zip(chosen, options, strict=True)]
    before = [render(c.messages[:-1], **arguments) for c, arguments in zip(chosen, options, strict=True)]
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    errors, positions, equal = [0.0, 0.0], 0, 0
    for output, prompt in zip(outputs, before, strict=True):
        ids = torch.tensor([output.prompt_token_ids])
        expected, theirs = (model(ids).logits[0].float().log_softmax(-1)[:-1] for model in (exact, rough))
        reported = [position or {} for position in (output.prompt_logprobs or [])[1:]]
        token_ids = ids[0, 1:].tolist()
        ours = torch.tensor([position[token].logprob for position, token in zip(reported, token_ids, strict=True)])
        rows = range(len(token_ids))
        for i, got in enumerate((ours, theirs[rows, token_ids])):
            errors[i] += float((got - expected[rows, token_ids]).square().sum())
        answer = slice(len(llm.get_tokenizer().encode(prompt)) - 1, None)
        best = [next(token for token, found in position.items() if found.rank == 1) for position in reported[answer]]
        equal += sum(a == b for a, b in zip(best, expected[answer].argmax(-1).tolist(), strict=True))
        positions += len(best)
    assert math.sqrt(errors[0]) <= 1.2 * math.sqrt(errors[1])
    assert equal >= 0.995 * positions


def test_sequences_of_a_request_differ_and_repeat_with_seed(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=120)
    (output,) = llm.chat([{"role": "user", "content": "Tell me a story."}], params, use_tqdm=False)
    assert len({made.text for made in output.outputs}) == 4
    assert [made.index for made in output.outputs] == [0, 1, 2, 3]
    (again,) = llm.chat([{"role": "user", "content": "Tell me a story."}], params, use_tqdm=False)
    assert [made.text for made in again.outputs] == [made.text for made in output.outputs]


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_text(llm: LLM, include: bool) -> None:
    """The stop string begins in the middle of a token and is longer than a token."""
    params = GREEDY.replace(stop=("f Can", "Ottawa"), include_stop_str_in_output=include)
    (output,) = llm.chat(CANADA, params, use_tqdm=False)
    (made,) = output.outputs
    assert made.text == "The capital o" + "f Can" * include
    assert (made.finish_reason, made.stop_reason) == ("stop", "f Can")
    assert not llm.engine.busy


def test_string_and_lists_are_accepted_for_tuples(llm: LLM) -> None:
    """Users of vLLM pass a string or lists where Penstock's fields are tuples."""
    params = SamplingParams(temperature=0, max_tokens=40, stop="Ottawa", stop_token_ids=[3], bad_words=["Paris"])  # type: ignore[arg-type]
    (output,) = llm.chat(CANADA, params, use_tqdm=False)
    assert output.outputs[0].text == "The capital of Canada is "


def test_interrupt_ends_requests_and_frees_blocks(llm: LLM) -> None:
    """Ctrl-C is pressed in the middle of a batch, as in a notebook."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=2000, ignore_eos=True), use_tqdm=False)
    assert not llm.engine.busy
    assert llm.engine.scheduler.device_pool.num_free == llm.engine.scheduler.device_pool.total
    assert llm.chat(CANADA, GREEDY, use_tqdm=False)[0].outputs[0].text == "The capital of Canada is Ottawa."


def test_eos_token_of_tokenizer_ends_output(llm: LLM, tmp_path: Path) -> None:
    """generation_config.json names another EOS token, as in checkpoints fine-tuned for chat."""
    for path in demo.CHAT.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    (output,) = LLM(tmp_path, num_gpu_blocks_override=40).chat(CANADA, GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"


def test_bad_words_are_not_generated(llm: LLM) -> None:
    (output,) = llm.chat(CANADA, GREEDY.replace(bad_words=("Ottawa",)), use_tqdm=False)
    assert "Ottawa" not in output.outputs[0].text


def test_loglikelihoods_equal_transformers(llm: LLM) -> None:
    """The three continuations share a batch. The correct answer is the most likely."""
    prompt = llm.get_tokenizer().apply_chat_template(CANADA, tokenize=False, add_generation_prompt=True)
    choices = [f"The capital of Canada is {city}." for city in ("Paris", "Ottawa", "Lima")]
    results = llm.loglikelihood([prompt] * 3, choices, use_tqdm=False)
    assert max(range(3), key=lambda i: results[i].logprob) == 1
    assert [result.is_greedy for result in results] == [False, True, False]
    model = AutoModelForCausalLM.from_pretrained(demo.CHAT, dtype=torch.float32)
    before = llm.get_tokenizer().encode(prompt)
    for result in results:
        with torch.inference_mode():
            table = model(torch.tensor([before + result.token_ids])).logits[0].log_softmax(-1)
        rows = range(len(before) - 1, len(before) + len(result.token_ids) - 1)
        assert result.logprobs == pytest.approx(table[rows, result.token_ids].tolist(), abs=1e-4)
    with pytest.raises(PenstockError, match="continuations"):
        llm.loglikelihood([prompt, prompt], choices)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], GREEDY, "prompt"),
        ([1] * 2048, GREEDY, "prompt"),
        ([4000], GREEDY, "prompt"),
        ({"text": "?"}, GREEDY, "prompt"),
        (["a"], GREEDY, "prompt"),
        ("half a pair: \ud800", GREEDY, "prompt"),
        ([5], SamplingParams(allowed_token_ids=(6,), stop_token_ids=(6,), min_tokens=2), "min_tokens"),
        ([5], SamplingParams(stop_token_ids=(4000,)), "stop_token_ids"),
        ([5], SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
    ],
)
def test_invalid_request_is_refused_with_field(llm: LLM, prompt: object, params: SamplingParams, field: str) -> None:
    with pytest.raises(PenstockError) as refused:
        llm.generate([[5], prompt], params, use_tqdm=False)  # type: ignore[list-item]
    assert refused.value.failure.field == field
    assert refused.value.failure.code in (Code.INVALID, Code.TOO_LONG)
    assert not llm.engine.busy, "a request of the batch was started"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, "did you mean max_num_seqs"),
        ({"dtype": "int3"}, "dtype"),
        ({"max_model_len": 10**6}, "context of 2048"),
        ({"num_gpu_blocks_override": 2}, "do not fit into 2 KV blocks"),
        ({"device": "gpu"}, "use cpu, cuda"),
        ({"block_size": 24, "ops": "cpu"}, "multiple of 16"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096, "long_prefill_token_threshold": 9},
            "long_prefill_token_threshold",
        ),
    ],
)
def test_invalid_options_fail_the_start(options: dict[str, object], message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        LLM(**options)  # type: ignore[arg-type]


def test_chunked_prefill_and_small_batches_keep_answers() -> None:
    """Prompts are computed in chunks of 64 tokens, at most eight at a time; all blocks are freed."""
    prompts = [llm_prompt * 20 for llm_prompt in ([5, 6, 7], [8, 9], [10, 11, 12, 13])] * 8
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    small = LLM(num_gpu_blocks_override=40, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False)
    large = LLM(num_gpu_blocks_override=400)
    ours, theirs = (
        [o.outputs[0].token_ids for o in m.generate(prompts, params, use_tqdm=False)] for m in (small, large)
    )
    assert ours == theirs
    assert small.engine.scheduler.device_pool.num_free == small.engine.scheduler.device_pool.total
