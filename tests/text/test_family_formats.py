"""Tool calls and reasoning of the families with recurrent state or sparse attention: the formats are detected from the
markers of their chat templates, and read an answer in the family's form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock import demo
from penstock.core import PenstockError
from penstock.text import (
    ParserConfig,
    ReasoningStage,
    ResponseParser,
    Tokenizer,
    initial_stage,
    reasoning_format,
    tool_call_format,
)

DEEPSEEK_CALL = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
CODER_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
OBJECT = '{"name": "add", "arguments": {"a": 1}}'


class Family(NamedTuple):
    """Chat template and an answer of a family."""

    markers: str
    """The part of the chat template that describes calls and reasoning."""
    prompt: str
    """The prompt's end."""
    answer: str
    """An answer with the call ``add(a=1)``, after the reasoning "Why." if the family has it."""
    tools: str
    """Name of the expected parser of tool calls."""
    reasoning: str | None = None
    """Name of the expected parser of reasoning."""


FAMILIES = {
    "DeepSeek-V3.2": Family(
        "{% set dsml = '｜DSML｜' %}function_calls> {% if thinking %}<think>{% else %}</think> <｜Assistant｜>",
        "<｜Assistant｜><think>",
        f"Why.</think>{DEEPSEEK_CALL}",
        "deepseek_v32",
        "qwen3",
    ),
    "Falcon-H1": Family(
        "<tools></tools> <tool_call>\n{…}\n</tool_call> <|im_start|>",
        "<|im_start|>assistant\n",
        f"<tool_call>\n{OBJECT}\n</tool_call>",
        "hermes",
    ),
    "Gemma 4": Family(
        "<|tool_call>call: <|channel>thought\n<channel|>",
        "<|turn>model\n",
        "<|channel>thought\nWhy.<channel|><|tool_call>call:add{a:1}<tool_call|>",
        "gemma4",
        "gemma4",
    ),
    "GLM-5": Family(
        "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call> </think> <|assistant|>",
        "<|assistant|><think>",
        "Why.</think><tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        "glm47",
        "qwen3",
    ),
    "Granite 4": Family(
        "<|start_of_role|> <tools></tools> <tool_call>\n{…}\n</tool_call>",
        "<|start_of_role|>assistant<|end_of_role|>",
        f"<tool_call>\n{OBJECT}\n</tool_call>",
        "hermes",
    ),
    "Jamba": Family(
        "<|bom|> <tool_definitions></tool_definitions> <tool_calls>[…]</tool_calls>",
        "<|bom|><|assistant|>",
        f" <tool_calls>[{OBJECT}]</tool_calls>",
        "hunyuan_a13b",
    ),
    "Jamba Reasoning": Family(
        "<tools></tools> <tool_call>\n{…}\n</tool_call> content.split('</think>')",
        "<|im_start|>assistant\n<think>\n",
        f"Why.\n</think>\n\n<tool_call>\n{OBJECT}\n</tool_call>",
        "hermes",
        "qwen3",
    ),
    "Kimi-Linear": Family(
        "<|im_middle|> <|tool_calls_section_begin|><|tool_call_begin|>",
        "<|im_assistant|>assistant<|im_middle|>",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "kimi_k2",
    ),
    "LFM2": Family(
        "List of tools: <|tool_list_start|>[ <|tool_response_start|>",
        "<|im_start|>assistant\n",
        "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
        "lfm2",
    ),
    "LFM2.5-Thinking": Family(
        "List of tools: [ content.split('</think>')",
        "<|im_start|>assistant\n",
        "<think>Why.</think><|tool_call_start|>[add(a=1)]<|tool_call_end|>",
        "lfm2",
        "qwen3",
    ),
    "MiniMax-01": Family(
        "<beginning_of_sentence>system function_setting=functions\n{…}<end_of_sentence>",
        "<beginning_of_sentence>ai name=assistant\n",
        '<function_call>```typescript\nfunctions.add({"a": 1})\n```',
        "minimax_01",
    ),
    "MiniMax-M1": Family(
        "<beginning_of_sentence>system tool_setting=tools\n<tools></tools> <tool_calls></tool_calls>",
        "<beginning_of_sentence>ai name=assistant\n",
        f"<think>\nWhy.\n</think>\n<tool_calls>\n{OBJECT}\n</tool_calls>",
        "minimax_m1",
        "minimax_m1",
    ),
    "Nemotron Nano 2": Family(
        "<AVAILABLE_TOOLS> <TOOLCALL>[…]</TOOLCALL> content.split('</think>') <SPECIAL_11>",
        "<SPECIAL_11>Assistant\n<think>\n",
        f"Why.\n</think>\n\n<TOOLCALL>[{OBJECT}]</TOOLCALL>",
        "nemotron_json",
        "qwen3",
    ),
    "Nemotron 3": Family(
        "<tool_call>\n<function=…>\n<parameter=…> </think>",
        "<|im_start|>assistant\n<think>\n",
        f"Why.\n</think>\n{CODER_CALL}",
        "qwen3_coder",
        "qwen3",
    ),
    "OLMo-Hybrid": Family(
        "<functions></functions> <function_calls></function_calls> <think> </think>",
        "<|im_start|>assistant\n<think>",
        "Why.</think><function_calls>add(a=1)</function_calls>",
        "olmo3",
        "qwen3",
    ),
    "Qwen3-Next": Family(
        "<tools></tools> <tool_call>\n{…}\n</tool_call>",
        "<|im_start|>assistant\n",
        f"<tool_call>\n{OBJECT}\n</tool_call>",
        "hermes",
    ),
    "Qwen3.5": Family(
        "<tool_call>\n<function=…>\n<parameter=…> '</think>' in content",
        "<|im_start|>assistant\n<think>\n",
        f"Why.\n</think>\n\n{CODER_CALL}",
        "qwen3_coder",
        "qwen3",
    ),
}
SCHEMAS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}


@pytest.mark.parametrize("name", FAMILIES)
def test_formats_of_family_are_detected_and_read_an_answer(name: str) -> None:
    family = FAMILIES[name]
    tools, reasoning = tool_call_format("auto", family.markers), reasoning_format("auto", family.markers)
    assert tools is not None
    assert family.tools in tools.parsers
    assert (reasoning is None) == (family.reasoning is None)
    assert reasoning is None or family.reasoning in reasoning.parsers
    stage = initial_stage(reasoning, family.prompt) if reasoning else ReasoningStage.AFTER
    config = ParserConfig(reasoning=reasoning, stage=stage, tools=tools, schemas=SCHEMAS)
    for chunks in ([family.answer], list(family.answer)):
        parser = ResponseParser(config)
        for at, chunk in enumerate(chunks):
            parser.add(chunk, last=at == len(chunks) - 1)
        message = parser.message
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [("add", {"a": 1})]
        assert message.reasoning_content.strip() == ("Why." if reasoning else "")
        assert not message.content.strip()


# --- DeepSeek-V3.2, whose checkpoints have no chat template ----------------------------------------------------------


def deepseek(folder: Path, model_type: str) -> Tokenizer:
    """A tokenizer in a folder without a chat template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.CHAT / name, folder / name)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return Tokenizer(folder)


def call(**arguments: object) -> dict[str, object]:
    return {"type": "function", "id": "0", "function": {"name": "add", "arguments": arguments}}


def test_deepseek_v32_has_a_template_of_ours(tmp_path: Path) -> None:
    """The expected texts are those of the format's description by DeepSeek (``encoding_dsv32.py``)."""
    tokenizer = deepseek(tmp_path, "deepseek_v32")
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Add.",
            "tool_calls": [call(a=1), call(a="x", b=[2])],
        },
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
    ]
    before = "Be brief.<｜User｜>1 + 1?<｜Assistant｜>"
    calls = DEEPSEEK_CALL.replace(
        "\n</｜DSML｜function_calls>",
        '\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">[2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
    )
    results = "<｜end▁of▁sentence｜>\n\n<function_results>\n<result>2</result>\n<result>3</result>\n</function_results>"
    assert tokenizer.render(chat[:2]) == f"<|im_start|>{before}</think>"
    assert (
        tokenizer.render(chat, thinking=True) == f"<|im_start|>{before}<think>Add.</think>{calls}{results}\n\n<think>"
    )
    assert tokenizer.render(chat, enable_thinking=False).endswith(f"{before}</think>{calls}{results}\n\n</think>")
    later = [*chat, {"role": "assistant", "content": "2."}, {"role": "user", "content": "Why?"}]
    assert tokenizer.render(later, thinking=True) == (
        f"<|im_start|>{before}</think>{calls}{results}\n\n</think>2.<｜end▁of▁sentence｜><｜User｜>Why?<｜Assistant｜><think>"
    )
    schema = {"type": "function", "function": {"name": "add", "parameters": SCHEMAS["add"]}}
    shown = tokenizer.render(chat[1:2], tools=[schema])
    assert shown.startswith("<|im_start|>\n\n## Tools\n\nYou have access to a set of tools")
    assert f"<functions>\n{json.dumps(schema['function'])}\n</functions>\n<｜User｜>1 + 1?" in shown
    assert tool_call_format("auto", tokenizer.template_source or "") is tool_call_format("deepseek_v32", "")


def test_other_models_without_a_template_have_none(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="no default chat template"):
        deepseek(tmp_path, "deepseek_v3").render([{"role": "user", "content": "Hi"}])
