"""Pooling methods of ``LLM``: embeddings, classification, and scores of text pairs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from penstock.core import LoRARequest, PoolingParams
from penstock.core.errors import invalid
from penstock.text.encoding import Texts

from .arguments import as_list, checked_call, described, poolings_of
from .batch import UseTqdm
from .chat_renderer import Steps, run_inline
from .input_processor import NO_GENERATION
from .managed_llm import ManagedLLM
from .outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    cosine,
    embedding_of,
)
from .pooling_config import PoolingTask
from .prompts import Prompt, TokenizedPrompt

T = TypeVar("T")
LoRA = LoRARequest | Sequence[LoRARequest | None] | None
Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingLLM(ManagedLLM):
    """Pooling methods of ``LLM``. Common arguments:

    ``pooling_params``: one object for all prompts, or one per prompt; None fields take the checkpoint's values.
    ``lora_request``: as for ``LLM.generate``.
    ``truncate_prompt_tokens``: number of tokens to keep of a prompt, including special tokens; -1: the model's maximum.

    All methods raise ``PenstockError`` if a prompt is invalid, or its request fails.
    """

    _ids: itertools.count[int]

    @checked_call
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: LoRA = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed prompts.

        Args:
            prompt_name: name of a prefix of texts in ``config_sentence_transformers.json``; None: the default prefix
                of this file; empty: no prefix.
        """
        pooler = self._input_processor.pooler
        texts = [pooler.with_prompt(each, prompt_name) if isinstance(each, str) else each for each in as_list(prompts)]
        params = [pooler.embedding_params(each) for each in poolings_of(pooling_params, len(texts))]
        outputs = self._pool(texts, params, use_tqdm, lora_request, truncate_prompt_tokens)
        return [EmbeddingRequestOutput.of(output) for output in outputs]

    @checked_call
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: LoRA = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Class probabilities, for models with a classifier (``…ForSequenceClassification``)."""
        outputs = self._classified(as_list(prompts), pooling_params, use_tqdm, lora_request, truncate_prompt_tokens)
        return [ClassificationRequestOutput.of(output) for output in outputs]

    @checked_call
    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: LoRA = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """Classifier outputs for every token, for reward models."""
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            truncate_prompt_tokens=truncate_prompt_tokens,
            pooling_task="token_classify",
        )

    @checked_call
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRA = None,
        truncate_prompt_tokens: int | None = None,
        pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput]:
        """Pool prompts to vectors.

        Args:
            pooling_task: ``embed``, ``classify`` (or ``score``), or ``token_embed`` or ``token_classify`` for one
                vector per token; None: the checkpoint's task.
        """
        each = as_list(prompts)
        params = [
            self._input_processor.pooler.params(pooling_task, one) for one in poolings_of(pooling_params, len(each))
        ]
        outputs = self._pool(each, params, use_tqdm, lora_request, truncate_prompt_tokens)
        return [
            PoolingRequestOutput.of(output, one.pooling_type == "all")
            for output, one in zip(outputs, params, strict=True)
        ]

    @checked_call
    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        chat_template: str | Path | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score text pairs: item by item, or one text of ``data_1`` against each of ``data_2``. Embedding models return
        the cosine similarity (see ``similarity``).

        Args:
            chat_template: text or path of a template that renders each pair from messages with the roles ``query`` and
                ``document``; None: the option of ``LLM``, or else the model's pair of texts.
        """
        if not self._input_processor.pooler.is_cross_encoder:
            return self.similarity(data_1, data_2, use_tqdm=use_tqdm, lora_request=lora_request)
        first, second = _pairs(_texts(data_1, "data_1"), _texts(data_2, "data_2"))
        processor = self._input_processor
        template = processor.chat_template(chat_template)
        pairs = [processor.pair(a, b, template) for a, b in zip(first, second, strict=True)]
        texts = [
            pair if isinstance(pair, Texts) else run_inline(processor.chats.text(pair, {}, Steps(), template=template))
            for pair in pairs
        ]
        outputs = self._classified(texts, pooling_params, use_tqdm, lora_request, truncate_prompt_tokens)
        return [ScoringRequestOutput(ScoringOutput(embedding_of(one)[0]), one.prompt_token_ids) for one in outputs]

    @checked_call
    def similarity(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Cosine similarity of embeddings: item by item, or of one ``text_1`` with each ``text_2``."""
        first, second = as_list(text_1, "text_1"), as_list(text_2, "text_2")
        _pairs(first, second)
        outputs = self.embed([*first, *second], use_tqdm=use_tqdm, lora_request=lora_request)
        before, after = _pairs(outputs[: len(first)], outputs[len(first) :])
        return [
            ScoringRequestOutput(
                ScoringOutput(cosine(a.outputs.embedding, b.outputs.embedding)), a.prompt_token_ids + b.prompt_token_ids
            )
            for a, b in zip(before, after, strict=True)
        ]

    def _classified(
        self, prompts: Sequence[Prompt | Texts], params: Params, use_tqdm: UseTqdm, lora: LoRA, limit: int | None
    ) -> list[RequestOutput]:
        pooler = self._input_processor.pooler
        texts = [pooler.normalize_case(each) if isinstance(each, str) else each for each in prompts]
        each = [pooler.classifier_params(one) for one in poolings_of(params, len(texts))]
        return self._pool(texts, each, use_tqdm, lora, limit)

    def _pool(
        self,
        prompts: Sequence[Prompt | Texts],
        params: Sequence[PoolingParams],
        use_tqdm: UseTqdm,
        lora_request: LoRA,
        limit: int | None,
    ) -> list[RequestOutput]:
        adapters = self.load_adapters(lora_request, len(prompts))
        processors = [
            self._input_processor.create_output_processor(
                str(next(self._ids)),
                self._prompt(prompt, limit),
                NO_GENERATION,
                adapter=adapter.lora_name if adapter else "",
                pooling=pooling,
            )
            for prompt, pooling, adapter in zip(prompts, params, adapters, strict=True)
        ]
        for processor in processors:
            self.engine.validate(processor.request)
        return self._run(processors, use_tqdm)

    def _prompt(self, prompt: Prompt | Texts, limit: int | None) -> TokenizedPrompt:
        if limit is not None and (not isinstance(limit, int) or limit < -1 or limit == 0):
            message = f"must be at least 1, or -1 for the model's maximum, is {limit!r}"
            raise invalid("truncate_prompt_tokens", message, 1)
        limit = self.engine.max_model_len if limit == -1 else limit
        if isinstance(prompt, Texts):
            return self._input_processor.encode_texts(msgspec.structs.replace(prompt, max_len=limit))
        if limit is None:
            return self._input_processor.tokenize(prompt)
        if isinstance(prompt, str):
            tokenized = self._input_processor.encode_texts(Texts(prompt, max_len=limit))
            return msgspec.structs.replace(tokenized, text=prompt)
        return TokenizedPrompt(self._input_processor.encode(prompt)[:limit])


def _pairs(first: Sequence[T], second: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Repeat the only item of ``first`` for each item of ``second``; equal numbers of items are returned unmodified.
    Raises ``PenstockError`` (``invalid``) for other numbers of items."""
    if len(first) not in (1, len(second)):
        message = f"has {len(second)} texts, and text_1 has {len(first)}: text_1 must have one, or as many as text_2"
        raise invalid("text_2", message, len(first))
    return (list(first) * len(second) if len(first) == 1 else first), second


def _texts(given: str | Sequence[str], field: str) -> list[str]:
    """Convert a text, or several, to a list. Raises ``PenstockError`` (``invalid``) for other types."""
    texts = as_list(given, field)
    for text in texts:
        if not isinstance(text, str):
            raise invalid(field, f"must be a text or a list of texts, has {described(text)}")
    return cast(list[str], texts)
