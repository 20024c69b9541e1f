"""Requests of OpenAI's API, with the fields that vLLM and FastDeploy add. ``serve/chat/request.py`` has the chat's."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec

from penstock.core.guided import GuidedBackend
from penstock.core.sampling import MAX_LOGPROBS
from penstock.serve.chat.request import (
    ChatRequest,
    Count,
    GenerationRequest,
    Message,
    NonEmptyText,
    PromptRequest,
    TokenId,
    TokenIds,
    Tool,
)

MAX_PROMPTS = 2048
PROMPT_SCHEMAS = [
    {"type": "string"},
    {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
    {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_PROMPTS,
        "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
    },
]


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    prompt: Annotated[
        str | Annotated[list[str | TokenId | TokenIds], msgspec.Meta(min_length=1)],
        msgspec.Meta(extra_json_schema={"anyOf": PROMPT_SCHEMAS}),
    ]
    """One or several texts, or lists of token ids."""
    prompt_token_ids: Annotated[list[TokenId | TokenIds], msgspec.Meta(min_length=1)] | None = None
    """FastDeploy's: taken in place of prompt."""
    max_tokens: Count | None = None
    """16 by default; 0 goes with echo."""
    echo: bool | None = None
    """Return the prompt before the answer."""
    suffix: str | Annotated[dict[str, Any], msgspec.Meta(max_length=0)] | None = None
    """Text after the answer, which fills in the middle; FastDeploy's clients send an empty object."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


class PoolingRequest(PromptRequest, kw_only=True, forbid_unknown_fields=True):
    """Fields of all embedding and score requests. A field that is null is taken as absent."""

    model: str | None = None
    """Absent or "default": the one that is served."""
    add_special_tokens: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Lower runs first, where the server's scheduling_policy is priority."""
    cache_salt: str | None = None
    """Share cached prefixes only with requests of the same salt."""
    user: str | None = None
    use_activation: bool | None = None
    """Whether classes and scores are probabilities, and embeddings have length 1; by default as the checkpoint says."""


class EmbeddingRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    input: Annotated[
        str | Annotated[list[str | TokenId | TokenIds], msgspec.Meta(min_length=1)],
        msgspec.Meta(extra_json_schema={"anyOf": PROMPT_SCHEMAS}),
    ]
    """One or several texts, or lists of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or float32 in base64."""
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Number of leading elements of a vector to keep, before it is normalized."""
    normalize: bool | None = None
    """Whether vectors have length 1; by default as the checkpoint says."""
    prompt_name: str | None = None
    """What texts begin with, of the checkpoint's prompts; by default as it says, and empty is nothing."""


class PoolRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    input: Annotated[
        str | Annotated[list[str | TokenId | TokenIds], msgspec.Meta(min_length=1)],
        msgspec.Meta(extra_json_schema={"anyOf": PROMPT_SCHEMAS}),
    ]
    """One or several texts, or lists of token ids."""
    task: Literal["embed", "classify", "score", "token_embed", "token_classify"] | None = None
    """Those of tokens give a vector for each token; by default what the checkpoint is for."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or float32 in base64."""
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Number of leading elements of a vector to keep, before it is normalized."""
    normalize: bool | None = None
    """Whether vectors have length 1; by default as the checkpoint says."""


class ClassifyRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    input: Annotated[
        str | Annotated[list[str | TokenId | TokenIds], msgspec.Meta(min_length=1)],
        msgspec.Meta(extra_json_schema={"anyOf": PROMPT_SCHEMAS}),
    ]
    """One or several texts, or lists of token ids."""


class RerankText(msgspec.Struct, kw_only=True):
    """A document as an object, as Jina and Cohere's older clients send it."""

    text: str


class RerankRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    query: str
    documents: Annotated[list[str | RerankText], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    """Number of documents to return; 0 and by default all."""
    return_documents: bool | None = None
    """Whether the answer repeats the documents' texts; true by default."""
    max_tokens_per_doc: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    """Tokens of a document that are read; 0 and by default all."""


TextOrList = str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]


class ScoreRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """Pairs of texts, or one text and several. The two fields have one of several pairs of names (``TEXT_PAIRS``)."""

    text_1: TextOrList | None = None
    text_2: TextOrList | None = None
    queries: TextOrList | None = None
    documents: TextOrList | None = None
    items: TextOrList | None = None
    """With queries, too."""
    data_1: TextOrList | None = None
    data_2: TextOrList | None = None


TEXT_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt or messages to tokenize."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter as PEFT saves it."""

    lora_name: NonEmptyText
    """Name under which requests select the adapter, in ``model``."""
    lora_path: NonEmptyText
    """A folder of the server."""
    base_model_name: str | None = None
    """The adapter's base model; by default the first one."""


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: NonEmptyText
    lora_int_id: int | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[TokenId]


REQUESTS = (
    CompletionRequest,
    ChatRequest,
    EmbeddingRequest,
    ScoreRequest,
    RerankRequest,
    ClassifyRequest,
    PoolRequest,
    TokenizeRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)

GUIDED_BACKENDS = tuple(
    f"{name}{option}" for name in get_args(GuidedBackend) if name != "off" for option in ("", ":no-fallback")
)
"""Values that the flag accepts, too. Which backend compiles a grammar does not change what it allows."""
UNSUPPORTED_FIELDS: dict[type, dict[str, tuple[Any, ...]]] = {
    GenerationRequest: {
        "audio": (),
        "collect_metrics": (False,),
        "completion_token_ids": ([],),
        "disaggregate_info": ({},),
        "ec_transfer_params": ({},),
        "function_call": ("none",),
        "functions": ([],),
        "guided_decoding_backend": GUIDED_BACKENDS,
        "include_draft_logprobs": (False,),
        "include_logprobs_decode_token": (True,),
        "kv_transfer_params": ({},),
        "logits_processors": (),
        "logits_processors_args": ({},),
        "media_io_kwargs": ({},),
        "mm_hashes": ([],),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "prediction": (),
        "prompt_embeds": (),
        "repetition_detection": (),
        "return_assistant_tokens_mask": (False, True),  # vLLM's /render paths alone read this one
        "return_token_offsets": (False, True),  # and this
        "suffix": ("", {}),
        "thinking_token_budget": (-1,),
        "trace_context": ("",),
        "vllm_xargs": ({},),
        "web_search_options": (),
    },
    PoolingRequest: {
        "additional_data": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "instruction": ("",),
        "max_tokens_per_doc": (0,),
        "max_tokens_per_query": (0,),
        "messages": (),
        "mm_processor_kwargs": ({},),
    },
    TokenizeRequest: {
        "chat_template": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    },
}
"""By kind of request: fields of other servers that are not supported yet, each with the values that have no effect."""
