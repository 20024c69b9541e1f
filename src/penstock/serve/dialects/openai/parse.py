"""From bytes to requests, and from requests to what the gateway takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from penstock.core import Code, PenstockError, SamplingParams
from penstock.core.errors import invalid
from penstock.serve.http.body import convert
from penstock.serve.http.unknown_fields import Unknown

from .forms import form_of
from .requests import NOT_YET, ROLES, ChatRequest, CompletionRequest, Message, Request, TokenizeRequest, Truncated

T = TypeVar("T", bound=msgspec.Struct)

SAME = (
    "n best_of use_beam_search length_penalty early_stopping temperature top_p top_k min_p presence_penalty "
    "frequency_penalty repetition_penalty seed logit_bias allowed_token_ids bad_words min_tokens stop "
    "stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens prompt_logprobs "
    "temp_scaled_logprobs top_p_normalized_logprobs"
).split()
"""Fields that sampling parameters have under the same name."""
ONLY_CHATS = frozenset(ChatRequest.__struct_fields__).difference(CompletionRequest.__struct_fields__)


def parse(found: dict[str, Any], schema: type[T], unknown: Unknown) -> T:
    """A request from its JSON, of which nothing else is left.

    Args:
        unknown: told of fields that nobody knows.

    Raises ``PenstockError``: ``unsupported`` for fields that are not there yet, ``invalid`` for those of other requests
    and for values of a wrong type, and for unknown fields where requests are read strictly.
    """
    elsewhere = ONLY_CHATS if schema is CompletionRequest else frozenset()
    not_yet = next((fields for kind, fields in NOT_YET.items() if issubclass(schema, kind)), {})
    for name in (not_yet.keys() | elsewhere).difference(schema.__struct_fields__).intersection(found):
        value = found.pop(name)
        if value is None or value in not_yet.get(name, ()):
            continue
        if name in elsewhere:
            raise invalid(name, "goes with chats only")
        raise PenstockError(Code.UNSUPPORTED, f"{name}: not supported yet", name)
    return convert(found, schema, unknown)


def sampling_of(request: Request, defaults: SamplingParams, **own: Any) -> SamplingParams:
    """``own`` are the values that the two kinds of requests name differently."""
    given = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        if name in given:
            given[name] = (given[name],) if isinstance(given[name], str) else tuple(given[name])
    if request.bad_words_token_ids is not None:
        words = request.bad_words_token_ids
        given["bad_word_ids"] = tuple((word,) if isinstance(word, int) else tuple(word) for word in words)
    if (form := form_of(request)) is not None:
        given["guided_decoding"] = form
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "goes with stream only")
    if given.get("top_p") == 0:
        given |= {"top_p": 1.0, "top_k": 1}
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
    budgets = {value for value in (request.reasoning_max_tokens, request.thinking_token_budget) if value is not None}
    if len(budgets) > 1:
        raise invalid("thinking_token_budget", "differs from reasoning_max_tokens; give one of them")
    budget = budgets.pop() if budgets else -1
    own = {
        "max_tokens": both.pop() if both else None,
        "reasoning_max_tokens": budget if budget >= 0 else None,
        "response_max_tokens": request.response_max_tokens,
    }
    return sampling_of(request, defaults, **own, logprobs=(request.top_logprobs or 0) if request.logprobs else None)


def completion_sampling(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """With ``echo``, ``max_tokens`` 0 computes one token, which is not told.

    Raises ``PenstockError`` (``invalid``) for values that do not go together.
    """
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "must be at least 1, or 0 with echo", 1)
    own: dict[str, Any] = {"logprobs": request.logprobs}
    if request.max_tokens is not None:
        own["max_tokens"] = max(request.max_tokens, 1)
    if request.echo and request.logprobs is not None:
        if request.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "logprobs with echo gives them already")
        own["prompt_logprobs"] = request.logprobs
    return sampling_of(request, defaults, **own)


def truncated(token_ids: list[int], request: Truncated, most: int, side: str = "left") -> list[int]:
    """A prompt cut to the length that its request asks for.

    Args:
        most: the longest that there is room for, which -1 asks for.
        side: what is cut where the request does not say: the beginning or the end (``right``).
    """
    wanted = request.truncate_prompt_tokens
    if wanted is None:
        return token_ids
    if wanted == 0:
        raise invalid("truncate_prompt_tokens", "must be at least 1, or -1 for what there is room for", 1)
    most = max(most, 1) if wanted == -1 else wanted
    return token_ids[:most] if (request.truncation_side or side) == "right" else token_ids[-most:]


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
