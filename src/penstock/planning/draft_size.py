"""Size of draft heads (EAGLE, Medusa) and draft models."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.checkpoint.composite_config import complete_config
from penstock.checkpoint.config_json import read_config_json
from penstock.checkpoint.stored_tensors import read_header
from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED

from .model_size import ModelSize, model_size_of

METHODS = ("eagle3", "eagle", "medusa")
"""Methods of ``speculative_config`` with a separate checkpoint of draft heads."""
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
MEDUSA_BLOCK = re.compile(r"(medusa_heads?\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\.weight")
MEDUSA_LM_HEAD = re.compile(r"(medusa_heads?\.)?(\d+\.\d+|lm_heads\.\d+)\.weight")
PICKLED_BYTES = 2
"""Assumed bytes per parameter in PyTorch's pickled files, which are not opened."""


def head_method(folder: Path) -> str:
    """Detect the method of draft heads from their ``config.json``; empty: a complete draft model.

    Raises ``PenstockError`` (``invalid``) if ``config.json`` is missing.
    """
    raw = read_config_json(folder)
    names = [*(raw.get("architectures") or ()), raw.get("model_type"), raw.get("speculators_model_type")]
    names = [str(name).lower() for name in names if name]
    return next((method for method in METHODS if any(method in name for name in names)), "")


def draft_size_of(folder: Path, method: str, model: ModelSize) -> ModelSize:
    """Size of draft heads or of a draft model. Heads compute in the data type of the target model.

    Args:
        method: method of ``speculative_config``; empty: detected from ``config.json``.
        model: size of the target model.

    Raises ``PenstockError`` (``invalid``) if ``config.json`` or a header of the weights is missing or damaged.
    """
    if method not in METHODS and not (method := head_method(folder)):
        return model_size_of(read_config_json(folder))
    raw, shapes = read_config_json(folder), _shapes(folder)
    try:
        head = _medusa(folder, shapes, model) if method == "medusa" else _eagle(raw, shapes, method, model)
    except KeyError as error:
        raise invalid("speculative_config", f"{folder / 'config.json'} lacks {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        message = f"{folder / 'config.json'} has a value of the wrong kind: {error}"
        raise invalid("speculative_config", message) from error
    return replace(
        head,
        architecture=method,
        dtype=model.dtype,
        stored=UNQUANTIZED,
        gguf_layers={},
        gguf_head={},
        mtp_weights=0,
        num_mtp_layers=0,
        unquantized_weights=0,
        expert_weights=0,
        vision_weights=0,
    )


def _eagle(raw: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], method: str, model: ModelSize) -> ModelSize:
    """Size of an EAGLE head: an input projection and a decoder layer. EAGLE-3 has an LM head, and optionally an
    embedding.

    For PyTorch's files, an LM head and no embedding are assumed, as in published checkpoints.
    """
    layer = complete_config(raw.get("transformer_layer_config") or {})
    size = model_size_of({**raw, **layer, "tie_word_embeddings": True})
    hidden, inputs, own = size.hidden_size, size.hidden_size + model.hidden_size, 0
    if method == "eagle3":
        nested = raw.get("eagle_config") or {}
        given = raw.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
        inputs = len(given or range(3)) * model.hidden_size
        own = hidden * int(raw.get("draft_vocab_size") or size.head_weights // hidden) if _has(shapes, LM_HEAD) else 0
        own += size.head_weights if EMBEDDING in shapes else 0
    heads = int(raw.get("num_attention_heads") or hidden // size.kv_dim)
    # The q, k and v projections of EAGLE-3 read a second input.
    wider = hidden * size.kv_dim * (heads + 2 * size.num_kv_heads) if method == "eagle3" else 0
    return replace(
        size, layer_weights=size.layer_weights + inputs * hidden + wider, embedding_weights=own, head_weights=own
    )


def _medusa(folder: Path, shapes: Mapping[str, Sequence[int]], model: ModelSize) -> ModelSize:
    """Size of Medusa heads: blocks of one matrix, and LM heads. An LM head shared by all heads is loaded once per
    head."""
    blocks = {name: math.prod(shape) for name, shape in shapes.items() if MEDUSA_BLOCK.fullmatch(name)}
    heads = {name: math.prod(shape) for name, shape in shapes.items() if MEDUSA_LM_HEAD.fullmatch(name)}
    weights, own = sum(blocks.values()), sum(heads.values())
    if len(heads) == 1 and any(".layers." in name for name in blocks):
        own *= len({name.rpartition(".layers.")[0] for name in blocks})
    if not shapes:
        own = sum(path.stat().st_size for path in folder.glob("medusa_lm_head.pt")) // PICKLED_BYTES
    return replace(model, num_layers=0, num_kv_layers=0, layer_weights=weights, embedding_weights=own, head_weights=own)


def _has(shapes: Mapping[str, Sequence[int]], name: str) -> bool:
    return name in shapes or not shapes


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in a folder's safetensors files; empty without such files."""
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            tensors, _ = read_header(path)
        except msgspec.MsgspecError as error:
            raise invalid("speculative_config", f"{path} is damaged ({error}): download it again") from error
        found |= {name: tensor.shape for name, tensor in tensors.items()}
    return found
