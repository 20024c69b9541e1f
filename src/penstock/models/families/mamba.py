"""Mamba (Gu and Dao, 2023), a model without attention, and FalconMamba (TII, 2024), with norms of dt, B and C."""

from dataclasses import replace
from typing import Any, Literal

from penstock.checkpoint.decoder_options import LayerNorms
from penstock.checkpoint.model_config import ACTIVATIONS, ConfigJson, LayerKind, ModelConfig, dense_config, options_of
from penstock.checkpoint.state_config import MambaConfig, check_kernel
from penstock.core import Code, PenstockError

from ..registry import Family
from ..stored import Stored, part_of

MAX_LEN = 2**18
"""Default of the maximum sequence length: the state has a fixed size, and there are no positions."""
NAMES = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"}


def _read(raw: ConfigJson, norms: Literal["none", "unweighted"]) -> ModelConfig:
    check_silu(raw)
    hidden = int(raw["hidden_size"])
    channels = int(raw.get("intermediate_size") or int(float(raw.get("expand") or 2) * hidden))
    state = MambaConfig(
        channels,
        int(raw.get("state_size") or 16),
        step_rank(raw.get("time_step_rank"), hidden),
        check_kernel(int(raw.get("conv_kernel") or 4), "conv_kernel"),
        bias=bool(raw.get("use_bias", False)),
        convolution_bias=bool(raw.get("use_conv_bias", True)),
        norms=norms,
        norm_eps=float(raw.get("mixer_rms_eps") or 1e-6),
    )
    fields: dict[str, Any] = {
        # sizes of attention, which no layer has; ranks can share this number of heads
        **{"num_attention_heads": channels, "num_key_value_heads": channels, "head_dim": 16},
        "intermediate_size": channels,
        "rms_norm_eps": raw.get("layer_norm_epsilon") or 1e-5,
        "max_position_embeddings": raw.get("max_position_embeddings") or MAX_LEN,
    }
    config = dense_config(
        {**raw, **fields},
        options=options_of(raw, layer_norms=LayerNorms(before_attention="norm"), separate_mlps=True),
    )
    kinds: tuple[LayerKind, ...] = tuple("state" for _ in range(config.num_layers))
    return replace(config, raw=raw, layer_kinds=kinds, state=state)


def check_silu(raw: ConfigJson) -> None:
    """Raise ``PenstockError`` (``unsupported``) if the convolution has another activation than SiLU."""
    name = str(raw.get("hidden_act") or "silu")
    if ACTIVATIONS.get(name) != "silu":
        message = f"hidden_act {name[:40]!r} is not supported for Mamba layers; supported is silu"
        raise PenstockError(Code.UNSUPPORTED, message, "model")


def step_rank(given: Any, hidden_size: int) -> int:
    """Rank of the projection to the steps; "auto": a sixteenth of the hidden size."""
    return -(-hidden_size // 16) if given in (None, "auto") else int(given)


def read_mamba(raw: ConfigJson) -> ModelConfig:
    return _read(raw, "none")


def read_falcon_mamba(raw: ConfigJson) -> ModelConfig:
    return _read(raw, "unweighted")


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    if name in NAMES:
        return Stored(NAMES[name], other="backbone.embedding" if name == "model.embed_tokens" else "")
    return find_parts(config, name.replace("model.layers.", "backbone.layers.", 1))


def find_parts(config: ModelConfig, name: str) -> Stored:
    """Location of the parts of ``in_proj`` and ``x_proj``."""
    state, (parent, _, last) = config.state, name.rpartition(".")
    assert isinstance(state, MambaConfig)
    if last in ("in_proj_x", "in_proj_z"):
        return part_of(f"{parent}.in_proj", [state.channels] * 2, last == "in_proj_z")
    if last in ("x_proj_step", "x_proj_states"):
        return part_of(f"{parent}.x_proj", [state.step_rank, 2 * state.state_size], last == "x_proj_states")
    return Stored(name)


MAMBA = Family(("MambaForCausalLM",), read_mamba, find_stored=find_stored, find_gguf=find_parts)
FALCON_MAMBA = Family(("FalconMambaForCausalLM",), read_falcon_mamba, find_stored=find_stored, find_gguf=find_parts)
