"""Chat request to which requests of all dialects except PaddleNLP are converted: OpenAI's fields with the extensions of
vLLM and FastDeploy.

Null fields are treated as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec

from penstock.core.guided import GuidedBackend
from penstock.core.sampling import MAX_LOGPROBS, MAX_SEQUENCES
from penstock.serve.http.body import Reading, RequestBody, unsupported

Number = float
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Seed of sampling; -1: a random seed."""
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
NonEmptyText = Annotated[str, msgspec.Meta(min_length=1)]
REQUEST_ID = r"^[\x21-\x7e]{1,128}$(?!\n)"
TOOL_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$(?!\n)"
"""Allowed tool names: letters, digits and some punctuation. Models' tool call formats do not allow other characters."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """Send the usage in a final chunk."""
    continuous_usage_stats: bool | None = None
    """With include_usage: also send the current usage in every chunk."""
    include_obfuscation: Literal[False] | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None
    """True: also require all listed properties, and disallow unlisted ones. The schema is always enforced."""


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's response format, with variants of llama-server, Text Generation Inference and vLLM."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "json", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | bool | None = None
    """llama-server: JSON Schema (types json_object and json_schema)."""
    value: dict[str, Any] | str | None = None
    """Text Generation Inference: JSON Schema (types json and json_object) or regular expression (type regex)."""
    pattern: str | None = None
    """Regular expression (type regex)."""
    grammar: str | None = None
    """Grammar in Lark or GBNF syntax (type grammar)."""
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's structured outputs: one constraint, with options."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[NonEmptyText], msgspec.Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    """Disallow properties that the schema does not list."""
    whitespace_pattern: str | None = None


GUIDED_BACKENDS = tuple(
    f"{name}{option}" for name in get_args(GuidedBackend) if name != "off" for option in ("", ":no-fallback")
)
"""Accepted values of guided_decoding_backend. They are ignored, as the backend does not change the allowed output."""
UNSUPPORTED = unsupported(
    {
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
        "return_assistant_tokens_mask": (False, True),  # only vLLM's /render paths read it
        "return_token_offsets": (False, True),  # only vLLM's /render paths read it
        "suffix": ("", {}),
        "thinking_token_budget": (-1,),
        "trace_context": ("",),
        "vllm_xargs": ({},),
        "web_search_options": (),
    }
)
"""Unsupported fields of OpenAI and other servers, with the values that have no effect and are accepted."""


class PromptRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Fields of all requests with a prompt."""

    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    """Truncate the prompt to this number of tokens; -1: to the maximum that fits into the context."""
    truncation_side: Literal["left", "right"] | None = None
    """Side of the prompt that is removed. Default: left for generation, right for embeddings."""
    request_id: Annotated[str, msgspec.Meta(pattern=REQUEST_ID)] | None = None
    """Request id in the log, in the header X-Request-Id, and at the end of the response id."""


class GenerationRequest(PromptRequest, kw_only=True, forbid_unknown_fields=True):
    """Fields of all generation requests. Null fields are treated as absent."""

    reading: ClassVar = Reading(unsupported=UNSUPPORTED)

    model: str | None = None
    """Name of the model or adapter. Absent or "default": the first served model."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    """Number of sequences to generate; the n most likely are returned."""
    use_beam_search: bool | None = None
    """Beam search with best_of beams; requires temperature 0."""
    length_penalty: Annotated[Number, msgspec.Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    temperature: Annotated[Number, msgspec.Meta(ge=0, le=100)] | None = None
    """Sampling temperature; 0: greedy decoding."""
    top_p: Annotated[Number, msgspec.Meta(ge=0, le=1)] | None = None
    """Probability mass of nucleus sampling; 0: always the most likely token."""
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    """Number of most likely tokens to sample from; 0 or -1: all tokens."""
    min_p: Annotated[Number, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, msgspec.Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, msgspec.Meta(gt=0)] | None = None
    seed: Seed | None = None
    logit_bias: dict[TokenId, Annotated[Number, msgspec.Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[NonEmptyText] | None = None
    bad_words_token_ids: list[TokenId | TokenIds] | None = None
    """Token ids, or sequences of token ids, that must not be generated."""

    min_tokens: Count | None = None
    stop: NonEmptyText | list[NonEmptyText] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """No effect (as in vLLM with fast tokenizers)."""

    response_format: ResponseFormat | None = None
    """Structured output: any JSON object, a JSON Schema, a regular expression, a grammar or a structural tag."""
    guided_json: str | dict[str, Any] | None = None
    """JSON Schema of the answer."""
    guided_regex: str | None = None
    guided_choice: Annotated[list[NonEmptyText], msgspec.Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    """Grammar of the answer in Lark or GBNF syntax."""
    guided_whitespace_pattern: str | None = None
    """Regular expression of the whitespace between JSON tokens."""
    guided_decoding_disable_any_whitespace: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    """Free text with tagged parts that match a schema."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's newer form of the fields guided_*."""
    json_schema: str | dict[str, Any] | None = None
    """llama-server's and SGLang's name for guided_json."""
    regex: str | None = None
    """SGLang's name for guided_regex."""
    grammar: str | None = None
    """llama-server's name for guided_grammar."""
    ebnf: str | None = None
    """SGLang's name for guided_grammar."""

    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_tokens_as_token_ids: bool | None = None
    """Return tokens in logprobs as token_id:ID."""
    temp_scaled_logprobs: bool | None = None
    """FastDeploy: compute logprobs at the request's temperature."""
    top_p_normalized_logprobs: bool | None = None
    """FastDeploy: compute logprobs among the tokens within top_p."""
    return_token_ids: bool | None = None
    """Return the token ids of the prompt and the answer."""
    max_streaming_response_tokens: Count | None = None
    """FastDeploy: maximum number of choices per chunk. No effect: chunks have one choice."""
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Priority with the scheduling_policy priority; lower values run first."""
    cache_salt: str | None = None
    """Share cached prefixes only with requests that have the same salt."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Any = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


MAX_TEMPLATE = 65_536
"""Maximum number of characters of a request's chat template."""
ROLES = ("system", "developer", "user", "assistant", "tool")


class MediaURL(msgspec.Struct):
    """URL of an image or a video."""

    url: str | None = None
    detail: str | None = None
    """No effect; mm_processor_kwargs limits the size of images."""


class ContentPart(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | MediaURL | None = None
    video_url: str | MediaURL | None = None
    video: str | MediaURL | None = None
    """Same as ``video_url``."""


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class Function(msgspec.Struct, kw_only=True):
    name: Annotated[str, msgspec.Meta(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    """Messages of the chat; empty if prompt_token_ids is given."""
    prompt_token_ids: TokenIds | None = None
    """The prompt, rendered and encoded by the client."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Maximum number of tokens to generate. Default: the rest of the context."""
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """OpenAI's newer name for max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    """auto: the model decides; none: no call; required: at least one call; or a call of the named tool."""
    parallel_tool_calls: bool | None = None
    """Allow several tool calls in an answer. Default: true."""
    include_reasoning: bool | None = None
    """Return the reasoning. Default: true."""
    reasoning_max_tokens: Count | None = None
    """Maximum number of reasoning tokens."""
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    """vLLM's name for reasoning_max_tokens; -1: unlimited."""
    response_max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """FastDeploy: maximum number of tokens after the reasoning."""
    return_prompt_text: bool | None = None
    """Return the rendered prompt."""
    disable_chat_template: bool | None = None
    """FastDeploy: use the first message's text as prompt, without the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template (enable_thinking, ...)."""
    chat_template: Annotated[str, msgspec.Meta(max_length=MAX_TEMPLATE)] | None = None
    """Chat template to use instead of the model's (requires --trust-request-chat-template)."""
    documents: list[dict[str, Any]] | None = None
    """Documents for the chat template. Rejected if the model's template does not read them."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Reasoning effort for the chat template. Ignored if the model's template does not read it."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    """Begin the answer with the text of the last message, if that is an assistant message."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Override the server's limits min_pixels and max_pixels of images and videos, and fps or num_frames of videos."""
    media_io_kwargs: dict[str, Any] | None = None
    """Number of frames sampled from videos, {"video": {"num_frames": 32}}, or per second, {"video": {"fps": 2}}."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens (BOS, EOS) to the rendered prompt. Default: false."""


ChatRequest.reading = ChatRequest.reading.accepting(ChatRequest)
