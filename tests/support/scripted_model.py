"""A checkpoint with scripted replies to any prompt; after each tool result, it generates the next reply.

The checkpoint tests how clients handle replies, especially tool calls, which a model with random weights does not
generate. The chat template puts the reply before the header of the assistant's message, at a fixed distance from the
end of the prompt, and the model copies it from there. The reply is chosen by the number of tool results since the last
user message, plus the template's variable ``first_reply``; smolagents sends tool results as user messages that start
with "Observation:". Each byte is a token, so that the tokens which a grammar inserts are those of the reply.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from copying_model import save_copying_model
from transformers import PreTrainedTokenizerFast

from penstock import demo

HEADER = "<|im_start|>assistant\n"
TEMPLATE = """{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
To call one: <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}
{%- set state = namespace(results=0) %}
{%- for message in messages %}
    {%- set text = message.content if message.content is string else ((message.content or [{}])[0].text or '') %}
    {%- set is_result = message.role == 'tool' or (message.role == 'user' and text.startswith('Observation:')) %}
    {%- if is_result %}{% set state.results = state.results + 1 %}
    {%- elif message.role == 'user' %}{% set state.results = 0 %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{ message.content }}
    {%- else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- set replies = REPLIES %}
    {{- replies[[state.results + (first_reply | default(0)), replies | length - 1] | min] + HEADER }}
{%- endif %}"""


def tool_call(name: str, **arguments: Any) -> str:
    """Text of a tool call, as a reply or part of one."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted_model(folder: Path, *replies: str, max_model_len: int = 1 << 18) -> Path:
    """Write the checkpoint.

    Args:
        replies: the first to a user message, the next ones to tool results, the last to all further tool results.
    """
    built_in = PreTrainedTokenizerFast.from_pretrained(demo.CHAT)
    content = json.loads(built_in.backend_tokenizer.to_str())
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    content["model"] |= {"vocab": {letter: i for i, letter in enumerate(letters)}, "merges": []}
    # A grammar would not accept a marker in pieces if it were an added token.
    added = [token for token in content["added_tokens"] if "tool_call" not in token["content"]]
    content["added_tokens"] = [{**token, "id": len(letters) + i} for i, token in enumerate(added)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(content)),
        eos_token=built_in.eos_token,
        pad_token=built_in.pad_token,
    )
    end = str(tokenizer.eos_token)
    lengths = [len(tokenizer.encode(reply)) for reply in replies]
    size = max(lengths) + 512  # room for outputs that a grammar makes longer
    padded = [reply + end * (size - length) for reply, length in zip(replies, lengths, strict=True)]
    tokenizer.chat_template = TEMPLATE.replace("REPLIES", json.dumps(padded)).replace("HEADER", json.dumps(HEADER))
    offset = size + len(tokenizer.encode(HEADER)) - 1
    return save_copying_model(folder, tokenizer, offset, max_model_len, sliding_window=True)
