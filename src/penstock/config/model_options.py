"""Options of a model that are used outside its engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.core.errors import PenstockError, invalid
from penstock.core.sampling import MAX_LOGPROBS, SamplingParams

from .option import option

MAX_MEDIA = {"image": 16, "video": 4}
"""Default maximum numbers of images and videos in a prompt."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a model that are used outside its engine: tokenizer, chat template, parsers, default sampling
    parameters, media, download."""

    pooling_type: Literal["auto", "last", "cls", "mean", "all"] = "auto"
    """Pooling of hidden states for embeddings and classifiers: the last or first (cls) token, the mean, or all tokens
    (one vector per token); auto: the checkpoint's pooling, by default last for decoders and cls for encoders."""
    pooling_task: Literal["auto", "embed", "classify", "score"] = "auto"
    """Task of a pooling model; auto: classify and score if the checkpoint has a classifier, otherwise embed. classify
    and score also work with generative models that answer with one of classifier_tokens, such as Qwen3-Reranker."""
    pooling_activation: Literal["auto", "on", "off"] = "auto"
    """Normalize embeddings to length 1, and convert a classifier's outputs to probabilities; auto: the checkpoint's
    setting."""
    classifier_tokens: tuple[str, ...] = ("no", "yes")
    """The two tokens with which a generative reranker answers: first no, then yes."""
    tokenizer: str = ""
    """Folder of the tokenizer; empty: the model's folder."""
    chat_template: str = ""
    """Chat template (Jinja), or a file that contains it; empty: the model's template."""
    allow_special_tokens_in_content: bool = False
    """Allow special tokens and other control tokens (<think>) in the content of messages; otherwise they are encoded as
    plain text, so that users cannot forge turns or tool calls."""
    tool_call_parser: Literal[
        "auto",
        "generic",
        "apertus",
        "apertus2509",
        "cohere_command3",
        "cohere_command4",
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_v32",
        "deepseek_v4",
        "deepseekv3",
        "deepseekv31",
        "deepseekv32",
        "deepseekv4",
        "dots",
        "ernie",
        "ernie45",
        "functiongemma",
        "gemma4",
        "gigachat3",
        "gigachat35",
        "glm",
        "glm45",
        "glm47",
        "gpt-oss",
        "granite",
        "granite-20b-fc",
        "granite4",
        "hermes",
        "hunyuan_a13b",
        "hy_v3",
        "inkling",
        "internlm",
        "interns1",
        "jamba",
        "k2_horizon",
        "kimi_k2",
        "kimi_k3",
        "lfm2",
        "ling3",
        "llama3",
        "llama3_json",
        "llama4_json",
        "llama4_pythonic",
        "llama_nemotron_json",
        "longcat",
        "mimo",
        "minicpm5",
        "minimax",
        "minimax-m2",
        "minimax-m3",
        "minimax_01",
        "minimax_m1",
        "minimax_m2",
        "minimax_m3",
        "mistral",
        "nemotron_json",
        "olmo3",
        "openai",
        "phi4_mini_json",
        "poolside_v1",
        "pythonic",
        "qwen",
        "qwen25",
        "qwen3_coder",
        "qwen3_xml",
        "seed_oss",
        "solar_open",
        "solar_open2",
        "spark25",
        "step3",
        "step3p5",
        "trinity",
        "xlam",
    ] = "auto"
    """Format of the model's tool calls; auto: detected from the chat template; generic: described in the system message
    instead, for models whose chat template has no tools."""
    tool_strictness: Literal["off", "function", "schema"] = "schema"
    """Constraint on tool calls that the model decides to make: off: none; function: names of the request's tools, and
    arguments in valid JSON; schema: arguments that follow the tools' schemas."""
    reasoning_parser: Literal[
        "auto",
        "none",
        "apertus",
        "apertus2509",
        "cohere_command3",
        "cohere_command4",
        "deepseek-r1",
        "deepseek-v3",
        "deepseek-v4",
        "deepseek_r1",
        "deepseek_v3",
        "deepseek_v4",
        "ernie",
        "ernie45",
        "gemma4",
        "glm45",
        "glm47",
        "gpt-oss",
        "granite",
        "holo2",
        "hunyuan",
        "hunyuan_a13b",
        "hy_v3",
        "inkling",
        "interns1",
        "k2_horizon",
        "kimi",
        "kimi_k2",
        "kimi_k3",
        "longcat",
        "mimo",
        "minimax",
        "minimax-m3",
        "minimax_m1",
        "minimax_m2",
        "minimax_m3",
        "mistral",
        "nemotron_3",
        "nemotron_v3",
        "olmo3",
        "openai_gptoss",
        "poolside_v1",
        "qwen3",
        "qwen3-thinking",
        "seed_oss",
        "solar_open",
        "solar_open2",
        "step3",
        "step3p5",
    ] = "auto"
    """Format of the model's reasoning, which is returned separately from the answer; auto: detected from the chat
    template, none: reasoning stays in the content."""
    generation_config: str = "auto"
    """Default sampling parameters of requests: auto uses the model's generation_config.json, vllm uses vLLM's defaults;
    any other value is a folder with a generation_config.json."""
    override_generation_config: str = ""
    """Default sampling parameters with precedence over generation_config, as JSON: {"temperature": 0.6}."""
    max_logprobs: Annotated[int, option(ge=0, le=MAX_LOGPROBS)] = MAX_LOGPROBS
    """Maximum of the parameters logprobs and prompt_logprobs of a request."""
    enable_logprob: bool = True
    """Allow requests for logprobs; otherwise they are rejected."""
    limit_mm_per_prompt: Annotated[str, option(empty='{"image": 16, "video": 4}')] = ""
    """Maximum numbers of images and videos in a prompt, as JSON: {"image": 4}."""
    mm_processor_kwargs: Annotated[str, option(empty="the model's")] = ""
    """Overrides for the parameters of the model's image processor, as JSON: minimum and maximum pixels of a resized
    image, {"min_pixels": 3136, "max_pixels": 1003520}; for videos also the sampling of frames: fps or num_frames,
    min_frames, max_frames."""
    media_io_kwargs: Annotated[str, option(empty="the model's")] = ""
    """Sampling of video frames, as JSON: {"video": {"num_frames": 32}}, or fps; -1: all frames."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts from which images and videos may be fetched, even from private addresses; empty: any host with a public
    address."""
    allowed_local_media_path: str = ""
    """Folder with files that requests may use as images (file: URLs); empty: no files may be used."""
    max_image_size: Annotated[int, option("bytes", ge=1)] = 20 * 2**20
    """Maximum size of an image file."""
    max_image_pixels: Annotated[int, option("pixels", ge=1)] = 2**26
    """Maximum width times height of an image, before and after it is resized."""
    media_timeout: Annotated[float, option("seconds", gt=0)] = 10.0
    """Maximum time to download an image or a video."""
    max_video_size: Annotated[int, option("bytes", ge=1)] = 100 * 2**20
    """Maximum size of a video file."""
    max_video_frames: Annotated[int, option("frames", ge=1)] = 768
    """Maximum number of frames sampled from a video."""
    max_video_pixels: Annotated[int, option("pixels", ge=1)] = 2**27
    """Maximum width times height times frames of a video, after resizing."""
    video_timeout: Annotated[float, option("seconds", gt=0)] = 30.0
    """Maximum time to decode a video."""
    max_audio_size: Annotated[int, option("bytes", ge=1)] = 25 * 2**20
    """Maximum size of an audio file."""
    max_audio_duration: Annotated[float, option("seconds", gt=0)] = 3600.0
    """Maximum duration of an audio file."""
    audio_timeout: Annotated[float, option("seconds", gt=0)] = 30.0
    """Maximum time to decode an audio file."""
    model_hub: Literal["huggingface", "modelscope"] = "huggingface"
    """Hub from which models named org/name are downloaded."""
    revision: str = ""
    """Branch, tag or commit of the model on the hub; empty: the main branch."""
    hf_token: str = ""
    """Access token for the Hugging Face hub; empty: the environment variable HF_TOKEN."""
    download_dir: str = ""
    """Folder for downloads; empty: the Hugging Face cache, and ~/.cache/penstock/downloads for downloads from
    elsewhere."""

    def __post_init__(self) -> None:
        self.sampling()
        self.max_media("image")
        self.media_kwargs()

    def sampling(self) -> dict[str, Any]:
        """Parse ``override_generation_config``. Raises ``PenstockError`` (``invalid``) for invalid parameters."""
        if not self.override_generation_config:
            return {}
        try:
            result = msgspec.json.decode(self.override_generation_config, type=dict[str, Any])
            SamplingParams(**result)
        except (msgspec.MsgspecError, TypeError, PenstockError) as error:
            raise invalid(
                "override_generation_config", f"{self.override_generation_config} is wrong: {error}"
            ) from error
        return result

    def max_media(self, kind: str) -> int:
        """Maximum number of images or videos in a prompt.

        Args:
            kind: image or video.

        Raises ``PenstockError`` (``invalid``) if ``limit_mm_per_prompt`` is invalid.
        """
        try:
            limits = MAX_MEDIA | msgspec.json.decode(self.limit_mm_per_prompt or "{}", type=dict[str, Any])
            counts = {  # also accepts vLLM's form {"image": {"count": 4}}
                name: limit["count"] if isinstance(limit, dict) else limit for name, limit in limits.items()
            }
            result: dict[str, int] = msgspec.convert(counts, dict[str, Annotated[int, msgspec.Meta(ge=0)]])
        except (msgspec.MsgspecError, KeyError) as error:
            raise invalid("limit_mm_per_prompt", f"{self.limit_mm_per_prompt} is wrong: {error}") from error
        return result[kind]

    def media_kwargs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parse ``mm_processor_kwargs`` and ``media_io_kwargs``. Raises ``PenstockError`` (``invalid``) if they are not
        JSON objects."""
        result = []
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            given = getattr(self, name)
            try:
                result.append(msgspec.json.decode(given or "{}", type=dict[str, Any]))
            except msgspec.MsgspecError as error:
                raise invalid(name, f"{given} is wrong: {error}") from error
        return result[0], result[1]
