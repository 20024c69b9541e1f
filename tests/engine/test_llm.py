"""``LLM`` on the model in the box: the library's own answers, and what callers may ask besides."""

from __future__ import annotations

import math
import os
import shutil
import signal
from functools import cache
from pathlib import Path

import pytest
import torch
from corpus import Check, Conversation
from evaluate import Local, Penstock, held_out
from transformers import AutoModelForCausalLM

from penstock import LLM, PenstockError, SamplingParams, demo
from penstock.core import Code

QUESTIONS = int(os.environ.get("PENSTOCK_QUESTIONS", "1"))
"""For each of the evaluation's skills."""
GREEDY = SamplingParams(temperature=0, max_tokens=40)
CANADA = [{"role": "user", "content": "What is the capital of Canada?"}]


@cache
def questions() -> list[Conversation]:
    drawn = held_out(count=QUESTIONS, seed=3)
    return [c for cs in drawn.values() for c in cs if c.check is not Check.FREE]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_gpu_blocks_override=400)


def test_answers_are_those_of_transformers() -> None:
    """The evaluation's own questions, in float32, greedy: the same to the last character."""
    ours, theirs = (backend(demo.CHAT, "float32").ask(questions()) for backend in (Penstock, Local))
    assert ours == theirs


def test_a_cache_in_8_bits_answers_nearly_always_the_same() -> None:
    whole, rounded = (Penstock(demo.CHAT, kv_cache_dtype=kept).ask(questions()) for kept in ("auto", "int8"))
    same = sum(a == b for a, b in zip(whole, rounded, strict=True))
    assert same >= 0.95 * len(whole), f"{same} of {len(whole)}"


def test_sampling_is_the_makers_unless_it_is_to_be_vllms(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.4, top_k=20, top_p=0.95)
    for options in ({"generation_config": "vllm"}, {"compat": "ascend-vllm"}):
        assert LLM(num_gpu_blocks_override=50, **options).get_default_sampling_params() == SamplingParams()
    theirs = {"enforce_eager": True, "trust_remote_code": True, "tensor_parallel_size": 1, "dtype": "float"}
    changed = LLM(num_gpu_blocks_override=50, **theirs, override_generation_config={"temperature": 0.5})  # type: ignore[arg-type]
    assert changed.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=20, top_p=0.95)
    with pytest.raises(PenstockError, match=r"generation_config: theirs/generation_config\.json does not exist"):
        LLM(generation_config="theirs")


def test_sampling_is_as_another_folder_says(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_k": 5, "eos_token_id": 0}')
    llm = LLM(num_gpu_blocks_override=50, generation_config=str(tmp_path))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=5)
    tokens = SamplingParams(temperature=0, max_tokens=1, logit_bias={0: 100})
    (output,) = llm.generate("Once upon a time", tokens, use_tqdm=False)
    assert output.outputs[0].token_ids == [0] and output.outputs[0].finish_reason == "stop", "ends as it says, too"


def test_a_request_that_does_not_say_keeps_to_the_limit() -> None:
    llm = LLM(num_gpu_blocks_override=50, max_output_len=5)
    assert llm.get_default_sampling_params().max_tokens == 5
    (output,) = llm.generate("Once upon a time", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


def test_a_sketch_of_the_vocabulary_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    whole = Penstock(demo.CHAT).ask(questions()[:9])
    monkeypatch.setattr(cpu.sketch, "MIN_SKETCH_OUTPUTS", 64)
    assert Penstock(demo.CHAT).ask(questions()[:9]) == whole


@torch.inference_mode()
def test_bfloat16_is_as_good_as_transformers() -> None:
    """Against the library in float32: the error of what was said is at most 1.2 times that of the library in bfloat16,
    and where the model answers, the likeliest token is the same on 99.5 % of positions."""
    exact, rough = (AutoModelForCausalLM.from_pretrained(demo.CHAT, dtype=d) for d in (torch.float32, torch.bfloat16))
    llm = LLM(dtype="bfloat16", num_gpu_blocks_override=400)
    render = llm.get_tokenizer().render
    chosen = questions()[::3]
    options = [{"tools": c.tools, "enable_thinking": c.thinking} for c in chosen]
    texts = [render(c.messages, **own) for c, own in zip(chosen, options, strict=True)]
    before = [render(c.messages[:-1], **own) for c, own in zip(chosen, options, strict=True)]
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    errors, positions, equal = [0.0, 0.0], 0, 0
    for output, prompt in zip(outputs, before, strict=True):
        ids = torch.tensor([output.prompt_token_ids])
        wanted, theirs = (model(ids).logits[0].float().log_softmax(-1)[:-1] for model in (exact, rough))
        told = [position or {} for position in (output.prompt_logprobs or [])[1:]]
        said = ids[0, 1:].tolist()
        ours = torch.tensor([position[token].logprob for position, token in zip(told, said, strict=True)])
        rows = range(len(said))
        for i, got in enumerate((ours, theirs[rows, said])):
            errors[i] += float((got - wanted[rows, said]).square().sum())
        answer = slice(len(llm.get_tokenizer().encode(prompt)) - 1, None)
        best = [next(token for token, found in position.items() if found.rank == 1) for position in told[answer]]
        equal += sum(a == b for a, b in zip(best, wanted[answer].argmax(-1).tolist(), strict=True))
        positions += len(best)
    assert math.sqrt(errors[0]) <= 1.2 * math.sqrt(errors[1])
    assert equal >= 0.995 * positions


def test_several_sequences_start_alike_and_differ(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=120)
    (output,) = llm.chat([{"role": "user", "content": "Tell me a story."}], params, use_tqdm=False)
    assert len({made.text for made in output.outputs}) == 4
    assert [made.index for made in output.outputs] == [0, 1, 2, 3]
    (again,) = llm.chat([{"role": "user", "content": "Tell me a story."}], params, use_tqdm=False)
    assert [made.text for made in again.outputs] == [made.text for made in output.outputs]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text(llm: LLM, include: bool) -> None:
    """Also one that begins in the middle of a token, and is longer than one."""
    params = GREEDY.replace(stop=("f Can", "Ottawa"), include_stop_str_in_output=include)
    (output,) = llm.chat(CANADA, params, use_tqdm=False)
    (made,) = output.outputs
    assert made.text == "The capital o" + "f Can" * include
    assert (made.finish_reason, made.stop_reason) == ("stop", "f Can")
    assert not llm.engine.busy


def test_one_string_and_lists_will_do(llm: LLM) -> None:
    """As vLLM's users write them."""
    params = SamplingParams(temperature=0, max_tokens=40, stop="Ottawa", stop_token_ids=[3], bad_words=["Paris"])  # type: ignore[arg-type]
    (output,) = llm.chat(CANADA, params, use_tqdm=False)
    assert output.outputs[0].text == "The capital of Canada is "


def test_an_interrupt_leaves_nothing_behind(llm: LLM) -> None:
    """Ctrl-C in the middle of a batch, as in a notebook: the next batch has all blocks again."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=2000, ignore_eos=True), use_tqdm=False)
    assert not llm.engine.busy
    assert llm.engine.scheduler.device_pool.num_free == llm.engine.scheduler.device_pool.total
    assert llm.chat(CANADA, GREEDY, use_tqdm=False)[0].outputs[0].text == "The capital of Canada is Ottawa."


def test_the_tokenizers_own_end_counts(llm: LLM, tmp_path: Path) -> None:
    """Also where the other files name another one, as checkpoints fine-tuned for chat do."""
    for path in demo.CHAT.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    (output,) = LLM(tmp_path, num_gpu_blocks_override=40).chat(CANADA, GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"


def test_bad_words_do_not_come_out(llm: LLM) -> None:
    (output,) = llm.chat(CANADA, GREEDY.replace(bad_words=("Ottawa",)), use_tqdm=False)
    assert "Ottawa" not in output.outputs[0].text


def test_loglikelihoods_choose_the_right_answer(llm: LLM) -> None:
    """Each continuation as likely as the library finds it, whatever shares the batch."""
    prompt = llm.get_tokenizer().render(CANADA)
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
        ([5], SamplingParams(n=1.5), "n"),  # type: ignore[arg-type]
        ([5], SamplingParams(ignore_eos="yes"), "ignore_eos"),  # type: ignore[arg-type]
        ([5], SamplingParams(logit_bias={"5": 1.0}), "logit_bias"),  # type: ignore[dict-item]
        ([5], SamplingParams(allowed_token_ids=(6,), stop_token_ids=(6,), min_tokens=2), "min_tokens"),
        ([5], SamplingParams(stop_token_ids=(4000,)), "stop_token_ids"),
        ([5], SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
    ],
)
def test_what_can_never_run_is_refused_by_name(llm: LLM, prompt: object, params: SamplingParams, field: str) -> None:
    with pytest.raises(PenstockError) as refused:
        llm.generate([[5], prompt], params, use_tqdm=False)  # type: ignore[list-item]
    assert refused.value.failure.field == field
    assert refused.value.failure.code in (Code.INVALID, Code.TOO_LONG)
    assert not llm.engine.busy, "none of the batch was begun"


@pytest.mark.parametrize(
    ("options", "words"),
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
def test_wrong_options_stop_the_start_with_one_sentence(options: dict[str, object], words: str) -> None:
    with pytest.raises(PenstockError, match=words):
        LLM(**options)  # type: ignore[arg-type]


def test_a_prompt_longer_than_a_step_and_many_at_once() -> None:
    """Chunks of 64 tokens and eight rows: the same answers, and all blocks come back."""
    prompts = [llm_prompt * 20 for llm_prompt in ([5, 6, 7], [8, 9], [10, 11, 12, 13])] * 8
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    small = LLM(num_gpu_blocks_override=40, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=False)
    large = LLM(num_gpu_blocks_override=400)
    ours, theirs = (
        [o.outputs[0].token_ids for o in m.generate(prompts, params, use_tqdm=False)] for m in (small, large)
    )
    assert ours == theirs
    assert small.engine.scheduler.device_pool.num_free == small.engine.scheduler.device_pool.total
