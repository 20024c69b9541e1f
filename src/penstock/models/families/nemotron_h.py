"""Nemotron-H and Nemotron 3 (NVIDIA, 2025): each layer is either a Mamba 2 layer, attention without rotary embedding,
an MLP, or a mixture of experts without gates, which may have a smaller hidden size than the model."""

from dataclasses import replace

from penstock.checkpoint.decoder_options import LayerNorms, NormOptions
from penstock.checkpoint.experts_config import ExpertsConfig, read_routing
from penstock.checkpoint.model_config import ConfigJson, LayerKind, ModelConfig, dense_config, options_of

from ..mamba import find_mamba2, layer_kinds, read_mamba2
from ..registry import Family
from ..stored import Stored

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Character of ``hybrid_override_pattern`` → layer type."""
DEFAULT_PATTERN = "ME*-"
"""Pattern of a configuration without layer types."""
WHOLE = {"model.embed_tokens": "model.embeddings", "model.norm": "model.norm_f"}
NAMES = {"self_attn": "mixer", "mlp": "mixer", "c_fc": "up_proj", "c_proj": "down_proj"}
MTP_KINDS = ["full_attention", "moe"]
"""Layers for multi-token prediction, which are one decoder layer of Penstock."""
MTP_NAMES = {
    **{name: f"layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj")},
    "input_layernorm": "layers.0.norm",
    "post_attention_layernorm": "layers.1.norm",
    "shared_head.norm": "layers.1.final_layernorm",
}
"""Module of ``DecoderMTPHead`` → module of ``mtp`` in the checkpoint."""


def read_config(raw: ConfigJson) -> ModelConfig:
    types, num_mtp = layer_types(raw), num_mtp_layers(raw)
    heads, head_dim, bias = int(raw["mamba_num_heads"]), int(raw["mamba_head_dim"]), bool(raw.get("use_bias"))
    state = read_mamba2(
        raw,
        heads * head_dim,
        activation="mamba_hidden_act",
        heads=heads,
        head_dim=head_dim,
        groups=int(raw.get("mamba_n_groups") or raw["n_groups"]),
        state_size=int(raw["ssm_state_size"]),
        kernel=int(raw.get("mamba_d_conv") or raw["conv_kernel"]),
        convolution_bias=bool(raw.get("mamba_conv_bias", raw["use_conv_bias"])),
        input_bias=bias,
        output_bias=bias,
        min_step=float(raw["time_step_min"]),  # transformers ignores time_step_limit
        max_step=float("inf"),
        module="mixer",
    )
    options = options_of(
        {**raw, "hidden_act": raw["mlp_hidden_act"]},
        norm=NormOptions(float32=True),
        layer_norms=LayerNorms("norm", before_mlp="norm"),
        separate_mlps=True,
        gated_mlp=False,
        mtp_layer_norms=LayerNorms(),
        rope_layers=(False,) * (len(types) + num_mtp),
    )
    config = dense_config(
        {**raw, "num_hidden_layers": len(types), "layer_types": None},
        rms_norm_eps=float(raw["layer_norm_epsilon"]),
        tie_word_embeddings=False,  # transformers ties no matrices of this family
        num_mtp_layers=num_mtp,
        qkv_bias=False,
        output_bias=False,
        options=options,
    )
    kinds: tuple[LayerKind, ...] = tuple("mlp" if each in ("mlp", "moe") else layer_kinds([each])[0] for each in types)
    experts = read_experts(raw, types) if "moe" in types else None
    return replace(config, raw=raw, layer_kinds=kinds, state=state if "state" in kinds else None, experts=experts)


def layer_types(raw: ConfigJson) -> list[str]:
    """Type of each layer, from ``layers_block_type`` or ``hybrid_override_pattern``."""
    if types := raw.get("layers_block_type") or raw.get("layer_types"):
        return list(types)
    return _types_of_pattern(raw, "hybrid_override_pattern", DEFAULT_PATTERN)


def num_mtp_layers(raw: ConfigJson) -> int:
    """1 if the checkpoint has layers for multi-token prediction, of the kinds of Nemotron 3. GGUF files have none."""
    kinds = raw.get("mtp_layers_block_type") or _types_of_pattern(raw, "mtp_hybrid_override_pattern", "")
    kinds = ["full_attention" if kind == "attention" else kind for kind in kinds]
    return int(bool(raw.get("num_nextn_predict_layers")) and kinds == MTP_KINDS and "moe" in layer_types(raw))


def _types_of_pattern(raw: ConfigJson, name: str, default: str) -> list[str]:
    pattern = str(raw.get(name) or default)
    if unknown := set(pattern).difference(PATTERN):
        raise ValueError(f"{name} has {min(unknown)!r}; it must consist of {' '.join(PATTERN)}")
    return [PATTERN[each] for each in pattern]


def read_experts(raw: ConfigJson, types: list[str]) -> ExpertsConfig:
    num_experts = int(raw["n_routed_experts"])
    routing = read_routing(
        raw,
        num_experts,
        scores="sigmoid",
        min_sum=1e-20,
        group_score="two best",
        scale=float(raw.get("routed_scaling_factor") or 1.0),
    )
    return ExpertsConfig(
        num_experts,
        int(raw["moe_intermediate_size"]),
        routing,
        dense_layers=frozenset(layer for layer, kind in enumerate(types) if kind != "moe"),
        shared_size=int(raw["moe_shared_expert_intermediate_size"]),
        shared_bias=bool(raw.get("mlp_bias")),
        router_bias="gate.e_score_correction_bias",
        router_float32=True,
        module="mixer",
        projections=("", "up_proj", "down_proj"),
        latent_size=int(raw.get("moe_latent_size") or 0),
        latent_bias=bool(raw.get("mlp_bias")),
    )


def find_stored(config: ModelConfig, name: str) -> Stored:
    """NVIDIA's checkpoints have the prefix ``backbone``, those of transformers may have ``model``."""
    mtp_layer = f"model.layers.{config.num_layers}."
    if name.startswith(mtp_layer):
        module = name.removeprefix(mtp_layer)
        first, *rest = (NAMES.get(part, part) for part in module.split("."))
        default = ".".join((f"layers.{int(not module.startswith('self_attn.'))}", first, *rest))
        return Stored(f"mtp.{MTP_NAMES.get(module, default)}")
    name = WHOLE.get(name) or ".".join(NAMES.get(part, part) for part in name.split("."))
    stored = find_mamba2(config, name)
    if not stored.name.startswith("model."):
        return stored
    return replace(stored, name=f"backbone.{stored.name.removeprefix('model.')}", other=stored.name)


FAMILY = Family(("NemotronHForCausalLM",), read_config, find_stored=find_stored, find_gguf=find_mamba2)
