"""Small checkpoints of vision-language models: models with random weights, and a model with constructed weights that
names colours."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Ernie4_5_VLMoeConfig,
    Ernie4_5_VLMoeForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

COLOURS = ("red", "green", "blue")
MARKS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
)
SPECIAL = [*MARKS, *COLOURS]
FIRST = 280
"""Id of the first special token; byte tokens and unused tokens have smaller ids."""
EOS, START, END, VISION_START, PLACEHOLDER, VISION_END, VIDEO = range(FIRST, FIRST + len(MARKS))
RED = FIRST + len(MARKS)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
IDS = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
SHARED_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED_EXPERTS |= {"shared_expert_intermediate_size": 40}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
PATCH = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}


def qwen2_vl(**changes: Any) -> Qwen2VLForConditionalGeneration:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, **PATCH}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=TEXT | changes, vision_config=vision, **IDS))


def qwen2_5_vl(**changes: Any) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL with windows of 2 x 2 features in all vision layers except the second."""
    vision = {"depth": 3, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 44, **PATCH}
    vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=TEXT | changes, vision_config=vision, **IDS))


def qwen3_vl(**changes: Any) -> Qwen3VLForConditionalGeneration:
    """Qwen3-VL with DeepStack features for the first two of three decoder layers."""
    vision = {"depth": 4, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 44, **PATCH}
    vision |= {"num_position_embeddings": 36, "deepstack_visual_indexes": [2, 0]}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = TEXT | {"num_hidden_layers": 3, "head_dim": 16, "rope_parameters": rope} | changes
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **IDS))


def qwen3_vl_moe(**changes: Any) -> Qwen3VLMoeForConditionalGeneration:
    """``qwen3_vl`` with experts in all decoder layers except one."""
    vision = {"depth": 4, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 44, **PATCH}
    vision |= {"num_position_embeddings": 36, "deepstack_visual_indexes": [2, 0]}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    text = TEXT | {"num_hidden_layers": 3, "head_dim": 16, "rope_parameters": rope} | EXPERTS | changes
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **IDS)
    return Qwen3VLMoeForConditionalGeneration(config)


def qwen3_5(**changes: Any) -> Qwen3_5ForConditionalGeneration:
    """Qwen3.5 with gated delta nets in two of three decoder layers, and half of a head rotated."""
    vision = {"depth": 4, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 44, **PATCH}
    vision |= {"num_position_embeddings": 36}
    text = TEXT | {"num_hidden_layers": 3, "head_dim": 32, **DELTA_NET} | changes
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision, **IDS))


def qwen3_5_moe(**changes: Any) -> Qwen3_5MoeForConditionalGeneration:
    """``qwen3_5`` with experts."""
    vision = {"depth": 4, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 44, **PATCH}
    vision |= {"num_position_embeddings": 36}
    text = TEXT | {"num_hidden_layers": 3, "head_dim": 32, **DELTA_NET, **SHARED_EXPERTS} | changes
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **IDS)
    return Qwen3_5MoeForConditionalGeneration(config)


ERNIE_IDS = {
    "image_token_id": PLACEHOLDER,
    "image_start_token_id": VISION_START,
    "image_end_token_id": VISION_END,
    "video_token_id": VIDEO,
}


def ernie4_5_vl(**changes: Any) -> Ernie4_5_VLMoeForConditionalGeneration:
    """ERNIE 4.5 VL with one dense layer, and experts of two sizes in the other layers."""
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 44, "patch_size": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
    text = TEXT | {"num_hidden_layers": 3, "rope_parameters": rope, "moe_intermediate_size": [24, 16]}
    text |= {"moe_k": 2, "moe_num_experts": 5, "moe_num_shared_experts": 1} | changes
    config = Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ERNIE_IDS)
    return Ernie4_5_VLMoeForConditionalGeneration(config)


def draw(family: str, rng: Random) -> PreTrainedModel:
    """A model of a family with random sizes."""
    heads, kv_heads = rng.choice([(4, 2), (4, 4), (6, 2), (8, 1)])
    head_dim, vision_heads, depth = rng.choice([16, 32]), rng.choice([1, 2, 4]), rng.randint(2, 4)
    half, hidden = head_dim // 2, heads * head_dim
    patch = {"patch_size": rng.choice([4, 6]), "spatial_merge_size": 2, "temporal_patch_size": rng.choice([1, 2])}
    vision: dict[str, Any] = {"depth": 4, "num_heads": vision_heads, **patch}
    size = vision_heads * rng.choice([8, 16, 20])
    if "qwen3" in family:
        turns = rng.randint(1, half // 3)
        sections = [half - 2 * turns, turns, turns]
        vision |= {"hidden_size": size, "out_hidden_size": hidden, "intermediate_size": rng.choice([20, 44])}
        vision |= {"num_position_embeddings": rng.choice([4, 36, 100])}
        vision |= {"deepstack_visual_indexes": rng.choice([[], [1], [0, 3], [2, 0]])[: depth - 1]}
    else:
        ends = sorted(rng.sample(range(1, half), 2))
        sections = [ends[0], ends[1] - ends[0], half - ends[1]]
    if family == "qwen2-vl":
        vision |= {"embed_dim": size, "hidden_size": hidden, "mlp_ratio": rng.choice([2, 4])}
    if family == "qwen2.5-vl":
        vision |= {"hidden_size": size, "out_hidden_size": hidden, "intermediate_size": rng.choice([20, 44, 70])}
        vision |= {"window_size": patch["patch_size"] * 2 * rng.choice([1, 2, 3])}
        vision |= {"fullatt_block_indexes": rng.choice([[], [1], [0, 2]])}
    text = TEXT | {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    text |= {"num_hidden_layers": depth, "intermediate_size": rng.choice([48, 100])}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}}
    if "qwen3" in family:
        text |= {"head_dim": head_dim, "attention_bias": rng.random() < 0.5}
    if family == "qwen3-vl-moe":
        text |= {"num_experts": rng.choice([4, 7]), "num_experts_per_tok": rng.choice([1, 3])}
        text |= {"moe_intermediate_size": rng.choice([20, 36]), "decoder_sparse_step": rng.choice([1, 2])}
        text |= {"mlp_only_layers": rng.choice([None, [0]])}
    if "qwen3.5" in family:
        rope = {"partial_rotary_factor": 1.0, "mrope_section": sections}
        text |= DELTA_NET | {"layer_types": ["linear_attention", *["full_attention"] * (depth - 1)]}
        text["rope_parameters"] = {**text["rope_parameters"], **rope}
    if family == "qwen3.5-moe":
        text |= SHARED_EXPERTS
    if family == "ernie4.5-vl":
        turns = rng.randint(1, (half - 1) // 2)
        text["rope_parameters"] |= {"mrope_section": [turns, turns, half - 2 * turns]}
        vision = {"depth": 2, "num_heads": vision_heads, "hidden_size": size, "patch_size": patch["patch_size"]}
        vision |= {"intermediate_size": rng.choice([20, 44])}
        text |= {"moe_intermediate_size": rng.choice([[24, 16], [16, 40]]), "moe_k": rng.choice([1, 3])}
        text |= {"moe_num_experts": rng.choice([4, 7]), "moe_num_shared_experts": rng.choice([0, 1, 2])}
        if rng.random() < 0.5:
            text |= {"mlp_layer_types": [rng.choice(["dense", "sparse"]) for _ in range(depth)]}
    config, model = FAMILIES[family]
    ids = ERNIE_IDS if family == "ernie4.5-vl" else IDS
    return model(config(text_config=text, vision_config=vision, tie_word_embeddings=rng.random() < 0.4, **ids))


FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2-vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2.5-vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3-vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3-vl-moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
    "qwen3.5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3.5-moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
    "ernie4.5-vl": (Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeForConditionalGeneration),
}


def has_state(model: PreTrainedModel) -> bool:
    """Whether a model has linear attention."""
    return "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ())


def errors(
    model: PreTrainedModel, tokens: list[int], found: list[float], table: Callable[[PreTrainedModel], torch.Tensor]
) -> tuple[float, float]:
    """Largest errors of the log probabilities ``found`` of ``tokens[1:]``, and of those of transformers in float32.
    They are relative to float64 for models with linear attention, which amplifies rounding errors, and else to
    float32.

    Args:
        table: function from a model to its log probabilities after each token, ``[tokens, vocabulary]``.
    """
    rows, following = range(len(tokens) - 1), tokens[1:]
    library = exact = table(model)[rows, following]
    if has_state(model):
        precise = deepcopy(model).double()
        precise.set_experts_implementation("eager")  # other implementations do not compute in float64
        exact = table(precise)[rows, following]
    error, library_error = (float((each - exact).abs().max()) for each in (torch.tensor(found), library))
    return error, library_error


def save_random(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Save a checkpoint with random weights, large enough that positions, windows and pixels matter."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=0.5 if name.endswith("bias") else 0.2, generator=generator)
        if "norm" in name or "ln_q" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5, generator=generator)
    return _save(model, folder)


@torch.no_grad()
def save_colours(folder: Path, latest: bool = False) -> PreTrainedModel:
    """Save a model whose next token names the brightest colour channel of all images so far.

    The vision encoder averages each channel of a patch. The only decoder layer attends to all tokens equally, and adds
    the channel averages to the logits of the colours' words. With ``latest`` it attends mostly to tokens that are near
    in time, so that the last frames of a video decide.
    """
    rope = TEXT["rope_parameters"] | ({"rope_theta": 1e8} if latest else {})
    model = qwen2_vl(num_hidden_layers=1, rope_parameters=rope)
    parameters = dict(model.named_parameters())
    for name, weight in parameters.items():
        weight.fill_(float("norm" in name or name.endswith("ln_q.weight")))
    visual, layer = "model.visual.", "model.language_model.layers.0."
    parameters[f"{visual}patch_embed.proj.weight"][range(3), range(3)] = 1 / (2 * 4 * 4)
    merged = parameters[f"{visual}merger.mlp.0.weight"]
    output = parameters[f"{visual}merger.mlp.2.weight"]
    for channel in range(3):
        merged[channel, channel::32] = 1.0
        output[channel, channel] = 1.0
        parameters[f"{layer}self_attn.v_proj.weight"][channel, channel] = 1.0
        parameters[f"{layer}self_attn.o_proj.weight"][3 + channel, channel] = 1.0
        parameters["lm_head.weight"][RED + channel, 3 + channel] = 10.0
    if latest:
        # RoPE rotates the second dimension pair by the temporal position, so scores decrease with the distance in time
        parameters[f"{layer}self_attn.q_proj.bias"][1::16] = 9.0
        parameters[f"{layer}self_attn.k_proj.bias"][1::16] = 9.0
    return _save(model, folder)


def _save(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.eval().save_pretrained(folder)
    image_processor(model).save_pretrained(folder)
    if "qwen" in model.config.model_type:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video_processor(model)))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"<|unused{i}|>" for i in range(FIRST - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(mark, special=mark in MARKS) for mark in SPECIAL])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=MARKS[0], chat_template=TEMPLATE).save_pretrained(
        folder
    )
    return model


def image_processor(model: PreTrainedModel) -> Any:
    """transformers' image processor for a model created by this module."""
    vision, size = model.config.vision_config, {"shortest_edge": 256, "longest_edge": 4096}
    if "ernie" in model.config.model_type:
        return Ernie4_5_VLMoeImageProcessorPil(patch_size=vision.patch_size, size=size)
    sizes = {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size}
    return Qwen2VLImageProcessorPil(**sizes, size=size)


def video_processor(model: PreTrainedModel) -> dict[str, Any]:
    """Configuration of transformers' video processor (``video_preprocessor_config.json``)."""
    vision = model.config.vision_config
    sizes = {"patch_size": vision.patch_size, "temporal_patch_size": vision.temporal_patch_size}
    return sizes | {"size": {"shortest_edge": 256, "longest_edge": 16384}, "fps": 2, "min_frames": 2}


def noise(seed: int, height: int, width: int) -> Image.Image:
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def converted(picture: Image.Image, mode: str) -> Image.Image:
    """An image in another mode of Pillow; "transparent MODE" makes parts of it transparent."""
    transparent, _, name = mode.rpartition(" ")
    image = picture.convert(name)
    if (transparent and name == "P") or (transparent and name == "RGB"):
        image.info["transparency"] = image.getpixel((3, 3))
    elif transparent:
        image.putalpha(picture.convert("L"))
    return image


def plain(colour: str, height: int = 24, width: int = 24) -> Image.Image:
    """An image filled with one of ``COLOURS``."""
    return Image.new("RGB", (width, height), colour)


def prompt(
    images: Sequence[Image.Image], *, text: int = 3, seed: int = 0, videos: Sequence[Any] = ()
) -> dict[str, Any]:
    """A prompt with images and videos between random tokens."""
    rng = Random(seed)
    tokens = [rng.randrange(2, 250) for _ in range(text)]
    for placeholder in [PLACEHOLDER] * len(images) + [VIDEO] * len(videos):
        tokens += [VISION_START, placeholder, VISION_END, rng.randrange(2, 250)]
    result: dict[str, Any] = {"prompt_token_ids": tokens}
    return result | {"multi_modal_data": {"image": list(images), "video": list(videos)}} if images or videos else result
