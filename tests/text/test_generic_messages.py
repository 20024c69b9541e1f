"""Chats with tools are converted to messages that any chat template can render."""

from __future__ import annotations

from typing import Any

from penstock.text import ChatTemplate
from penstock.text.generic_tools import generic_messages, tool_instructions

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}},
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def call(call_id: str, city: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}


def result(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


CALLS = {"role": "assistant", "content": "I look.", "tool_calls": [call("a", "Paris"), call("b", "Rome")]}
ALTERNATING = ChatTemplate(
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
    "{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)


def test_instructions_describe_tools_and_calls() -> None:
    text = tool_instructions([TOOL])
    assert '{"name": "get_weather", "description": "Weather.", "parameters": {"type": "object"}}' in text
    assert "<tool_call>" in text and "<tool_response>" in text


def test_instructions_are_added_to_system_message_or_first_user_message() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert generic_messages([QUESTION], "Tools.")[0] == {"role": "system", "content": "Tools."}
    assert generic_messages([system, QUESTION], "Tools.")[0]["content"] == "Be brief.\n\nTools."
    (only,) = generic_messages([QUESTION], "Tools.", in_system=False)
    assert only == {"role": "user", "content": "Tools.\n\nWhat is the weather in Paris?"}
    assert generic_messages([QUESTION]) == [QUESTION]


def test_calls_and_results_are_text_and_roles_alternate() -> None:
    chat = [QUESTION, CALLS, result("a", "sunny"), result("b", ""), {"role": "user", "content": "Thanks."}]
    assert ALTERNATING.render(generic_messages(chat, "Tools.", in_system=False)) == (
        "[user] Tools.\n\nWhat is the weather in Paris?\n"
        '[assistant] I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        "[user] <tool_response>\nsunny\n</tool_response>\n<tool_response>\n</tool_response>\nThanks.\n"
    )


def test_parts_with_images_are_kept() -> None:
    image = {"type": "image"}
    (converted,) = generic_messages([result("a", [image, {"type": "text", "text": "A photo."}])])
    texts = [part.get("text", "IMAGE") for part in converted["content"]]
    assert "".join(texts) == "<tool_response>\nIMAGEA photo.\n</tool_response>"


def test_messages_of_the_caller_are_not_changed() -> None:
    chat = [{"role": "system", "content": "Be brief."}, QUESTION, CALLS, result("a", "sunny")]
    before = repr(chat)
    generic_messages(chat, "Tools.")
    generic_messages(chat, "Tools.", in_system=False)
    assert repr(chat) == before
