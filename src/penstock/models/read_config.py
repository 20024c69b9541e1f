"""Reader of a model's configuration. It refuses unsupported features."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from penstock.checkpoint.config_defaults import class_named
from penstock.checkpoint.config_json import CONFIG, read_config_json, read_plain_config_json
from penstock.checkpoint.decoder_options import DecoderOptions
from penstock.checkpoint.encoders import architecture_name, encoder_prefix
from penstock.checkpoint.experts_config import read_common_experts
from penstock.checkpoint.latent_config import read_latent_config
from penstock.checkpoint.model_config import (
    COUNTED_WEIGHTS,
    PADDED_TO,
    ModelConfig,
    architecture_of,
    dense_config,
    padded_head_dim,
)
from penstock.checkpoint.rope import check_rope_type, rope_parameters_of
from penstock.checkpoint.stored_format import quantization_config_of, quantization_of
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.quantization import SCHEMES

from .registry import RUN_BY_TRANSFORMERS, TRANSFORMERS, Family, find_family, has_family, imported
from .transformers.library import architectures_of, has_causal_lm, is_installed, unknown_message

logger = logging.getLogger(__name__)
has_other_pytorch_head = imported("penstock.models.weights.checkpoint:has_other_pytorch_head")
read_quantization_config = imported("penstock.quant:read_quantization_config")

ModelImpl = Literal["auto", "penstock", "transformers"]
"""Values of the option ``model_impl``."""


def read_config(folder: Path, model_impl: ModelImpl = "penstock") -> ModelConfig:
    """Read the configuration of a checkpoint.

    Args:
        model_impl: implementation of the model. auto: transformers if Penstock has no family for the architecture, or
            the family does not support a feature in ``config.json``.

    Raises ``PenstockError``: ``invalid`` if ``config.json`` is missing or broken, ``unsupported`` if no implementation
    supports it.
    """
    raw, path = read_config_json(folder), folder / CONFIG
    if not raw.get("architectures") and model_impl != "penstock" and is_installed():
        raw = {**raw, "architectures": architectures_of(str(raw.get("model_type")))}
    if raw.get("tie_word_embeddings") and any(folder.glob("pytorch_model*.bin")) and has_other_pytorch_head(folder):
        raw = {**raw, "tie_word_embeddings": False}
    architecture, name = architecture_of(raw)[0], architecture_name(raw)
    auto = model_impl == "auto" and is_installed()
    if model_impl == "transformers" or (auto and has_causal_lm(name) and not has_family(architecture)):
        return _read_transformers_config(raw, folder)
    hint = unknown_message() if auto and not has_family(architecture) else RUN_BY_TRANSFORMERS
    family = find_family(architecture, name, hint)
    is_decoder = encoder_prefix(raw) is None
    # "vision" (Gemma 4) concerns images, which text prompts lack.
    is_bidirectional = raw.get("use_bidirectional_attention") not in (None, False, "vision")
    if is_decoder and (raw.get("is_causal") is False or is_bidirectional):
        message = (
            f"{path} sets bidirectional attention (is_causal, use_bidirectional_attention): not supported for decoders"
        )
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    try:
        return _read_family_config(family, raw, path)
    except PenstockError as error:
        if error.failure.code is not Code.UNSUPPORTED or not auto or not has_causal_lm(name):
            raise
        try:
            config = _read_transformers_config(raw, folder)
        except PenstockError:
            raise error from None
        logger.info("%s; running the model with transformers instead", error)
        return config


def _read_transformers_config(raw: Mapping[str, Any], folder: Path) -> ModelConfig:
    """Read the configuration of a model run by transformers. transformers completes ``config.json`` with its defaults;
    only values read from the weights are added here."""
    names = ("architectures", "tie_word_embeddings", "dtype")
    completed = {name: raw[name] for name in names if raw.get(name) is not None}
    given = {name: value for name, value in read_plain_config_json(folder).items() if name != "torch_dtype"}
    with _checked(folder / CONFIG):
        return TRANSFORMERS.read_config({**given, **completed})


def _read_family_config(family: Family, raw: Mapping[str, Any], path: Path) -> ModelConfig:
    quantization = quantization_of(raw)
    if quantization and quantization not in SCHEMES:
        message = f"{path} has quantization {quantization!r}, which is not supported; supported: {', '.join(SCHEMES)}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    if quantization is None:
        read_quantization_config(quantization_config_of(raw))
    with _checked(path):
        _check_lists(raw, path)
        config = family.read_config(raw)
        if config.num_heads % config.num_kv_heads:
            message = f"num_attention_heads is {config.num_heads}; it must be a multiple of num_key_value_heads"
            raise invalid("model", f"{path}: {message}, {config.num_kv_heads}")
        if len(config.sliding_windows) != config.num_layers:
            message = f"{path} has {len(config.sliding_windows)} layer_types; it must have one for each of"
            raise invalid("model", f"{message} {config.num_layers} layers")
        _check_rope(config, path)
        return _with_padded_heads(config)


def config_of(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the configuration of a model of any architecture, accurate enough to compute the model's size. The model's
    family reads it; without a family that supports the model, the usual field names are read. Does not import torch.

    Raises ``PenstockError`` (``invalid``) for a missing or invalid field.
    """
    architecture, known = architecture_of(raw)[0], class_named(raw.get("model_type"))
    if not has_family(architecture) and known and known.architecture:
        architecture = known.architecture
    with _checked(Path(CONFIG)):
        if has_family(architecture) and COUNTED_WEIGHTS not in raw:
            try:
                return _with_padded_heads(find_family(architecture).read_config(raw))
            except PenstockError as error:
                if error.failure.code is not Code.UNSUPPORTED:
                    raise
        config = dense_config(raw, options=DecoderOptions(), experts=read_common_experts(raw))
        if raw.get("kv_lora_rank"):
            return replace(config, latent=read_latent_config(raw, config.rope_parameters, rope_interleave=True))
        return replace(config, head_dim=padded_head_dim(config.head_dim))


def _with_padded_heads(config: ModelConfig) -> ModelConfig:
    """The configuration with heads padded to a supported size, if necessary. Only heads of decoders are padded.

    Raises ``PenstockError`` (``unsupported``) for padded heads with q/k norms, which would include the zeros, and for
    models with images.
    """
    head_dim, padded = config.head_dim, padded_head_dim(config.head_dim)
    if head_dim == padded or config.latent or config.encoder or config.speech:
        return config
    if config.has_vision or config.qk_norm:
        feature = "q/k norms" if config.qk_norm else "images"
        message = f"head_dim is {head_dim}; for a model with {feature} it must be a multiple of {PADDED_TO}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    scale = config.options.attention_scale
    options = replace(config.options, attention_scale=head_dim**-0.5 if scale is None else scale)
    return replace(config, head_dim=padded, stored_head_dim=head_dim, options=options)


def _check_lists(raw: Mapping[str, Any], path: Path) -> None:
    """Raise ``PenstockError`` (``unsupported``) for fields with one value per layer, which no family supports."""
    rope = rope_parameters_of(raw)
    for name, value in (("sliding_window", raw.get("sliding_window")), ("rope_theta", rope["rope_theta"])):
        if isinstance(value, list):
            message = f"{path} has a list as {name}; only a single value for all layers is supported"
            raise PenstockError(Code.UNSUPPORTED, message, "model")


def _check_rope(config: ModelConfig, path: Path) -> None:
    """Raise ``PenstockError`` for unsupported or invalid rotary parameters."""
    dim = config.rotary_dim
    for rope in (config.rope_parameters, config.local_rope_parameters or config.rope_parameters):
        kind = rope["rope_type"]
        check_rope_type(kind)
        if dim % 2:
            message = f"{path} has {dim} rotary dimensions per head; the number must be even"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
        lists = [name for name in ("short_factor", "long_factor") if kind == "longrope" and len(rope[name]) != dim // 2]
        if lists:
            message = f"{path}: {lists[0]} of rope_parameters has {len(rope[lists[0]])} numbers, not {dim // 2}"
            raise invalid("model", message)
        factor = rope.get("partial_rotary_factor", 1.0)
        whole = config.latent.qk_rope_head_dim if config.latent else config.checkpoint_head_dim
        if kind not in ("default", "proportional") and int(whole * factor) != dim:
            message = f"{path} has partial_rotary_factor {factor}, which is not supported for {config.architecture}"
            raise invalid("model", message)


@contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Context manager that raises ``PenstockError`` (``invalid``) for errors caused by a broken ``config.json``."""
    try:
        yield
    except KeyError as error:
        raise invalid("model", f"{path} lacks {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise invalid("model", f"{path} has an invalid value: {error}") from error
