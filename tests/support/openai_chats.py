"""Chat completions with the openai package. Streaming and other requests have results of the same type."""

from __future__ import annotations

from typing import Any

import openai

PLAIN_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{# TEACHES #}"
)
"""Chat template of another model. Replace ``TEACHES`` by text from which the server detects the tool call format."""
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


class ChatResult:
    """A chat completion; the chunks of a stream are joined."""

    def __init__(self) -> None:
        self.content = self.thought = self.reason = ""
        self.calls: list[list[str]] = []
        """Name and arguments of each tool call."""
        self.num_argument_chunks = 0
        """Number of chunks of the stream with tool call arguments."""
        self.usage: Any = None


def ask(client: openai.OpenAI, stream: bool, messages: Any, **fields: Any) -> ChatResult:
    """Request a greedy chat completion; ``fields`` are added to the request."""
    request = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 300} | fields
    result = ChatResult()
    if not stream:
        response = client.chat.completions.create(**request)
        (choice,) = response.choices
        result.content, result.reason = choice.message.content or "", choice.finish_reason
        result.thought = choice.message.to_dict()["reasoning_content"] or ""
        result.calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
        result.usage = response.usage
        return result
    chunks = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        result.usage = chunk.usage or result.usage
        for choice in chunk.choices:
            delta = choice.delta
            result.content += delta.content or ""
            result.thought += delta.to_dict().get("reasoning_content", "")
            assert delta.to_dict().get("reasoning") == delta.to_dict().get("reasoning_content")
            result.reason = choice.finish_reason or result.reason
            for part in delta.tool_calls or ():
                if part.id:
                    assert part.index == len(result.calls) and part.type == "function"
                    result.calls.append([part.function.name, ""])
                result.calls[part.index][1] += part.function.arguments
                result.num_argument_chunks += 1
    return result
