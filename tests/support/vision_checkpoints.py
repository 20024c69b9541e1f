"""Small checkpoints of vision-language families with a vision transformer and a projector, and their processors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

FIRST = 280
"""Id of the first special token; tokens for bytes and for runs of line feeds have smaller ids."""
EOS = FIRST
RUNS = 4
TEMPLATE = (
    "{% for message in messages %}<turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<end>\n{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}


def flag(rng: Random) -> bool:
    return rng.random() < 0.5


def draw_text(rng: Random) -> dict[str, Any]:
    heads, kv_heads = rng.choice([(4, 2), (4, 4), (6, 2), (8, 1)])
    head_dim = rng.choice([16, 32])
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * head_dim}
    return TEXT | sizes | {"head_dim": head_dim, "intermediate_size": rng.choice([48, 100])}


def draw_vision(rng: Random) -> dict[str, Any]:
    heads = rng.choice([1, 2, 4])
    sizes = {"num_attention_heads": heads, "hidden_size": heads * rng.choice([8, 16, 24])}
    return VISION | sizes | {"num_hidden_layers": rng.randint(1, 3), "intermediate_size": rng.choice([20, 44])}


@dataclass
class Family:
    """A vision-language family: small models, processors and special tokens."""

    marks: tuple[str, ...]
    """Special tokens of the family, in the order of their ids."""
    marker: str
    """Text that the chat template inserts for an image."""
    model: Callable[[Random | None], PreTrainedModel]
    """Creates a small model, with random sizes if a ``Random`` is given."""
    image_processor: Callable[[PreTrainedModel, dict[str, Any]], Any]
    """Creates transformers' image processor of a model, with ``mm_processor_kwargs``."""
    inputs: Callable[[PreTrainedModel, Any, str, list[Image.Image], dict[str, Any]], dict[str, Any]]
    """transformers' model inputs for a model, tokenizer, text, images and ``mm_processor_kwargs``."""
    names: dict[str, str]
    """Special tokens in the tokenizer's configuration, by name."""
    kwargs: tuple[dict[str, Any], ...]
    """``mm_processor_kwargs`` to test."""

    def id(self, mark: str) -> int:
        return FIRST + 3 + self.marks.index(mark)


# --- Gemma 3 ----------------------------------------------------------------------------------------------------------

GEMMA_MARKS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")


def gemma3(rng: Random | None = None) -> PreTrainedModel:
    text = TEXT | {"sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    vision, edge = VISION | {"image_size": 24}, 3
    if rng:
        edge, pooled = rng.choice([2, 3, 4]), rng.choice([1, 2, 3])
        patch = rng.choice([3, 4])
        vision = draw_vision(rng) | {"patch_size": patch, "image_size": edge * pooled * patch + rng.choice([0, 1])}
        text = draw_text(rng) | {"sliding_window": rng.choice([8, 24, 100]), "attention_bias": flag(rng)}
        text |= {"sliding_window_pattern": rng.choice([2, 3]), "final_logit_softcapping": rng.choice([None, 30.0])}
    ids = {"boi_token_index": FIRST + 3, "image_token_index": FIRST + 4, "eoi_token_index": FIRST + 5}
    vision |= {"vision_use_head": False}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=edge**2, **ids)
    return Gemma3ForConditionalGeneration(config)


def gemma3_processor(model: PreTrainedModel, kwargs: dict[str, Any]) -> Gemma3ImageProcessorPil:
    edge = model.config.vision_config.image_size
    defaults = Gemma3Processor.images_kwargs if kwargs else {}
    return Gemma3ImageProcessorPil(size={"height": edge, "width": edge}, **defaults | kwargs)


def gemma3_inputs(
    model: PreTrainedModel, tokenizer: Any, text: str, images: list[Image.Image], kwargs: dict[str, Any]
) -> dict[str, Any]:
    processor = Gemma3Processor(
        gemma3_processor(model, {}), tokenizer, image_seq_length=model.config.mm_tokens_per_image
    )
    return dict(processor(text=text, images=images or None, return_tensors="pt", **kwargs))


# --- Pixtral and Mistral Small 3.1 ------------------------------------------------------------------------------------

PIXTRAL_MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


def draw_layers(rng: Random | None, depth: int) -> Any:
    """A random value of ``vision_feature_layer`` for ``depth`` layers."""
    return rng.choice([-1, -2 if depth > 1 else -1, 1]) if rng else -1


def mistral3(rng: Random | None = None, **text_fields: Any) -> PreTrainedModel:
    text, vision, merge = TEXT | {"model_type": "mistral"}, VISION | {"model_type": "pixtral"}, 2
    if rng:
        text = draw_text(rng) | {"model_type": "mistral", "sliding_window": rng.choice([None, 24])}
        vision, merge = draw_vision(rng) | {"model_type": "pixtral"}, rng.choice([1, 2, 3])
        vision |= {"hidden_act": rng.choice(["gelu", "silu"]), "rope_parameters": draw_vision_rope(rng)}
    return Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config=text | text_fields,
            vision_config=vision,
            image_token_index=FIRST + 3,
            spatial_merge_size=merge,
            vision_feature_layer=draw_layers(rng, vision["num_hidden_layers"]),
            multimodal_projector_bias=bool(rng and flag(rng)),
            tie_word_embeddings=bool(rng and flag(rng)),
        )
    )


def ministral3(rng: Random | None = None) -> PreTrainedModel:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope |= {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5}
    return mistral3(rng, model_type="ministral3", rope_parameters=rope)


def draw_vision_rope(rng: Random) -> dict[str, Any]:
    return {"rope_type": "axial", "rope_theta": rng.choice([100.0, 10_000.0])}


def pixtral_edge(model: PreTrainedModel) -> int:
    return model.config.vision_config.patch_size * getattr(model.config, "spatial_merge_size", 1)


def pixtral_processor(model: PreTrainedModel, kwargs: dict[str, Any]) -> PixtralImageProcessorPil:
    edge = pixtral_edge(model)
    patch = {"patch_size": {"height": edge, "width": edge}}
    return PixtralImageProcessorPil(**{"size": {"longest_edge": 48}, **patch, **kwargs})


def pixtral_inputs(
    model: PreTrainedModel, tokenizer: Any, text: str, images: list[Image.Image], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Equivalent of ``PixtralProcessor``, which requires torchvision."""
    pixels = dict(pixtral_processor(model, kwargs)(images=images, return_tensors="pt")) if images else {}
    expanded, *rest = text.split(PIXTRAL_MARKS[0])
    for (height, width), part in zip(pixels.get("image_sizes", []), rest, strict=True):
        rows, columns = height // pixtral_edge(model), width // pixtral_edge(model)
        lines = [PIXTRAL_MARKS[0] * columns] * rows
        expanded += PIXTRAL_MARKS[1].join(lines) + PIXTRAL_MARKS[2] + part
    return dict(tokenizer(expanded, return_tensors="pt")) | pixels


# --- LLaVA ------------------------------------------------------------------------------------------------------------

LLAVA_MARKS = ("<image>",)


def llava(rng: Random | None = None) -> PreTrainedModel:
    text = TEXT | {"model_type": "llama"}
    vision = VISION | {"model_type": "clip_vision_model", "image_size": 16}
    strategy, layer = "default", -2
    if rng:
        text = draw_text(rng) | {"model_type": "llama"}
        vision = draw_vision(rng) | {"image_size": rng.choice([16, 19, 24])}
        vision |= {"model_type": rng.choice(["clip_vision_model", "siglip_vision_model"]), "vision_use_head": False}
        strategy, layer = rng.choice(["default", "full"]), draw_layers(rng, vision["num_hidden_layers"])
        if flag(rng):
            layer = [layer, 1]
    return LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=text,
            vision_config=vision,
            image_token_index=FIRST + 3,
            vision_feature_layer=layer,
            vision_feature_select_strategy=strategy,
            multimodal_projector_bias=not rng or flag(rng),
            projector_hidden_act=rng.choice(["gelu", "silu"]) if rng else "gelu",
            tie_word_embeddings=bool(rng and flag(rng)),
        )
    )


def llava_processor(model: PreTrainedModel, kwargs: dict[str, Any]) -> Any:
    edge = model.config.vision_config.image_size
    square = {"height": edge, "width": edge}
    if model.config.vision_config.model_type == "siglip_vision_model":
        return SiglipImageProcessorPil(size=square)
    if model.config.vision_feature_select_strategy == "full":
        return LlavaImageProcessorPil(size={"shortest_edge": edge}, crop_size=square, do_pad=True)
    return CLIPImageProcessorPil(size={"shortest_edge": edge + 3}, crop_size=square)


def llava_inputs(
    model: PreTrainedModel, tokenizer: Any, text: str, images: list[Image.Image], kwargs: dict[str, Any]
) -> dict[str, Any]:
    config = model.config
    processor = LlavaProcessor(
        llava_processor(model, kwargs),
        tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=int(config.vision_config.model_type == "clip_vision_model"),
    )
    return dict(processor(text=text, images=images or None, return_tensors="pt"))


def llava_pixtral(rng: Random | None = None) -> PreTrainedModel:
    text, vision = TEXT | {"model_type": "mistral"}, VISION | {"model_type": "pixtral", "patch_size": 8}
    if rng:
        text = draw_text(rng) | {"model_type": rng.choice(["mistral", "llama"])}
        vision = draw_vision(rng) | {"model_type": "pixtral", "patch_size": rng.choice([7, 8])}
    return LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=text,
            vision_config=vision,
            image_token_index=FIRST + 3,
            vision_feature_layer=draw_layers(rng, vision["num_hidden_layers"]),
            vision_feature_select_strategy="full",
        )
    )


# --- LLaVA-OneVision --------------------------------------------------------------------------------------------------


def onevision(rng: Random | None = None) -> PreTrainedModel:
    text = TEXT | {"model_type": "qwen2"}
    vision, edge, tiles = VISION | {"patch_size": 4}, 12, 2
    if rng:
        text = draw_text(rng) | {"model_type": rng.choice(["qwen2", "qwen3"])}
        vision, tiles = draw_vision(rng) | {"patch_size": rng.choice([4, 6])}, rng.choice([1, 2, 4])
        edge = vision["patch_size"] * rng.choice([2, 3]) + rng.choice([0, 1])
    text = {name: each for name, each in text.items() if name != "head_dim" or text["model_type"] == "qwen3"}
    vision |= {"model_type": "siglip_vision_model", "image_size": edge, "vision_use_head": False}
    return LlavaOnevisionForConditionalGeneration(
        LlavaOnevisionConfig(
            text_config=text,
            vision_config=vision,
            image_token_index=FIRST + 3,
            image_grid_pinpoints=[[edge * rows, edge * columns] for rows in (1, 2, 3) for columns in (1, 2, 3, 4)],
            vision_aspect_ratio=f"anyres_max_{tiles}",
            vision_feature_layer=draw_layers(rng, vision["num_hidden_layers"]),
            multimodal_projector_bias=not rng or flag(rng),
            tie_word_embeddings=bool(rng and flag(rng)),
        )
    )


def onevision_processor(model: PreTrainedModel, kwargs: dict[str, Any]) -> LlavaOnevisionImageProcessorPil:
    edge = model.config.vision_config.image_size
    pinpoints = model.config.image_grid_pinpoints
    return LlavaOnevisionImageProcessorPil(size={"height": edge, "width": edge}, image_grid_pinpoints=pinpoints)


def onevision_inputs(
    model: PreTrainedModel, tokenizer: Any, text: str, images: list[Image.Image], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Model inputs as from ``LlavaOnevisionProcessor``, with the images as one conversation (a nested list)."""
    config = model.config
    pixels = dict(onevision_processor(model, kwargs)([images], return_tensors="pt")) if images else {}
    processor = SimpleNamespace(
        num_image_tokens=(config.vision_config.image_size // config.vision_config.patch_size) ** 2,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        image_token=LLAVA_MARKS[0],
        image_processor=onevision_processor(model, kwargs),
        vision_aspect_ratio=config.vision_aspect_ratio,
    )
    for name in ("_get_number_of_features", "_get_unpadded_features"):
        setattr(processor, name, MethodType(getattr(LlavaOnevisionProcessor, name), processor))
    expanded, *rest = text.split(LLAVA_MARKS[0])
    for number, part in enumerate(rest):
        expanded += LlavaOnevisionProcessor.replace_image_token(processor, pixels, number) + part
    return dict(tokenizer(expanded, return_tensors="pt")) | pixels


# --- InternVL ---------------------------------------------------------------------------------------------------------

INTERNVL_NAMES = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}


def internvl(rng: Random | None = None) -> PreTrainedModel:
    text = TEXT | {"model_type": "qwen2"}
    vision, edge, merge = VISION | {"patch_size": [4, 4]}, 16, 2
    if rng:
        text = draw_text(rng) | {"model_type": rng.choice(["qwen2", "qwen3", "llama"])}
        vision, merge, patch = draw_vision(rng), rng.choice([1, 2, 4]), rng.choice([3, 4])
        vision |= {"patch_size": [patch, patch], "attention_bias": flag(rng), "use_qk_norm": flag(rng)}
        vision |= {"norm_type": rng.choice(["layer_norm", "rms_norm"]), "use_mean_pooling": flag(rng)}
        edge = patch * merge * rng.choice([1, 2])
    text = {name: each for name, each in text.items() if name != "head_dim" or text["model_type"] != "qwen2"}
    vision |= {"image_size": [edge, edge], "layer_scale_init_value": 0.5}
    layer = draw_layers(rng, vision["num_hidden_layers"])
    grid = edge // vision["patch_size"][0] // merge
    return InternVLForConditionalGeneration(
        InternVLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=FIRST + 3,
            image_seq_length=grid**2,
            downsample_ratio=1 / merge,
            vision_feature_layer=layer,
            tie_word_embeddings=bool(rng and flag(rng)),
        )
    )


def internvl_processor(model: PreTrainedModel, kwargs: dict[str, Any]) -> GotOcr2ImageProcessorPil:
    edge = model.config.vision_config.image_size[0]
    return GotOcr2ImageProcessorPil(size={"height": edge, "width": edge}, **{"crop_to_patches": True} | kwargs)


def internvl_inputs(
    model: PreTrainedModel, tokenizer: Any, text: str, images: list[Image.Image], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Equivalent of ``InternVLProcessor``, whose video processor requires torchvision."""
    pixels = dict(internvl_processor(model, kwargs)(images, return_tensors="pt")) if images else {}
    names = INTERNVL_NAMES
    processor = SimpleNamespace(
        image_seq_length=model.config.image_seq_length,
        start_image_token=names["start_image_token"],
        image_token=names["context_image_token"],
        end_image_token=names["end_image_token"],
    )
    expanded, *rest = text.split(names["context_image_token"])
    for number, part in enumerate(rest):
        expanded += InternVLProcessor.replace_image_token(processor, pixels, number) + part
    pixels.pop("num_patches", None)
    return dict(tokenizer(expanded, return_tensors="pt")) | pixels


SCAN = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8}
FAMILIES = {
    "gemma3": Family(
        marks=GEMMA_MARKS,
        marker=GEMMA_MARKS[0],
        model=gemma3,
        image_processor=gemma3_processor,
        inputs=gemma3_inputs,
        names=dict(zip(("boi_token", "image_token", "eoi_token"), GEMMA_MARKS, strict=True)),
        kwargs=({}, SCAN, SCAN | {"pan_and_scan_max_num_crops": 2, "pan_and_scan_min_ratio_to_activate": 2.5}),
    ),
    "mistral3": Family(
        marks=PIXTRAL_MARKS,
        marker=PIXTRAL_MARKS[0],
        model=mistral3,
        image_processor=pixtral_processor,
        inputs=pixtral_inputs,
        names={},
        kwargs=({}, {"size": {"longest_edge": 20}}),
    ),
    "ministral3": Family(
        marks=PIXTRAL_MARKS,
        marker=PIXTRAL_MARKS[0],
        model=ministral3,
        image_processor=pixtral_processor,
        inputs=pixtral_inputs,
        names={},
        kwargs=({}, {"size": {"longest_edge": 20}}),
    ),
    "llava": Family(
        marks=LLAVA_MARKS,
        marker=LLAVA_MARKS[0],
        model=llava,
        image_processor=llava_processor,
        inputs=llava_inputs,
        names={},
        kwargs=({},),
    ),
    "internvl": Family(
        marks=tuple(INTERNVL_NAMES.values()),
        marker=INTERNVL_NAMES["context_image_token"],
        model=internvl,
        image_processor=internvl_processor,
        inputs=internvl_inputs,
        names=INTERNVL_NAMES,
        kwargs=({}, {"max_patches": 3}, {"min_patches": 4, "max_patches": 6}, {"crop_to_patches": False}),
    ),
    "llava with Pixtral": Family(
        marks=PIXTRAL_MARKS,
        marker=PIXTRAL_MARKS[0],
        model=llava_pixtral,
        image_processor=pixtral_processor,
        inputs=pixtral_inputs,
        names={},
        kwargs=({},),
    ),
    "llava-onevision": Family(
        marks=LLAVA_MARKS,
        marker=LLAVA_MARKS[0],
        model=onevision,
        image_processor=onevision_processor,
        inputs=onevision_inputs,
        names={},
        kwargs=({},),
    ),
}


def save(family: str, folder: Path, rng: Random | None = None) -> PreTrainedModel:
    """Save a checkpoint of random weights, large enough that positions and pixels matter."""
    model = FAMILIES[family].model(rng)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        std = 0.5 if name.endswith("bias") else 0.1 if "embed_tokens" in name else 1.2 / weight[0].numel() ** 0.5
        torch.nn.init.normal_(weight, std=std, generator=generator)
        if "norm" in name:
            mean = 0 if family == "gemma3" and ("language_model" in name or "soft_emb" in name) else 1
            torch.nn.init.uniform_(weight, mean - 0.5, mean + 0.5, generator=generator)
    model.eval().save_pretrained(folder)
    FAMILIES[family].image_processor(model, {}).save_pretrained(folder)
    tokenizer_of(family).save_pretrained(folder)
    return model


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer with tokens for bytes, runs of line feeds and the family's special tokens."""
    spec = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    runs = ["Ċ" * count for count in range(2, 2 + RUNS)]
    tokens = [*alphabet, *runs, *(f"<|unused{i}|>" for i in range(FIRST - len(alphabet) - RUNS))]
    merges = [("Ċ" * (len(run) - 1), "Ċ") for run in runs]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ("<eos>", "<turn>", "<end>", *spec.marks)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        chat_template=TEMPLATE.replace("MARK", spec.marker),
        extra_special_tokens=spec.names,
    )
