"""Chats by OpenAI's own client, streamed and whole: what came of them in one shape."""

from __future__ import annotations

from typing import Any

import openai

PLAIN_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{# TEACHES #}"
)
"""Of a model that was taught otherwise."""
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


class ChatResult:
    """What a client makes of an answer; of a stream, of its pieces."""

    def __init__(self) -> None:
        self.content = self.thought = self.reason = ""
        self.calls: list[list[str]] = []
        self.num_argument_chunks = 0
        """Of arguments."""
        self.usage: Any = None


def ask(client: openai.OpenAI, stream: bool, messages: Any, **fields: Any) -> ChatResult:
    asked = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 300} | fields
    told = ChatResult()
    if not stream:
        answer = client.chat.completions.create(**asked)
        (choice,) = answer.choices
        told.content, told.reason = choice.message.content or "", choice.finish_reason
        told.thought = choice.message.to_dict()["reasoning_content"] or ""
        told.calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
        told.usage = answer.usage
        return told
    chunks = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        told.usage = chunk.usage or told.usage
        for choice in chunk.choices:
            delta = choice.delta
            told.content += delta.content or ""
            told.thought += delta.to_dict().get("reasoning_content", "")
            assert delta.to_dict().get("reasoning") == delta.to_dict().get("reasoning_content")
            told.reason = choice.finish_reason or told.reason
            for part in delta.tool_calls or ():
                if part.id:
                    assert part.index == len(told.calls) and part.type == "function"
                    told.calls.append([part.function.name, ""])
                told.calls[part.index][1] += part.function.arguments
                told.num_argument_chunks += 1
    return told
