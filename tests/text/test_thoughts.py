"""Reasoning is separated from content, limited, and precedes constrained answers, in OpenAI's API and in Python."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai_chats import PLAIN_TEMPLATE, THINK, ChatResult
from openai_chats import ask as ask_about
from serving import Served, Servers

from penstock import LLM, GuidedDecodingParams, PenstockError, SamplingParams, demo

SUM = [{"role": "user", "content": "What is 12 + 34 + 56?"}]
IN_PARIS = [{"role": "user", "content": "巴黎的天气怎么样？"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
THOUGHT, ANSWER = "12 + 34 = 46\n46 + 56 = 102", "12 + 34 + 56 = 102"


@pytest.fixture(scope="module")
def server(servers: Servers) -> Served:
    return servers.get("--num-gpu-blocks-override", "400")


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def ask(client: openai.OpenAI, stream: bool, messages: Any = SUM, **fields: Any) -> ChatResult:
    return ask_about(client, stream, messages, **fields)


both = pytest.mark.parametrize("stream", [False, True])


@pytest.mark.slow_after(1)
@both
def test_thought_is_separated_from_content(client: openai.OpenAI, stream: bool) -> None:
    reply = ask(client, stream, extra_body=THINK)
    assert (reply.thought, reply.content, reply.reason) == (THOUGHT, ANSWER, "stop")
    thought = reply.usage.completion_tokens_details.reasoning_tokens
    assert 0 < thought < reply.usage.completion_tokens
    hidden = ask(client, stream, extra_body=THINK | {"include_reasoning": False})
    assert (hidden.thought, hidden.content) == ("", ANSWER)
    assert hidden.usage.completion_tokens_details.reasoning_tokens == thought
    without_thought = ask(client, stream)
    assert without_thought.thought == "" and without_thought.content
    assert without_thought.usage.completion_tokens_details.reasoning_tokens == 0


@both
@pytest.mark.parametrize("limit", [0, 1, 5, 100])
def test_thought_ends_at_reasoning_max_tokens(client: openai.OpenAI, stream: bool, limit: int) -> None:
    reply = ask(client, stream, extra_body=THINK | {"reasoning_max_tokens": limit})
    assert THOUGHT.startswith(reply.thought) and reply.content and reply.reason == "stop"
    marks = 2
    assert reply.usage.completion_tokens_details.reasoning_tokens <= limit + marks
    assert "think>" not in reply.content
    assert (reply.content == ANSWER) == (limit == 100)


@pytest.mark.row("fastdeploy", "response_max_tokens")
@both
@pytest.mark.parametrize("limit", [1, 4, 300])
def test_answer_ends_at_response_max_tokens(client: openai.OpenAI, stream: bool, limit: int) -> None:
    """Only the answer's tokens are counted, with or without a thought before the answer."""
    for extra in (THINK, THINK | {"reasoning_max_tokens": 3}, {}):
        whole = ask(client, stream, extra_body=extra)
        cut = ask(client, stream, extra_body=extra | {"response_max_tokens": limit})
        assert cut.thought == whole.thought and whole.content.startswith(cut.content)
        thought = cut.usage.completion_tokens_details.reasoning_tokens
        assert thought == whole.usage.completion_tokens_details.reasoning_tokens
        if limit == 300:
            assert (cut.content, cut.reason) == (whole.content, "stop")
        else:
            between = 1 if extra.get("reasoning_max_tokens") else 0  # the forced end of the thought is not counted
            assert cut.reason == "length" and cut.usage.completion_tokens - thought in (limit, limit + between)
    assert ask(client, stream, max_tokens=8, extra_body=THINK | {"response_max_tokens": limit}).reason == "length"


@both
def test_reasoning_limit_does_not_limit_content(client: openai.OpenAI, stream: bool) -> None:
    limited = ask(client, stream, extra_body={"reasoning_max_tokens": 0})
    assert limited.content == ask(client, stream).content


@both
def test_constraint_applies_after_thought(client: openai.OpenAI, stream: bool) -> None:
    for fields in ({"guided_choice": ["many", "102"]}, {"guided_regex": "(many|102)", "reasoning_max_tokens": 100}):
        reply = ask(client, stream, extra_body=THINK | fields)
        assert (reply.thought, reply.content) == (THOUGHT, "102")
    schema = {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 999}}, "required": ["sum"]}
    schema_format = {
        "type": "json_schema",
        "json_schema": {"name": "sum", "schema": schema | {"additionalProperties": False}},
    }
    reply = ask(client, stream, response_format=schema_format, extra_body=THINK)
    assert reply.thought == THOUGHT
    jsonschema.validate(json.loads(reply.content), schema)


@both
def test_unfinished_thought_is_not_content(client: openai.OpenAI, stream: bool) -> None:
    reply = ask(client, stream, max_tokens=8, extra_body=THINK)
    assert reply.content == "" and THOUGHT.startswith(reply.thought) and reply.reason == "length"
    assert reply.usage.completion_tokens_details.reasoning_tokens == 8


def test_unfinished_thought_can_be_continued() -> None:
    llm = LLM(num_gpu_blocks_override=200, chat_template=PLAIN_TEMPLATE.replace("TEACHES", "</think>"))
    unfinished = {"role": "assistant", "content": "<think>\n12 + 34 = 46"}
    options = {"add_generation_prompt": False, "continue_final_message": True, "use_tqdm": False}
    (output,) = llm.chat([*SUM, unfinished], SamplingParams(temperature=0, max_tokens=60), **options)
    assert output.outputs[0].message
    assert (output.outputs[0].message.reasoning_content, output.outputs[0].message.content) == (THOUGHT[12:], ANSWER)


def test_invalid_or_conflicting_limits_are_refused(client: openai.OpenAI) -> None:
    for fields, message in (
        ({"reasoning_max_tokens": -1}, "reasoning_max_tokens"),
        ({"reasoning_max_tokens": 5, "bad_words": ["x"]}, "bad_words.*reasoning_max_tokens"),
        ({"reasoning_max_tokens": 5, "allowed_token_ids": [5]}, "allowed_token_ids.*reasoning_max_tokens"),
        ({"response_max_tokens": 0}, "response_max_tokens"),
        ({"response_max_tokens": 5, "use_beam_search": True, "n": 2}, "use_beam_search.*response_max_tokens"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            ask(client, False, extra_body=fields)
    for field in ("reasoning_max_tokens", "response_max_tokens"):
        with pytest.raises(openai.BadRequestError, match=f"{field}: is for chats only"):
            client.completions.create(model="default", prompt="x", extra_body={field: 1})


@pytest.mark.slow
def test_thoughts_do_not_depend_on_the_batch() -> None:
    """Thoughts also do not depend on logprobs, chunked prefill, ``n`` samples, preemption or speculative decoding."""
    questions = [[{"role": "user", "content": f"What is {i} + {2 * i} + 56?"}] for i in (12, 23)]
    constraint = GuidedDecodingParams(regex="[0-9]{1,4}")
    kinds: list[dict[str, Any]] = [
        {"reasoning_max_tokens": 7},
        {"guided_decoding": constraint},
        {"guided_decoding": constraint, "reasoning_max_tokens": 4},
        {"response_max_tokens": 5},
        {},
    ]
    params = [SamplingParams(max_tokens=80, seed=3, temperature=t, **kind) for kind in kinds for t in (0.0, 1.0)]
    cases = [(questions[i // 2 % 2], sampling) for i, sampling in enumerate(params)]
    llm = LLM(num_gpu_blocks_override=400, block_size=16)
    speculation = {"method": "draft_model", "adaptive": False}
    speculative = LLM(num_gpu_blocks_override=400, block_size=16, speculative_config=speculation)
    tight = LLM(
        speculation=False,
        num_gpu_blocks_override=20,
        block_size=16,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=40,
    )

    def run(llm: LLM, cases: list[Any]) -> list[Any]:
        chats, samplings = zip(*cases, strict=True)
        outputs = llm.chat(
            list(chats), list(samplings), use_tqdm=False, chat_template_kwargs=THINK["chat_template_kwargs"]
        )
        return [output.outputs[0] for output in outputs]

    alone = [run(llm, [case])[0] for case in cases]
    with_logprobs = run(llm, [(question, sampling.replace(logprobs=1)) for question, sampling in cases])
    siblings = run(llm, [(question, sampling.replace(n=3)) for question, sampling in cases])
    preempted = run(tight, cases * 3)[-len(cases) :]
    assert tight.engine.scheduler.num_preemptions > 0
    speculated = run(speculative, cases)
    assert speculative.engine.scheduler.speculation.stats.accepted_tokens > 0
    for (_, sampling), expected, *others in zip(
        cases, alone, with_logprobs, siblings, preempted, speculated, strict=True
    ):
        assert all(other.token_ids == expected.token_ids and other.message == expected.message for other in others)
        if sampling.reasoning_max_tokens is not None:
            assert expected.reasoning_tokens <= sampling.reasoning_max_tokens + 2
        if sampling.guided_decoding:
            assert re.fullmatch("[0-9]{1,4}", expected.message.content)


def test_end_token_within_thought_is_followed_by_constrained_answer() -> None:
    llm = LLM(num_gpu_blocks_override=100)
    (end,) = llm.get_tokenizer().encode("<|im_end|>", add_special_tokens=False)
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={end: 100})
    outputs = llm.chat(
        SUM, params.replace(guided_decoding=GuidedDecodingParams(regex="[ab]{2}")), use_tqdm=False, **THINK
    )
    message = outputs[0].outputs[0].message
    assert message and re.fullmatch("[ab]{2}", message.content)
    assert llm.chat(SUM, params, use_tqdm=False, **THINK)[0].outputs[0].message.content == ""


# --- Markers that are special tokens, or no tokens at all -------------------------------------------------------------


def tokenizer_with(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Path:
    """Copy of the demo model's tokenizer with each added token changed, or removed (``change`` returns None)."""
    for file in demo.CHAT.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    changed = [change(token) for token in whole["added_tokens"]]
    whole["added_tokens"] = [token for token in changed if token]
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_special_token_markers_are_parsed_and_not_in_content(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, lambda token: token | {"special": True})
    special, plain = LLM(num_gpu_blocks_override=200, tokenizer=tokenizer), LLM(num_gpu_blocks_override=200)
    greedy = SamplingParams(temperature=0, max_tokens=100)

    def answers(llm: LLM) -> list[Any]:
        thought = llm.chat(SUM, greedy, use_tqdm=False, **THINK)[0].outputs[0]
        called = llm.chat(IN_PARIS, greedy, use_tqdm=False, tools=TOOLS)[0].outputs[0]
        return [thought.message, thought.reasoning_tokens, called.message]

    assert answers(special) == answers(plain)
    thought, _, called = answers(special)
    assert (thought.reasoning_content, thought.content) == (THOUGHT, ANSWER)
    assert [(call.name, call.arguments) for call in called.tool_calls] == [("get_weather", '{"city": "巴黎"}')]
    (marker,) = special.get_tokenizer().encode("</think>", add_special_tokens=False)
    always = greedy.replace(logit_bias={marker: 100}, max_tokens=5)
    for llm, content in ((special, ""), (plain, "</think>" * 5)):
        assert llm.chat(SUM, always, use_tqdm=False)[0].outputs[0].message.content == content
    shown = special.chat(SUM, always.replace(skip_special_tokens=False), use_tqdm=False)[0].outputs[0]
    assert shown.message.content == "</think>" * 5


@pytest.mark.slow
def test_multi_token_markers_are_parsed_and_limits_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, lambda token: token if "think" not in token["content"] else None)
    llm = LLM(num_gpu_blocks_override=200, tokenizer=tokenizer)
    written = "".join(llm.get_tokenizer().decode(i) for i in llm.get_tokenizer().encode("</think>"))
    assert written == "</think>" and len(llm.get_tokenizer().encode("</think>")) > 1
    with pytest.raises(PenstockError, match=r"reasoning_max_tokens.*no single token ends it"):
        llm.chat(SUM, SamplingParams(reasoning_max_tokens=5), use_tqdm=False, **THINK)
    text = "<think>\nx\n</think>\n\ny"
    forced = SamplingParams(temperature=0, max_tokens=100, guided_decoding=GuidedDecodingParams(choice=[text]))
    output = llm.chat(SUM, forced, use_tqdm=False, **THINK)[0].outputs[0]
    assert (output.message.reasoning_content, output.message.content) == ("x", "y")
    tokens = [llm.get_tokenizer().decode(token) for token in output.token_ids]
    assert "".join(tokens[: output.reasoning_tokens]).rstrip("\n") == "<think>\nx\n</think>"
