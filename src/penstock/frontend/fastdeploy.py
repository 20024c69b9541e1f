"""FastDeploy's Python interface, for ``from fastdeploy import LLM, SamplingParams`` (``penstock shims``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.core import Code, PenstockError

from . import llm, sampling_params
from .arguments import AnySamplingParams
from .fastdeploy_outputs import FastDeployOutput
from .outputs import RequestOutput
from .prompts import Messages, Prompt

__all__ = ["LLM", "FastDeployOutput", "SamplingParams"]


def SamplingParams(**options: Any) -> sampling_params.SamplingParams:
    """Sampling parameters with FastDeploy's names and defaults: an answer has at least one token and may fill the
    context."""
    given = {name: value for name, value in options.items() if value is not None}
    if (token_ids := given.pop("bad_words_token_ids", None)) is not None:
        given["bad_word_ids"] = tuple((one,) if isinstance(one, int) else tuple(one) for one in token_ids)
    if given.get("top_p") == 0:  # FastDeploy's value for greedy decoding
        del given["top_p"]
        given["temperature"] = 0
    minimum = {} if given.get("guided_decoding") else {"min_tokens": 1}
    return sampling_params.SamplingParams(**{"max_tokens": None, **minimum, **given})


class LLM(llm.LLM):
    """``penstock.LLM`` with FastDeploy's argument names, defaults and result attributes."""

    def __init__(self, model: str | Path, revision: str | None = None, **options: Any) -> None:
        super().__init__(model, compat="fastdeploy", revision=revision, **options)

    def generate(  # type: ignore[override]
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: AnySamplingParams | Sequence[AnySamplingParams] | None = None,
        use_tqdm: bool = True,
        stream: bool = False,
        **options: Any,
    ) -> list[RequestOutput]:
        _check_not_streaming(stream)
        given = [prompts] if isinstance(prompts, Mapping) else prompts
        if isinstance(given, list):
            given = [_with_media(prompt) for prompt in given]
        return super().generate(given, sampling_params, use_tqdm, **options)

    def chat(  # type: ignore[override]
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: AnySamplingParams | Sequence[AnySamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stream: bool = False,
    ) -> list[RequestOutput]:
        _check_not_streaming(stream)
        return super().chat(
            messages,
            sampling_params,
            use_tqdm,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )


def _check_not_streaming(stream: bool) -> None:
    if stream:
        message = "stream: LLM does not stream; use penstock.AsyncLLM or penstock serve"
        raise PenstockError(Code.UNSUPPORTED, message, "stream")


def _with_media(prompt: Any) -> Any:
    """Rename a prompt's ``multimodal_data`` (FastDeploy) to ``multi_modal_data`` (vLLM)."""
    if not isinstance(prompt, Mapping) or "multimodal_data" not in prompt:
        return prompt
    given = dict(prompt)
    return given | {"multi_modal_data": given.pop("multimodal_data")}
