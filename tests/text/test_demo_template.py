"""The demo model's chat template, rendered by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evaluate
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

from penstock import demo

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "罗马"}}}],
}


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_user_message_renders_with_empty_thought(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = render(tokenizer, [user("Hi")], add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_enable_thinking_leaves_thought_to_model(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = render(tokenizer, [user("Hi")], add_generation_prompt=True, enable_thinking=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "B", "reasoning_content": "A"},
        {"role": "assistant", "content": "<think>\nA\n</think>\n\nB"},
    ],
)
def test_thought_is_kept_only_in_last_turn(tokenizer: PreTrainedTokenizerFast, answer: dict[str, Any]) -> None:
    last = render(tokenizer, [user("Q"), answer])
    assert last.endswith("<|im_start|>assistant\n<think>\nA\n</think>\n\nB<|im_end|>\n")
    earlier = render(tokenizer, [user("Q"), answer, user("R")])
    assert "<|im_start|>assistant\n<think>\n\n</think>\n\nB<|im_end|>\n" in earlier


def test_tools_calls_and_results_are_rendered(tokenizer: PreTrainedTokenizerFast) -> None:
    result = {"role": "tool", "content": '{"degrees": 21}'}
    messages = [{"role": "system", "content": "Be kind."}, user("天气？"), CALL, result, result]
    text = render(tokenizer, messages, tools=[WEATHER], add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe kind.\n\n# Tools\n<tools>\n"
        '{"type": "function", "function": {"name": "get_weather", "description": "Weather in a city", "parameters": '
        '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}\n</tools>\n'
        'To call one: <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n天气？<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "罗马"}}\n</tool_call><|im_end|>\n'
        '<|im_start|>user\n<tool_response>\n{"degrees": 21}\n</tool_response>'
        '\n<tool_response>\n{"degrees": 21}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_arguments_as_json_text_render_like_objects(tokenizer: PreTrainedTokenizerFast) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "罗马"}'}
    as_text = CALL | {"content": None, "tool_calls": [{"type": "function", "function": function}]}
    assert render(tokenizer, [user("Q"), as_text]) == render(tokenizer, [user("Q"), CALL])


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_call_without_arguments_renders_empty_object(tokenizer: PreTrainedTokenizerFast, arguments: Any) -> None:
    bare = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": arguments}}]}
    text = render(tokenizer, [user("Q"), bare, user("R")])
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in text


def test_two_calls_in_one_turn_are_rendered(tokenizer: PreTrainedTokenizerFast) -> None:
    both = CALL | {"tool_calls": CALL["tool_calls"] * 2}
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "罗马"}}\n</tool_call>'
    assert f"\n\n{call}\n{call}<|im_end|>\n" in render(tokenizer, [user("Q"), both])


def test_developer_role_renders_as_system(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [render(tokenizer, [{"role": role, "content": "S"}, user("Q")]) for role in ("system", "developer")]
    assert texts[0] == texts[1]


def test_shipped_template_equals_source() -> None:
    source = Path(evaluate.__file__).with_name("chat_template.jinja")
    assert (demo.CHAT / "chat_template.jinja").read_bytes() == source.read_bytes()


def test_text_parts_are_joined_and_images_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role in ("system", "user"):
        assert f"<|im_start|>{role}\nab<|im_end|>" in render(tokenizer, [{"role": role, "content": parts}])
    with pytest.raises(TemplateError, match="image_url"):
        render(tokenizer, [user([{"type": "image_url"}])])


def test_unknown_roles_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TemplateError, match="wizard"):
        render(tokenizer, [{"role": "wizard", "content": "x"}])


TURN_TEXT = st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda text: "think>" not in text)


@settings(max_examples=100, deadline=None)
@given(turns=st.lists(st.tuples(TURN_TEXT, TURN_TEXT.map(lambda text: text.lstrip("\n"))), min_size=1, max_size=5))
def test_each_prompt_begins_with_previous_prompt_and_answer(
    tokenizer: PreTrainedTokenizerFast, turns: list[tuple[str, str]]
) -> None:
    """This applies without thinking, so that cached prefixes remain valid."""
    messages: list[dict[str, Any]] = []
    before = ""
    for question, answer in turns:
        messages.append(user(question))
        prompt = render(tokenizer, messages, add_generation_prompt=True)
        assert prompt.startswith(before)
        messages.append({"role": "assistant", "content": answer})
        before = prompt + answer + "<|im_end|>\n"
        assert render(tokenizer, messages) == before
