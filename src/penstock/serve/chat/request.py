"""The chat request that every dialect but PaddleNLP is converted to: OpenAI's fields, and those that vLLM and
FastDeploy add to them.

A field that is null is taken as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec

from penstock.core.guided import GuidedBackend
from penstock.core.sampling import MAX_LOGPROBS, MAX_SEQUENCES
from penstock.serve.http.body import Reading, RequestBody, unsupported

Number = float
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""-1 is a random seed."""
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
NonEmptyText = Annotated[str, msgspec.Meta(min_length=1)]
REQUEST_ID = r"^[\x21-\x7e]{1,128}$(?!\n)"
TOOL_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$(?!\n)"
"""Letters, digits and a few punctuation marks; models' tool call formats allow no others."""


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """Send the usage in a last chunk."""
    continuous_usage_stats: bool | None = None
    """With include_usage: send the usage so far in every chunk."""
    include_obfuscation: Literal[False] | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None
    """Also require all listed properties, and no others; the schema is enforced in either case."""


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's response format, with the forms of llama-server, Text Generation Inference and vLLM."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "json", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | bool | None = None
    """llama-server's: the schema of json_object or json_schema."""
    value: dict[str, Any] | str | None = None
    """Text Generation Inference's: the schema of json or json_object, the expression of regex."""
    pattern: str | None = None
    """The expression of regex."""
    grammar: str | None = None
    """The grammar of the type grammar, in Lark's or GBNF's notation."""
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of these constraints."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[NonEmptyText], msgspec.Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    """Objects have no properties but those that the schema lists."""
    whitespace_pattern: str | None = None


GUIDED_BACKENDS = tuple(
    f"{name}{option}" for name in get_args(GuidedBackend) if name != "off" for option in ("", ":no-fallback")
)
"""Values that the flag accepts, too. Which backend compiles a grammar does not change what it allows."""
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
        "return_assistant_tokens_mask": (False, True),  # vLLM's /render paths alone read this one
        "return_token_offsets": (False, True),  # and this
        "suffix": ("", {}),
        "thinking_token_budget": (-1,),
        "trace_context": ("",),
        "vllm_xargs": ({},),
        "web_search_options": (),
    }
)
"""Fields of OpenAI's and other servers' requests that are not supported yet, with values that have no effect."""


class PromptRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """Fields of all requests with a prompt."""

    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    """Truncate the prompt to this number of tokens; -1 is as many as the context has room for."""
    truncation_side: Literal["left", "right"] | None = None
    """Side that is removed: left by default where the model continues the prompt, right for embeddings."""
    request_id: Annotated[str, msgspec.Meta(pattern=REQUEST_ID)] | None = None
    """The request's id in the log, in the header X-Request-Id, and at the end of the response's id."""


class GenerationRequest(PromptRequest, kw_only=True, forbid_unknown_fields=True):
    """Fields of all requests that generate. A field that is null is taken as absent."""

    reading: ClassVar = Reading(unsupported=UNSUPPORTED)

    model: str | None = None
    """Absent or "default": the one that is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    """Sequences to generate, of which the n likeliest are returned."""
    use_beam_search: bool | None = None
    """Beam search with best_of beams; requires temperature 0."""
    length_penalty: Annotated[Number, msgspec.Meta(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    temperature: Annotated[Number, msgspec.Meta(ge=0, le=100)] | None = None
    """0 is greedy."""
    top_p: Annotated[Number, msgspec.Meta(ge=0, le=1)] | None = None
    """0 takes the likeliest token."""
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 or -1 is all."""
    min_p: Annotated[Number, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, msgspec.Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, msgspec.Meta(gt=0)] | None = None
    seed: Seed | None = None
    logit_bias: dict[TokenId, Annotated[Number, msgspec.Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[NonEmptyText] | None = None
    bad_words_token_ids: list[TokenId | TokenIds] | None = None
    """Token ids, or sequences of them, that must not be generated."""

    min_tokens: Count | None = None
    stop: NonEmptyText | list[NonEmptyText] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """No effect, as in vLLM with fast tokenizers."""

    response_format: ResponseFormat | None = None
    """Structured output: any JSON object, one of a JSON Schema, or a structural tag."""
    guided_json: str | dict[str, Any] | None = None
    """JSON Schema of the answer."""
    guided_regex: str | None = None
    guided_choice: Annotated[list[NonEmptyText], msgspec.Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    """In Lark's or GBNF's notation."""
    guided_whitespace_pattern: str | None = None
    """Regular expression of the whitespace between the parts of JSON."""
    guided_decoding_disable_any_whitespace: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    """Free text with tagged parts that follow a schema."""
    structured_outputs: StructuredOutputs | None = None
    """The fields guided_*, under vLLM's newer name."""
    json_schema: str | dict[str, Any] | None = None
    """llama-server's and SGLang's name of guided_json."""
    regex: str | None = None
    """SGLang's name of guided_regex."""
    grammar: str | None = None
    """llama-server's name of guided_grammar."""
    ebnf: str | None = None
    """SGLang's name of guided_grammar."""

    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in logprobs token_id:ID."""
    temp_scaled_logprobs: bool | None = None
    """FastDeploy's: logprobs at the request's temperature."""
    top_p_normalized_logprobs: bool | None = None
    """FastDeploy's: log probabilities among the tokens that top_p leaves."""
    return_token_ids: bool | None = None
    """Return the token ids of prompt and answer."""
    max_streaming_response_tokens: Count | None = None
    """FastDeploy's: choices that a chunk may have at most; here it has one."""
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Lower runs first, where the server's scheduling_policy is priority."""
    cache_salt: str | None = None
    """Share cached prefixes only with requests of the same salt."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Any = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


MAX_TEMPLATE = 65_536
"""Characters of a chat template that a request brings."""
ROLES = ("system", "developer", "user", "assistant", "tool")


class MediaURL(msgspec.Struct):
    """Where an image or a video is."""

    url: str | None = None
    detail: str | None = None
    """No effect: mm_processor_kwargs limits the size of images."""


class ContentPart(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | MediaURL | None = None
    video_url: str | MediaURL | None = None
    video: str | MediaURL | None = None
    """As ``video_url``."""


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
    """Empty where there are prompt_token_ids."""
    prompt_token_ids: TokenIds | None = None
    """The whole prompt, rendered and encoded by the client."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """By default what is left of the context."""
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    """auto: the model decides; none; required: at least one call; or a call of this tool."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several tool calls; true by default."""
    include_reasoning: bool | None = None
    """Whether to return the reasoning; true by default."""
    reasoning_max_tokens: Count | None = None
    """Maximum number of reasoning tokens."""
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    """vLLM's name of reasoning_max_tokens; -1 is unlimited."""
    response_max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """FastDeploy's: maximum number of tokens of the answer after the reasoning."""
    return_prompt_text: bool | None = None
    """Return the prompt as the chat template renders it."""
    disable_chat_template: bool | None = None
    """FastDeploy's: the first message's text is the prompt, as it is."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the chat template (enable_thinking …)."""
    chat_template: Annotated[str, msgspec.Meta(max_length=MAX_TEMPLATE)] | None = None
    """Used in place of the model's, where the server does so (trust_request_chat_template)."""
    documents: list[dict[str, Any]] | None = None
    """Passed to the chat template, if it reads them."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Passed to the chat template, if it reads it."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    """Begin the answer with the last message's text, where the answer has the same role."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Limits of images' pixels, min_pixels and max_pixels, and of videos also fps or num_frames, in place of the
    server's."""
    media_io_kwargs: dict[str, Any] | None = None
    """How many frames are taken of videos: {"video": {"num_frames": 32}}, or fps."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to those that the chat template writes."""


ChatRequest.reading = ChatRequest.reading.accepting(ChatRequest)
