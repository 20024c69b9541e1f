"""Response parsing: reasoning, content and tool calls do not depend on how the text is split into chunks."""

from __future__ import annotations

import itertools
import json
import os
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.options import ModelOptions
from penstock.text import (
    Message,
    ParserConfig,
    ReasoningStage,
    ResponseParser,
    initial_stage,
    reasoning_format,
    tool_call_format,
)
from penstock.text.reasoning import REASONING_FORMATS
from penstock.text.tool_calls.formats import TOOL_CALL_FORMATS
from penstock.text.tool_calls.json_calls import JSONFormat
from penstock.text.tool_calls.xml_calls import XMLFormat

EXAMPLES = int(os.environ.get("PENSTOCK_READING_EXAMPLES", "40"))
"""Number of random texts per tool-call format and reasoning stage."""
TOOLS = {name: tool_call_format(name, "") for name in (
    "hermes", "llama3_json", "mistral", "deepseek_v3", "granite", "phi4_mini_json", "hunyuan_a13b", "cohere_command3",
    "internlm", "kimi_k2", "qwen3_coder", "seed_oss", "minimax_m2", "glm45", "pythonic", "olmo3", "lfm2", "openai",
    "generic", "granite-20b-fc", "nemotron_json", "xlam", "apertus", "minimax_01", "minimax_m1", "solar_open",
    "deepseek_v32", "deepseek_v4", "gigachat35", "kimi_k3", "step3", "solar_open2", "minicpm5", "dots", "gemma4",
    "functiongemma", "minimax_m3", "inkling", "k2_horizon",
)} | {
    "longcat": tool_call_format("longcat", "<longcat_tool_call>"),
    "longcat elements": tool_call_format("longcat", "<longcat_tool_call> <longcat_arg_key>"),
    "gigachat3": tool_call_format("gigachat3", "<|role_sep|> function call"),
    "gigachat31": tool_call_format("gigachat3", "<|role_sep|> <|function_call|>"),
    "hy_v3": tool_call_format("hy_v3", "<tool_sep> <arg_key>"),
    "hy_v3 with suffix": tool_call_format("hy_v3", "<tool_sep:opensource>"),
}  # fmt: skip
THOUGHTS = {name: reasoning_format(name, "") for name in (
    "qwen3", "deepseek_r1", "ernie", "hunyuan_a13b", "cohere_command3", "seed_oss", "granite", "mistral",
    "openai_gptoss", "gemma4", "minimax_m3", "kimi_k3", "apertus", "solar_open2", "solar_open", "longcat", "kimi",
    "kimi_k2", "inkling", "k2_horizon",
)} | {"hy_v3": reasoning_format("hy_v3", "<think:opensource>")}  # fmt: skip


def read(config: ParserConfig, chunks: list[str], hidden: tuple[str, ...] = ()) -> Message:
    """Parse chunks; assert that each chunk only appends to the message."""
    parser, previous = ResponseParser(config, hidden), ("", "", [])
    for i, chunk in enumerate(chunks):
        parser.add(chunk, last=i == len(chunks) - 1)
        message = parser.message
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        assert message.content.startswith(previous[0]) and message.reasoning_content.startswith(previous[1])
        for before, after in zip(previous[2], calls, strict=False):
            assert before[0] == after[0] and after[1].startswith(before[1])
        previous = (message.content, message.reasoning_content, calls)
    return parser.message


def cut(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=30)))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


ADD = '{"a": 1, "b": "<é> }] \\" </tool_call>"}'
HERMES = f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>'
LLAMA = f'{{"name": "add", "parameters": {ADD}}}'
MISTRAL = f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD}, "id": "x}}"}}, {{"name": "now", "arguments": {{}}}}]'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD}<｜tool▁call▁end｜>"
CALL, NOW = ("add", ADD), ("now", "{}")

SCHEMAS = {
    "add": {
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "string"},
            "c": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "d": {"$ref": "#/$defs/numbers"},
            "e": {"enum": ["1", "2"]},
            "f": {"type": ["boolean", "null"]},
        },
        "$defs": {"numbers": {"type": "array", "items": {"type": "number"}}},
    }
}
CODER = """<tool_call>
<function=add>
<parameter=a>
1
</parameter>
<parameter=b>

<é> }] \\" </div>

</parameter>
</function>
</tool_call>"""
CODED = ("add", '{"a": 1, "b": "\\n<é> }] \\\\\\" </div>\\n"}')
SEED = "<seed:tool_call>\n<function=add>\n<parameter=e>1</parameter>\n</function>\n</seed:tool_call>"
INVOKED = '<invoke name="add">\n<parameter name="b">5</parameter>\n<parameter name="a">5</parameter>\n</invoke>'
GLM = "<tool_call>add\n<arg_key>b</arg_key>\n<arg_value> 5\n</arg_value>\n<arg_key>d</arg_key>\n<arg_value>[1, 2.5]"
GLM += "</arg_value>\n</tool_call>"
PYTHON = """add(a=-1, b='it\\'s, ok)', c=None, d=[1, {"x": (2,)}], f=true)"""
CALLED = ("add", '{"a": -1, "b": "it\'s, ok)", "c": null, "d": [1, {"x": [2]}], "f": true}')
KIMI = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"

NOTHING = '{"name": "now", "arguments": {}}'
SHORT = ("add", '{"a": 1, "b": "5"}')
NESTED = (
    "add",
    r'{"b": "a, {b}: \"]", "a": -1.5, "c": null, "d": [1, 2.5], "g": {"x": ["y"], "z": {}}, "f": true}',
)
DSML = """<｜DSML｜invoke name="add">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
<｜DSML｜parameter name="b" string="true">5</｜DSML｜parameter>
</｜DSML｜invoke>"""
DSML_TYPES = """<｜DSML｜invoke name="x">
<｜DSML｜parameter name="s" string="true">5</｜DSML｜parameter>
<｜DSML｜parameter name="n" string="false">5</｜DSML｜parameter>
<｜DSML｜parameter name="l" string="false">[1, {"y": null}]</｜DSML｜parameter>
</｜DSML｜invoke>"""
DSML_TYPED = ("x", '{"s": "5", "n": 5, "l": [1, {"y": null}]}')
K3 = """<|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>\
<|open|>argument key="b" type="string"<|sep|>5<|close|>argument<|sep|><|close|>call<|sep|>"""
STEP = """<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add">
<steptml:parameter name="a">1</steptml:parameter>
<steptml:parameter name="b">5</steptml:parameter>
</steptml:invoke><｜tool_call_end｜>"""
SOLAR = """<|tool_call:start|>add
<|tool_arg:start|>a<|tool_arg:value|>1<|tool_arg:end|>
<|tool_arg:start|>b<|tool_arg:value|>5<|tool_arg:end|>
<|tool_call:end|>"""
HY = """<tool_call>add<tool_sep>
<arg_key>a</arg_key>
<arg_value>1</arg_value>
<arg_key>b</arg_key>
<arg_value>5</arg_value>
</tool_call>"""
LONGCAT = """<longcat_tool_call>add
<longcat_arg_key>a</longcat_arg_key>
<longcat_arg_value>1</longcat_arg_value>
<longcat_arg_key>b</longcat_arg_key>
<longcat_arg_value>5</longcat_arg_value>
</longcat_tool_call>"""
GEMMA = """<|tool_call>call:add{b:<|"|>a, {b}: "]<|"|>,a:-1.5,c:null,d:[1, 2.5],g:{x:[<|"|>y<|"|>],z:{}},f:true}\
<tool_call|>"""
NS = "]<]minimax[>["
M3 = f"""{NS}<invoke name="add">{NS}<b>a, {{b}}: "]{NS}</b>{NS}<a>-1.5{NS}</a>{NS}<c>null{NS}</c>\
{NS}<d>{NS}<item>1{NS}</item>{NS}<item>2.5{NS}</item>{NS}</d>\
{NS}<g>{NS}<x>{NS}<item>y{NS}</item>{NS}</x>{NS}<z>{{}}{NS}</z>{NS}</g>{NS}<f>true{NS}</f>{NS}</invoke>"""

CALLS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": [
        ("Hello there.", "Hello there.", []),
        (HERMES, "", [CALL]),
        (f"I shall add. \n{HERMES}\n{HERMES}\n", "I shall add.", [CALL, CALL]),
        (f"{HERMES} Done.", "Done.", [CALL]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
        ('<tool_call>{"arguments": {"x": 1}, "name": "n"}</tool_call>', "", [("n", '{"x": 1}')]),
        ('<tool_call>{"name": "n", "arguments": "{}"}</tool_call>', "", [("n", "{}")]),
        ('<tool_call>{"name": "n", "arguments": {"x":1,  "y":[{}]}}</tool_call>', "", [("n", '{"x":1,  "y":[{}]}')]),
        ('<tool_call>{"name": "n", "arguments": {"x": 1}</tool_call> So.', "So.", [("n", '{"x": 1}')]),
        ('<tool_call>{"name": "n", "arguments": {"x": [1<tool_call>{"name": "now"}', "", [("n", '{"x": [1'), NOW]),
        ('<tool_call>{"name": "n", "arguments": {"x": "ab', "", [("n", '{"x": "ab')]),
        ("a < b <tool_ca", "a < b <tool_ca", []),
        ('<tool_call>{\\" <tool_call>{"name": "now"', '<tool_call>{\\" <tool_call>{"name": "now"', []),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}', "", [("\\ud800", "{}")]),
        ('<tool_call>{"arguments": {"a": "\\ud800"}, "name": "n"}', "", [("n", '{"a": "\\ud800"}')]),
        ("Look: <tool_call>\nnot JSON\n</tool_call>", "Look: <tool_call>\nnot JSON\n</tool_call>", []),
        (f"Write <tool_call>, as in {HERMES}", "Write <tool_call>, as in", [CALL]),
        ('<tool_call>{"x": {"name": "n"}}</tool_call>', '<tool_call>{"x": {"name": "n"}}</tool_call>', []),
        ('It was \n<tool_call>{"name": ', "It was", []),
        ("A line. \n\n", "A line. \n\n", []),
    ],
    "llama3_json": [
        (LLAMA, "", [CALL]),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", "", [CALL, CALL]),
        (f'{{"type": "function", {LLAMA[1:]}', "", [("add", json.dumps(json.loads(ADD), ensure_ascii=False))]),
        ('{"name": "n", "parameters": {"x": 1}; {"name": "now", "parameters": {}}', "", [("n", '{"x": 1}'), NOW]),
        (' {"answer": 42}', ' {"answer": 42}', []),
        (f"See {LLAMA}", f"See {LLAMA}", []),
        (f"{LLAMA}\n{LLAMA}{{}}", "{}", [CALL, CALL]),
        (f"{LLAMA}; and so on", "; and so on", [CALL]),
    ],
    "mistral": [
        (MISTRAL, "", [CALL, NOW]),
        (f"[TOOL_CALLS]add[ARGS]{ADD}[TOOL_CALLS]now[CALL_ID]x1[ARGS]{{}}", "", [CALL, NOW]),
        (f"Well. [TOOL_CALLS]add{ADD}", "Well.", [CALL]),
        ("[TOOL_CALLS] are tokens.", "[TOOL_CALLS] are tokens.", []),
        ("[TOOL_CALLS] " + "long " * 200 + "{}", "[TOOL_CALLS] " + "long " * 200 + "{}", []),
        ("See [1], [2].", "See [1], [2].", []),
    ],
    "deepseek_v3": [
        (f"<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>", "", [("add", "{}")] * 2),
        (f"Yes.\n\n{V31}<｜tool▁calls▁end｜>", "Yes.", [CALL]),
        (f"{V31}<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>", "", [CALL, NOW]),
        ("<｜tool▁calls▁begin｜>none.\n", "<｜tool▁calls▁begin｜>none.\n", []),
    ],
    "granite": [
        (
            f'<|tool_call|>[{{"name": "add", "arguments": {ADD}}}, {{"name": "now", "arguments": {{}}}}]',
            "",
            [CALL, NOW],
        ),
        ("A <|tool_call|> is a token.", "A <|tool_call|> is a token.", []),
    ],
    "phi4_mini_json": [
        (f'functools[{{"name": "add", "arguments": {ADD}}}]', "", [CALL]),
        ('<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", [NOW]),
        ("import functools", "import functools", []),
    ],
    "hunyuan_a13b": [
        (f'Yes.\n<tool_calls>[{{"name": "add", "arguments": {ADD}}}]</tool_calls>', "Yes.", [CALL]),
    ],
    "cohere_command3": [
        (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": {}},\n    '
            f'{{"tool_name": "add", "parameters": {ADD}, "tool_call_id": "1"}}\n]<|END_ACTION|>',
            "",
            [NOW, CALL],
        ),
        ('<|START_ACTION|>[{"parameters": {}, "tool_name": "now"}]<|END_ACTION|>', "", [NOW]),
    ],
    "kimi_k2": [
        (
            f"So. <|tool_calls_section_begin|>{KIMI}{ADD}<|tool_call_end|>{KIMI} {{}}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            "So.",
            [CALL, ("add", "{}")],
        ),
        ("<|tool_call_begin|>add<|tool_call_end|>", "<|tool_call_begin|>add<|tool_call_end|>", []),
    ],
    "qwen3_coder": [
        (CODER, "", [CODED]),
        (f"I add.\n\n{CODER}\n{CODER}\n", "I add.", [CODED, CODED]),
        (CODER.replace("<tool_call>\n", ""), "", [CODED]),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call> Done.", "Done.", [NOW]),
        ("<function=now></function><function=now></tool_call>", "", [NOW, NOW]),
        ("<tool_call><function=add><parameter=a>\n 007 \n</parameter></function>", "", [("add", '{"a": " 007 "}')]),
        ("<tool_call><function=add><parameter=a>7</parameter>so<parameter=b>x", "", [("add", '{"a": 7, "b": "x')]),
        ("<tool_call><function=add><parameter=a>7", "", [("add", "{")]),
        ("<tool_call><function=add><parameter=a", "", [("add", "{")]),
        ("<tool_call><function=x><parameter=y>TRUE</parameter></function>", "", [("x", '{"y": true}')]),
        ("<tool_call><function=x><parameter=y>{'z': None}</parameter></function>", "", [("x", '{"y": {"z": null}}')]),
        ("<tool_call><function=x><parameter=y>{z}</parameter></function>", "", [("x", '{"y": "{z}"}')]),
        ("<tool_call><function=add><parameter=c>null</parameter></function>", "", [("add", '{"c": null}')]),
        ("<tool_call><function=add><parameter=c>12</parameter></function>", "", [("add", '{"c": "12"}')]),
        ("<tool_call><function=add><parameter=d>[1,\n 2]</parameter></function>", "", [("add", '{"d": [1,\n 2]}')]),
        ("<tool_call><function=add><parameter=f>False</parameter></function>", "", [("add", '{"f": false}')]),
        ("A <tool_call> is a mark, <function= is, too.", "A <tool_call> is a mark, <function= is, too.", []),
        ("<tool_call>\n<function=a b>", "<tool_call>\n<function=a b>", []),
    ],
    "seed_oss": [
        (f"Yes. {SEED}{SEED}", "Yes.", [("add", '{"e": "1"}')] * 2),
        ("<tool_call>", "<tool_call>", []),
    ],
    "minimax_m2": [
        (
            f"<minimax:tool_call>\n{INVOKED}\n<invoke name='x'>\n{INVOKED}\n</minimax:tool_call>",
            f"<invoke name='x'>\n{INVOKED}\n</minimax:tool_call>",
            [("add", '{"b": "5", "a": 5}')],
        ),
        (
            f"<minimax:tool_call>\n{INVOKED}\n{INVOKED}\n</minimax:tool_call>.",
            ".",
            [("add", '{"b": "5", "a": 5}')] * 2,
        ),
    ],
    "glm45": [
        (f"Hm.\n{GLM}\n{GLM}", "Hm.", [("add", '{"b": " 5\\n", "d": [1, 2.5]}')] * 2),
        (
            "<tool_call>add<arg_key>a</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
            "",
            [("add", '{"a": 3}'), NOW],
        ),
        ("<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
        ("<tool_call>add <arg_key>a</arg_key> 5 </tool_call>", "", [("add", "{}")]),
    ],
    "pythonic": [
        (f"[{PYTHON}]", "", [CALLED]),
        (f" <|python_start|>[{PYTHON}, now()]<|python_end|> So.", "So.", [CALLED, NOW]),
        ("[now( ), now()] and", "and", [NOW, NOW]),
        ('[f(x="a' + "\\n" + '", y=b c)]', "", [("f", '{"x": "a\\n", "y": "b c"}')]),
        ("[f(x=1, y=[1", "", [("f", '{"x": 1')]),
        ("[f(x=1, y", "", [("f", '{"x": 1')]),
        ("[1, 2]", "[1, 2]", []),
        ("[f(1)] = [f(x == 2)]", "[f(1)] = [f(x == 2)]", []),
        ("[see](http://x)", "[see](http://x)", []),
        ("f(x=1)", "f(x=1)", []),
    ],
    "olmo3": [
        (f"Yes. <function_calls>{PYTHON}\nnow()</function_calls>\n", "Yes.", [CALLED, NOW]),
        (f"<function_calls>\n[{PYTHON}]\n</function_calls>", "", [CALLED]),
        ("<function_calls>none</function_calls>", "<function_calls>none</function_calls>", []),
    ],
    "lfm2": [
        (f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>Now.", "Now.", [CALLED]),
    ],
    "internlm": [
        (f'Well.<|action_start|><|plugin|>\n{{"name": "add", "parameters": {ADD}}}<|action_end|>', "Well.", [CALL]),
    ],
    "generic": [
        (f"I shall add.\n{HERMES}\n{HERMES}", "I shall add.", [CALL, CALL]),
        ("{}", "{}", []),
    ],
    "longcat": [
        (f'Yes.\n<longcat_tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</longcat_tool_call>', "Yes.", [CALL]),
        (
            f'<longcat_tool_call>{{"name": "add", "arguments": {ADD}}}</longcat_tool_call>\n'
            '<longcat_tool_call>{"name": "now", "arguments": {}}</longcat_tool_call>',
            "",
            [CALL, NOW],
        ),
        ("<longcat_tool_call>none</longcat_tool_call>", "<longcat_tool_call>none</longcat_tool_call>", []),
    ],
    "longcat elements": [
        (f"Yes.{LONGCAT}\n{LONGCAT}", "Yes.", [SHORT, SHORT]),
        (LONGCAT.replace("\n", ""), "", [SHORT]),
        ("<longcat_tool_call>now</longcat_tool_call>", "", [NOW]),
    ],
    "granite-20b-fc": [
        (f'<function_call> {{"name": "add", "arguments": {ADD}}}', "", [CALL]),
        (
            f'<function_call> {{"name": "add", "arguments": {ADD}}}\n<function_call> {NOTHING}',
            "",
            [CALL, NOW],
        ),
        ("A <function_call> has a name.", "A <function_call> has a name.", []),
    ],
    "nemotron_json": [
        (
            f'Yes.\n\n<TOOLCALL>[{{"name": "add", "arguments": {ADD}}}, {NOTHING}]</TOOLCALL>',
            "Yes.",
            [CALL, NOW],
        ),
        ("<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", []),
    ],
    "xlam": [
        (f'[{{"name": "add", "arguments": {ADD}}}, {{"name": "now", "arguments": {{}}}}]', "", [CALL, NOW]),
        (f'```json\n[{{"name": "add", "arguments": {ADD}}}]\n```', "", [CALL]),
        (f'Yes. [TOOL_CALLS] [{{"name": "add", "arguments": {ADD}}}]', "Yes.", [CALL]),
        (f'<tool_call>[{{"name": "add", "arguments": {ADD}}}]</tool_call>', "", [CALL]),
        ('[{"x": 1}]', '[{"x": 1}]', []),
        ("[1] is a source.", "[1] is a source.", []),
        ('Write ```json\n{"x": 1}\n```.', 'Write ```json\n{"x": 1}\n```.', []),
    ],
    "apertus": [
        (f'Yes. <|tools_prefix|>[{{"add": {ADD}}}, {{"now": {{}}}}]<|tools_suffix|>', "Yes.", [CALL, NOW]),
        ('<|tools_prefix|>[{"name": {"x": 1}}]<|tools_suffix|>', "", [("name", '{"x": 1}')]),
        ('<|tools_prefix|>[{"now": 5}]<|tools_suffix|>', '<|tools_prefix|>[{"now": 5}]<|tools_suffix|>', []),
    ],
    "minimax_01": [
        (f"Yes.\n<function_call>```typescript\nfunctions.add({ADD})\n```", "Yes.", [CALL]),
        (f"```typescript\nfunctions.add({ADD})\n```\n```typescript\nfunctions.now({{}})\n```", "", [CALL, NOW]),
        ("```typescript\nlet f = {};\n```", "```typescript\nlet f = {};\n```", []),
        ("```typescript\nfunctions.add;\n```", "```typescript\nfunctions.add;\n```", []),
    ],
    "minimax_m1": [
        (
            f'Yes.\n<tool_calls>\n{{"name": "add", "arguments": {ADD}}}\n{NOTHING}\n</tool_calls>',
            "Yes.",
            [CALL, NOW],
        ),
        ("<tool_calls>\nnone\n</tool_calls>", "<tool_calls>\nnone\n</tool_calls>", []),
    ],
    "solar_open": [
        (
            f"Yes.<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>add<|tool_call:args|>{ADD}"
            "<|tool_call:end|><|tool_call:begin|>0123456789<|tool_call:name|>now<|tool_call:args|>{}"
            "<|tool_call:end|><|calls|>",
            "Yes.",
            [CALL, NOW],
        ),
        (
            f"<|tool_call:begin|><|tool_call:name|>add<|tool_call:args|>{ADD}<|tool_call:end|>",
            "",
            [CALL],
        ),
        ("<|tool_calls|>none at all", "<|tool_calls|>none at all", []),
    ],
    "gigachat3": [
        (
            "Yes.<|message_sep|>\n\nfunction call<|role_sep|>\n"
            f'{{"name": "add", "arguments": {ADD}}}<|message_sep|>\n\n',
            "Yes.",
            [CALL],
        ),
        (f'function call<|role_sep|>\n{{"name": "add", "arguments": {ADD}}}', "", [CALL]),
        ("A function call is a message.", "A function call is a message.", []),
    ],
    "gigachat31": [
        (f'Yes. <|function_call|>{{"name": "add", "arguments": {ADD}}}<|message_sep|>\n\n', "Yes.", [CALL]),
    ],
    "deepseek_v32": [
        (f"Yes.\n\n<｜DSML｜function_calls>\n{DSML}\n{DSML}\n</｜DSML｜function_calls>", "Yes.", [SHORT, SHORT]),
        (f"<｜DSML｜function_calls>\n{DSML_TYPES}\n</｜DSML｜function_calls>.", ".", [DSML_TYPED]),
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>', "", [NOW]),
        ("<｜DSML｜function_calls>none", "<｜DSML｜function_calls>none", []),
    ],
    "deepseek_v4": [
        (f"Yes.\n\n<｜DSML｜tool_calls>\n{DSML}\n{DSML}\n</｜DSML｜tool_calls>", "Yes.", [SHORT, SHORT]),
    ],
    "gigachat35": [
        (
            f"Yes.\n\n<｜DSML｜tool_calls>\n{DSML_TYPES}\n</｜DSML｜tool_calls>".replace("DSML", "GCML"),
            "Yes.",
            [DSML_TYPED],
        ),
    ],
    "kimi_k3": [
        (
            f"<|open|>tools<|sep|>{K3}{K3}<|close|>tools<|sep|><|close|>message<|sep|>",
            "",
            [SHORT, SHORT],
        ),
        (
            '<|open|>tools<|sep|><|open|>call tool="x" index="1"<|sep|><|open|>argument key="&quot;&amp;" type="object"'
            '<|sep|>{"y": [1]}<|close|>argument<|sep|><|open|>argument key="s" type="string"<|sep|>5'
            "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
            "",
            [("x", '{"\\"&": {"y": [1]}, "s": "5"}')],
        ),
        ('<|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|>', "", [NOW]),
    ],
    "step3": [
        (f"Yes.\n<｜tool_calls_begin｜>\n{STEP}\n{STEP}\n<｜tool_calls_end｜>", "Yes.", [SHORT, SHORT]),
        (f"<｜tool_calls_begin｜>{STEP}<｜tool_calls_end｜>".replace("\n", ""), "", [SHORT]),
        (
            '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add">'
            '<steptml:parameter name="b">if a < b: c</steptml:parameter></steptml:invoke><｜tool_call_end｜>',
            "",
            [("add", '{"b": "if a < b: c"}')],
        ),
    ],
    "hy_v3": [
        (f"Yes.<tool_calls>\n{HY}\n{HY}\n</tool_calls>", "Yes.", [SHORT, SHORT]),
        (f"<tool_calls>{HY}</tool_calls>".replace("\n", ""), "", [SHORT]),
        ("<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>", "", [NOW]),
    ],
    "hy_v3 with suffix": [
        (f"Yes.<tool_calls>\n{HY}\n{HY}\n</tool_calls>".replace(">", ":opensource>"), "Yes.", [SHORT, SHORT]),
    ],
    "solar_open2": [
        (f"Yes.{SOLAR}\n{SOLAR}", "Yes.", [SHORT, SHORT]),
        ("<|tool_call:start|>now\n<|tool_call:end|>", "", [NOW]),
    ],
    "minicpm5": [
        (
            'Yes. <function name="add"><param name="a">1</param><param name="b">5</param></function>\n'
            '<function name="now"></function>',
            "Yes.",
            [SHORT, NOW],
        ),
        (
            '<function name="add"><param name="b"><![CDATA[<b>\n</param>]]></param>'
            '<param name="a"><![CDATA[1]]></param></function>',
            "",
            [("add", '{"b": "<b>\\n</param>", "a": 1}')],
        ),
        ('<function name="a b">', '<function name="a b">', []),
    ],
    "dots": [
        (
            f"Yes.\n<dots_function_call>\n{INVOKED}\n</dots_function_call>",
            "Yes.",
            [("add", '{"b": "5", "a": 5}')],
        ),
    ],
    "inkling": [
        (
            '<|content_text|>Yes.<|end_message|><|message_model|>x<|content_invoke_tool_json|>{"name": "add", "args": '
            f"{ADD}}}<|end_message|><|message_model|><|content_invoke_tool_json|>{{}}",
            "<|content_text|>Yes.<|end_message|><|message_model|><|content_invoke_tool_json|>{}",
            [CALL],
        ),
        (f'add<|content_invoke_tool_json|>{{"name": "add", "args": {ADD}}}<|end_message|>', "", [CALL]),
        ('<|content_invoke_tool_json|>{"args": {"x": 1}, "name": "n"}<|end_message|>', "", [("n", '{"x": 1}')]),
        ("<|content_text|>No.<|end_message|>", "<|content_text|>No.<|end_message|>", []),
    ],
    "k2_horizon": [
        (
            "Yes.<ifm|tool_calls><ifm|tool_call>add<ifm|arg_key>a</ifm|arg_key><ifm|arg_value>1</ifm|arg_value>"
            "<ifm|arg_key>b</ifm|arg_key><ifm|arg_value>5</ifm|arg_value></ifm|tool_call><ifm|tool_call>now"
            "</ifm|tool_call></ifm|tool_calls>",
            "Yes.",
            [SHORT, NOW],
        ),
    ],
    "gemma4": [
        (f"{GEMMA}{GEMMA}", "", [NESTED, NESTED]),
        ("Yes.<|tool_call>call:now{}<tool_call|>", "Yes.", [NOW]),
        (
            '<|tool_call>call:x{a:[{b:<|"|>c<|"|>},true],d:e f}<tool_call|>',
            "",
            [("x", '{"a": [{"b": "c"}, true], "d": "e f"}')],
        ),
        (
            '<|tool_call>call:x{<|"|>a b<|"|>:"c\\n",d:{"e": 1}}<tool_call|>',
            "",
            [("x", '{"a b": "c\\n", "d": {"e": 1}}')],
        ),
        ("<|tool_call>call:add{b:5,a:1}<tool_call|>", "", [("add", '{"b": "5", "a": 1}')]),
        ("<|tool_call>call:x{a:{b:[1", "", [("x", '{"a": {"b": [')]),
        ("<|tool_call>none<tool_call|>", "<|tool_call>none<tool_call|>", []),
    ],
    "functiongemma": [
        (
            GEMMA.replace('<|"|>', "<escape>")
            .replace("<|tool_call>", "<start_function_call>")
            .replace("<tool_call|>", "<end_function_call>"),
            "",
            [NESTED],
        ),
    ],
    "minimax_m3": [
        (f"Yes.\n{NS}<tool_call>\n{M3}\n{M3}\n{NS}</tool_call>", "Yes.", [NESTED, NESTED]),
        (f'{NS}<tool_call>{NS}<invoke name="now">{NS}</invoke>{NS}</tool_call>', "", [NOW]),
        (
            f'{NS}<invoke name="add">{NS}<b>x {NS}<y>{NS}</b>{NS}<d>[1]{NS}</d>{NS}</invoke>',
            "",
            [("add", f'{{"b": "x {NS}<y>", "d": [1]}}')],
        ),
        (
            f'{NS}<invoke name="x">{NS}<a>{NS}<item>{NS}<b>c{NS}</b>{NS}</item>{NS}</a>{NS}<d>5{NS}</d>{NS}</invoke>',
            "",
            [("x", '{"a": [{"b": "c"}], "d": 5}')],
        ),
        (f"{NS}<tool_call>none", f"{NS}<tool_call>none", []),
    ],
}


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [(form, *case) for form, cases in CALLS.items() for case in cases],
)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_calls_are_parsed_at_any_chunk_boundaries(
    form: str, text: str, content: str, calls: list[Any], data: st.DataObject
) -> None:
    message = read(ParserConfig(tools=TOOLS[form], schemas=SCHEMAS), cut(text, data))
    assert message.content == content
    assert [(call.name, call.arguments) for call in message.tool_calls] == calls


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [(form, *case) for form, cases in CALLS.items() for case in cases if case[2]],
)
def test_truncated_call_leaves_no_markup_in_content(form: str, text: str, content: str, calls: list[Any]) -> None:
    """The text is cut after any character: content and arguments are prefixes of the complete content and arguments."""
    tools = TOOLS[form]
    assert tools
    for length in range(len(text)):
        message = read(ParserConfig(tools=tools, schemas=SCHEMAS), [text[:length]])
        if tools.allow_unmarked and not message.tool_calls and "<|" not in text[:length]:
            continue  # content that is plain JSON or a list may begin in the same way
        markers = (*tools.start_markers, *tools.separators) if isinstance(tools, JSONFormat) else tools.start_markers
        partial_markers = [
            marker[:n] for marker in ("", *markers) for n in range(len(marker) or 1)
        ]  # the text so far may be content or the beginning of a call
        visible = [
            message.content.removesuffix(marker_start).rstrip()
            for marker_start in partial_markers
            if message.content.endswith(marker_start)
        ]
        assert any(content.startswith(text_shown) for text_shown in visible), text[:length]
        for call, (name, arguments) in zip(message.tool_calls, calls, strict=False):
            assert call.name == name and arguments.startswith(call.arguments), text[:length]


LIST_OR_TEXT = {"anyOf": [{"type": "array"}, {"type": "string"}]}
VALUES = [
    ("a", "1,000", "1000"),
    ("a", "-12,345,678", "-12345678"),
    ("a", "1,00", '"1,00"'),
    ("a", "1, 2", '"1, 2"'),
    ("a", "(1, 2)", "[1, 2]"),
    ("b", "1, 2", '"1, 2"'),
    ("d", "1, 2", "[1, 2]"),
    ("d", "'a', \"b\"", '["a", "b"]'),
    ("g", "1, 2", '"1, 2"'),
    ("x", "1, 2", '"1, 2"'),
    ("a", "", None),
    ("a", " ", None),
    ("b", "1,000", '"1,000"'),
    ("b", "", '""'),
    ("c", "", '""'),
    ("d", "", None),
    ("f", "", "null"),
    ("n", "1,000.5", "1000.5"),
    ("x", "1,000", '"1,000"'),
    ("x", "", '""'),
]
"""Parameter name, its text, and its JSON value; None: the argument is omitted. The schema has no ``x``."""


@pytest.mark.parametrize(
    "form", [name for name, form in TOOLS.items() if isinstance(form, XMLFormat) and not form.kinds]
)
@pytest.mark.parametrize(("name", "written", "value"), VALUES)
def test_unquoted_values_follow_schema_types(form: str, name: str, written: str, value: str | None) -> None:
    tools = TOOLS[form]
    assert isinstance(tools, XMLFormat)
    begin, end = tools.parameter
    element = f"{begin}{name}{end}{tools.value_start}{written}{tools.value_end}"
    before, after = tools.call_start
    text = (
        f"{tools.prefix}{before}add{after}{element}{begin}b{end}{tools.value_start}z{tools.value_end}{tools.call_end}"
    )
    schema = SCHEMAS["add"]
    schemas = {"add": schema | {"properties": schema["properties"] | {"n": {"type": "number"}, "g": LIST_OR_TEXT}}}
    (call,) = read(ParserConfig(tools=tools, schemas=schemas), [text]).tool_calls
    first = f'"{name}": {value}, ' if value is not None else ""
    assert call.arguments == f'{{{first}"b": "z"}}'


ANSWERS = [
    ("qwen3", ReasoningStage.BEFORE, "<think>\nLet me see.\n</think>\n\nIt is 4.\n", "Let me see.", "It is 4.\n"),
    ("qwen3", ReasoningStage.BEFORE, "\nIt is <think>4</think>.", "", "\nIt is <think>4</think>."),
    ("qwen3", ReasoningStage.WITHIN, "Let me see.\n\n</think>It is 4.", "Let me see.", "It is 4."),
    ("qwen3", ReasoningStage.WITHIN, "Let me see.\n", "Let me see.\n", ""),
    ("qwen3", ReasoningStage.WITHIN, "a </think", "a </think", ""),
    ("qwen3", ReasoningStage.AFTER, "\n</think>It is 4.", "", "\n</think>It is 4."),
    ("qwen3", ReasoningStage.BEFORE, "<thin", "", "<thin"),
    ("deepseek_r1", ReasoningStage.WITHIN, "<think>\n<think>a</think>b</think>", "<think>a", "b</think>"),
    ("hunyuan_a13b", ReasoningStage.BEFORE, "<think>\na\n</think>\n<answer>\nb\n</answer>", "a", "b"),
    (
        "cohere_command3",
        ReasoningStage.BEFORE,
        "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",
        "a",
        "b",
    ),
    ("seed_oss", ReasoningStage.WITHIN, "a\n</seed:think>\nb", "a", "b"),
    ("mistral", ReasoningStage.BEFORE, "[THINK]a[/THINK]b", "a", "b"),
    ("granite", ReasoningStage.BEFORE, "Here is my thought process: a\nHere is my response: b", " a", " b"),
    ("mistral", ReasoningStage.BEFORE, "[/THINK]b", "", "b"),
    ("gemma4", ReasoningStage.BEFORE, "<|channel>thought\na\n<channel|>b", "a", "b"),
    ("gemma4", ReasoningStage.BEFORE, "<|channel>thought\n<channel|>b", "", "b"),
    ("minimax_m3", ReasoningStage.BEFORE, "<mm:think>a</mm:think>b", "a", "b"),
    ("minimax_m3", ReasoningStage.BEFORE, "</mm:think>b", "", "b"),
    (
        "kimi_k3",
        ReasoningStage.WITHIN,
        "a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|><|close|>message<|sep|>",
        "a",
        "b",
    ),
    ("kimi_k3", ReasoningStage.AFTER, "b<|close|>response<|sep|><|close|>message<|sep|>", "", "b"),
    ("apertus", ReasoningStage.BEFORE, "<|inner_prefix|>a<|inner_suffix|>b", "a", "b"),
    ("solar_open2", ReasoningStage.WITHIN, "a<|think:end|>b", "a", "b"),
    ("solar_open", ReasoningStage.BEFORE, "<|think|>a<|end|><|begin|>assistant<|content|>b<|end|>", "a", "b"),
    ("hy_v3", ReasoningStage.WITHIN, "a</think:opensource>b", "a", "b"),
    (
        "inkling",
        ReasoningStage.BEFORE,
        "<|content_thinking|>a<|end_message|><|message_model|><|content_text|>b<|end_message|>",
        "a",
        "b",
    ),
    ("k2_horizon", ReasoningStage.WITHIN, "a\n</ifm|think>\nb", "a", "b"),
    ("longcat", ReasoningStage.WITHIN, "a\n</longcat_think>\nb", "a", "b"),
    ("kimi", ReasoningStage.BEFORE, "◁think▷a◁/think▷b", "a", "b"),
    ("cohere_command3", ReasoningStage.WITHIN, "a<|END_THINKING|><|START_TEXT|>b<|END_TEXT|>", "a", "b"),
    ("ernie", ReasoningStage.WITHIN, "a\n</think>\n\n<response>\nb\n\nc\n</response>\n", "a", "b\n\nc"),
]


@pytest.mark.parametrize(("form", "stage", "text", "thought", "answer"), ANSWERS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_thought_is_separated_at_any_chunk_boundaries(
    form: str, stage: ReasoningStage, text: str, thought: str, answer: str, data: st.DataObject
) -> None:
    message = read(ParserConfig(THOUGHTS[form], stage), cut(text, data))
    assert (message.reasoning_content, message.content) == (thought, answer)


def test_call_markup_within_thought_is_not_a_call() -> None:
    config = ParserConfig(THOUGHTS["qwen3"], ReasoningStage.BEFORE, tools=TOOLS["hermes"])
    message = read(config, [f"<think>\nMaybe {HERMES}?\n</think>\n\nSure. {HERMES}"])
    assert (message.reasoning_content, message.content) == (f"Maybe {HERMES}?", "Sure.")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [CALL]


@pytest.mark.parametrize(
    ("form", "thought", "call"),
    [
        ("apertus", "apertus", '<|tools_prefix|>[{"now": {}}]<|tools_suffix|>'),
        ("kimi_k3", "kimi_k3", '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|>'),
        ("kimi_k2", "kimi_k2", f"<|tool_calls_section_begin|>{KIMI.replace('add', 'now')}{{}}<|tool_call_end|>"),
    ],
)
@given(data=st.data())
def test_call_ends_reasoning_of_families_that_omit_end_marker(
    form: str, thought: str, call: str, data: st.DataObject
) -> None:
    config = ParserConfig(THOUGHTS[thought], ReasoningStage.WITHIN, tools=TOOLS[form])
    message = read(config, cut(f"Let me see. {call}", data))
    assert (message.reasoning_content.strip(), message.content) == ("Let me see.", "")
    assert [(called.name, called.arguments) for called in message.tool_calls] == [NOW]


@given(data=st.data())
def test_special_tokens_within_longer_markers_are_not_content(data: st.DataObject) -> None:
    tools, reasoning = TOOLS["kimi_k3"], THOUGHTS["kimi_k3"]
    assert tools
    text = "a<|close|>think<|sep|><|open|>response<|sep|>b <|sep|>c<|close|>response<|sep|><|open|>tools<|sep|>"
    config = ParserConfig(reasoning, ReasoningStage.WITHIN, tools=tools, schemas=SCHEMAS)
    message = read(config, cut(f"{text}{K3}<|close|>tools<|sep|><|close|>message<|sep|>", data), tools.marker_tokens)
    assert (message.reasoning_content, message.content) == ("a", "b c")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [SHORT]


def test_marker_tokens_are_not_content() -> None:
    form = TOOLS["mistral"]
    assert form
    assert read(ParserConfig(tools=form), ["a [TOOL_CALLS]", " b c"], form.marker_tokens).content == "a  b c"


MARKS = {mark for form in TOOLS.values() if form for mark in form.marker_tokens} | {"</think>", "<think>", "<response>"}
PARTS = 'function ```json ``` { } [ ] " \\ , ; : {} {"a": {"name": {"name":"f", "name" "arguments": "parameters":{ f'
PARTS += (
    ' <function= <parameter= </parameter> </function> > <invoke name=" "> <parameter name=" </invoke> add( = \' ) ('
)
FRAGMENTS = [*sorted(MARKS), *PARTS.split(), "</response>", " ", "\n", "\n\n", "add", "a=", HERMES, LLAMA, V3, CODER]
FRAGMENTS += [INVOKED, GLM, f"[{PYTHON}", KIMI]
HARMONY = f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ADD}<|call|>"
FRAGMENTS += [HARMONY, "<|channel|>analysis<|message|>"]
FRAGMENTS += [DSML, K3, STEP, SOLAR, HY, LONGCAT, GEMMA, M3]
FRAGMENTS += [f'{NS}<invoke name="', f"{NS}<a>", f"{NS}</a>", f"{NS}<item>"]
FRAGMENTS += ["call:x{", "a:", "<![CDATA[", "]]>", '<param name="', "</param>", "</invoke>", ' type="string"<|sep|>']
FRAGMENTS += ["think", "response", "tools", "assistant", "thought\n", "function call", '<function name="add">']


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("tools", TOOLS)
@pytest.mark.parametrize("stage", list(ReasoningStage))
@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None)
def test_result_does_not_depend_on_chunk_boundaries(tools: str, stage: ReasoningStage, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=14)))
    thought = data.draw(st.sampled_from([None, *THOUGHTS]))
    config = ParserConfig(
        THOUGHTS[thought] if thought else None, stage, data.draw(st.booleans()), TOOLS[tools], SCHEMAS
    )
    hidden = data.draw(st.sampled_from([(), config.markers]))
    assert read(config, cut(text, data), hidden) == read(config, [text], hidden)
    assert read(config, list(text) or [""], hidden) == read(config, [text], hidden)


# --- Format detection from chat templates -----------------------------------------------------------------------------

TEMPLATES = {
    '{{ "<tool_call>" }}': ("hermes", None),
    '{{ "<tool_call><function=" }}': ("qwen3_coder", None),
    '{{ "[TOOL_CALLS] [" }}': ("mistral", None),
    '{{ "<think></think><tool_call>" }}': ("hermes", "qwen3"),
    "{{ '<｜Assistant｜>' + x.split('</think>')[-1] }}<｜tool▁call▁begin｜>": ("deepseek_v3", "deepseek_r1"),
    "</think>\n\n<response>\n<tool_call>": ("hermes", "ernie"),
    'Respond in the format {"name": function name, "parameters": dictionary of …}.': (
        "llama3_json",
        None,
    ),
    "{{ '<|START_ACTION|>' }}{{ '<|START_THINKING|>' }}": ("cohere_command3", "cohere_command3"),
    "<seed:think> <seed:tool_call><function=": ("seed_oss", "seed_oss"),
    "<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value> </think>": ("glm47", "qwen3"),
    "<tool_call>{name}<arg_key>{k}</arg_key><arg_value>{v}</arg_value>": ("glm47", None),
    "{%- set begin = '<minimax:tool_call>' %}<think>\n </think>": ("minimax_m2", "qwen3"),
    "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]": ("pythonic", None),
    "<function_calls> </function_calls>": ("olmo3", None),
    "<|tool_calls_section_begin|>": ("kimi_k2", None),
    "[TOOL_CALLS] [THINK]": ("mistral", "mistral"),
    "<|tool_call|> Here is my thought process:": ("granite", "granite"),
    "<|tool|>": ("phi4_mini_json", None),
    "</think>\n<answer> <tool_calls>": ("hunyuan_a13b", "hunyuan_a13b"),
    "<|action_start|><|plugin|>": ("internlm", None),
    "<|start|>assistant<|channel|>analysis<|message|><|call|>": ("openai", "openai_gptoss"),
    "{{ messages }}": (None, None),
    '{{ "<|tool_call>call:" }}<|channel>thought\n<channel|>': ("gemma4", "gemma4"),
    "<start_function_call>call:": ("functiongemma", None),
    "{%- set ns_token = ']<]minimax[>[' %}<tool_call> <mm:think> </mm:think>": ("minimax_m3", "minimax_m3"),
    "{{- '<|open|>' + tag }}{{- '<|sep|>' }}": ("kimi_k3", "kimi_k3"),
    "{%- set dsml_token = '｜DSML｜' %}<{{ dsml_token }}function_calls> </think> <｜Assistant｜>": (
        "deepseek_v32",
        "deepseek_r1",
    ),
    "{%- set dsml_token = '｜DSML｜' %}<' + dsml_token + 'tool_calls> </think> <｜Assistant｜>": (
        "deepseek_v4",
        "deepseek_r1",
    ),
    "{% if thinking %}<think>{% else %}</think>{% endif %}<｜Assistant｜><｜tool▁call▁begin｜>": (
        "deepseek_v3",
        "qwen3",
    ),
    "<tool_calls><tool_call>{name}<tool_sep><arg_key></arg_key> </think>": ("hy_v3", "qwen3"),
    "<tool_calls:opensource><tool_sep:opensource></arg_key:opensource><think:opensource>": ("hy_v3", "hy_v3"),
    "<longcat_tool_call>{…}</longcat_tool_call> <longcat_think>": ("longcat", "longcat"),
    "<longcat_tool_call>{name}<longcat_arg_key>": ("longcat", None),
    "<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=": ("step3", None),
    "<|tools_prefix|> <|inner_prefix|>": ("apertus", "apertus"),
    "<|tool_call:begin|><|tool_call:args|> <|begin|>assistant<|think|>": ("solar_open", "solar_open"),
    "<|tool_call:start|><|tool_arg:start|> <|think:start|>": ("solar_open2", "solar_open2"),
    "<|role_sep|>\n function call {": ("gigachat3", None),
    "<|role_sep|>\n <|function_call|>": ("gigachat3", None),
    "<|role_sep|>\n function call <｜GCML｜tool_calls> </think>": ("gigachat35", "qwen3"),
    "<TOOLCALL>[{…}]</TOOLCALL> </think>": ("nemotron_json", "qwen3"),
    "<|function_call_library|> please output <function_call> {…}": ("granite-20b-fc", None),
    "When using tools, make calls in a single JSON array:": ("xlam", None),
    "<beginning_of_sentence>system <tool_calls>": ("minimax_m1", "minimax_m1"),
    '<function name="…"><param name="…"> </think>': ("minicpm5", "qwen3"),
    "<dots_function_call>": ("dots", None),
    "<|message_model|><|content_invoke_tool_json|> <|content_thinking|>": ("inkling", "inkling"),
    "<ifm|tool_call><ifm|arg_key> <ifm|think>": ("k2_horizon", "k2_horizon"),
    "List of tools: <|tool_list_start|>[": ("lfm2", None),
    "<tool_call></tool_call> <tool_calls>[": ("hunyuan_a13b", None),
    "<|tool_calls_section_begin|> </think>": ("kimi_k2", "kimi_k2"),
    "<minimax:tool_call> <response> </think>": ("minimax_m2", "qwen3"),
    "<|START_ACTION|> <|START_THINKING|> <|START_TEXT|>": ("cohere_command3", "cohere_command3"),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_formats_are_detected_from_template(template: str) -> None:
    tools, thought = tool_call_format("auto", template), reasoning_format("auto", template)
    assert (tools and tools.parsers[0], thought and thought.parsers[0]) == TEMPLATES[template]


@pytest.mark.parametrize(
    ("option", "formats", "others"),
    [
        ("tool_call_parser", TOOL_CALL_FORMATS, {"auto"}),
        ("reasoning_parser", REASONING_FORMATS, {"auto", "none"}),
    ],
)
def test_options_have_names_of_all_formats(option: str, formats: Any, others: set[str]) -> None:
    names = {name for form in formats for name in form.parsers}
    assert set(get_args(get_type_hints(ModelOptions)[option])) == names | others


def test_prompt_determines_initial_stage() -> None:
    qwen, deepseek = THOUGHTS["qwen3"], THOUGHTS["deepseek_r1"]
    assert qwen and deepseek
    assert initial_stage(qwen, "user: <think>\nassistant:") is ReasoningStage.BEFORE
    assert initial_stage(qwen, "assistant:\n<think>\n") is ReasoningStage.WITHIN
    assert initial_stage(qwen, "assistant:\n<think>\n\n</think>\n\n") is ReasoningStage.AFTER
    assert initial_stage(deepseek, "assistant:") is ReasoningStage.WITHIN
    kimi, gemma = THOUGHTS["kimi_k3"], THOUGHTS["gemma4"]
    assert kimi and gemma
    assert initial_stage(kimi, "<|open|>think<|sep|>") is ReasoningStage.WITHIN
    assert initial_stage(kimi, "<|open|>response<|sep|>") is ReasoningStage.AFTER
    assert initial_stage(gemma, "model\n<|channel>thought\n<channel|>") is ReasoningStage.AFTER
    assert initial_stage(qwen, "… <think>I was", continued="<think>I was") is ReasoningStage.WITHIN
    assert initial_stage(qwen, "… </think>It", continued="<think>I was</think>It") is ReasoningStage.AFTER
