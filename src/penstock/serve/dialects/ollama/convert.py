"""Conversion of Ollama's requests to OpenAI's chat and completion requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.serve.http.unknown_fields import UnknownFields

from .schema import ChatRequest, GenerateRequest, OllamaGeneration, OllamaMessage

OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Name in ``options`` → name in OpenAI's or vLLM's API."""
WITHOUT_EFFECT = frozenset(
    "num_ctx num_batch num_gpu main_gpu num_thread num_keep use_mmap use_mlock low_vram vocab_only numa f16_kv "
    "repeat_last_n penalize_newline draft_num_predict".split()
)
"""Ignored options: settings of model loading (set when the server starts), and the token range of penalties (Penstock's
penalties apply to all tokens)."""
NEUTRAL: dict[str, tuple[Any, ...]] = {"mirostat": (0,), "tfs_z": (1, 1.0), "typical_p": (1, 1.0)}
"""Unsupported options → values that have no effect and are accepted."""


def chat_fields(request: ChatRequest, unknown: UnknownFields) -> dict[str, Any]:
    """Convert a chat request to the fields of OpenAI's chat request. Raises ``PenstockError`` for invalid fields."""
    fields = generation_fields(request, unknown)
    fields["messages"] = [_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
    if request.tools:
        fields["tools"] = request.tools
    return fields


def generate_fields(request: GenerateRequest, unknown: UnknownFields) -> dict[str, Any]:
    """Convert a generate request to the fields of OpenAI's chat request, or completion request (``raw``, ``suffix``).

    Raises ``PenstockError`` for invalid or unsupported fields.
    """
    for name in ("template", "context"):
        if getattr(request, name):
            raise PenstockError(Code.UNSUPPORTED, f"{name}: is not supported; use raw, or /api/chat", name)
    fields = generation_fields(request, unknown)
    if request.raw or request.suffix:
        logprobs = fields.pop("top_logprobs", 0)
        if fields.pop("logprobs", False):
            fields["logprobs"] = logprobs
        for name in ("chat_template_kwargs", "reasoning_effort"):
            fields.pop(name, None)
        return fields | {"prompt": request.prompt, "suffix": request.suffix}
    turn = OllamaMessage(role="user", content=request.prompt, images=request.images)
    system = [{"role": "system", "content": request.system}] if request.system else []
    return fields | {"messages": [*system, _message(turn, "prompt")]}


def generation_fields(request: OllamaGeneration, unknown: UnknownFields) -> dict[str, Any]:
    """Convert the fields of ``OllamaGeneration``. Raises ``PenstockError`` as ``sampling_fields`` does."""
    fields = sampling_fields(request.options or {}, unknown)
    if request.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif request.format:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": request.format}}
    if isinstance(request.think, str):
        fields["reasoning_effort"] = request.think
    elif request.think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": request.think}
    if request.logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return fields


def sampling_fields(options: Mapping[str, Any], unknown: UnknownFields) -> dict[str, Any]:
    """Convert ``options`` to OpenAI's and vLLM's names. Raises ``PenstockError`` for invalid or unsupported options."""
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in OPTIONS:
            fields[OPTIONS[name]] = value
        elif name == "num_predict":
            if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
                raise invalid("num_predict", f"must be an integer, is {value!r}")
            if value > 0:  # values up to 0 set no limit: -1 (unlimited), -2 (fill the context)
                fields["max_tokens"] = int(value)
        elif name in NEUTRAL:
            if value not in NEUTRAL[name]:
                message = f"{name}: is not supported; leave it out, or set {NEUTRAL[name][0]}"
                raise PenstockError(Code.UNSUPPORTED, message, name)
        else:
            unknown.ignore("options.", name, OPTIONS, value=value)
    return fields


def _message(message: OllamaMessage, where: str) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.images:
        parts = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in message.images]
        result["content"] = [*parts, {"type": "text", "text": message.content or ""}]
    if message.thinking:
        result["reasoning_content"] = message.thinking
    if message.tool_calls:
        result["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    if message.tool_name:
        result["name"] = message.tool_name
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    return result


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(where, f"must have a function with a name, is {str(call)[:50]!r}")
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return call_id | {
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments") or {}},
    }


def _data_url(image: str) -> str:
    """The ``image_url`` of a base64 image. The media type has no effect: Pillow detects the image format."""
    return image if image.startswith("data:") else f"data:image/png;base64,{image}"
