"""Options of a model beside its engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.core.errors import PenstockError, invalid
from penstock.core.sampling import MAX_LOGPROBS, SamplingParams

from .option import option

MAX_MEDIA = {"image": 16, "video": 4}
"""Images and videos that a prompt may have by default."""


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a model beside its engine: tokenizer, chat template, parsers, default sampling parameters,
    download."""

    pooling_type: Literal["auto", "last", "cls", "mean", "all"] = "auto"
    """Hidden state that becomes an embedding, or goes into a classifier: the last or first (cls) token's, the mean, or
    one for each token (all); auto is what the checkpoint says, else of decoders last and of encoders cls."""
    pooling_task: Literal["auto", "embed", "classify", "score"] = "auto"
    """What is pooled for: auto is classes and scores where the checkpoint has a classifier, else embeddings; classify
    and score have a model that generates answer with one of classifier_tokens, as Qwen3-Reranker."""
    pooling_activation: Literal["auto", "on", "off"] = "auto"
    """Whether embeddings have length 1, and a classifier's outputs become probabilities; auto is what the checkpoint
    says."""
    classifier_tokens: tuple[str, ...] = ("no", "yes")
    """Tokens by which a model that generates says no and yes to a pair of texts."""
    tokenizer: str = ""
    """Folder to take the tokenizer from; nothing for the model's own."""
    chat_template: str = ""
    """File with a template, or the template; nothing for the model's own."""
    tool_call_parser: Literal[
        "auto",
        "hermes",
        "qwen",
        "ernie",
        "llama3_json",
        "llama4_json",
        "mistral",
        "deepseek_v3",
        "deepseek_v31",
        "kimi_k2",
        "granite",
        "granite4",
        "phi4_mini_json",
        "hunyuan_a13b",
        "jamba",
        "cohere_command3",
        "internlm",
        "qwen3_coder",
        "qwen3_xml",
        "mimo",
        "seed_oss",
        "minimax_m2",
        "glm45",
        "glm47",
        "pythonic",
        "llama4_pythonic",
        "olmo3",
        "lfm2",
        "openai",
    ] = "auto"
    """Format of the model's tool calls; auto is the one that its chat template has."""
    reasoning_parser: Literal[
        "auto",
        "none",
        "qwen3",
        "deepseek_r1",
        "deepseek_v3",
        "glm45",
        "glm47",
        "kimi_k2",
        "minimax_m2",
        "mimo",
        "olmo3",
        "step3",
        "mistral",
        "ernie",
        "hunyuan_a13b",
        "cohere_command3",
        "seed_oss",
        "granite",
        "openai_gptoss",
    ] = "auto"
    """Format of the model's reasoning, which is separated from its answers; auto is the one that its chat template has,
    none leaves it in the content."""
    generation_config: str = "auto"
    """Default sampling parameters of requests: auto is the model's generation_config.json, vllm is vLLM's defaults,
    else a folder with another generation_config.json."""
    override_generation_config: str = ""
    """Default sampling parameters that override those of generation_config, as JSON: {"temperature": 0.6}."""
    max_logprobs: Annotated[int, option(ge=0, le=MAX_LOGPROBS)] = MAX_LOGPROBS
    """Maximum logprobs of a request."""
    enable_logprob: bool = True
    """Return logprobs; without it, requests for them are refused."""
    limit_mm_per_prompt: Annotated[str, option(empty='{"image": 16, "video": 4}')] = ""
    """Images and videos that a prompt may have, as JSON: {"image": 4}."""
    mm_processor_kwargs: Annotated[str, option(empty="the model's")] = ""
    """Limits of the pixels of an image once it is resized, in place of those of the model's image processor, as JSON:
    {"min_pixels": 3136, "max_pixels": 1003520}; of videos also which frames are taken: fps or num_frames, min_frames,
    max_frames."""
    media_io_kwargs: Annotated[str, option(empty="the model's")] = ""
    """Which frames of videos are taken, as JSON: {"video": {"num_frames": 32}}, or fps; -1 is all."""
    allowed_media_domains: tuple[str, ...] = ()
    """The only hosts that images are fetched from, which may then have any address; nothing for all hosts with public
    addresses."""
    allowed_local_media_path: str = ""
    """Folder whose files requests may name as images (file:); nothing for none."""
    max_image_size: Annotated[int, option("bytes", ge=1)] = 20 * 2**20
    """Maximum size of an image's file."""
    max_image_pixels: Annotated[int, option("pixels", ge=1)] = 2**26
    """Maximum width times height of an image, before and after it is resized."""
    media_timeout: Annotated[float, option("seconds", gt=0)] = 10.0
    """Maximum time to fetch an image or a video."""
    max_video_size: Annotated[int, option("bytes", ge=1)] = 100 * 2**20
    """Maximum size of a video's file."""
    max_video_frames: Annotated[int, option("frames", ge=1)] = 768
    """Maximum number of frames taken of a video."""
    max_video_pixels: Annotated[int, option("pixels", ge=1)] = 2**27
    """Maximum width times height times frames of a video, after these are resized."""
    video_timeout: Annotated[float, option("seconds", gt=0)] = 30.0
    """Maximum time to decode a video."""
    max_audio_size: Annotated[int, option("bytes", ge=1)] = 25 * 2**20
    """Maximum size of an audio file."""
    max_audio_duration: Annotated[float, option("seconds", gt=0)] = 3600.0
    """Maximum duration of audio."""
    audio_timeout: Annotated[float, option("seconds", gt=0)] = 30.0
    """Maximum time to decode audio."""
    model_hub: Literal["huggingface", "modelscope"] = "huggingface"
    """Hub of models that are named org/name."""
    revision: str = ""
    """Branch, tag or commit on the hub; nothing for its main branch."""
    hf_token: str = ""
    """Token for the Hugging Face hub; nothing for the environment's HF_TOKEN."""
    download_dir: str = ""
    """Where downloads are kept; nothing for Hugging Face's own cache, and ~/.cache/penstock/downloads for what is not
    from its hub."""

    def __post_init__(self) -> None:
        self.sampling()
        self.max_media("image")
        self.media_kwargs()

    def sampling(self) -> dict[str, Any]:
        """``override_generation_config`` by field. Raises ``PenstockError`` (``invalid``) where it is wrong."""
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
        """Images or videos that a prompt may have. Raises ``PenstockError`` (``invalid``) where ``limit_mm_per_prompt``
        is wrong.

        Args:
            kind: image or video.
        """
        try:
            limits = MAX_MEDIA | msgspec.json.decode(self.limit_mm_per_prompt or "{}", type=dict[str, Any])
            counts = {  # vLLM also takes {"image": {"count": 4}}
                name: limit["count"] if isinstance(limit, dict) else limit for name, limit in limits.items()
            }
            result: dict[str, int] = msgspec.convert(counts, dict[str, Annotated[int, msgspec.Meta(ge=0)]])
        except (msgspec.MsgspecError, KeyError) as error:
            raise invalid("limit_mm_per_prompt", f"{self.limit_mm_per_prompt} is wrong: {error}") from error
        return result[kind]

    def media_kwargs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """``mm_processor_kwargs`` and ``media_io_kwargs`` by name. Raises ``PenstockError`` (``invalid``) where they
        are no JSON object."""
        result = []
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            given = getattr(self, name)
            try:
                result.append(msgspec.json.decode(given or "{}", type=dict[str, Any]))
            except msgspec.MsgspecError as error:
                raise invalid(name, f"{given} is wrong: {error}") from error
        return result[0], result[1]
