"""Tool calls in each model's format, streamed and whole, tested with OpenAI's Python client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai_chats import PLAIN_TEMPLATE, THINK, ChatResult, ask
from serving import Served


def tool(name: str, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("get_weather", city={"type": "string", "maxLength": 20}), tool("roll", sides={"enum": [6, 20]})]
PLAN = tool(
    "plan",
    days={"type": "integer", "minimum": 1, "maximum": 9},
    note={"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    rain={"type": "boolean"},
    place={"$ref": "#/$defs/place"},
    mode={"enum": ["by car", "by train"]},
)
PLAN["function"]["parameters"] |= {
    "required": ["days", "place"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"enum": [1.5, 2]}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
IN_PARIS = [{"role": "user", "content": "巴黎的天气怎么样？"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with Served("--num-gpu-blocks-override", "400", "--trust-request-chat-template") as served:
        yield openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)


both = pytest.mark.parametrize("stream", [False, True])


def check_calls(answer: ChatResult) -> None:
    assert answer.calls
    for name, arguments in answer.calls[:-1] if answer.reason == "length" else answer.calls:
        known = next(t["function"]["parameters"] for t in [*TOOLS, PLAN] if t["function"]["name"] == name)
        jsonschema.validate(json.loads(arguments), known)


@pytest.mark.parametrize("name", ["my tool", "a[b", "", "x" * 129])
def test_invalid_function_name_is_rejected(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="matching regex") as caught:
        ask(client, False, IN_PARIS, tools=[tool(name)])
    assert caught.value.param == "tools[0].function.name"


def test_template_without_tools_rejects_tools(client: openai.OpenAI) -> None:
    template = "{% for m in messages %}{{ m.content }}<tool_call>{% endfor %}"
    with pytest.raises(openai.BadRequestError, match="does not support tools"):
        ask(client, False, IN_PARIS, tools=TOOLS, extra_body={"chat_template": template})


def test_arguments_are_streamed_in_chunks(client: openai.OpenAI) -> None:
    whole, streamed = (ask(client, stream, IN_PARIS, tools=TOOLS[:1]) for stream in (False, True))
    assert streamed.calls == whole.calls == [["get_weather", '{"city": "巴黎"}']]
    assert (streamed.content, streamed.reason) == (whole.content, whole.reason) == ("", "tool_calls")
    write = tool("write", text={"type": "string", "minLength": 500})
    long = ask(client, True, IN_PARIS, tools=[write], tool_choice="required", max_tokens=1000)
    # a busy server puts several tokens in one chunk, but not all of them
    assert long.num_argument_chunks > 1 and long.calls[0][0] == "write"


@both
def test_forced_call_follows_reasoning(client: openai.OpenAI, stream: bool) -> None:
    fields = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False, "extra_body": THINK}
    answer = ask(client, stream, IN_PARIS, **fields)
    check_calls(answer)
    assert answer.content == "" and len(answer.calls) == 1


@both
def test_truncated_call_has_partial_arguments(client: openai.OpenAI, stream: bool) -> None:
    whole = ask(client, stream, IN_PARIS, tools=TOOLS[:1])
    short = ask(client, stream, IN_PARIS, tools=TOOLS[:1], max_tokens=whole.usage.completion_tokens - 5)
    ((name, arguments),) = short.calls
    assert name == "get_weather" and whole.calls[0][1].startswith(arguments) and short.reason == "length"


FORMATS = {
    "mistral": "[TOOL_CALLS]",
    "mistral with arguments": "[TOOL_CALLS]NAME[ARGS]",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary}.',
    "deepseek_v3": "<｜tool▁call▁begin｜>NAME ```json",
    "granite": "<|tool_call|>",
    "phi4_mini_json": "<|tool|>",
    "hunyuan_a13b": "<tool_calls>",
    "cohere_command3": "<|START_ACTION|>",
    "internlm": "<|action_start|>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "qwen3_coder": "<tool_call><function=",
    "seed_oss": "<seed:tool_call>",
    "minimax_m2": "minimax:tool_call",
    "glm45": "<tool_call><arg_key>",
    "glm47": "<tool_call></arg_key><arg_value>",
    "pythonic": "[func_name1(params_name1=params_value1)]",
    "olmo3": "<function_calls>",
    "longcat": "<longcat_tool_call>",
    "longcat elements": "<longcat_tool_call><longcat_arg_key>",
    "granite-20b-fc": "<|function_call_library|><function_call>",
    "nemotron_json": "<TOOLCALL>",
    "xlam": "make calls in a single JSON array",
    "apertus": "<|tools_prefix|>",
    "minimax_01": "system function_setting=functions",
    "minimax_m1": "<beginning_of_sentence><tool_calls>",
    "solar_open": "<|tool_call:args|>",
    "solar_open2": "<|tool_arg:start|>",
    "gigachat3": "function call<|role_sep|>",
    "gigachat31": "<|role_sep|><|function_call|>",
    "gigachat35": "<｜GCML｜tool_calls>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "deepseek_v4": "<｜DSML｜tool_calls>",
    "kimi_k3": "<|open|><|sep|>",
    "step3": "<steptml:invoke",
    "hy_v3": "<tool_calls><tool_call><tool_sep><arg_key>",
    "hy_v3 with suffix": "<tool_calls:opensource><tool_sep:opensource>",
    "minicpm5": "<function name=<param name=",
    "dots": "<dots_function_call>",
    "gemma4": "<|tool_call>",
    "functiongemma": "<start_function_call>",
    "minimax_m3": "]<]minimax[>[",
    "lfm2": "List of tools: ",
    "inkling": "<|content_invoke_tool_json|>",
    "k2_horizon": "<ifm|tool_call>",
}
"""By format: fragment of a chat template from which the format is detected."""


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_format_is_detected_generated_and_parsed(client: openai.OpenAI, tool_format: str) -> None:
    template: dict[str, Any] = {"chat_template": PLAIN_TEMPLATE.replace("TEACHES", FORMATS[tool_format])}
    if tool_format == "minimax_m1":  # whose templates are also recognized as those of a reasoning model
        template["thinking_token_budget"] = 10
    for fields in (
        {"tool_choice": {"type": "function", "function": {"name": "roll"}}},
        {"tool_choice": "required", "temperature": 1, "seed": 5, "max_tokens": 100},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": "required", "parallel_tool_calls": False, "tools": [PLAN], "temperature": 1, "seed": 1},
    ):
        request = {"tools": TOOLS, "extra_body": template, **fields}
        whole, streamed = (ask(client, stream, IN_PARIS, **request) for stream in (False, True))
        check_calls(whole)
        assert (streamed.calls, streamed.content) == (whole.calls, whole.content)
        assert whole.reason == "length" or not whole.content
    assert not ask(client, False, IN_PARIS, tools=TOOLS, tool_choice="none", extra_body=template).calls


def test_call_ids_match_template(client: openai.OpenAI) -> None:
    patterns = {"mistral": "[0-9a-zA-Z]{9}", "deepseek_v3": "call_[0-9a-f]{24}"}
    for tool_format, pattern in patterns.items():
        template = {"chat_template": PLAIN_TEMPLATE.replace("TEACHES", FORMATS[tool_format])}
        fields: dict[str, Any] = {"model": "default", "messages": IN_PARIS, "tools": TOOLS, "tool_choice": "required"}
        answer = client.chat.completions.create(
            **fields, extra_body=template, parallel_tool_calls=False, max_tokens=200
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert re.fullmatch(pattern, call.id)


@pytest.mark.slow
def test_tool_call_parser_selects_format() -> None:
    arguments = ("--num-gpu-blocks-override", "400", "--tool-call-parser", "mistral", "--reasoning-parser", "none")
    with Served(*arguments) as served:
        client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
        check_calls(ask(client, True, IN_PARIS, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False))
        unparsed = ask(client, False, IN_PARIS, tools=TOOLS[:1], extra_body=THINK)
        assert not unparsed.calls and not unparsed.thought and unparsed.content.startswith("<think>")


def test_schema_unsupported_by_format_is_rejected(client: openai.OpenAI) -> None:
    template = {"chat_template": PLAIN_TEMPLATE.replace("TEACHES", FORMATS["qwen3_coder"])}
    wrong = tool("roll", **{"a b": {"type": "string"}})
    with pytest.raises(openai.BadRequestError, match="the name of the parameter 'a b' is not supported") as caught:
        ask(client, False, IN_PARIS, tools=[wrong], tool_choice="required", extra_body=template)
    assert caught.value.param == "tools"


def test_tools_are_rejected_with_unknown_format(client: openai.OpenAI) -> None:
    template = {"chat_template": PLAIN_TEMPLATE.replace("TEACHES", "<|calls|>")}
    with pytest.raises(openai.BadRequestError, match="tools: this model's chat template does not support tools"):
        ask(client, False, IN_PARIS, tools=TOOLS, extra_body=template)
