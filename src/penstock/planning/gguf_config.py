"""The ``config.json`` of a model in a GGUF file."""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .gguf_file import GGUFFile, GGUFTensor

MAX_SIZE = 2**24
"""Limit of every size in the metadata, the context length among them."""
BLOCK = (
    *("attn_norm.weight", "ffn_norm.weight"),
    *("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"),
    *("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
)
"""Tensors of a layer in every architecture."""
QKV_BIAS = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of floating-point numbers, as ``config.json`` names them."""
FREQUENCY_FACTORS = "rope_freqs.weight"
OTHER_MODELS = (
    *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale", "attn_logit_softcapping"),
    *("embedding_scale", "final_logit_softcapping", "logit_scale", "residual_scale"),
)
"""Numbers by which other models compute something else."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files."""

    name: str
    """In ``config.json``."""
    block: tuple[str, ...] = ()
    """Tensors of a layer besides ``BLOCK``."""
    optional: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Other tensors of a layer, all there or none, by the flag of ``config.json`` that says so."""


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM",
        optional=(
            ("attention_bias", (*QKV_BIAS, "attn_output.bias")),
            ("mlp_bias", ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")),
        ),
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", QKV_BIAS),
    "qwen3": Architecture("Qwen3ForCausalLM", ("attn_q_norm.weight", "attn_k_norm.weight")),
}
"""By ``general.architecture``. Mistral's models are among those of ``llama``."""


def config_of(files: list[GGUFFile]) -> dict[str, Any]:
    """What ``config.json`` says of a model in one file or several parts.

    Raises ``PenstockError``: ``unsupported`` for an architecture, or a variant of it, that is not computed; ``invalid``
    where the metadata or tensors are broken.
    """
    first = files[0]
    if (kind := first.get("general.type", str, "model")) != "model":
        raise _unsupported(first, f"is of type {kind!r}, and no model")
    architecture = first.require("general.architecture", str)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise _unsupported(first, f"has a model of architecture {architecture!r}; {known} are served")
    return _Reader(first, architecture, tensors_of(files)).config()


def tensors_of(files: list[GGUFFile]) -> dict[str, GGUFTensor]:
    """The tensors of all parts. Raises ``PenstockError`` (``invalid``) where parts have the same ones."""
    tensors: dict[str, GGUFTensor] = {}
    for file in files:
        if double := tensors.keys() & file.tensors.keys():
            raise invalid("model", f"{file.path} has tensor {min(double)!r}, which an earlier part has, too")
        tensors |= file.tensors
    if max(files[0].get("split.count", int, 1), 1) != len(files):  # 0 in a file that gguf-split has merged
        raise invalid(
            "model", f"{files[0].path} is a part of a model: name the file as llama.cpp does, -00001-of-00002"
        )
    return tensors


class _Reader:
    def __init__(self, file: GGUFFile, architecture: str, tensors: dict[str, GGUFTensor]) -> None:
        self._file = file
        self._prefix = architecture
        self._architecture = ARCHITECTURES[architecture]
        self._tensors = tensors

    def config(self) -> dict[str, Any]:
        layers, heads = self._size("block_count"), self._size("attention.head_count")
        hidden, context = self._size("embedding_length"), self._size("context_length")
        head_dim = self._size("attention.key_length", hidden // heads)
        flags = self._check_tensors(layers)
        self._check_variant(head_dim)
        vocabulary, *_ = self._tensors["token_embd.weight"].shape
        window = self._size("attention.sliding_window", 0)
        name = self._architecture.name
        if window and name == "LlamaForCausalLM":
            name = "MistralForCausalLM"
        return {
            "architectures": [name],
            "model_type": name.removesuffix("ForCausalLM").lower(),
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": self._size("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(head_dim, context),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "sliding_window": window or None,
            "use_sliding_window": bool(window),
            "max_window_layers": 0,
            **flags,
            "dtype": self._dtype(),
            "gguf": self._num_weights(),
            **self._token_ids(),
        }

    def _check_tensors(self, layers: int) -> dict[str, bool]:
        """Raise ``PenstockError`` where a tensor is missing, or one is there that would be ignored. Returns flags of
        ``config.json``."""
        names, architecture = self._tensors.keys(), self._architecture
        if layers > len(names):
            raise invalid("model", f"{self._file.path} has {layers} layers and {len(names)} tensors")
        flags = {flag: f"blk.0.{optional[0]}" in names for flag, optional in architecture.optional}
        block = [*BLOCK, *architecture.block]
        for flag, optional in architecture.optional:
            block += optional * flags[flag]
        wanted = {"token_embd.weight", "output_norm.weight"}
        wanted |= {f"blk.{layer}.{name}" for layer in range(layers) for name in block}
        if missing := wanted - names:
            raise invalid("model", f"{self._file.path} has no tensor {min(missing)}")
        allowed = {"output.weight"} | ({FREQUENCY_FACTORS} if self._prefix == "llama" else set())
        if unknown := names - wanted - allowed:
            raise self._unsupported(f"tensor {min(unknown)!r}")
        return flags

    def _check_variant(self, head_dim: int) -> None:
        if self._size("expert_count", 0):
            raise self._unsupported("experts")
        if head_dim < 2 or head_dim % 2:
            raise self._unsupported(f"heads of size {head_dim}")
        if not self._file.get(self._key("attention.causal"), bool, True):
            raise self._unsupported("attention in both directions")
        for key in OTHER_MODELS:
            if self._file.get(self._key(key), float, 0.0):
                raise self._unsupported(f"a number {key}")
        if self._size("attention.value_length", head_dim) != head_dim:
            raise self._unsupported("values of another length than keys")
        if self._size("rope.dimension_count", head_dim) != head_dim:
            raise self._unsupported("rotary positions in a part of each head")
        if len(self._tensors["token_embd.weight"].shape) != 2:
            raise invalid("model", f"{self._file.path}: token_embd.weight is no matrix")

    def _rope(self, head_dim: int, context: int) -> dict[str, Any]:
        """``rope_parameters``."""
        theta = self._number("rope.freq_base", 10_000.0)
        factor = self._number("rope.scaling.factor", 0.0) or self._number("rope.scale_linear", 0.0)  # its older name
        kind = self._file.get(self._key("rope.scaling.type"), str, "linear")
        if kind == "linear" and factor in (0.0, 1.0):
            kind = "none"
        if kind not in ("none", "linear", "yarn"):
            raise self._unsupported(f"rotary positions scaled by {kind!r}")
        if FREQUENCY_FACTORS in self._tensors:
            if kind != "none":
                raise self._unsupported(f"{FREQUENCY_FACTORS} and rotary positions scaled by {kind!r}")
            factors = self._frequency_factors(head_dim)
            return {"rope_theta": theta, "rope_type": "frequency_factors", "frequency_factors": factors}
        if kind == "none":
            return {"rope_theta": theta, "rope_type": "default"}
        rope: dict[str, Any] = {"rope_theta": theta, "rope_type": kind, "factor": factor or 1.0}
        if kind == "yarn":
            self._read_yarn(rope, context)
        return rope

    def _read_yarn(self, rope: dict[str, Any], context: int) -> None:
        rope["original_max_position_embeddings"] = self._size("rope.scaling.original_context_length", context)
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if value := self._number(f"rope.scaling.{key}", 0.0):
                rope[name] = value
        for key, usual in (("yarn_log_multiplier", 0.0), ("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0)):
            if self._number(f"rope.scaling.{key}", usual) != usual:
                raise self._unsupported(f"a {key} of its own")
        if self._number("rope.scaling.attn_factor", 1.0) != 1.0:
            raise self._unsupported("an attn_factor of its own")

    def _frequency_factors(self, head_dim: int) -> list[float]:
        tensor = self._tensors[FREQUENCY_FACTORS]
        if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
            raise invalid("model", f"{self._file.path}: {FREQUENCY_FACTORS} has another type or shape than it should")
        factors = struct.unpack_from(f"<{head_dim // 2}f", self._file.content, tensor.offset)
        if not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise invalid("model", f"{self._file.path}: {FREQUENCY_FACTORS} has values that are not above 0")
        return list(factors)

    def _dtype(self) -> str:
        """That of the matrices; bfloat16 where they are quantized."""
        types = {tensor.type.name for tensor in self._tensors.values() if len(tensor.shape) > 1}
        if types - DTYPES.keys() or len(types) > 1:
            return "bfloat16"
        return DTYPES[types.pop()]

    def _num_weights(self) -> dict[str, dict[str, int]]:
        """The weights of the matrices by type, for ``planning.model_size``."""
        counts: dict[str, Counter[str]] = {"layers": Counter(), "head": Counter()}
        for tensor in self._tensors.values():
            if len(tensor.shape) > 1:
                counts["layers" if tensor.name.startswith("blk.") else "head"][tensor.type.name] += prod(tensor.shape)
        return {part: dict(count) for part, count in counts.items()}

    def _token_ids(self) -> dict[str, int]:
        ids = {name: self._file.get(f"tokenizer.ggml.{name}", int) for name in ("bos_token_id", "eos_token_id")}
        return {name: token_id for name, token_id in ids.items() if token_id is not None}

    def _size(self, key: str, default: int | None = None) -> int:
        """A number of at least 1, or the default. There may be an array in its place, with one for each layer."""
        key = self._key(key)
        if self._file.is_array(key):
            values = set(self._file.numbers(key))
            if len(values) != 1:
                raise self._unsupported(f"layers that differ ({key})")
            value = values.pop()
        else:
            value = self._file.require(key, int) if default is None else self._file.get(key, int, default)
        if not isinstance(value, int) or not (default == value or 1 <= value <= MAX_SIZE):
            raise invalid("model", f"{self._file.path}: {key} is {value}, and not from 1 to {MAX_SIZE}")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        key = self._key(key)
        value = self._file.require(key, float) if default is None else self._file.get(key, float, default)
        if not (math.isfinite(value) and (value > 0 or value == default)):
            raise invalid("model", f"{self._file.path}: {key} is {value}, and not above 0")
        return float(f"{value:.7g}")  # what it was before it was rounded to float32

    def _key(self, key: str) -> str:
        return f"{self._prefix}.{key}"

    def _unsupported(self, what: str) -> PenstockError:
        return _unsupported(self._file, f"has {what}, which models of architecture {self._prefix} do not have here")


def _unsupported(file: GGUFFile, what: str) -> PenstockError:
    return PenstockError(Code.UNSUPPORTED, f"{file.path} {what}", "model")
