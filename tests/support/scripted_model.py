"""A checkpoint with scripted replies to any prompt; after each tool result, it generates the next reply.

The checkpoint tests how clients handle replies, especially tool calls, which a model with random weights does not
generate. The output of its layer is zero, so the next token depends only on the last token. The chunks of each reply
are tokens that form a chain. The chat template ends the prompt with the first token of a chain, chosen by the
number of tool results since the last user message, plus the template's variable ``first_reply``.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from penstock import demo

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
    {%- if message.role == 'user' %}{% set state.results = 0 %}{% endif %}
    {%- if message.role == 'tool' %}{% set state.results = state.results + 1 %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{ message.content }}
    {%- else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- set reply = [state.results + (first_reply | default(0)), LAST] | min %}
    {{- '<|im_start|>assistant\\n<|reply_' + reply | string + '|>' }}
{%- endif %}"""


def tool_call(name: str, **arguments: Any) -> str:
    """Text of a tool call, as a reply or part of one."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted_model(folder: Path, *replies: str, max_model_len: int = 1 << 18) -> Path:
    """Write the checkpoint.

    Args:
        replies: replies in ASCII: the first to a user message, the next ones to tool results, the last to all further
            tool results.
    """
    built_in = PreTrainedTokenizerFast.from_pretrained(demo.CHAT)
    content = json.loads(built_in.backend_tokenizer.to_str())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    seen, letters = set(built_in.get_vocab()), bytes_to_unicode()
    chains: list[list[int]] = []
    for reply in replies:
        chains.append([])
        for chunk in _chunks("".join(letters[byte] for byte in reply.encode()), seen):
            chains[-1].append(len(vocabulary))
            vocabulary[chunk] = len(vocabulary)
    # A grammar would not accept a marker in pieces if it were an added token.
    added = [token for token in content["added_tokens"] if "tool_call" not in token["content"]]
    starts = [{**added[0], "content": f"<|reply_{number}|>"} for number in range(len(replies))]
    content["added_tokens"] = [{**token, "id": len(vocabulary) + i} for i, token in enumerate([*added, *starts])]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(content)),
        eos_token=built_in.eos_token,
        pad_token=built_in.pad_token,
    )
    end = int(tokenizer.eos_token_id)
    for number, chain in enumerate(chains):
        chain[:] = [int(tokenizer.convert_tokens_to_ids(f"<|reply_{number}|>")), *chain, end]
    tokenizer.chat_template = TEMPLATE.replace("LAST", str(len(replies) - 1))

    followers = [pair for chain in chains for pair in pairwise(chain)]
    size = -(-(len(followers) + 1) // 64) * 64
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=False,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    layer, embedding, head = model.model.layers[0], model.get_input_embeddings().weight, model.lm_head.weight
    with torch.no_grad():
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, embedding, head):
            weight.zero_()
        embedding[:, 0] = 1
        head[end, 0] = 1
        for direction, (token, next_token) in enumerate(followers, 1):
            embedding[token] = 0
            embedding[token, direction] = head[next_token, direction] = 1
        head *= 8
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _chunks(text: str, seen: set[str]) -> list[str]:
    """Split a text into chunks that are not in ``seen`` yet, and add them to ``seen``."""
    chunks: list[str] = []
    begin = 0
    while begin < len(text):
        end = begin + 6
        while text[begin:end] in seen and end < len(text):
            end += 1
        while text[begin:end] in seen and chunks:  # the end of the text has been seen: join it with the chunk before
            begin -= len(chunks[-1])
            seen.remove(chunks.pop())
        seen.add(text[begin:end])
        chunks.append(text[begin:end])
        begin = end
    return chunks
