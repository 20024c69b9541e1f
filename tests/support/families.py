"""Random configurations of every text model family, and their checkpoints of random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from checkpoints import SMALL, save
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    HunYuanMoEV1Config,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from penstock.models.families.internlm import NAMES

SIZES = SMALL | {"max_position_embeddings": 512}
VOCABULARY = SIZES["vocab_size"]


def sizes(rng: Random, head_dim: bool = True) -> dict[str, Any]:
    """Random sizes of a model.

    Args:
        head_dim: draw ``head_dim`` independently of ``hidden_size / num_attention_heads``.
    """
    heads, kv_heads = rng.choice(((4, 2), (4, 4), (4, 1), (8, 2)))
    hidden = rng.choice((128, 192) if heads == 8 else (64, 128))
    given: dict[str, Any] = SIZES | {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "intermediate_size": rng.choice((96, 128, 200)),
        "num_hidden_layers": rng.choice((3, 4)),
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if head_dim:
        given["head_dim"] = rng.choice((16, 32))
    elif heads == 8:
        given["hidden_size"] = 128  # results in a head dimension of 16
    return given


def rope(rng: Random, dim: int, *kinds: str) -> dict[str, Any]:
    """``rope_parameters`` of a random type: one of ``kinds``, or the default type."""
    kind, base = rng.choice(("default", "default", *kinds)), {"rope_theta": rng.choice((10_000.0, 500_000.0))}
    extension = {"factor": 4.0, "original_max_position_embeddings": 128}
    match kind:
        case "linear":
            return base | {"rope_type": kind, "factor": 4.0}
        case "yarn":
            return base | {"rope_type": kind, **extension}
        case "llama3":
            return base | {"rope_type": kind, **extension, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        case _:
            return base | {"rope_type": "default"}


SCALINGS = ("linear", "yarn", "llama3")


def flag(rng: Random) -> bool:
    return rng.random() < 0.5


def llama(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    given["rope_parameters"] = rope(rng, given["head_dim"], *SCALINGS)
    activation = rng.choice(("silu", "silu", "gelu", "gelu_pytorch_tanh", "relu"))
    return LlamaConfig(**given, hidden_act=activation, attention_bias=flag(rng), mlp_bias=flag(rng))


def mistral(rng: Random) -> PreTrainedConfig:
    return MistralConfig(**sizes(rng), sliding_window=rng.choice((None, 24, 100)))


def ministral3(rng: Random) -> PreTrainedConfig:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope |= {"original_max_position_embeddings": rng.choice((32, 64)), "llama_4_scaling_beta": rng.choice((0.1, 0.5))}
    return Ministral3Config(**sizes(rng) | {"rope_parameters": rope})


def qwen2(rng: Random) -> PreTrainedConfig:
    windows = {"use_sliding_window": flag(rng), "sliding_window": 24, "max_window_layers": rng.choice((0, 1, 2))}
    return Qwen2Config(**sizes(rng, head_dim=False), **windows)


def qwen3(rng: Random) -> PreTrainedConfig:
    return Qwen3Config(**sizes(rng), attention_bias=flag(rng))


def gemma(rng: Random) -> PreTrainedConfig:
    return GemmaConfig(**sizes(rng), attention_bias=flag(rng))


def gemma2(rng: Random) -> PreTrainedConfig:
    return Gemma2Config(
        **sizes(rng),
        attention_bias=flag(rng),
        sliding_window=rng.choice((24, 100)),
        query_pre_attn_scalar=rng.choice((16, 24, 64)),
        attn_logit_softcapping=rng.choice((None, 5.0, 50.0)),
        final_logit_softcapping=rng.choice((None, 5.0, 30.0)),
    )


def gemma3(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    parameters = {
        "full_attention": rope(rng, given["head_dim"], *SCALINGS),
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return Gemma3TextConfig(
        **given,
        attention_bias=flag(rng),
        sliding_window=rng.choice((24, 100)),
        sliding_window_pattern=rng.choice((2, 3)),
        query_pre_attn_scalar=rng.choice((16, 24, 64)),
        final_logit_softcapping=rng.choice((None, 30.0)),
        rope_parameters=parameters,
    )


def gemma3n(rng: Random) -> PreTrainedConfig:
    """Layers with and without a window, sparse activations, and keys and values of their own, in all combinations that
    the numbers of layers allow."""
    given, streams = sizes(rng) | {"num_hidden_layers": 6}, rng.choice((2, 3, 4, 4))
    kinds = ["sliding_attention", "full_attention"]
    parameters = {
        "full_attention": rope(rng, given["head_dim"], *SCALINGS),
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return Gemma3nTextConfig(
        **given | {"intermediate_size": rng.choice((96, [96, 200, 128, 64, 96, 128]))},
        attention_bias=flag(rng),
        layer_types=rng.choice((kinds * 3, [*kinds, *kinds[:1] * 3, kinds[1]])),
        sliding_window=rng.choice((24, 100)),
        num_kv_shared_layers=rng.choice((0, 2, 3)),
        hidden_size_per_layer_input=rng.choice((16, 32)),
        vocab_size_per_layer_input=rng.choice((VOCABULARY, VOCABULARY - 40)),
        altup_num_inputs=streams,
        altup_active_idx=rng.choice((0, 0, streams - 1)),
        altup_correct_scale=rng.random() < 0.8,
        laurel_rank=rng.choice((8, 16)),
        activation_sparsity_pattern=[rng.choice((0.0, 0.5, 0.95)) for _ in range(6)],
        final_logit_softcapping=rng.choice((10.0, 30.0)),
        rope_parameters=parameters,
    )


def gemma4(rng: Random) -> PreTrainedConfig:
    given = sizes(rng) | {"num_hidden_layers": 6, "tie_word_embeddings": flag(rng)}
    shared, kinds = rng.choice((0, 2, 3)), ["sliding_attention", "full_attention"]
    return Gemma4TextConfig(
        **given,
        attention_bias=flag(rng),
        global_head_dim=rng.choice((16, 48, 64)),
        num_global_key_value_heads=rng.choice((None, 1, 2)),
        attention_k_eq_v=flag(rng),
        layer_types=rng.choice((kinds * 3, [*kinds, *kinds[:1] * 3, kinds[1]])),
        sliding_window=rng.choice((24, 100)),
        num_kv_shared_layers=shared,
        use_double_wide_mlp=flag(rng),
        # transformers cannot compute models with shared keys and values without these
        hidden_size_per_layer_input=rng.choice((16, 32) if shared else (0, 0, 16)),
        vocab_size_per_layer_input=VOCABULARY,
        final_logit_softcapping=rng.choice((None, 30.0)),
    )


def gemma4_moe(rng: Random) -> PreTrainedConfig:
    config = gemma4(rng)
    config.enable_moe_block = True
    config.num_experts, config.top_k_experts, config.moe_intermediate_size = 8, rng.choice((1, 2, 3)), 48
    return config


def phi3(rng: Random) -> PreTrainedConfig:
    given = sizes(rng, head_dim=False)
    given["num_hidden_layers"] = 3
    dim = given["hidden_size"] // given["num_attention_heads"]
    share = rng.choice((1.0, 0.75, 0.5))
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share}
    if flag(rng):  # all prompts of the tests are shorter than the trained context
        factors = [[rng.uniform(1, most) for _ in range(int(dim * share) // 2)] for most in (1.5, 8)]
        parameters |= {"rope_type": "longrope", "short_factor": factors[0], "long_factor": factors[1]}
        given |= {"original_max_position_embeddings": 512}
        parameters |= {"original_max_position_embeddings": 512}
    return Phi3Config(**given, rope_parameters=parameters, sliding_window=rng.choice((None, 24, 100)))


def _glm(kind: type[PreTrainedConfig]) -> Callable[[Random], PreTrainedConfig]:
    def draw(rng: Random) -> PreTrainedConfig:
        parameters = {"rope_theta": 10_000.0, "partial_rotary_factor": rng.choice((0.5, 1.0, 0.25))}
        parameters |= {"rope_type": "default"}
        return kind(**sizes(rng), attention_bias=flag(rng), rope_parameters=parameters)

    return draw


def granite(rng: Random) -> PreTrainedConfig:
    return GraniteConfig(
        **sizes(rng, head_dim=False),
        attention_bias=flag(rng),
        mlp_bias=flag(rng),
        embedding_multiplier=rng.choice((1.0, 12.0)),
        attention_multiplier=rng.choice((0.25, 0.1)),
        residual_multiplier=rng.choice((1.0, 0.22)),
        logits_scaling=rng.choice((1.0, 3.0, 8.0)),
    )


def granite_moe(rng: Random) -> PreTrainedConfig:
    return GraniteMoeConfig(
        **sizes(rng, head_dim=False),
        **experts(rng, "num_local_experts", norm=False),
        embedding_multiplier=rng.choice((1.0, 12.0)),
        attention_multiplier=rng.choice((0.2, 0.1)),
        residual_multiplier=rng.choice((1.0, 0.22)),
        logits_scaling=rng.choice((1.0, 8.0)),
    )


def olmo2(rng: Random) -> PreTrainedConfig:
    return Olmo2Config(**sizes(rng, head_dim=False), attention_bias=flag(rng))


def olmo3(rng: Random) -> PreTrainedConfig:
    given = sizes(rng, head_dim=False)
    given["num_hidden_layers"] = 4
    dim = given["hidden_size"] // given["num_attention_heads"]
    parameters = {
        "full_attention": rope(rng, dim, "yarn"),
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return Olmo3Config(**given, attention_bias=flag(rng), sliding_window=24, rope_parameters=parameters)


def cohere(rng: Random) -> PreTrainedConfig:
    return CohereConfig(
        **sizes(rng, head_dim=False),
        attention_bias=flag(rng),
        use_qk_norm=flag(rng),
        logit_scale=rng.choice((0.0625, 0.3, 1.0)),
    )


def cohere2(rng: Random) -> PreTrainedConfig:
    return Cohere2Config(
        **sizes(rng, head_dim=False),
        attention_bias=flag(rng),
        sliding_window=rng.choice((24, 100)),
        sliding_window_pattern=rng.choice((2, 3)),
        logit_scale=rng.choice((0.0625, 0.3, 1.0)),
    )


def smollm3(rng: Random) -> PreTrainedConfig:
    windows = {"use_sliding_window": flag(rng), "sliding_window": 24}
    interval = rng.choice((2, 4))
    return SmolLM3Config(**sizes(rng, head_dim=False), **windows, no_rope_layer_interval=interval)


def seed_oss(rng: Random) -> PreTrainedConfig:
    return SeedOssConfig(**sizes(rng), attention_bias=flag(rng), attention_out_bias=flag(rng), mlp_bias=flag(rng))


def exaone4(rng: Random) -> PreTrainedConfig:
    if flag(rng):
        given = sizes(rng)
        return Exaone4Config(**given, sliding_window=None, layer_types=["full_attention"] * given["num_hidden_layers"])
    return Exaone4Config(**sizes(rng), sliding_window=24, sliding_window_pattern=rng.choice((2, 3)))


def starcoder2(rng: Random) -> PreTrainedConfig:
    return Starcoder2Config(**sizes(rng, head_dim=False), use_bias=flag(rng), sliding_window=rng.choice((None, 24)))


def ernie4_5(rng: Random) -> PreTrainedConfig:
    return Ernie4_5Config(**sizes(rng), use_bias=flag(rng))


def hunyuan(rng: Random) -> PreTrainedConfig:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if flag(rng):
        parameters |= {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
    config: PreTrainedConfig = AutoConfig.for_model(
        "hunyuan_v1_dense", **sizes(rng), attention_bias=flag(rng), rope_parameters=parameters
    )
    return config


def internlm3(rng: Random) -> PreTrainedConfig:
    bias = flag(rng)
    config: PreTrainedConfig = AutoConfig.for_model("internlm3", **sizes(rng), attention_bias=bias, mlp_bias=bias)
    return config


def bloom(rng: Random) -> PreTrainedConfig:
    given = sizes(rng, head_dim=False)
    return BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=given["hidden_size"],
        n_head=given["num_attention_heads"],
        n_layer=given["num_hidden_layers"],
        apply_residual_connection_post_layernorm=rng.random() < 0.3,
        tie_word_embeddings=given["tie_word_embeddings"],
    )


def mpt(rng: Random) -> PreTrainedConfig:
    given = sizes(rng, head_dim=False)
    return MptConfig(
        vocab_size=VOCABULARY,
        d_model=given["hidden_size"],
        n_heads=given["num_attention_heads"],
        n_layers=given["num_hidden_layers"],
        attn_config={"softmax_scale": rng.choice((None, 0.2))},
        tie_word_embeddings=given["tie_word_embeddings"],
    )


def falcon(rng: Random) -> PreTrainedConfig:
    """Falcon with rotary embedding: 7B, 40B, 11B, and RW's layers."""
    given = sizes(rng, head_dim=False)
    kind = rng.choice(("7B", "40B", "11B", "RW"))
    kv_heads = {"40B": given["num_key_value_heads"], "11B": given["num_key_value_heads"]}
    return FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=given["hidden_size"],
        num_attention_heads=given["num_attention_heads"],
        num_hidden_layers=given["num_hidden_layers"],
        new_decoder_architecture=kind in kv_heads,
        multi_query=kind == "7B",
        parallel_attn=kind != "RW",
        num_kv_heads=kv_heads.get(kind),
        num_ln_in_parallel_attn=1 if kind == "11B" else None,
        ffn_hidden_size=rng.choice((96, 256)),
        activation=rng.choice(("gelu", "relu")),
        bias=flag(rng),
        tie_word_embeddings=given["tie_word_embeddings"],
    )


def experts(rng: Random, number: str = "num_experts", norm: bool = True) -> dict[str, Any]:
    """Random sizes of the experts; ``number`` is the family's name of the number of experts."""
    given: dict[str, Any] = {number: rng.choice((5, 8, 16)), "num_experts_per_tok": rng.choice((1, 2, 4))}
    return given | ({"norm_topk_prob": flag(rng)} if norm else {})


def qwen3_moe(rng: Random) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        **sizes(rng),
        **experts(rng, "num_local_experts"),
        moe_intermediate_size=rng.choice((24, 32, 64)),
        mlp_only_layers=rng.choice(([], [0], [2])),
        decoder_sparse_step=rng.choice((1, 1, 2)),
        hidden_act=rng.choice(("silu", "gelu", "gelu_pytorch_tanh", "relu")),
        use_sliding_window=flag(rng),
        sliding_window=rng.choice((None, 24)),
    )


def mixtral(rng: Random) -> PreTrainedConfig:
    window = rng.choice((None, 24))
    return MixtralConfig(**sizes(rng), **experts(rng, "num_local_experts", norm=False), sliding_window=window)


def qwen2_moe(rng: Random) -> PreTrainedConfig:
    return Qwen2MoeConfig(
        **sizes(rng, head_dim=False),
        **experts(rng),
        moe_intermediate_size=rng.choice((24, 32, 64)),
        shared_expert_intermediate_size=rng.choice((40, 64)),
        mlp_only_layers=rng.choice(([], [1])),
        decoder_sparse_step=rng.choice((1, 1, 2)),
        qkv_bias=flag(rng),
        use_sliding_window=flag(rng),
        sliding_window=24,
        max_window_layers=rng.choice((0, 2, 9)),
    )


def olmoe(rng: Random) -> PreTrainedConfig:
    return OlmoeConfig(**sizes(rng, head_dim=False), **experts(rng), attention_bias=flag(rng))


def glm4_moe(rng: Random) -> PreTrainedConfig:
    groups = rng.choice((1, 1, 4))
    return Glm4MoeConfig(
        **sizes(rng),
        n_routed_experts=16,
        num_experts_per_tok=rng.choice((1, 2, 4)),
        norm_topk_prob=flag(rng),
        n_group=groups,
        topk_group=max(groups // 2, 1),
        n_shared_experts=rng.choice((1, 2)),
        routed_scaling_factor=rng.choice((1.0, 2.5)),
        first_k_dense_replace=rng.choice((0, 1, 2)),
        moe_intermediate_size=rng.choice((24, 32, 64)),
        attention_bias=flag(rng),
        use_qk_norm=flag(rng),
    )


def ernie4_5_moe(rng: Random) -> PreTrainedConfig:
    return Ernie4_5_MoeConfig(
        **sizes(rng),
        moe_num_experts=rng.choice((8, 16)),
        moe_k=rng.choice((1, 2, 4)),
        moe_num_shared_experts=rng.choice((0, 1, 2)),
        moe_intermediate_size=rng.choice((24, 32, 64)),
        moe_layer_start_index=rng.choice((0, 1)),
        moe_layer_end_index=rng.choice((-1, 2)),
        moe_layer_interval=rng.choice((1, 1, 2)),
    )


def dots1(rng: Random) -> PreTrainedConfig:
    groups, layers = rng.choice((1, 4)), rng.choice((2, 9))
    return Dots1Config(
        **sizes(rng),
        n_routed_experts=16,
        num_experts_per_tok=rng.choice((1, 2, 4)),
        norm_topk_prob=flag(rng),
        n_group=groups,
        topk_group=max(groups // 2, 1),
        n_shared_experts=rng.choice((1, 2)),
        routed_scaling_factor=rng.choice((1.0, 2.5)),
        first_k_dense_replace=rng.choice((0, 1)),
        moe_intermediate_size=rng.choice((20, 32, 64)),
        attention_bias=flag(rng),
        sliding_window=24,
        max_window_layers=layers,
    )


def hunyuan_moe(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    topk = rng.choice((1, 2, 4))
    return HunYuanMoEV1Config(
        **given,
        num_experts=rng.choice((5, 8)),
        moe_topk=rng.choice((topk, [topk] * given["num_hidden_layers"])),
        attention_bias=flag(rng),
    )


def minimax_m2(rng: Random) -> PreTrainedConfig:
    return MiniMaxM2Config(
        **sizes(rng), **experts(rng, "num_local_experts", norm=False), rotary_dim=rng.choice((8, 16))
    )


def gpt_oss(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    parameters = rope(rng, given["head_dim"], "yarn") | {"truncate": flag(rng)}
    return GptOssConfig(
        **given,
        **experts(rng, "num_local_experts", norm=False),
        sliding_window=rng.choice((24, 100)),
        attention_bias=flag(rng),
        rope_parameters=parameters,
    )


def llama4(rng: Random) -> PreTrainedConfig:
    given = sizes(rng)
    return Llama4TextConfig(
        **given,
        intermediate_size_mlp=rng.choice((80, 144)),
        num_local_experts=rng.choice((5, 8, 16)),
        interleave_moe_layer_step=rng.choice((1, 2)),
        no_rope_layer_interval=rng.choice((2, 4)),
        attention_chunk_size=rng.choice((24, 64, 100)),
        use_qk_norm=flag(rng),
        attn_temperature_tuning=rng.random() < 0.7,
        floor_scale=rng.choice((10, 100)),
        attn_scale=rng.choice((0.1, 0.3)),
        attention_bias=flag(rng),
        rope_parameters=rope(rng, given["head_dim"], "llama3"),
    )


def _deepseek(kind: type[PreTrainedConfig]) -> Callable[[Random], PreTrainedConfig]:
    def draw(rng: Random) -> PreTrainedConfig:
        given = sizes(rng, head_dim=False)
        given["num_key_value_heads"] = given["num_attention_heads"]
        latent = {"q_lora_rank": rng.choice((None, 24)), "kv_lora_rank": 32, "qk_nope_head_dim": 32}
        latent |= {"qk_rope_head_dim": 16, "v_head_dim": 32, "attention_bias": flag(rng)}
        experts = {"first_k_dense_replace": rng.choice((1, 9)), "moe_intermediate_size": 48, "n_shared_experts": 2}
        experts |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        return kind(**given, **latent, **experts, routed_scaling_factor=1.7)

    return draw


FAMILIES: dict[str, Callable[[Random], PreTrainedConfig]] = {
    "Llama": llama,
    "Mistral": mistral,
    "Ministral3": ministral3,
    "Qwen2": qwen2,
    "Qwen3": qwen3,
    "Gemma": gemma,
    "Gemma2": gemma2,
    "Gemma3": gemma3,
    "Gemma3n": gemma3n,
    "Gemma4": gemma4,
    "Phi3": phi3,
    "Granite": granite,
    "Glm": _glm(GlmConfig),
    "Glm4": _glm(Glm4Config),
    "Olmo2": olmo2,
    "Olmo3": olmo3,
    "Cohere": cohere,
    "Cohere2": cohere2,
    "SmolLM3": smollm3,
    "SeedOss": seed_oss,
    "Exaone4": exaone4,
    "Starcoder2": starcoder2,
    "Ernie4_5": ernie4_5,
    "HunYuanDenseV1": hunyuan,
    "Bloom": bloom,
    "Mpt": mpt,
    "Falcon": falcon,
    "InternLM3": internlm3,
    "DeepseekV2": _deepseek(DeepseekV2Config),
    "DeepseekV3": _deepseek(DeepseekV3Config),
}
"""Functions that draw a configuration of a dense model, by the architecture's name without ``ForCausalLM``."""
WITH_EXPERTS: dict[str, Callable[[Random], PreTrainedConfig]] = {
    "Qwen3Moe": qwen3_moe,
    "Mixtral": mixtral,
    "Qwen2Moe": qwen2_moe,
    "Olmoe": olmoe,
    "Glm4Moe": glm4_moe,
    "Ernie4_5_Moe": ernie4_5_moe,
    "GraniteMoe": granite_moe,
    "Dots1": dots1,
    "HunYuanMoEV1": hunyuan_moe,
    "MiniMaxM2": minimax_m2,
    "GptOss": gpt_oss,
    "Llama4": llama4,
}
"""Functions that draw a configuration of a mixture-of-experts model, with the keys of ``FAMILIES``."""


def draw(family: str, seed: int, folder: Path, vocab_size: int = VOCABULARY) -> PreTrainedModel:
    """Write a checkpoint of a random configuration of a family; return the model.

    Args:
        seed: seed of the configuration; each family has different random numbers.
    """
    config = (FAMILIES | WITH_EXPERTS)[family](Random(f"{family} {seed}"))
    config.vocab_size = vocab_size
    if family in ("Gemma3n", "Gemma4"):
        config.vocab_size_per_layer_input = vocab_size - (family == "Gemma3n") * 40
    model = save(config, folder)
    if family != "Llama4":  # Llama 4's experts have only one implementation
        model.set_experts_implementation("eager")  # the other implementations do not support float64
    return model


def draw_llama_without_biases(folder: Path, vocab_size: int = VOCABULARY, **fields: Any) -> PreTrainedModel:
    """Write a Llama checkpoint that ``rewrite_as_internlm2`` can convert; ``fields`` are added to its configuration."""
    config = llama(Random("Llama 0"))
    for name, value in fields.items():
        setattr(config, name, value)
    config.attention_bias = config.mlp_bias = config.tie_word_embeddings = False
    config.vocab_size = vocab_size
    return save(config, folder)


def rewrite_as_internlm2(folder: Path) -> None:
    """Convert a Llama checkpoint to InternLM 2's names, which transformers does not support."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    groups, dim = config["num_key_value_heads"], config["head_dim"]
    renamed = {}
    for name, tensor in tensors.items():
        for llama_name, internlm_name in NAMES.items():
            if name.endswith(f"{llama_name}.weight"):
                name = name.removesuffix(f"{llama_name}.weight") + f"{internlm_name}.weight"
        renamed[name] = tensor
    for layer in range(config["num_hidden_layers"]):
        parts = [renamed.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        heads = [part.unflatten(0, (groups, -1, dim)) for part in parts]
        renamed[f"model.layers.{layer}.attention.wqkv.weight"] = torch.cat(heads, 1).flatten(0, 2).contiguous()
    save_file(renamed, folder / "model.safetensors")
    kept = {name: value for name, value in config.items() if name not in ("attention_bias", "mlp_bias")}
    kept |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    (folder / "config.json").write_text(json.dumps(kept))
