"""BLOOM (BigScience, 2022): ALiBi, layer norms, also of the embedding, an MLP without a gate, and a fused QKV tensor
with the query, key and value of each head in turn."""

from penstock.checkpoint.alibi import alibi_slopes
from penstock.checkpoint.decoder_options import NormedResidual, NormOptions
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of

from ..registry import Family
from ..stored import Stored, find_grouped_qkv

NAMES = {
    "model.embed_tokens": "transformer.word_embeddings",
    "model.embed_norm": "transformer.word_embeddings_layernorm",
    "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
"""Modules: name in layers → name in the checkpoint, or in a layer of it."""


def read_config(raw: ConfigJson) -> ModelConfig:
    hidden, heads, layers = int(raw.get("n_embed") or raw["hidden_size"]), int(raw["n_head"]), int(raw["n_layer"])
    given = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
    }
    length = raw.get("max_position_embeddings") or raw.get("seq_length") or 2048
    normed = NormedResidual((1, 1), (1, 1), (1, 1)) if raw.get("apply_residual_connection_post_layernorm") else None
    options = options_of(
        {"hidden_act": "gelu_pytorch_tanh"},
        norm=NormOptions("layer", bias=True),
        gated_mlp=False,
        rope_layers=(False,) * layers,
        alibi=alibi_slopes(heads),
        embedding_norm=True,
        normed_residual=normed,
    )
    return dense_config(
        {**raw, **given, "intermediate_size": 4 * hidden, "max_position_embeddings": length},
        rms_norm_eps=float(raw.get("layer_norm_epsilon") or 1e-5),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        options=options,
    )


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``. Checkpoints of ``BloomModel``, as the published ones, have names without a prefix."""
    return without_prefix(find_fused(config, name, NAMES, config.num_heads))


def find_fused(config: ModelConfig, name: str, names: dict[str, str], groups: int) -> Stored:
    """Location of a module of BLOOM or Falcon.

    Args:
        names: other names in the checkpoint, like ``NAMES``.
        groups: number of groups of query heads with a key and a value in ``query_key_value``.
    """
    if name in names:
        return Stored(names[name])
    layer, module = (".".join(part) for part in (name.split(".")[2:3], name.split(".")[3:]))
    if not layer:
        return Stored(name)
    if module.endswith(("q_proj", "k_proj", "v_proj")):
        return find_grouped_qkv(config, f"transformer.h.{layer}.self_attention.query_key_value", module[-6], groups)
    return Stored(f"transformer.h.{layer}.{names.get(module, module)}")


def without_prefix(stored: Stored) -> Stored:
    """A location with an alternative name without ``transformer.``."""
    name = stored.name.removeprefix("transformer.")
    return Stored(stored.name, stored.total, stored.ranges, "" if name == stored.name else name)


FAMILY = Family(("BloomForCausalLM",), read_config, find_stored=find_stored)
