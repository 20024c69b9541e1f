"""Qwen3-Next (Qwen Team, 2025): gated delta nets in three of four layers, gated attention in the others, and a mixture
of experts with a shared expert."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.checkpoint.decoder_options import NormOptions
from penstock.checkpoint.experts_config import dense_layers_by_step, read_experts
from penstock.checkpoint.model_config import ConfigJson, LayerKind, ModelConfig, dense_config, options_of
from penstock.checkpoint.rope import rope_parameters_of
from penstock.checkpoint.state_config import GatedDeltaNetConfig, check_kernel
from penstock.core import Code, PenstockError

from ..registry import Family
from ..stored import Stored, part_of

MTP_MODULES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
"""Module of ``DecoderMTPHead`` → module of ``mtp`` in the checkpoint."""
MAX_KEY_DIM = 256
"""Maximum number of elements of a key (``csrc/states.h``)."""


def read_config(raw: ConfigJson) -> ModelConfig:
    share = rope_parameters_of(raw).get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25))
    options = options_of(raw, norm=NormOptions(unit_offset=True), attention_gate=True, partial_rotary_factor=share)
    config = dense_config(raw, qk_norm=True, options=options, num_mtp_layers=1)
    kinds = layer_types(raw, config.num_layers)
    experts = read_experts(
        raw,
        "moe_intermediate_size",
        dense_layers=dense_layers_by_step(raw),
        shared_size=int(raw["shared_expert_intermediate_size"]),
        shared_name="shared_expert",
        shared_gate="shared_expert_gate",
    )
    return replace(config, experts=experts, layer_kinds=kinds, state=delta_net_config(raw))


def layer_types(raw: ConfigJson, num_layers: int) -> tuple[LayerKind, ...]:
    """``ModelConfig.layer_kinds`` from ``layer_types``, or ``full_attention_interval``."""
    if types := raw.get("layer_types"):
        return layer_kinds(types)
    interval = int(raw.get("full_attention_interval") or 4)
    return tuple("state" if (layer + 1) % interval else "attention" for layer in range(num_layers))


def layer_kinds(types: Sequence[str]) -> tuple[LayerKind, ...]:
    """``ModelConfig.layer_kinds`` from ``layer_types``.

    Raises ``PenstockError`` (``unsupported``) for an unknown type.
    """
    kinds: dict[str, LayerKind] = {"linear_attention": "state", "full_attention": "attention"}
    if unknown := set(types).difference(kinds):
        message = f"layer_types has {min(unknown)!r:.40}; supported are {', '.join(kinds)}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    return tuple(kinds[each] for each in types)


def delta_net_config(raw: ConfigJson) -> GatedDeltaNetConfig:
    """The gated delta nets of a ``config.json``."""
    config = GatedDeltaNetConfig(
        key_heads=int(raw["linear_num_key_heads"]),
        value_heads=int(raw["linear_num_value_heads"]),
        key_dim=int(raw["linear_key_head_dim"]),
        value_dim=int(raw["linear_value_head_dim"]),
        kernel=int(raw["linear_conv_kernel_dim"]),
    )
    check_state_layer(raw, config.kernel, config.key_dim)
    if min(config.key_heads, config.value_dim) < 1 or config.value_heads % config.key_heads:
        found = f"{config.key_heads} key heads and {config.value_heads} value heads of size {config.value_dim}"
        raise ValueError(f"linear attention has {found}; the value heads must be a multiple of the key heads")
    return config


def check_state_layer(raw: ConfigJson, kernel: int, key_dim: int) -> None:
    """Raise ``PenstockError`` (``unsupported``) for linear attention that the kernels do not support."""
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        message = f"linear attention with hidden_act {raw['hidden_act']!r:.40} is not supported; supported is silu"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    check_kernel(kernel, "linear_conv_kernel_dim")
    if not 1 <= key_dim <= MAX_KEY_DIM:
        message = f"linear attention with keys of {key_dim} elements is not supported; the maximum is {MAX_KEY_DIM}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")


def find_stored(config: ModelConfig, name: str) -> Stored:
    """Parts of ``in_proj_qkvz``, ``in_proj_ba`` and ``q_proj``, which are interleaved by head."""
    parent, _, last = name.rpartition(".")
    net = config.state
    assert isinstance(net, GatedDeltaNetConfig)
    groups = net.value_heads // net.key_heads
    values = groups * net.value_dim
    if last in ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"):
        sizes = [net.key_dim, net.key_dim, values, values]
        return interleaved(f"{parent}.in_proj_qkvz", net.key_heads, sizes, "qkvz".index(last[-1]))
    if last in ("in_proj_b", "in_proj_a"):
        return interleaved(f"{parent}.in_proj_ba", net.key_heads, [groups, groups], "ba".index(last[-1]))
    return find_convolution(config, find_mtp(config, name))


def find_gguf(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_gguf``. Files have the queries, keys and values in one matrix, as checkpoints of Qwen3.5."""
    if name.endswith((".in_proj_b", ".in_proj_a")):
        return find_stored(config, name)
    return find_qkv(config, name)


def find_qkv(config: ModelConfig, name: str) -> Stored:
    """Parts of ``in_proj_qkv``, ``conv1d``, and ``q_proj`` with the output gate."""
    parent, _, last = name.rpartition(".")
    net = config.state
    assert isinstance(net, GatedDeltaNetConfig)
    if last not in ("in_proj_q", "in_proj_k", "in_proj_v"):
        return find_convolution(config, name)
    keys = net.key_heads * net.key_dim
    return part_of(f"{parent}.in_proj_qkv", [keys, keys, net.value_heads * net.value_dim], "qkv".index(last[-1]))


def find_convolution(config: ModelConfig, name: str) -> Stored:
    """Parts of ``conv1d``, and of ``q_proj`` with the output gate."""
    parent, _, last = name.rpartition(".")
    net = config.state
    assert isinstance(net, GatedDeltaNetConfig)
    if last in ("conv1d_q", "conv1d_k", "conv1d_v"):
        keys = net.key_heads * net.key_dim
        sizes = [keys, keys, net.value_heads * net.value_dim]
        return part_of(f"{parent}.conv1d", sizes, "qkv".index(last[-1]))
    if last in ("q_proj", "q_gate"):
        return interleaved(f"{parent}.q_proj", config.num_heads, [config.head_dim] * 2, last == "q_gate")
    return Stored(name)


def find_mtp(config: ModelConfig, name: str) -> str:
    """Name in the checkpoint of a module of the MTP layer; other names are returned as they are."""
    prefix = f"model.layers.{config.num_layers}."
    if not name.startswith(prefix):
        return name
    module = name.removeprefix(prefix)
    return f"mtp.{MTP_MODULES.get(module, f'layers.0.{module}')}"


def interleaved(name: str, heads: int, sizes: list[int], number: int) -> Stored:
    """Location of one of several matrices that are stacked head by head in a tensor.

    Args:
        sizes: number of rows of each matrix per head.
        number: index of the matrix.
    """
    size, first = sum(sizes), sum(sizes[:number])
    ranges = tuple((head * size + first, head * size + first + sizes[number]) for head in range(heads))
    return Stored(name, heads * size, ranges)


FAMILY = Family(("Qwen3NextForCausalLM",), read_config, find_stored=find_stored, find_gguf=find_gguf)
