"""``LLM``: an engine in the caller's process, for batches of prompts."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from tqdm import tqdm

from penstock import demo
from penstock.core import EngineRequest, SamplingParams
from penstock.core.errors import invalid
from penstock.core.options import EngineOptions
from penstock.engine.engine import Engine
from penstock.text import Tokenizer

from .assembly import Assembler
from .defaults import read_defaults
from .outputs import RequestOutput

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or either in a mapping: ``{"prompt": …}``, ``{"prompt_token_ids": …}``."""
Messages = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class LLM:
    """A model to generate with.

    >>> llm = LLM()
    >>> llm.chat([{"role": "user", "content": "What is the capital of Canada?"}])[0].outputs[0].text
    'The capital of Canada is Ottawa.'

    Args:
        model: folder of a Hugging Face checkpoint; nothing for the model in the box.
        chat_template: a template to use instead of the checkpoint's.
        options: ``EngineOptions`` by name.

    Raises ``PenstockError`` with one sentence where options or checkpoint do not allow a start.
    """

    def __init__(
        self, model: str | Path = "", *, tokenizer: str | Path = "", chat_template: str | None = None, **options: Any
    ) -> None:
        folder = Path(model) if model else demo.CHAT
        self.options = _options({"model": str(model)} | options)
        self.tokenizer = Tokenizer(Path(tokenizer) if tokenizer else folder, chat_template)
        self.engine = Engine(self.options)
        self._defaults = read_defaults(folder, self.tokenizer)
        self._ids = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """How the model's makers sample."""
        return SamplingParams(**self._defaults.sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, all of them at once.

        Args:
            sampling_params: one for all, or one a prompt; None samples as the model's makers do.
            use_tqdm: show a progress bar.
            priority: one a prompt, for the policy ``priority``.

        Returns:
            One output a prompt, in their order. One that fails says so in its ``failure``.

        Raises ``PenstockError`` (``invalid``) for a request that can never run; then none is run.
        """
        each = _each(prompts)
        params = _spread(sampling_params or self.get_default_sampling_params(), len(each), "sampling_params")
        ranks = _spread(0 if priority is None else priority, len(each), "priority")
        assemblers = [self._request(*given) for given in zip(each, params, ranks, strict=True)]
        return self._run(assemblers, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once; as ``generate`` otherwise."""
        several = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        prompts = [
            self.tokenizer.render(
                conversation,  # type: ignore[arg-type]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in several
        ]
        encoded = [
            {"prompt": prompt, "prompt_token_ids": self.tokenizer.encode(prompt, add_special_tokens=False)}
            for prompt in prompts
        ]
        return self.generate(encoded, sampling_params, use_tqdm)

    def _request(self, prompt: Prompt, sampling: SamplingParams, priority: int) -> Assembler:
        text, token_ids = self._prompt(prompt)
        words = [self.tokenizer.encode(form, False) for word in sampling.bad_words for form in (word, f" {word}")]
        if words:
            sampling = sampling.replace(bad_word_ids=sampling.bad_word_ids + tuple(map(tuple, words)))
        request = EngineRequest(
            request_id=str(next(self._ids)),
            prompt=token_ids,
            sampling=sampling,
            eos_token_ids=self._defaults.eos_token_ids,
            priority=priority,
        )
        self.engine.check(request)
        return Assembler(request, text, self.tokenizer if sampling.detokenize else None)

    def _prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        else:
            text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if token_ids is None:
            if text is None:
                raise invalid("prompt", "must be text, token ids, or a mapping with prompt or prompt_token_ids")
            token_ids = self.tokenizer.encode(text)
        return text, list(token_ids)

    def _run(self, assemblers: list[Assembler], use_tqdm: bool) -> list[RequestOutput]:
        by_id = {assembler.output.request_id: assembler for assembler in assemblers}
        left = iter(assemblers)
        following = next(left, None)
        bar = tqdm(total=len(assemblers), desc="requests", unit="request", disable=not use_tqdm)
        try:
            while following or self.engine.busy:
                while following and self.engine.has_room:
                    self.engine.add(following.request)
                    following = next(left, None)
                for delta in self.engine.step():
                    assembler = by_id[delta.request_id]
                    before = assembler.output.finished
                    if assembler.add(delta) is not None:
                        self.engine.stop(delta.request_id, delta.sequence)
                    bar.update(assembler.output.finished - before)
        finally:
            bar.close()
            for request_id, assembler in by_id.items():
                if not assembler.output.finished:
                    self.engine.abort(request_id)
        return [assembler.output for assembler in assemblers]


def _options(given: Mapping[str, Any]) -> EngineOptions:
    known = [field.name for field in msgspec.structs.fields(EngineOptions)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise invalid(name, f"no such option{f'; did you mean {near[0]}?' if near else ''}")
    try:
        return msgspec.convert(given, EngineOptions)
    except msgspec.ValidationError as error:
        raise invalid("options", str(error)) from error


def _each(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, be it one or several that were given."""
    one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return cast(list[Prompt], [prompts] if one else list(prompts))


def _spread(given: T | Sequence[T], count: int, field: str) -> list[T]:
    """One for each prompt."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise invalid(field, f"{len(given)} given for {count} prompts", count)
    return list(given)
