"""Zamba2 (Zyphra, 2024): Mamba 2 layers; some also have one of a few shared blocks of attention and MLP."""

import re
from dataclasses import replace

from penstock.checkpoint.decoder_options import LayerNorms
from penstock.checkpoint.model_config import (
    PADDED_TO,
    ConfigJson,
    LayerKind,
    ModelConfig,
    dense_config,
    options_of,
)
from penstock.core import Code, PenstockError

from ..mamba import find_mamba2, read_mamba2
from ..registry import Family, imported
from ..stored import Stored, find_fused_mlp, part_of

KINDS: dict[str, LayerKind] = {"linear_attention": "state", "mamba": "state", "hybrid": "both"}
ROTATED = "use_mem_rope"
MAMBA = re.compile(r"(model\.layers\.(\d+))\.((?:mamba|input_layernorm)(?:\..+)?)")

DEFAULT_HYBRID_LAYERS = (6, 12, 18, 24, 30, 36, 42, 47, 51)
"""Layers with a shared block in a configuration without types of the layers."""


def default_types(num_layers: int) -> list[str]:
    """Types of the layers of a configuration that does not name them: those of Zamba2-2.7B."""
    return ["hybrid" if layer in DEFAULT_HYBRID_LAYERS else "linear_attention" for layer in range(num_layers)]


def read_config(raw: ConfigJson) -> ModelConfig:
    hidden, heads, bias = int(raw["hidden_size"]), int(raw["num_attention_heads"]), bool(raw.get("add_bias_linear"))
    head_dim, kv_heads = 2 * hidden // heads, int(raw.get("num_key_value_heads") or heads)
    if raw.get("use_long_context"):
        raise PenstockError(Code.UNSUPPORTED, "use_long_context of Zamba2 is not supported", "model")
    if head_dim % PADDED_TO:
        message = f"the heads of Zamba2 have {head_dim} elements; it must be a multiple of {PADDED_TO}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    if raw.get("use_shared_attention_adapter") and kv_heads != heads:
        raise ValueError("use_shared_attention_adapter requires as many key and value heads as query heads")
    inner, mamba_heads = int(raw["mamba_expand"] * hidden), int(raw["n_mamba_heads"])
    state = read_mamba2(
        raw,
        inner,
        activation="mamba_hidden_act",
        heads=mamba_heads,
        head_dim=inner // mamba_heads,
        groups=int(raw["mamba_ngroups"]),
        state_size=int(raw["mamba_d_state"]),
        kernel=int(raw["mamba_d_conv"]),
        convolution_bias=True,
        input_bias=bias,
        output_bias=bias,
        min_step=float(raw["time_step_min"]),
        max_step=float("inf"),
        norm_eps=1e-5,
    )
    types = list(raw.get("layers_block_type") or raw.get("layer_types") or default_types(int(raw["num_hidden_layers"])))
    kinds = tuple(KINDS[each] for each in types)
    sizes = {"intermediate_size": raw.get("intermediate_size") or 4 * hidden, "num_hidden_layers": len(types)}
    options = options_of(
        raw,
        separate_mlps=True,
        layer_norms=LayerNorms(before_mlp=None),
        attention_scale=(head_dim / 2) ** -0.5,
    )
    config = dense_config(
        {**raw, **sizes, "layer_types": None},
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=bias,
        options=options,
    )
    config = replace(config, layer_kinds=kinds, state=state, raw=raw)
    return replace(config, counted_weights={"layer_weights": _layer_weights(config, raw)})


def _layer_weights(config: ModelConfig, raw: ConfigJson) -> int:
    """Parameters of all matrices, and of the convolutions."""
    hidden, rank, uses = config.hidden_size, int(raw["adapter_rank"]), len(hybrid_layers(config))
    outputs, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    block = 2 * hidden * (outputs + 2 * keys) + outputs * hidden + 3 * hidden * config.intermediate_size
    adapter = rank * (hidden + 2 * config.intermediate_size)
    if raw.get("use_shared_attention_adapter"):
        adapter += 3 * rank * (2 * hidden + outputs)
    assert config.state
    blocks = {block_name(config, layer) for layer in hybrid_layers(config)}
    return len(blocks) * block + uses * (adapter + hidden**2) + config.num_layers * config.state.num_weights(hidden)[0]


def hybrid_layers(config: ModelConfig) -> list[int]:
    """Indices of the layers with a shared block."""
    return [layer for layer, kind in enumerate(config.layer_kinds) if kind == "both"]


def block_name(config: ModelConfig, layer: int) -> str:
    """Module in the checkpoint with the shared block of a layer: that of the first layer with the same block. Without
    tied embeddings, transformers does not tie the blocks either."""
    layers = hybrid_layers(config)
    if not config.tie_word_embeddings:
        return f"model.layers.{layer}.shared_transformer"
    first = layers[layers.index(layer) % int(config.raw["num_mem_blocks"])]
    return f"model.layers.{first}.shared_transformer"


def find_stored(config: ModelConfig, name: str) -> Stored:
    parent, _, last = name.rpartition(".")
    if name == "model.norm":
        return Stored("model.final_layernorm")
    if ".gate_up_proj_adapter_list." in name and last in ("gate", "up"):
        return part_of(f"{parent}.1", [config.intermediate_size] * 2, last == "up")
    if last in ("gate_proj", "up_proj"):
        return find_fused_mlp(config, name)
    stored = find_mamba2(config, name)
    found = MAMBA.fullmatch(stored.name)
    if found and config.layer_kinds[int(found[2])] == "both":
        return replace(stored, name=f"{found[1]}.mamba_decoder.{found[3]}")
    return stored


FAMILY = Family(
    ("Zamba2ForCausalLM",), read_config, build=imported("penstock.models.zamba2:Zamba2"), find_stored=find_stored
)
