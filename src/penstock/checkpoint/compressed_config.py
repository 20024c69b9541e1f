"""Configuration of compressed attention and hyper-connections (DeepSeek-V4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.core import Code, PenstockError

from .latent_config import MAX_INDEX_DIM, MAX_INDEX_HEADS, MAX_INDEX_TOPK
from .rope import rope_parameters_of
from .state_spec import StateSpec, StateTensor

EntryKind = Literal["none", "all", "selected"]
"""Compressed entries of a layer: none (sliding window only), entries to which all later queries attend (heavily
compressed attention, HCA), or entries that an indexer selects (compressed sparse attention, CSA)."""
KINDS: dict[str, EntryKind] = {
    "sliding_attention": "none",
    "heavily_compressed_attention": "all",
    "compressed_sparse_attention": "selected",
}
"""Entry of ``layer_types`` → kind."""
RATIOS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""Entry of ``compress_ratios``, in published files → entry of ``layer_types``."""
MAX_RATE = 1024
"""Maximum number of tokens of an entry."""
MAX_STREAMS = 8
"""Maximum number of residual streams; a limit of the CPU kernels."""
MAX_DIM = 512
"""Maximum size of a head; a limit of the CPU kernels."""


@dataclass(frozen=True)
class HyperConnections:
    """Residual streams with hyper-connections (Xie et al., 2026)."""

    streams: int
    iterations: int
    """Iterations of Sinkhorn's algorithm."""
    eps: float


@dataclass(frozen=True)
class CompressedConfig:
    """Settings of compressed attention."""

    kinds: tuple[EntryKind, ...]
    """Kind of each layer."""
    rates: Mapping[EntryKind, int]
    """Number of tokens per entry, by kind."""
    window: int
    """Number of positions before and with its own to which a query attends in every layer."""
    head_dim: int
    rope_dim: int
    """Number of rotated elements, at the end of a head."""
    q_rank: int
    groups: int
    """Number of groups of heads, each with its own output projection to ``group_rank`` elements."""
    group_rank: int
    topk: int
    """Number of entries that a query selects, at most."""
    index_heads: int
    index_dim: int
    """Elements of an index head."""
    hyper: HyperConnections
    rope: Mapping[str, Any]
    """Rotary parameters of layers with entries."""
    window_rope: Mapping[str, Any]
    """Rotary parameters of layers without entries."""

    def rate(self, layer: int) -> int:
        """Number of tokens per entry; 0: the layer has no entries."""
        return self.rates.get(self.kinds[layer], 0)

    def entry_dim(self, layer: int) -> int:
        """Elements that follow the key in a token's vector: an entry, and the entry's index key."""
        return {"none": 0, "all": self.head_dim, "selected": self.head_dim + self.index_dim}[self.kinds[layer]]

    def state_spec(self, layer: int, dtype: str) -> StateSpec:
        """State of a layer with entries: the last tokens' values and gates."""
        rate = self.rate(layer)
        if self.kinds[layer] == "all":
            parts, span = {"entry": 2 * self.head_dim}, rate
        else:
            parts, span = {"entry": 4 * self.head_dim, "index": 4 * self.index_dim}, 2 * rate
        return StateSpec(
            {name: StateTensor((span, size), dtype) for name, size in parts.items()},
            {f"{name}_in": StateTensor((size,), dtype) for name, size in parts.items()},
        )

    def num_weights(self, layer: int, hidden: int, heads: int) -> int:
        """Parameters of the matrices of a layer's attention and hyper-connections."""
        dim, kind, streams = self.head_dim, self.kinds[layer], self.hyper.streams
        queries = self.q_rank * (hidden + heads * dim)
        outputs = heads * dim * self.group_rank + self.groups * self.group_rank * hidden
        count = queries + hidden * dim + outputs + 2 * (2 + streams) * streams * streams * hidden
        if kind == "all":
            count += 2 * hidden * dim
        if kind == "selected":
            indexer = self.q_rank * self.index_heads * self.index_dim + hidden * self.index_heads
            count += 4 * hidden * (dim + self.index_dim) + indexer
        return count


def read_compressed_config(raw: Mapping[str, Any], head_dim: int, num_heads: int, layers: int) -> CompressedConfig:
    """Read the settings. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for a missing or invalid field, and
    ``PenstockError`` (``unsupported``) for sizes that the kernels do not support."""
    names = (
        *("sliding_window", "q_lora_rank", "o_groups", "o_lora_rank", "index_topk", "index_n_heads", "index_head_dim"),
        *("hc_mult", "hc_sinkhorn_iters"),
    )
    sizes = {name: int(raw[name]) for name in names}
    if bad := [name for name in names if sizes[name] < 1]:
        raise ValueError(f"{bad[0]} is {sizes[bad[0]]}; it must be positive")
    rope_dim, index_dim = _rope_dim(raw, head_dim), sizes["index_head_dim"]
    if rope_dim % 2 or not 0 < rope_dim <= min(head_dim, index_dim):
        raise ValueError(f"{rope_dim} elements of a head are rotated; it must be an even number up to index_head_dim")
    if num_heads % sizes["o_groups"]:
        raise ValueError(f"o_groups is {sizes['o_groups']}; it must divide num_attention_heads ({num_heads})")
    kinds, rates = _kinds(raw, layers), _rates(raw)
    limits = {
        "index_topk": (sizes["index_topk"], MAX_INDEX_TOPK),
        "index_n_heads": (sizes["index_n_heads"], MAX_INDEX_HEADS),
        "index_head_dim": (index_dim, MAX_INDEX_DIM),
        "head_dim": (head_dim, MAX_DIM),
        "hc_mult": (sizes["hc_mult"], MAX_STREAMS),
        "compress_rates": (max(rates.values()), MAX_RATE),
        "sliding_window": (sizes["sliding_window"], MAX_INDEX_TOPK),
    }
    for name, (value, most) in limits.items():
        if value > most or (name.endswith("_dim") and value % 16):
            multiple = "a multiple of 16, " if name.endswith("_dim") else ""
            message = f"{name} is {value}; supported is {multiple}at most {most}"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
    window_rope, rope = _ropes(raw, rope_dim / head_dim)
    return CompressedConfig(
        kinds,
        rates,
        sizes["sliding_window"],
        head_dim,
        rope_dim,
        sizes["q_lora_rank"],
        sizes["o_groups"],
        sizes["o_lora_rank"],
        sizes["index_topk"],
        sizes["index_n_heads"],
        index_dim,
        HyperConnections(sizes["hc_mult"], sizes["hc_sinkhorn_iters"], float(raw["hc_eps"])),
        rope,
        window_rope,
    )


def _rope_dim(raw: Mapping[str, Any], head_dim: int) -> int:
    if (factor := raw.get("partial_rotary_factor")) is not None:
        return int(head_dim * float(factor))
    return int(raw["qk_rope_head_dim"]) if raw.get("qk_rope_head_dim") else head_dim // 8


def _kinds(raw: Mapping[str, Any], layers: int) -> tuple[EntryKind, ...]:
    """Kinds by ``layer_types``, else ``compress_ratios``, else HCA and CSA in turn, after two HCA layers."""
    if types := raw.get("layer_types"):
        names = list(types)
    elif ratios := raw.get("compress_ratios"):
        if unknown := set(ratios).difference(RATIOS):
            raise ValueError(f"compress_ratios has {min(unknown)}; known are {', '.join(map(str, RATIOS))}")
        names = [RATIOS[ratio] for ratio in ratios]
    else:
        names = ["heavily_compressed_attention"] * 2
        names += [("heavily_compressed_attention", "compressed_sparse_attention")[i % 2] for i in range(layers)]
    names = names[:layers]
    if len(names) != layers or set(names).difference(KINDS):
        raise ValueError(f"layer_types must have one of {', '.join(KINDS)} for each of {layers} layers")
    return tuple(KINDS[name] for name in names)


def _rates(raw: Mapping[str, Any]) -> dict[EntryKind, int]:
    given: Mapping[str, Any] = raw.get("compress_rates") or {}
    names = {
        "compressed_sparse_attention": ("compress_rate_csa", 4),
        "heavily_compressed_attention": ("compress_rate_hca", 128),
    }
    rates = {KINDS[name]: int(raw.get(old) or given.get(name) or default) for name, (old, default) in names.items()}
    if min(rates.values()) < 1:
        raise ValueError(f"compress_rates is {dict(given)!r:.80}; the numbers must be positive")
    return rates


def _ropes(raw: Mapping[str, Any], factor: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary parameters of layers without and with entries: ``rope_parameters`` of transformers has ``main`` and
    ``compress``; published files have only those of layers with entries, with another base."""
    rope = rope_parameters_of(raw)
    if "main" in rope and "compress" in rope:
        main, entries = (
            {"rope_type": each.get("type", "default")} | dict(each) for each in (rope["main"], rope["compress"])
        )
    else:
        main = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        entries = {**rope, "rope_theta": float(raw["compress_rope_theta"])}
        if entries["rope_type"] == "yarn":
            entries.setdefault("attention_factor", 1.0)
    return {**main, "partial_rotary_factor": factor}, {**entries, "partial_rotary_factor": factor}
