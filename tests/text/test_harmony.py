"""Harmony format of gpt-oss: parsing at any chunk boundaries, forced answers, and rendering of earlier turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest
from checkpoints import save
from families import SIZES
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_chats import ask
from serving import Served
from test_reading import cut, read
from transformers import GptOssConfig

from penstock.serve.chat.messages import messages_of
from penstock.serve.chat.request import Message
from penstock.text import ChatTemplate, ParserConfig, ReasoningStage, initial_stage, reasoning_format, tool_call_format

THOUGHT, TOOLS = reasoning_format("openai_gptoss", ""), tool_call_format("openai", "")
START = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
ANSWERS: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    f"<|channel|>analysis<|message|>Hm.\n<|end|>{START}<|channel|>final<|message|>42 <|return|>": ("Hm.\n", "42 ", []),
    "<|channel|>final<|message|>Yes": ("", "Yes", []),
    f"<|channel|>analysis<|message|>Hm.<|end|>{START}{CALL}": ("Hm.", "", [("add", '{"a": 1}')]),
    f"{CALL[:-8]}<|end|>{START}{CALL[:-8]}": ("", "", [("add", '{"a": 1}')] * 2),
    " to=functions.now<|channel|>commentary json<|message|>{}": ("", "", [("now", "{}")]),
    f"<|channel|>commentary<|message|>I look.<|end|>{START}{CALL}": ("", "I look.", [("add", '{"a": 1}')]),
    f"<|channel|>analysis to=browser.search<|message|>x<|end|>{START}<|channel|>analysis<|message|>y": ("x\ny", "", []),
    f"<|channel|>commentary<|message|>a<|end|>{START}<|channel|>final<|message|>b": ("", "a\nb", []),
    '{"forced": "to=json"}': ("", '{"forced": "to=json"}', []),
    "to be": ("", "to be", []),
    "<|channel|>anal": ("", "", []),
    "<|channel|>analysis<|message|>cut o": ("cut o", "", []),
}


@pytest.mark.parametrize("text", ANSWERS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_answer_is_parsed_at_any_chunk_boundaries(text: str, data: st.DataObject) -> None:
    message = read(ParserConfig(THOUGHT, ReasoningStage.BEFORE, False, TOOLS), cut(text, data))
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    assert (message.reasoning_content, message.content, calls) == ANSWERS[text]


def test_call_without_tool_parser_is_content() -> None:
    assert read(ParserConfig(THOUGHT, ReasoningStage.BEFORE), [CALL]).content == '{"a": 1}'


def test_prompt_determines_initial_stage() -> None:
    assert THOUGHT
    assert initial_stage(THOUGHT, "<|end|><|start|>assistant") is ReasoningStage.BEFORE
    assert initial_stage(THOUGHT, f"{START}<|channel|>analysis<|message|>") is ReasoningStage.WITHIN
    assert initial_stage(THOUGHT, f"{START}<|channel|>final<|message|>") is ReasoningStage.AFTER
    within = read(ParserConfig(THOUGHT, ReasoningStage.WITHIN), [f"a<|end|>{START}<|channel|>final<|message|>b"])
    assert (within.reasoning_content, within.content) == ("a", "b")


# --- A server ---------------------------------------------------------------------------------------------------------

TEMPLATE = """<|start|>system<|message|>You are a model.
Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if tools %}<|start|>developer<|message|>namespace functions {{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.thinking %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
        {{- call.arguments | tojson + "<|call|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start|>functions to=assistant<|channel|>commentary<|message|>" + message.content | tojson + "<|end|>" }}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- else %}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""Simplified gpt-oss template with the same parts."""
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CITY["additionalProperties"] = False  # type: ignore[assignment]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
QUESTION = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Client of a server. The model has random weights and the Harmony marker tokens."""
    assert TOOLS
    folder = tmp_path_factory.mktemp("gpt-oss")
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"vocab_size": 3600}
    save(GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2), folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"]))
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, mark in enumerate(TOOLS.marker_tokens, first):
        tokenizer["added_tokens"].append({"id": number, "content": mark, "special": True, **plain})
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [first + 5, first + 6]}))
    with Served("--model", str(folder), "--max-model-len", "2048", "--num-gpu-blocks-override", "100") as served:
        yield openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_forced_answer_follows_reasoning(client: openai.OpenAI, stream: bool) -> None:
    limit = {"reasoning_max_tokens": 6}
    schema_format = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    reply = ask(client, stream, QUESTION, response_format=schema_format, extra_body=limit, reasoning_effort="low")
    assert reply.thought and json.loads(reply.content)["city"] in ("Oslo", "Rome")
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    reply = ask(client, stream, QUESTION, extra_body=limit, **fields)
    ((name, arguments),) = reply.calls
    assert name == "weather" and json.loads(arguments)["city"] in ("Oslo", "Rome")
    assert reply.thought and (reply.content, reply.reason) == ("", "tool_calls")


def test_conversation_with_tools_is_rendered() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    conversation: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "reasoning_content": "In Oslo?", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    messages = messages_of(msgspec.convert(conversation, list[Message]))
    template = ChatTemplate(TEMPLATE)
    text = template.render(messages, tools=[WEATHER], reasoning_effort="high")
    assert "Reasoning: high<|end|>" in text and text.endswith('<|message|>"rain"<|end|><|start|>assistant')
    thought = "<|start|>assistant<|channel|>analysis<|message|>In Oslo?<|end|>"
    assert (
        f'{thought}<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{{"city": "Oslo"}}'
        in text
    )
    detected = tool_call_format("auto", TEMPLATE), reasoning_format("auto", TEMPLATE)
    assert detected == (TOOLS, THOUGHT) and "reasoning_effort" in template.variables
