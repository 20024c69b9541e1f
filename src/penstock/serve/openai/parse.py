"""From bytes to requests, and from requests to what the gateway takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from penstock.core import Code, PenstockError, SamplingParams
from penstock.core.errors import invalid
from penstock.core.settings import nearest
from penstock.serve.body import converted

from .forms import form_of
from .schema import NOT_YET, ROLES, ChatRequest, CompletionRequest, Message, Request, TokenizeRequest

T = TypeVar("T", bound=msgspec.Struct)

SAME = (
    "n best_of use_beam_search length_penalty early_stopping temperature top_p top_k min_p presence_penalty "
    "frequency_penalty repetition_penalty seed logit_bias allowed_token_ids bad_words min_tokens stop "
    "stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens prompt_logprobs"
).split()
"""Fields that sampling parameters have under the same name."""


def parse(found: dict[str, Any], schema: type[T]) -> T:
    """A request from its JSON, of which nothing else is left.

    Raises ``PenstockError``: ``unsupported`` for fields that are not there yet, ``invalid`` for unknown ones, with the
    nearest known name, and for values of a wrong type.
    """
    known = schema.__struct_fields__
    for name in [name for name in found if name not in known]:
        value = found.pop(name)
        if schema is CompletionRequest and name in ChatRequest.__struct_fields__:
            if value is not None:
                raise invalid(name, "goes with chats only")
            continue
        if name not in NOT_YET:
            raise invalid(name[:100], f"no such field{nearest(name[:100], (*known, *NOT_YET))}")
        if value is not None and value not in NOT_YET[name]:
            raise PenstockError(Code.UNSUPPORTED, f"{name}: not supported yet", name)
    return converted(found, schema)


def sampling_of(request: Request, defaults: SamplingParams, **own: Any) -> SamplingParams:
    """``own`` are the values that the two kinds of requests name differently."""
    given = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        if name in given:
            given[name] = (given[name],) if isinstance(given[name], str) else tuple(given[name])
    if (form := form_of(request)) is not None:
        given["guided_decoding"] = form
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "goes with stream only")
    if request.use_beam_search:  # whose makers had sampling in mind
        defaults = defaults.replace(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    return defaults.replace(**given, **own)


def chat_sampling(request: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """Raises ``PenstockError`` (``invalid``) for values that do not go together."""
    both = {value for value in (request.max_tokens, request.max_completion_tokens) if value is not None}
    if len(both) > 1:
        raise invalid("max_completion_tokens", "differs from max_tokens; give one of them")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "goes with logprobs only")
    own = {"max_tokens": both.pop() if both else None, "reasoning_max_tokens": request.reasoning_max_tokens}
    return sampling_of(request, defaults, **own, logprobs=(request.top_logprobs or 0) if request.logprobs else None)


def completion_sampling(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """With ``echo``, ``max_tokens`` 0 computes one token, which is not told.

    Raises ``PenstockError`` (``invalid``) for values that do not go together.
    """
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "must be at least 1, or 0 with echo", 1)
    own: dict[str, Any] = {"max_tokens": max(max_tokens, 1), "logprobs": request.logprobs}
    if request.echo and request.logprobs is not None:
        if request.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "logprobs with echo gives them already")
        own["prompt_logprobs"] = request.logprobs
    return sampling_of(request, defaults, **own)


def template_options(request: ChatRequest | TokenizeRequest, calls_tools: bool) -> dict[str, Any]:
    """What the chat template is given besides the messages.

    Raises ``PenstockError``: ``invalid`` for names that cannot be given, ``unsupported`` for tools that the template
    does not know.
    """
    options = dict(request.chat_template_kwargs or {})
    own = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
    if wrong := [name for name in own if name in options]:
        raise invalid("chat_template_kwargs", f"{wrong[0]} cannot be given there")
    if request.tools:
        if not calls_tools:
            raise PenstockError(Code.UNSUPPORTED, "tools: this model's chat template has no form for them", "tools")
        options["tools"] = [msgspec.to_builtins(tool) for tool in request.tools]
        for tool in options["tools"]:
            tool["function"] = {name: value for name, value in tool["function"].items() if value is not None}
    goes_on = bool(request.continue_final_message)
    options["continue_final_message"] = goes_on
    options["add_generation_prompt"] = (
        not goes_on if request.add_generation_prompt is None else request.add_generation_prompt
    )
    return options


def messages_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them: text in one piece, arguments of calls as objects.

    Raises ``PenstockError`` (``unsupported``) for content that is no text.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Message, path: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise invalid(f"{path}.role", f"{message.role[:50]!r} is none of {', '.join(ROLES)}")
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message, path),
    }
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    reasoning = message.reasoning_content or message.reasoning
    rest = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    return found | {name: value for name, value in rest.items() if value is not None}


def _text(message: Message, path: str) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise invalid(f"{path}.content", f"is missing, and a {message.role} message is nothing without")
        return ""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for i, part in enumerate(message.content):
        where = f"{path}.content[{i}]"
        if part.type != "text":
            raise PenstockError(Code.UNSUPPORTED, f"{where}: {part.type[:50]} is not supported, only text is", where)
        if part.text is None:
            raise invalid(f"{where}.text", "is missing")
        texts.append(part.text)
    return "\n".join(texts)


def _arguments(given: str | Mapping[str, Any] | None) -> Any:
    """An object where the text holds one; clients may send what a model wrote, whatever it was."""
    if not isinstance(given, str):
        return given or {}
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return found if isinstance(found, dict) else given
