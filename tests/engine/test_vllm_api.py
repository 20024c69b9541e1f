"""Names and calls of vLLM's Python interface, with the built-in model; wrong calls are refused with one sentence."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import penstock
from penstock import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    Counter,
    EngineArgs,
    FlexibleArgumentParser,
    Histogram,
    LLMEngine,
    PenstockError,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
    demo,
)

CANADA = [{"role": "user", "content": "What is the capital of Canada?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
CLOSED = SCHEMA | {"additionalProperties": False}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_gpu_blocks_override=400)


def text_of(llm: LLM, params: SamplingParams | None) -> str:
    return llm.chat(CANADA, params, use_tqdm=False)[0].outputs[0].text


def test_public_names_are_listed_and_importable() -> None:
    assert set(dir(penstock)) == set(penstock.__all__)
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    assert penstock.AsyncLLMEngine is AsyncLLM


def test_default_sampling_params_can_be_changed(llm: LLM) -> None:
    """As in vLLM's examples of ``generate`` and ``chat``. The defaults of later calls stay the same."""
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens = 0, 3
    params.stop = "Ottawa"
    params.logit_bias = None
    assert text_of(llm, params) == text_of(llm, GREEDY.replace(max_tokens=3))
    assert llm.get_default_sampling_params().temperature == 0.4


def test_clone_is_independent() -> None:
    params = SamplingParams(stop="a", logit_bias={5: 1.0}, structured_outputs=StructuredOutputsParams(choice=["x"]))
    copy = params.clone()
    assert copy == params
    copy.stop.append("b")
    copy.logit_bias[6] = 2.0
    assert params.stop == ["a"] and params.logit_bias == {5: 1.0}


def test_value_changed_to_wrong_one_is_refused_at_the_call(llm: LLM) -> None:
    params = SamplingParams()
    params.temperature = -1
    with pytest.raises(PenstockError, match="temperature: must be at least 0, is -1"):
        llm.generate("a", params)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"choice": ["Positive", "Negative"]}, "Positive|Negative"),
        ({"regex": r"\w{2,9}@\w{2,9}\.com"}, r"\w{2,9}@\w{2,9}\.com"),
        ({"grammar": 'root ::= "SELECT " column\ncolumn ::= "a" | "b"'}, "SELECT [ab]"),
        ({"json": SCHEMA, "disable_additional_properties": True}, r'\{\s*"city"\s*:\s*"[^"]*"\s*\}'),
        ({"json": json.dumps(CLOSED), "disable_any_whitespace": True}, r'\{"city":"[^"]*"\}'),
    ],
)
def test_structured_outputs_constrain_the_output(llm: LLM, constraint: dict[str, Any], pattern: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint), max_tokens=60, seed=1)
    (output,) = llm.generate("Classify this sentiment: vLLM is wonderful!", sampling_params=params, use_tqdm=False)
    assert re.fullmatch(pattern, output.outputs[0].text), output.outputs[0].text


def test_prompt_types_give_the_same_output(llm: LLM) -> None:
    text = "Once upon a time"
    ids = llm.get_tokenizer().encode(text)
    prompts = [text, ids, TextPrompt(prompt=text, cache_salt="a"), TokensPrompt(prompt_token_ids=ids, prompt=text)]
    outputs = [*llm.generate(prompts, GREEDY, use_tqdm=False)]
    outputs += llm.generate(prompt_token_ids=[ids], sampling_params=GREEDY, use_tqdm=False)
    outputs += llm.generate(text, GREEDY, prompt_token_ids=ids, use_tqdm=False)
    assert {tuple(output.outputs[0].token_ids) for output in outputs} == {tuple(outputs[0].outputs[0].token_ids)}
    assert [output.prompt for output in outputs] == [text, None, text, text, None, text]


def test_chat_template_of_a_call_replaces_the_models(llm: LLM, tmp_path: Path) -> None:
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    for given in (template, tmp_path / "template.jinja", str(tmp_path / "template.jinja")):
        (output,) = llm.chat(CANADA, GREEDY, use_tqdm=False, chat_template=given)
        assert output.prompt == f"[user] {CANADA[0]['content']}"


@torch.inference_mode()
def test_beam_search_equals_transformers(llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.CHAT)
    prompts = ["The capital of Canada is", "Once upon a time"]
    found = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8))
    model = AutoModelForCausalLM.from_pretrained(demo.CHAT, dtype=torch.float32)
    for prompt, result in zip(prompts, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8, "do_sample": False}
        settings = {"temperature": None, "top_p": None, "top_k": None, "return_dict_in_generate": True}
        expected = model.generate(ids, **options, **settings).sequences.tolist()
        padded = [
            one.tokens + [tokenizer.pad_token_id] * (ids.shape[1] + 8 - len(one.tokens)) for one in result.sequences
        ]
        assert padded == [one + [tokenizer.pad_token_id] * (ids.shape[1] + 8 - len(one)) for one in expected]
        assert result.sequences[0].text == tokenizer.decode(result.sequences[0].tokens, skip_special_tokens=True)


def test_one_beam_is_greedy(llm: LLM) -> None:
    (found,) = llm.beam_search("Once upon a time", BeamSearchParams(beam_width=1, max_tokens=20))
    (output,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert found.sequences[0].tokens == output.prompt_token_ids + output.outputs[0].token_ids
    assert found.sequences[0].cum_logprob < 0


@pytest.mark.parametrize("with_transformers", [True, False])
def test_tokenizer_equals_transformers(monkeypatch: pytest.MonkeyPatch, with_transformers: bool) -> None:
    expected = AutoTokenizer.from_pretrained(demo.CHAT)
    if not with_transformers:
        monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = LLM(num_gpu_blocks_override=50).get_tokenizer()
    assert ("transformers" in type(tokenizer).__module__) is with_transformers
    text = "What is\n the capital of Canada? <|im_end|>"
    ids = expected.encode(text)
    assert tokenizer.encode(text) == tokenizer(text).input_ids == ids
    assert tokenizer([text, "a"])["input_ids"] == expected([text, "a"])["input_ids"]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids) == expected.decode(ids)
    assert tokenizer.batch_decode([ids, ids[:2]]) == expected.batch_decode([ids, ids[:2]])
    for options in ({"tokenize": False}, {"tokenize": False, "add_generation_prompt": True}, {"return_dict": False}):
        assert tokenizer.apply_chat_template(CANADA, **options) == expected.apply_chat_template(CANADA, **options)
    assert tokenizer.apply_chat_template(CANADA)["input_ids"] == expected.apply_chat_template(CANADA)["input_ids"]
    tokens = expected.convert_ids_to_tokens(ids)
    assert tokenizer.convert_ids_to_tokens(ids) == tokens and tokenizer.convert_tokens_to_ids(tokens) == ids
    assert tokenizer.get_vocab() == expected.get_vocab() and len(tokenizer) == len(expected)
    for name in ("eos_token", "eos_token_id", "pad_token_id", "bos_token_id", "vocab_size", "chat_template"):
        assert getattr(tokenizer, name) == getattr(expected, name), name
    assert set(tokenizer.all_special_ids) >= {tokenizer.eos_token_id}


def test_engine_args_are_the_arguments_of_llm() -> None:
    """As ``LLM(**vars(args))``, ``LLM(**asdict(args))`` and ``LLM.from_engine_args(args)``."""
    args = EngineArgs(max_model_len=300, num_gpu_blocks_override=50, limit_mm_per_prompt={"image": 1})
    assert vars(args)["max_model_len"] == dataclasses.asdict(args)["max_model_len"] == 300
    for llm in (LLM(**vars(args)), LLM.from_engine_args(args)):
        assert llm.engine.max_model_len == 300 and llm.options.num_gpu_blocks_override == 50
    assert AsyncLLM.from_engine_args(AsyncEngineArgs(max_model_len=300)).options.max_model_len == 300


def test_engine_args_are_read_from_the_command_line() -> None:
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(runner="generate", seed=3)
    parser.add_argument("--top-p", type=float)
    line = (
        "--max_model_len 300 --enforce-eager --no-enable-prefix-caching --dtype=float32 --disable_log_stats --top-p 1"
        " --num-gpu-blocks-override 50"
    )
    args = parser.parse_args(line.split())
    engine_args = EngineArgs.from_cli_args(args)
    options = LLM(**vars(engine_args)).options
    assert (options.max_model_len, options.enforce_eager, options.enable_prefix_caching) == (300, True, False)
    assert (options.dtype, options.seed, args.top_p) == ("float32", 3, 1.0)
    with pytest.raises(SystemExit):
        parser.parse_args(["--block-size", "many"])


def test_llm_engine_steps_give_outputs_of_llm(llm: LLM) -> None:
    prompts = ["Once upon a time", "The capital of Canada is", "To be or not to be,"]
    engine = LLMEngine.from_engine_args(EngineArgs(dtype="float32", num_gpu_blocks_override=100))
    finished: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    with pytest.raises(PenstockError, match="request_id: '1' is the id of an unfinished request"):
        engine.add_request("1", "a", GREEDY)
    engine.add_request("aborted", "a", GREEDY)
    engine.abort_request(["aborted", "unknown"])
    assert engine.get_num_unfinished_requests() == 3
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].token_ids
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert [finished[str(i)] for i in range(len(prompts))] == expected and len(finished) == len(prompts)


def test_metrics_count_requests_and_order_their_times() -> None:
    llm = LLM(num_gpu_blocks_override=50)
    outputs = llm.generate(
        ["Once upon a time", "Hi"], SamplingParams(n=2, max_tokens=4, ignore_eos=True), use_tqdm=False
    )
    counts = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
    assert counts["vllm:generation_tokens"] == 2 * 2 * 4
    assert counts["vllm:prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
    assert counts["vllm:request_success"] == 4
    histograms = [metric for metric in llm.get_metrics() if isinstance(metric, Histogram)]
    assert all(metric.count == metric.buckets["+Inf"] == 2 and metric.sum > 0 for metric in histograms)
    for output in outputs:
        times = output.metrics
        assert times.first_token_ts and times.last_token_ts and times.num_generation_tokens == 8
        assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
        assert times.finished_time and times.arrival_time < times.finished_time


def test_progress_bar_shows_tokens_per_second(llm: LLM) -> None:
    shown = io.StringIO()
    llm.generate(["a", "b"], SamplingParams(max_tokens=2), use_tqdm=partial(tqdm, file=shown, mininterval=0))
    assert re.search(r"2/2.*input: \d+\.\d+ tokens/s, output: \d+\.\d+ tokens/s", shown.getvalue()), shown.getvalue()


def test_profile_writes_trace(tmp_path: Path) -> None:
    llm = LLM(num_gpu_blocks_override=50, profiler_config={"profiler": "torch", "torch_profiler_dir": str(tmp_path)})
    llm.start_profile("mine")
    llm.generate("a", use_tqdm=False)
    path = llm.stop_profile()
    assert path == tmp_path / "mine.trace.json" and json.loads(path.read_text())["traceEvents"]


MESSAGE = {"role": "user", "content": "Hi"}
CALLS: dict[str, tuple[Callable[[LLM], object], str]] = {
    "chat with a text": (lambda llm: llm.chat("Hi"), r"messages: must be a list of messages, .* is str 'Hi'"),
    "chat with None": (lambda llm: llm.chat(None), "messages: must be a list of messages, .* is None"),
    "chat with an empty list": (lambda llm: llm.chat([]), "messages: is empty: give a list"),
    "chat with texts": (lambda llm: llm.chat(["Hi"]), "messages: must be a list of messages, .* has str 'Hi'"),
    "message without role": (lambda llm: llm.chat([{"content": "Hi"}]), 'messages: must be dicts like {"role"'),
    "tools as a text": (lambda llm: llm.chat([MESSAGE], tools="f"), "tools: must be a list of dicts .* is str 'f'"),
    "template variables as a list": (
        lambda llm: llm.chat([MESSAGE], chat_template_kwargs=[1]),
        "chat_template_kwargs: must be a dict",
    ),
    "missing chat template": (
        lambda llm: llm.chat([MESSAGE], chat_template="missing.jinja"),
        "chat_template: missing.jinja cannot be read",
    ),
    "content format": (
        lambda llm: llm.chat([MESSAGE], chat_template_content_format="openai"),
        "chat_template_content_format: is 'openai', which is not supported: omit it",
    ),
    "generate with a number": (lambda llm: llm.generate(5), r"prompts: must be a prompt .* is int 5"),
    "generate with nothing": (lambda llm: llm.generate(), "prompts: is missing: give text"),
    "generate with bytes": (lambda llm: llm.generate(b"a"), "prompts: must be a prompt .* is bytes b'a'"),
    "generate with a mixed list": (
        lambda llm: llm.generate(["a", 5.0]),
        "prompts: item 1 must be text, .* is float 5.0",
    ),
    "prompt with a wrong key": (lambda llm: llm.generate({"promt": "a"}), "unknown key 'promt'; did you mean prompt?"),
    "prompt as embeddings": (
        lambda llm: llm.generate({"prompt_embeds": [[0.5]]}),
        "prompt_embeds: is not supported in prompts: give prompt or prompt_token_ids",
    ),
    "token ids and texts of different numbers": (
        lambda llm: llm.generate(["a", "b"], prompt_token_ids=[[5]]),
        "prompt_token_ids: has 1 items for 2 prompts",
    ),
    "token ids as texts": (
        lambda llm: llm.generate(prompt_token_ids="a"),
        "prompt_token_ids: must be a list of token ids",
    ),
    "dict as sampling parameters": (
        lambda llm: llm.generate("a", {"temperature": 0}),
        "sampling_params: must be SamplingParams.temperature=…., is dict",
    ),
    "text as sampling parameters": (lambda llm: llm.generate("a", "greedy"), "sampling_params: "),
    "beam search parameters": (
        lambda llm: llm.generate("a", BeamSearchParams(2, 5)),
        "sampling_params: is BeamSearchParams: call LLM.beam_search",
    ),
    "sampling parameters of a beam search": (
        lambda llm: llm.beam_search("a", GREEDY),
        "params: must be BeamSearchParams",
    ),
    "too few sampling parameters": (
        lambda llm: llm.generate(["a", "b"], [GREEDY]),
        "sampling_params: has 1 items for 2",
    ),
    "parameter of sampling as argument": (
        lambda llm: llm.generate("a", max_tokens=5),
        "max_tokens: is not an argument of generate; pass sampling_params=SamplingParams.max_tokens=5.",
    ),
    "misspelled argument": (
        lambda llm: llm.generate("a", sampling_param=GREEDY),
        "sampling_param: is not an argument of generate; did you mean sampling_params?",
    ),
    "progress bar as a list": (
        lambda llm: llm.generate("a", GREEDY, [5]),
        "use_tqdm: must be True, False, or a function",
    ),
    "adapter as a text": (lambda llm: llm.generate("a", lora_request="x"), "lora_request: must be LoRARequest"),
    "priority as a text": (lambda llm: llm.generate("a", priority="high"), "priority: must be an integer"),
    "tokenizer options": (
        lambda llm: llm.generate("a", tokenization_kwargs={"truncation": True}),
        "tokenization_kwargs: is .* not supported: give token ids",
    ),
    "wrong token id": (lambda llm: llm.generate([[1.5]]), "prompt: "),
    "embed with a number": (lambda llm: llm.embed(5), "prompts: must be a prompt"),
    "pooling parameters as a dict": (
        lambda llm: llm.embed("a", pooling_params={}),
        "pooling_params: must be PoolingParams",
    ),
    "score with token ids": (lambda llm: llm.loglikelihood("a", 5), "continuations: must be a prompt"),
    "function on the model": (
        lambda llm: llm.apply_model(len),
        "apply_model: workers run no functions of callers; use",
    ),
    "function on the workers": (lambda llm: llm.collective_rpc("f"), "collective_rpc: workers run no functions"),
    "profile that was not started": (
        lambda llm: llm.stop_profile(),
        "stop_profile: no profile is being recorded: call",
    ),
    "misspelled option": (lambda llm: LLM(max_model_ln=5), "max_model_ln: no such option; did you mean max_model_len?"),
    "misspelled engine argument": (
        lambda llm: EngineArgs(max_model_ln=5),
        "max_model_ln: no such option; did you mean",
    ),
    "misspelled parameter": (
        lambda llm: SamplingParams(temprature=0),
        "temprature: is not a parameter of SamplingParams; did you mean temperature?",
    ),
    "positional parameter": (lambda llm: SamplingParams(0), "SamplingParams: .* give its parameters by name"),
    "fraction as a count": (lambda llm: SamplingParams(n=1.5), "n: must be int, has float: 1.5"),
    "text as a number": (lambda llm: SamplingParams(temperature="0"), "temperature: must be float, has str: '0'"),
    "text as a flag": (lambda llm: SamplingParams(ignore_eos="yes"), "ignore_eos: must be bool, has str: 'yes'"),
    "number as a stop string": (lambda llm: SamplingParams(stop=5), "stop: must be a list, .* is int 5"),
    "numbers as stop strings": (lambda llm: SamplingParams(stop=[5]), r"stop: must be str, has int: \[5\]"),
    "texts as token ids": (lambda llm: SamplingParams(logit_bias={"5": 1.0}), "logit_bias: must be int, has str"),
    "all logprobs": (lambda llm: SamplingParams(logprobs=-1), "logprobs: is -1 .* not supported: give at most 20"),
    "custom logits processor": (
        lambda llm: SamplingParams(logits_processors=[len]),
        "logits_processors: is .* not supported: use logit_bias",
    ),
    "wrong kind of output": (
        lambda llm: SamplingParams(output_kind="delta"),
        "output_kind: must be one of .* is 'delta'",
    ),
    "constraint as a dict": (
        lambda llm: SamplingParams(structured_outputs={"json": {}}),
        "structured_outputs: must be StructuredOutputsParams",
    ),
    "no constraint": (
        lambda llm: StructuredOutputsParams(),
        "structured_outputs: set exactly one of json, .* given: none",
    ),
    "two constraints": (lambda llm: StructuredOutputsParams(regex="a", choice=["a"]), "given: regex and choice"),
    "choice as a text": (lambda llm: StructuredOutputsParams(choice="ab"), "structured_outputs.choice: must be a list"),
    "misspelled pooling parameter": (
        lambda llm: PoolingParams(dimension=5),
        "dimension: is not a parameter of PoolingParams; did you mean dimensions?",
    ),
    "beams without a length": (lambda llm: BeamSearchParams(beam_width=2), "BeamSearchParams: .*max_tokens"),
    "no beams": (lambda llm: BeamSearchParams(beam_width=0, max_tokens=5), "beam_width: must be at least 1, is 0"),
    "random beams": (lambda llm: BeamSearchParams(2, 5, temperature=1), "temperature: is 1, but beam search is greedy"),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_call_is_refused_with_one_sentence(llm: LLM, name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(PenstockError, match=message) as refused:
        call(llm)
    assert "\n" not in str(refused.value) and "$" not in str(refused.value)
    assert not llm.engine.busy


@pytest.mark.parametrize("name", ["prompt_embeds", "encoder_prompt", "multi_modal_uuids"])
def test_unsupported_key_of_prompt_is_named(llm: LLM, name: str) -> None:
    with pytest.raises(PenstockError, match=name) as refused:
        llm.generate({"prompt": "a", name: {"a": 1}})
    assert refused.value.failure.code == "unsupported"


def test_parser_keeps_arguments_of_the_script() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert parser.parse_args(["--max-model-len", "100"]).max_model_len == "100"
    assert parser.parse_args([]).max_model_len is None
