"""Fields missing from ``config.json`` have the defaults of transformers' configuration classes, for every family."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import encoder_checkpoints
import families
import image_checkpoints
import pytest
import state_families
import torch
import vision_checkpoints
from config_classes import TABLE, architecture_of, class_of, format_table, table
from transformers import PreTrainedConfig, WhisperConfig

from penstock import demo
from penstock.checkpoint.config_json import read_config_json
from penstock.config.options import ModelOptions
from penstock.core import PenstockError, SamplingParams
from penstock.frontend.llm import LLM
from penstock.frontend.pooling_config import read_pooler
from penstock.models import ModelConfig, read_config
from penstock.planning.model_size import model_size_of
from penstock.text import Tokenizer

DRAWS = int(os.environ.get("PENSTOCK_DEFAULT_DRAWS", "40"))
"""Number of configurations per family in the thorough test."""
KEPT = ("model_type", "architectures", "transformers_version", "dtype")
WHISPER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "vocab_size": 300}
DRAFTING = ("num_nextn_predict_layers", "num_mtp_layers")
"""Fields without a default: a checkpoint has drafting layers only if ``config.json`` names them."""
VISION = ("image_token_id", "image_token_index", "video_token_id", "vision_config", "mm_tokens_per_image")
"""Fields that are also read by other code than ``ModelConfig``."""
UNREAD = (
    *("_sliding_window_pattern", "initializer_range", "initializer_factor", "init_std", "layer_scale_init_value"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "num_labels", "use_cache"),
)


def _whisper(rng: Random) -> PreTrainedConfig:
    return WhisperConfig(**WHISPER, decoder_attention_heads=rng.choice((2, 4)), max_target_positions=64)


def _encoder(family: str, rng: Random) -> PreTrainedConfig:
    return encoder_checkpoints.draw_config(family, rng)


def _image(family: str, rng: Random) -> PreTrainedConfig:
    with torch.device("meta"):
        return image_checkpoints.draw(family, rng).config


def _vision(family: str, rng: Random) -> PreTrainedConfig:
    with torch.device("meta"):
        return vision_checkpoints.FAMILIES[family].model(rng).config


CONFIGS: dict[str, Callable[[Random], PreTrainedConfig]] = {
    **families.FAMILIES,
    **families.WITH_EXPERTS,
    **state_families.FAMILIES,
    "Whisper": _whisper,
    **{name: partial(_encoder, name) for name in ("bert", "roberta", "xlm-roberta", "gte", "modernbert")},
    **{name: partial(_image, name) for name in image_checkpoints.FAMILIES},
    **{name: partial(_vision, name) for name in vision_checkpoints.FAMILIES},
}


def whole(config: PreTrainedConfig) -> dict[str, Any]:
    """``config.json`` with every field, as transformers resolves it when it builds a model."""
    text = config.get_text_config(decoder=True) if config.model_type != "whisper" else config
    if getattr(text, "rope_parameters", None):
        text.standardize_rope_params()

    def number(value: dict[str, Any]) -> Any:
        """transformers writes infinity as an object."""
        return float(value["__float__"]) if "__float__" in value else value

    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False), object_hook=number)
    return found


def drawn(family: str, seed: int) -> dict[str, Any]:
    """A complete ``config.json`` of a family."""
    config = CONFIGS[family](Random(f"{family} {seed}"))
    raw = {name: value for name, value in whole(config).items() if name not in UNREAD}
    raw["architectures"] = raw.get("architectures") or [architecture_of(config.model_type)]
    return raw


def resolved(raw: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Results of reading a ``config.json``: fields of the model's configuration, its size, and fields of images."""
    (folder / "config.json").write_text(json.dumps(raw))
    made, complete = read_config(folder), read_config_json(folder)
    fields = {each.name: getattr(made, each.name) for each in dataclasses.fields(ModelConfig) if each.name != "raw"}
    ropes = [made.rope_of(layer) or {} for layer in range(made.num_layers)]
    fields["rope_parameters"] = [{"partial_rotary_factor": 1.0, **rope} for rope in ropes]
    fields.pop("local_rope_parameters")
    vision = {name: complete.get(name) for name in VISION}
    if vision["vision_config"]:
        vision["vision_config"] = {k: v for k, v in vision["vision_config"].items() if k in vision_tower_fields()}
    return fields, model_size_of(complete), vision


def vision_tower_fields() -> frozenset[str]:
    """Names of fields that a vision tower reads."""
    names = "depth embed_dim hidden_size intermediate_size num_heads num_attention_heads num_hidden_layers patch_size"
    names += " image_size hidden_act mlp_ratio spatial_merge_size temporal_patch_size temporal_merge_size window_size"
    names += " out_hidden_size fullatt_block_indexes num_position_embeddings deepstack_visual_indexes layer_norm_eps"
    return frozenset(names.split())


def places(raw: dict[str, Any]) -> list[tuple[str, ...]]:
    """Path of each field, including those of nested configurations."""
    found: list[tuple[str, ...]] = []
    for name, value in raw.items():
        if name in KEPT or name in UNREAD:
            continue
        found.append((name,))
        if name in ("text_config", "vision_config"):
            found += [(name, inner) for inner in value if inner not in ("dtype", *UNREAD)]
    return found


def without(raw: dict[str, Any], *paths: tuple[str, ...]) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    for path in sorted(paths, key=len, reverse=True):
        within = raw
        for name in path[:-1]:
            within = within.get(name, {})
        within.pop(path[-1], None)
    return raw


def compare(raw: dict[str, Any], folder: Path) -> bool:
    """Check that a ``config.json`` has the same meaning after transformers has filled in all fields. Returns False if
    transformers refuses it."""
    try:
        explicit = whole(class_of(raw["model_type"]).from_dict(copy.deepcopy(raw)))
    except Exception:  # transformers raises errors of many classes
        return False
    explicit["architectures"] = raw["architectures"]
    for name in DRAFTING:
        if name not in raw:
            explicit.pop(name, None)
    text = raw.get("text_config") or {}
    if raw.get("tie_word_embeddings") is None and text.get("tie_word_embeddings") is False:
        explicit["tie_word_embeddings"] = False  # transformers ignores it in nested configs; the weights decide
    try:
        expected: Any = resolved(explicit, folder)
    except PenstockError as error:  # the drawn sizes are inconsistent
        with pytest.raises(PenstockError):
            resolved(raw, folder)
        assert "lacks" not in str(error)
        return True
    found = resolved(raw, folder)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == theirs
    return True


def test_table_of_defaults_is_up_to_date() -> None:
    """Update the table with ``python tests/support/config_classes.py``."""
    assert TABLE.read_text() == format_table(table())


@pytest.mark.slow_after(27)
@pytest.mark.parametrize("family", CONFIGS)
def test_missing_field_has_the_default_of_transformers(family: str, tmp_path: Path) -> None:
    raw, rng = drawn(family, 0), Random(family)
    fields = places(raw)
    compared = [compare(without(raw, field), tmp_path) for field in rng.sample(fields, min(len(fields), 8))]
    compared += [compare(without(raw, *rng.sample(fields, 3)), tmp_path) for _ in range(2)]
    assert sum(compared) > len(compared) / 2


@pytest.mark.parametrize("family", CONFIGS)
def test_config_with_only_model_type_has_the_defaults(family: str, tmp_path: Path) -> None:
    raw = drawn(family, 0)
    assert compare({name: raw[name] for name in ("model_type", "architectures")}, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("family", CONFIGS)
def test_every_missing_field_has_the_default_of_transformers(family: str, tmp_path: Path) -> None:
    for seed in range(DRAWS):
        raw, rng = drawn(family, seed), Random(f"{family} {seed}")
        fields = places(raw)
        for field in fields:
            compare(without(raw, field), tmp_path)
        for _ in range(20):
            compare(without(raw, *rng.sample(fields, min(len(fields), rng.randint(2, 8)))), tmp_path)


SIZED = ("_size", "_dim", "_rank", "_heads", "_layers", "_experts", "_embeddings", "_group", "intermediate_size_mlp")
SIZES = (
    "architectures",
    "model_type",
    "num_experts_per_tok",
    "moe_k",
    "moe_topk",
    "vocab_size",
    "sliding_window_pattern",
)
SAMPLE = (
    *("Mixtral", "GptOss", "Gemma2", "Gemma3", "DeepseekV3", "Glm", "Cohere2", "Olmo3", "MiniMaxM2", "Starcoder2"),
    *("SmolLM3", "Qwen2Moe"),
)
"""Families with defaults that differ most from Llama's."""
PROMPT = [Random(0).randrange(2, 300) for _ in range(170)]


def check_logprobs(family: str, seed: int, folder: Path) -> None:
    """Compare log probabilities of a random model whose ``config.json`` has only sizes."""
    raw = drawn(family, seed)
    short = {name: value for name, value in raw.items() if value and (name in SIZES or name.endswith(SIZED))}
    short |= {"max_position_embeddings": 256, "pad_token_id": 0}
    model = families.save(class_of(raw["model_type"]).from_dict(short), folder)
    (folder / "config.json").write_text(json.dumps(short))
    options: dict[str, Any] = {"dtype": "float32", "block_size": 64, "weight_cache_dir": "none"}
    llm = LLM(folder, max_model_len=256, num_gpu_blocks_override=8, **options)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    with torch.inference_mode():
        table = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    reported = [found.logprob for position in (output.prompt_logprobs or [])[1:] for found in (position or {}).values()]
    assert reported == pytest.approx(table[range(len(PROMPT) - 1), PROMPT[1:]].tolist(), abs=1e-3)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", SAMPLE)
def test_logprobs_with_only_sizes_in_config_match_transformers(family: str, tmp_path: Path) -> None:
    check_logprobs(family, 0, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("family", families.FAMILIES | families.WITH_EXPERTS)
def test_logprobs_of_drawn_configs_with_only_sizes_match_transformers(family: str, tmp_path: Path) -> None:
    for seed in range(1, 4):
        check_logprobs(family, seed, tmp_path / str(seed))


def test_nested_text_config_has_the_defaults_of_its_class(tmp_path: Path) -> None:
    """The ``config.json`` is a composite model's, with the architecture of its language model."""
    text = drawn("Gemma3", 0)
    del text["rope_parameters"]
    nested = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3", "text_config": text}
    assert resolved(nested, tmp_path) == resolved(text, tmp_path)


def test_missing_type_vocab_size_of_bert_has_its_default(tmp_path: Path) -> None:
    """``type_vocab_size`` distinguishes the two texts of a pair."""
    raw = drawn("bert", 0) | {"architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(without(raw, ("type_vocab_size",))))
    assert read_pooler(tmp_path, ModelOptions(), Tokenizer(demo.CHAT)).token_types


ODD: list[Any] = [
    *(None, [], {}, "x", "", 0, -1, 5, 2.5, 1e308, float("nan"), True, False, [1, 2], [None], ["a"], {"a": 1}),
    *({"full_attention": None}, {"full_attention": {"rope_type": "yarn"}}, {"rope_type": ["a"]}),
    {"rope_type": "linear", "factor": 0},
]
OBJECTS = ("rope_scaling", "rope_parameters", "text_config", "vision_config", "layer_types", "quantization_config")
MORE = ("rope_theta", "partial_rotary_factor", "rotary_dim", "architectures", "model_type", "dtype", "torch_dtype")
BROKEN = [
    ("Whisper", {"rope_scaling": 5}),
    ("Llama", {"text_config": {}, "rope_parameters": 2.5}),
    ("Ernie4_5_Moe", {"text_config": {"full_attention": {"rope_type": "yarn"}}}),
]


def check_errors(raw: dict[str, Any], folder: Path) -> None:
    """Every reader of a broken ``config.json`` accepts it, or raises ``PenstockError`` with one line."""
    (folder / "config.json").write_text(json.dumps(raw))
    readers: list[Callable[[], Any]] = [
        lambda: read_config(folder),
        lambda: read_config(folder, "auto"),
        lambda: model_size_of(read_config_json(folder)),
    ]
    for read in readers:
        try:
            read()
        except PenstockError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000


def with_odd_values(raw: dict[str, Any], rng: Random) -> dict[str, Any]:
    fields, raw = [*places(raw), *((name,) for name in (*OBJECTS, *MORE))], copy.deepcopy(raw)
    for _ in range(rng.randint(1, 2)):
        *outer, name = rng.choice(fields)
        within = raw.get(outer[0]) if outer else raw
        if isinstance(within, dict):
            within[name] = rng.choice(ODD)
    return raw


@pytest.mark.parametrize(("family", "fields"), BROKEN)
def test_value_of_the_wrong_type_raises_one_line_error(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    check_errors(drawn(family, 0) | fields, tmp_path)


@pytest.mark.parametrize("family", CONFIGS)
def test_drawn_values_of_the_wrong_type_raise_one_line_errors(family: str, tmp_path: Path) -> None:
    raw, rng = drawn(family, 0), Random(family)
    for _ in range(10):
        check_errors(with_odd_values(raw, rng), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("family", CONFIGS)
def test_many_values_of_the_wrong_type_raise_one_line_errors(family: str, tmp_path: Path) -> None:
    for seed in range(DRAWS):
        raw, rng = drawn(family, seed), Random(f"odd {family} {seed}")
        for _ in range(25):
            check_errors(with_odd_values(raw, rng), tmp_path)
