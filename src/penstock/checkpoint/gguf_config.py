"""The ``config.json`` of a model in a GGUF file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

from penstock.core.errors import invalid

from .config_defaults import class_of
from .gguf_architectures import FUSED, Architecture
from .gguf_file import GGUFFile
from .gguf_metadata import Metadata
from .gguf_registry import architecture_of
from .gguf_rope import TENSORS as ROPE_TENSORS
from .gguf_rope import rope_parameters

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of floating-point types in ``config.json``."""
KINDS = (".weight", ".bias", ".scale")
COMPLETE = (".weight", ".A_log", ".D")
"""Suffixes of names in ``Architecture`` that stand for a tensor, not for a module."""
FLOAT32 = ("ffn_gate_inp", "_norm", "position_embd", "token_types", "conv")
"""Parts of the names of matrices that are float32 whatever the file's main type."""
OTHER_MODELS = (
    *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale", "attn_logit_softcapping"),
    *("embedding_scale", "final_logit_softcapping", "logit_scale", "residual_scale", "expert_count"),
    *("attention.temperature_scale", "rope.scaling.alpha", "attention.sliding_window"),
)
"""Metadata that changes the computation. A file is refused if its architecture does not read a key that it has."""


def config_of(files: list[GGUFFile]) -> dict[str, Any]:
    """The content of ``config.json`` for a model in one file or several parts.

    Raises ``PenstockError``: ``unsupported`` for an architecture, or a variant of one, that is not supported;
    ``invalid`` for broken metadata or tensors.
    """
    metadata = Metadata(files)
    return _Reader(metadata, architecture_of(metadata)).config()


class _Reader:
    def __init__(self, metadata: Metadata, architecture: Architecture) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def config(self) -> dict[str, Any]:
        metadata, architecture = self._metadata, self._architecture
        flags = self._check_tensors()
        layers = metadata.layers - metadata.mtp_layers
        vocabulary, *_ = metadata.tensors["token_embd.weight"].shape
        kind = class_of({"architectures": [architecture.name]})
        assert kind
        has_attention = not architecture.attention_free
        rotary_dim = self._check_heads(metadata.head_dim) if has_attention else 0
        fields = {**self._epsilon(), **self._windows(layers), **flags, **architecture.constants}
        given, rope_fields = architecture.read(metadata), architecture.rope(metadata)
        if key := metadata.unread(OTHER_MODELS):
            raise metadata.unsupported(f"the metadata key {key}")
        fields |= (self._attention(rope_fields, rotary_dim) if has_attention else {}) | given
        varied = architecture.varied_layers  # then ``read`` returns the sizes
        size = 0 if varied else metadata.size("feed_forward_length", 0 if architecture.parts else None)
        return {
            "architectures": [architecture.name],
            "model_type": kind.model_type,
            "vocab_size": vocabulary,
            "hidden_size": metadata.size("embedding_length"),
            **({"intermediate_size": size} if size else {}),
            "num_hidden_layers": layers,
            "num_nextn_predict_layers": metadata.mtp_layers,
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in metadata.tensors,
            **fields,
            "dtype": self._dtype(),
            "gguf": self._num_weights(),
            **self._token_ids(),
        }

    def _attention(self, rope_fields: Mapping[str, Any], rotary_dim: int) -> dict[str, Any]:
        metadata = self._metadata
        heads, head_dim = metadata.size("attention.head_count"), metadata.head_dim
        varied = self._architecture.varied_layers
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": max(metadata.sizes("attention.head_count_kv"))
            if varied
            else metadata.size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": metadata.size("context_length"),
            "rope_parameters": self._rope(rope_fields, rotary_dim, head_dim),
        }

    def _check_tensors(self) -> dict[str, bool]:
        """Check that the file has all required tensors and no unknown ones. Returns the flags of ``config.json``
        (``Architecture.flags``)."""
        metadata, architecture = self._metadata, self._architecture
        names = metadata.tensors.keys()
        if metadata.layers > len(names):
            message = f"{metadata.file.path} has {metadata.layers} layers, but only {len(names)} tensors"
            raise invalid("model", f"{message}; a layer has several: download the file again")
        flagged = {tensor for tensors in architecture.flags.values() for tensor in tensors}
        model = {f"{tensor}.weight" for tensor in architecture.model.values()}
        allowed = {"output.weight"}
        if architecture.layer_norm:
            allowed |= {"output_norm.bias", "token_embd_norm.bias"}
        wanted = model.difference({"output.weight"}, architecture.optional)
        allowed |= model
        allowed |= ROPE_TENSORS
        for layer in range(metadata.layers):
            prefix = f"blk.{layer}."
            sparse = f"{prefix}ffn_gate_inp.weight" in names and bool(architecture.experts)
            mlp = architecture.experts if sparse else architecture.mlp
            tensors = _names(architecture.layer) | _names(mlp)
            present = [part for part in architecture.parts if f"{prefix}{next(iter(part.values()))}.weight" in names]
            tensors = tensors.union(*map(_names, present or architecture.parts))
            separate = frozenset(tensors)
            for name, parts in FUSED.items():
                if f"{prefix}{name}.weight" not in names or not separate & {f"{part}.weight" for part in parts}:
                    continue
                tensors -= {f"{part}.weight" for part in parts if f"{prefix}{part}.weight" not in names}
                allowed.add(f"{prefix}{name}.weight")
                if flagged & {f"{part}.bias" for part in parts}:
                    allowed.add(f"{prefix}{name}.bias")
            allowed |= {f"{prefix}{name}" for name in (*tensors, *flagged)}
            wanted |= {f"{prefix}{name}" for name in tensors.difference(architecture.optional)}
        if missing := wanted - names:
            raise invalid("model", f"{metadata.file.path} has no tensor {min(missing)}: download or convert it again")
        if unknown := names - allowed - wanted:
            raise metadata.unsupported(f"tensor {min(unknown)!r}")
        if len(metadata.tensors["token_embd.weight"].shape) != 2:
            shape = metadata.tensors["token_embd.weight"].shape
            raise invalid("model", f"{metadata.file.path}: token_embd.weight has shape {shape}; it must be a matrix")
        return {flag: any(map(self._has, tensors)) for flag, tensors in architecture.flags.items() if flag}

    def _has(self, tensor: str) -> bool:
        """Whether any layer has a tensor, or a fused tensor that contains it."""
        name, _, kind = tensor.rpartition(".")
        fused = [other for other, parts in FUSED.items() if name in parts]
        return any(self._metadata.has_any(f"{each}.{kind}") for each in (name, *fused))

    def _check_heads(self, head_dim: int) -> int:
        """Raise ``PenstockError`` for unsupported heads. Returns the number of rotary dimensions of a head."""
        metadata, architecture = self._metadata, self._architecture
        if not architecture.encoder and not metadata.flag("attention.causal", True):
            raise metadata.unsupported("bidirectional attention")
        rotary_dim = head_dim if architecture.rope_free else metadata.size("rope.dimension_count", head_dim)
        if architecture.latent:
            return rotary_dim
        if head_dim < 2 or head_dim % 2:
            raise metadata.unsupported(f"heads of size {head_dim}")
        if (length := metadata.size("attention.value_length", head_dim)) != head_dim:
            raise metadata.unsupported(f"values of {length} and keys of {head_dim} elements per head")
        if rotary_dim != head_dim and not architecture.partial_rotary:
            raise metadata.unsupported(f"rotary embedding of {rotary_dim} of {head_dim} dimensions per head")
        if rotary_dim > head_dim or rotary_dim % 2:
            message = f"rope.dimension_count is {rotary_dim}; it must be even and at most the head size, {head_dim}"
            raise invalid("model", f"{metadata.file.path}: {message}")
        return rotary_dim

    def _epsilon(self) -> dict[str, float]:
        if not self._architecture.layer_norm:
            return {"rms_norm_eps": self._metadata.number("attention.layer_norm_rms_epsilon")}
        epsilon = self._metadata.number("attention.layer_norm_epsilon")
        return {"layer_norm_eps": epsilon, "norm_epsilon": epsilon, "norm_eps": epsilon}

    def _windows(self, layers: int) -> dict[str, Any]:
        architecture, metadata = self._architecture, self._metadata
        if architecture.windows is None:
            return {"sliding_window": None, "use_sliding_window": False}
        window = metadata.size("attention.sliding_window", architecture.default_window)
        fields = {"sliding_window": window or None, "use_sliding_window": bool(window)}
        if not architecture.windows:
            return {**fields, "max_window_layers": 0}
        windowed = metadata.flags("attention.sliding_window_pattern")
        if windowed is None:
            pattern = metadata.size("attention.sliding_window_pattern", architecture.windows)
            windowed = [(layer + 1) % pattern != 0 for layer in range(layers)]
        kinds = ["sliding_attention" if window and each else "full_attention" for each in windowed[:layers]]
        return {**fields, "layer_types": kinds}

    def _rope(self, extra: Mapping[str, Any], rotary_dim: int, head_dim: int) -> dict[str, Any]:
        """``rope_parameters`` of ``config.json``; with ``local_rope``, a dictionary: layer type → ``rope_parameters``.

        Args:
            extra: additional fields (``Architecture.rope``).
        """
        metadata, architecture = self._metadata, self._architecture
        rope = rope_parameters(metadata, rotary_dim)
        if rope["rope_type"] == "yarn" or "llama_4_scaling_beta" in extra:
            rope |= extra
        if architecture.partial_rotary:
            rope["partial_rotary_factor"] = _share(rotary_dim, head_dim)
        if not architecture.local_rope:
            return rope
        base = metadata.number("rope.freq_base_swa", 0.0)
        base = base or (10_000.0 if architecture.name.startswith("Gemma") else rope["rope_theta"])
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": base}}

    def _dtype(self) -> str:
        """The dtype of the matrices; bfloat16 if they are quantized or differ."""
        tensors = self._metadata.tensors.values()
        types = {tensor.type.name for tensor in tensors if len(tensor.shape) > 1 and _is_matrix(tensor.name)}
        if types - DTYPES.keys() or len(types) != 1:
            return "bfloat16"
        return DTYPES[types.pop()]

    def _num_weights(self) -> dict[str, dict[str, int]]:
        """Number of weights in matrices by GGUF type, for ``planning.model_size``."""
        counts: dict[str, Counter[str]] = {"layers": Counter(), "head": Counter()}
        for tensor in self._metadata.tensors.values():
            if len(tensor.shape) > 1 and tensor.name.endswith(".weight"):
                counts["layers" if tensor.name.startswith("blk.") else "head"][tensor.type.name] += prod(tensor.shape)
        return {part: dict(count) for part, count in counts.items()}

    def _token_ids(self) -> dict[str, int]:
        names = ("bos_token_id", "eos_token_id")
        ids = {name: self._metadata.file.get(f"tokenizer.ggml.{name}", int) for name in names}
        return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _names(modules: Mapping[str, str]) -> set[str]:
    """Names of tensors, below the prefix of their layer."""
    return {
        tensor if tensor.endswith(KINDS) or module.endswith(COMPLETE) else f"{tensor}.weight"
        for module, tensor in modules.items()
    }


def _is_matrix(name: str) -> bool:
    """Whether a tensor is a matrix stored in the file's main type."""
    return name.endswith(".weight") and not any(part in name for part in FLOAT32)


def _share(rotary_dim: int, head_dim: int) -> float:
    """``partial_rotary_factor``: a share for which ``int(head_dim * share) == rotary_dim``."""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, 1.0)
