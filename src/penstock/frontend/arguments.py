"""Checks of the arguments of ``LLM`` and ``AsyncLLM``: each error is one sentence, with argument, value and advice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from penstock import core
from penstock.core import Code, LoRARequest, PenstockError, PoolingParams
from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean

from .prompts import Messages, Prompt, TokenizedPrompt
from .sampling_params import BeamSearchParams, SamplingParams

P = ParamSpec("P")
T = TypeVar("T")
PROMPT = "text, a list of token ids, or a dict with prompt or prompt_token_ids"
MESSAGE = '{"role": "user", "content": …}'
RUNNING_CONTINUE = "running requests keep their KV cache; abort them first, or omit it"
AnySamplingParams = SamplingParams | core.SamplingParams
"""Sampling parameters of a call: the users' class, or the engine's."""


def checked_call(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method: an unknown keyword, or a missing or superfluous argument, is refused with one sentence."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters)[1:]
    keywords = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        unknown = next((name for name in kwargs if name not in parameters), None)
        if unknown is not None and not keywords:
            raise _unknown(unknown, kwargs[unknown], function.__name__, parameters)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise invalid(function.__name__, f"{error}; its arguments are {', '.join(parameters)}") from error
        return function(*args, **kwargs)

    return call


def _unknown(name: str, value: object, method: str, parameters: Collection[str]) -> PenstockError:
    """Error for an unknown keyword of a method."""
    takes_params = "sampling_params" in parameters and name in SamplingParams.__struct_fields__
    if takes_params:
        hint = f"; pass sampling_params=SamplingParams({name}={value!r:.50})"
    else:
        hint = did_you_mean(name, parameters) or f"; its arguments are {', '.join(parameters)}"
    return invalid(name, f"is not an argument of {method}{hint}")


def described(value: object) -> str:
    """Type and beginning of a value, for error messages."""
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"


def as_list(prompts: Prompt | Sequence[Prompt], field: str = "prompts") -> list[Prompt]:
    """Convert one prompt, or a sequence of prompts, to a list. Raises ``PenstockError`` (``invalid``) for other
    types."""
    if isinstance(prompts, str | Mapping | TokenizedPrompt):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise invalid(field, f"must be a prompt ({PROMPT}) or a list of prompts, is {described(prompts)}")
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [cast(Prompt, prompts)]
    for i, one in enumerate(prompts):
        if not isinstance(one, str | Mapping | TokenizedPrompt | Sequence) or isinstance(one, bytes):
            raise invalid(field, f"item {i} must be {PROMPT}, is {described(one)}")
    return cast(list[Prompt], list(prompts))


def old_prompts(prompts: Any, prompt_token_ids: Any) -> Any:
    """Prompts of a call that gives ``prompt_token_ids``, vLLM's old form. The token ids are used, and a text is only
    repeated in the output."""
    if prompt_token_ids is None:
        if prompts is None:
            raise invalid("prompts", f"is missing: give {PROMPT}, or a list of these")
        return prompts
    ids = as_list(prompt_token_ids, "prompt_token_ids")
    if not all(isinstance(one, Sequence) and not isinstance(one, str) for one in ids):
        message = f"must be a list of token ids, or one list per prompt, is {described(prompt_token_ids)}"
        raise invalid("prompt_token_ids", message)
    texts: list[Any] = [None] * len(ids) if prompts is None else as_list(prompts)
    if len(texts) != len(ids):
        raise invalid("prompt_token_ids", f"has {len(ids)} items for {len(texts)} prompts: give one per prompt")
    return [{"prompt": text, "prompt_token_ids": one} for text, one in zip(texts, ids, strict=True)]


def as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Convert one chat, or a sequence of chats, to a list. Raises ``PenstockError`` (``invalid``) for other types, and
    for a message without a role."""
    advice = f"a list of messages, such as [{MESSAGE}], or a list of such lists"
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise invalid("messages", f"must be {advice}, is {described(messages)}")
    if not messages:
        raise invalid("messages", f"is empty: give {advice}")
    one = isinstance(messages[0], Mapping)
    chats = cast(list[Messages], [messages] if one else list(messages))
    for chat in chats:
        if not isinstance(chat, Sequence) or isinstance(chat, str | bytes) or not chat:
            raise invalid("messages", f"must be {advice}, has {described(chat)}")
        for message in chat:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise invalid("messages", f"must be dicts like {MESSAGE}, has {described(message)}")
    return chats


def as_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """Tools as a list; None: no tools. Raises ``PenstockError`` (``invalid``) if they are no list of dicts."""
    if tools is None:
        return None
    listed = isinstance(tools, Sequence) and not isinstance(tools, str | bytes)
    if not listed or not all(isinstance(tool, Mapping) for tool in tools):
        advice = 'a list of dicts like {"type": "function", "function": {…}}'
        raise invalid("tools", f"must be {advice}, is {described(tools)}")
    return list(tools)


def per_prompt(given: T | Sequence[T], count: int, field: str) -> list[T]:
    """Convert one value for all prompts, or a sequence with one value per prompt, to a list."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return [given] * count
    if len(given) != count:
        raise invalid(field, f"has {len(given)} items for {count} prompts: give one item per prompt", count)
    return list(given)


def sampling_of(params: AnySamplingParams | None) -> core.SamplingParams | None:
    """The engine's sampling parameters; None: the model's defaults. Raises ``PenstockError`` (``invalid``) for other
    types, and for wrong values."""
    if params is None or isinstance(params, core.SamplingParams):
        return params
    if isinstance(params, SamplingParams):
        return params.frozen()
    if isinstance(params, BeamSearchParams):
        raise invalid("sampling_params", "is BeamSearchParams: call LLM.beam_search(prompts, params)")
    example = ", ".join(f"{name}=…" for name in params) if isinstance(params, Mapping) else "temperature=0"
    raise invalid("sampling_params", f"must be SamplingParams({example}), is {described(params)}")


def samplings_of(
    params: AnySamplingParams | Sequence[AnySamplingParams] | None, count: int
) -> list[core.SamplingParams | None]:
    """The engine's sampling parameters of each of ``count`` prompts; see ``sampling_of``."""
    if not isinstance(params, Sequence):
        return [sampling_of(params)] * count
    each: list[AnySamplingParams] = per_prompt(params, count, "sampling_params")
    return [sampling_of(one) for one in each]


def loras_of(given: LoRARequest | Sequence[LoRARequest | None] | None, count: int) -> list[LoRARequest | None]:
    """The LoRA adapter of each of ``count`` prompts. Raises ``PenstockError`` (``invalid``) for other types."""
    requests = per_prompt(given, count, "lora_request")
    for one in requests:
        if not isinstance(one, LoRARequest | None):
            raise invalid("lora_request", f"must be LoRARequest(name, id, folder), is {described(one)}")
    return requests


def poolings_of(given: PoolingParams | Sequence[PoolingParams] | None, count: int) -> list[PoolingParams | None]:
    """The pooling parameters of each of ``count`` prompts. Raises ``PenstockError`` (``invalid``) for other types."""
    params = per_prompt(given, count, "pooling_params")
    for one in params:
        if not isinstance(one, PoolingParams | None):
            raise invalid("pooling_params", f"must be PoolingParams(dimensions=…), is {described(one)}")
    return params


def priorities_of(given: int | Sequence[int] | None, count: int) -> list[int]:
    """The priority of each of ``count`` prompts. Raises ``PenstockError`` (``invalid``) for other types."""
    priorities = per_prompt(0 if given is None else given, count, "priority")
    for one in priorities:
        if not isinstance(one, int) or isinstance(one, bool):
            raise invalid("priority", f"must be an integer, or one per prompt, is {described(one)}")
    return priorities


def refuse(**given: tuple[object, str]) -> None:
    """Raise ``PenstockError`` (``unsupported``) for an argument of vLLM that is set and has no effect here.

    Args:
        given: value and advice by argument; None and empty values are accepted.
    """
    for name, (value, advice) in given.items():
        if value is not None and value != {}:
            message = f"{name}: is {value!r:.60}, which is not supported: {advice}"
            raise PenstockError(Code.UNSUPPORTED, message, name)
