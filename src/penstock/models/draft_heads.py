"""Loader of draft heads from a separate checkpoint: EAGLE and Medusa."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.checkpoint.config_json import CONFIG, read_config_json
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.quantization import SCHEMES
from penstock.layers import BuildContext
from penstock.ops import Ops
from penstock.parallel import SINGLE_RANK, Group

from .decoder import Decoder
from .eagle import EAGLE_HEADS, EagleHead, read_eagle_config
from .medusa import MedusaHead, build_medusa_heads
from .model import Model
from .weights import Checkpoint

FIELD = "speculative_config"


class DraftHeads(NamedTuple):
    """The draft heads of a checkpoint, with weak references to their model."""

    heads: Sequence[EagleHead | MedusaHead]
    aux_hidden_state_layers: Sequence[int]
    """``Model.aux_hidden_state_layers`` for these heads; empty if the heads read the last hidden states."""

    def attach(self, model: Model) -> None:
        """Set the draft heads of a model: the model they were loaded for, or a model that only differs in weights."""
        model.draft_heads = [head.with_model(model) for head in self.heads]
        model.aux_hidden_state_layers = self.aux_hidden_state_layers


def load_draft_heads(
    folder: Path,
    method: str,
    model: Model,
    ops: Ops,
    *,
    device: torch.device,
    quantization: str = "none",
    group: Group = SINGLE_RANK,
) -> DraftHeads:
    """Load draft heads for a model.

    Args:
        method: one of ``draft_size.METHODS``.
        model: a model in one pipeline stage.
        quantization: quantization of the heads at load, a key of ``SCHEMES``.

    Raises ``PenstockError`` if the heads are broken, not supported, or do not fit the model.
    """
    if not isinstance(model, Decoder):
        message = f"draft heads are not supported for {model.config.architecture}"
        remedy = "use a decoder-only model that Penstock implements, or another speculative method"
        raise PenstockError(Code.UNSUPPORTED, f"{message}: {remedy}", FIELD)
    raw = read_config_json(folder)
    context = BuildContext(
        ops, Checkpoint(folder), model.dtype, device, model.max_len, group=group, scheme=SCHEMES[quantization]
    )
    try:
        heads = _medusa(context, raw, model) if method == "medusa" else _eagle(context, raw, method, model)
    except KeyError as error:
        raise invalid(FIELD, f"{folder / CONFIG} lacks {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise invalid(FIELD, f"{folder / CONFIG} has an invalid value: {error}") from error
    if not heads.heads:
        raise invalid(FIELD, f"{folder} has no {method} heads: name a folder with heads of this method")
    return heads


def _medusa(context: BuildContext, raw: Mapping[str, Any], model: Model) -> DraftHeads:
    return DraftHeads(build_medusa_heads(context, raw, model), ())


def _eagle(context: BuildContext, raw: Mapping[str, Any], method: str, model: Model) -> DraftHeads:
    config = read_eagle_config(raw, method, model.config.num_layers)
    if config.decoder.vocab_size != model.config.vocab_size:
        message = (
            f"the head has vocab_size {config.decoder.vocab_size}, the model {model.config.vocab_size}; "
            "use a head that was trained for this model"
        )
        raise invalid(FIELD, message)
    if config.aux_hidden_state_layers and model.config.residual_streams > 1:
        message = f"heads that read hidden states of layers are not supported for {model.config.architecture}"
        raise PenstockError(Code.UNSUPPORTED, f"{message}, which has several residual streams", FIELD)
    return DraftHeads([EAGLE_HEADS[method](context, config, model)], config.aux_hidden_state_layers)
