"""Loads a worker's models: the served model and the draft model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from penstock import demo, ops
from penstock.checkpoint.kv_spec import KV_QUANTIZATION, KVSpec
from penstock.checkpoint.stored_format import quantization_config_of
from penstock.config.cache_folder import cache_folder
from penstock.config.options import EngineOptions
from penstock.config.speculative import SpeculativeConfig
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.expert_placement import Ranks, read_placement
from penstock.core.lora import parse_lora_modules
from penstock.layers import ExpertLoad
from penstock.models import ModelConfig, read_config
from penstock.models.draft_heads import load_draft_heads
from penstock.models.loader import LoadOptions, load_model
from penstock.models.model import Model
from penstock.ops import Ops
from penstock.parallel import SINGLE_RANK, SINGLE_STAGE, Group, PipelineStage
from penstock.planning.draft_size import METHODS, head_method
from penstock.planning.kv_size import check_kv_cache_dtype
from penstock.planning.model_size import size_of
from penstock.planning.pipeline import split_layers

from ..draft_folder import draft_folder
from ..step import ModelInfo
from .fingerprint import fingerprint


class LoadedModels(NamedTuple):
    """The models of a worker, with kernels, device and properties."""

    ops: Ops
    device: torch.device
    model: Model
    draft: Model | None
    max_model_len: int
    max_loras: int
    info: ModelInfo
    expert_load: ExpertLoad
    """Counters of tokens per expert of the served model; empty without the option ``expert_load``."""
    reload: Callable[[Path | None], Model]
    """Builds the served model with the weights of another folder; None: of the folder of the served model. Raises
    ``PenstockError`` if the folder has another model, or its weights are missing, damaged or not finite."""


def load_models(
    options: EngineOptions, group: Group = SINGLE_RANK, stage: PipelineStage = SINGLE_STAGE, weights: str = ""
) -> LoadedModels:
    """Load the models selected by the options: the layers of this stage, and this rank's shard of each matrix.

    Args:
        weights: folder of the weights of the served model; empty: the option ``model``.

    Raises ``PenstockError`` if the options or a checkpoint are invalid or not supported.
    """
    folder = Path(options.model) if options.model else demo.CHAT
    device = device_of(options.device)
    if group.size > 1 and device.type != "cpu":
        from penstock.parallel.device_group import DeviceGroup

        if not isinstance(group, DeviceGroup):
            message = f"several ranks need CPUs, or one GPU each on one machine; the device is {device}"
            raise invalid("tensor_parallel_size", message, 1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = read_config(folder, options.model_impl)
    backend = ops.backend(device, options.ops, options.batch_invariant)
    for is_limited, models in (
        (config.has_vision, "models with image input"),
        (config.speech, "speech-to-text models"),
    ):
        if is_limited and device.type != "cpu":
            raise PenstockError(Code.UNSUPPORTED, f"device: {device} is not supported for {models}; use cpu", "device")
    quantization = KV_QUANTIZATION[options.kv_cache_dtype]
    # Fail before loading weights if the backend does not support the format.
    backend.new_kv_cache([KVSpec(1, 64, "float32", quantization=quantization)], 0, device)
    if options.quantization == "none":
        options = msgspec.structs.replace(options, quantization=config.quantization)
    backend.set_threads(options.threads)
    max_model_len = options.max_model_len or config.max_model_len
    max_loras = options.max_loras if options.enable_lora or parse_lora_modules(options.lora_modules) else 0
    speculative = SpeculativeConfig.read(options.speculative_config)
    mtp = bool(speculative and speculative.method == "mtp")

    expert_load, placement = ExpertLoad(), dict[int, Ranks]()
    if options.expert_placement and config.experts:
        numbers = config.experts.num_experts, group.size, options.num_redundant_experts
        placement = read_placement(options.expert_placement, *numbers).layers
    layers, split = None, options.pipeline_parallel_layers
    if stage.size > 1 or split:
        size = size_of(config)
        layers = split_layers(size, stage.size, split, options.quantization, options.dtype)[stage.rank]

    loading = LoadOptions(
        dtype=None if options.dtype == "auto" else getattr(torch, options.dtype),
        device=device,
        load_format=options.load_format,
        seed=options.seed,
        quantization=options.quantization,
        weight_cache_dir=cache_folder(options.weight_cache_dir),
        weight_cache_size=options.weight_cache_size,
        mtp_heads=mtp,
        max_lora_rank=options.max_lora_rank,
        max_step_tokens=options.max_num_batched_tokens,
        threads=options.threads,
        group=group,
        layers=layers,
        expert_parallel=options.enable_expert_parallel,
    )
    served = replace(
        loading,
        max_len=options.max_model_len or None,
        max_loras=max_loras,
        expert_placement=placement,
        num_redundant_experts=options.num_redundant_experts,
        expert_load=expert_load if options.expert_load else None,
    )

    def read_model(other: Path | None) -> Model:
        checked = replace(served, check_finite=True)
        if not other:
            return load_model(folder, backend, checked, config)
        checked = replace(checked, load_format="safetensors", weight_cache_dir=None)
        return load_model(other, backend, checked, _config_of(other, config))

    def reload(other: Path | None) -> Model:
        result = read_model(other)
        if heads:
            heads.attach(result)
        return result

    draft = _draft(speculative, options, config)
    model = read_model(Path(weights)) if weights else load_model(folder, backend, served, config)
    heads = None
    if draft and not draft.config:
        quantized = options.quantization
        heads = load_draft_heads(
            draft.folder, draft.method, model, backend, device=device, quantization=quantized, group=group
        )
        heads.attach(model)
    if speculative and speculative.tree and model.draft_heads:
        depth, count = speculative.tree.depth, len(model.draft_heads)
        if depth > count and not model.draft_heads[-1].recurrent:
            message = f"the token tree has depth {depth}, and the model {count} draft heads; give at most depth {count}"
            raise invalid("speculative_config", message, count)
    dtype = str(model.dtype).removeprefix("torch.")
    info = ModelInfo(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        has_lm_head=config.has_lm_head,
        dtype=dtype,
        quantization=options.quantization,
        fingerprint=fingerprint(backend, model, options.quantization, quantization),
        batch_invariant=backend.BATCH_INVARIANT and model.batch_invariant,
        weights_version=model.weights_version,
        mtp_layers=len(model.draft_heads) if mtp else 0,
        has_vision=model.vision is not None,
        feature_bytes=_feature_bytes(model),
        token_types=config.encoder.type_vocab_size if config.encoder else 0,
        heads=tuple(model.heads),
        embedding_size=model.heads["dense"].outputs if "dense" in model.heads else config.hidden_size,
    )
    draft_model = None
    if draft and draft.config:
        if draft.config.state:
            message = f"speculative_config: {draft.config.architecture} has recurrent state, and cannot draft"
            raise PenstockError(Code.UNSUPPORTED, message, "speculative_config")
        draft_model = load_model(draft.folder, backend, replace(loading, max_len=max_model_len), draft.config)
    return LoadedModels(backend, device, model, draft_model, max_model_len, max_loras, info, expert_load, reload)


def _config_of(folder: Path, config: ModelConfig) -> ModelConfig:
    """Configuration of a model with other weights: ``config``, with the quantization of the weights in ``folder``.

    Raises ``PenstockError`` (``invalid``) if the folder does not exist or its ``config.json`` describes another model.
    """
    if not folder.is_dir():
        raise invalid("path", f"{folder} is not a folder on this machine; give the folder of a checkpoint")
    if not (folder / "config.json").exists():
        return config
    read = read_config(folder, config.model_impl)
    other = replace(read, raw=config.raw, dtype=config.dtype)  # the new weights may be stored in another dtype
    if other != config:
        names = [field for field in vars(config) if getattr(config, field) != getattr(other, field)]
        differences = [f"{name} {getattr(other, name)} instead of {getattr(config, name)}" for name in names]
        raise invalid("path", f"{folder} has another model than the engine: {'; '.join(differences)}")
    stored = {"quantization_config": quantization_config_of(read.raw), "compression_config": None}
    return replace(config, raw={**config.raw, **stored})


def device_of(name: str) -> torch.device:
    """Device selected by the option ``device``. Raises ``PenstockError`` (``invalid``) if the device does not exist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise invalid("device", f"{name!r} is not a device: use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise invalid("device", "no GPU found, or this PyTorch cannot use it")
    if device.type != "cuda":
        return device
    device = torch.device("cuda", device.index or 0)  # torch.cuda.set_device needs an index
    if device.index >= (count := torch.cuda.device_count()):
        raise invalid("device", f"{device} does not exist: there are {count} GPUs, and each rank needs one", count)
    return device


class Draft(NamedTuple):
    """Draft model or draft heads selected by the options."""

    folder: Path
    method: str
    """Drafting method: ``draft_model``, or a method with heads, one of ``METHODS``."""
    config: ModelConfig | None
    """Configuration of a draft model; None for draft heads."""


def _draft(speculative: SpeculativeConfig | None, options: EngineOptions, model: ModelConfig) -> Draft | None:
    """The draft model or draft heads selected by the options; None without them.

    Raises ``PenstockError`` if no folder is given, the draft model does not fit the model (vocabulary size, context
    length, images, dtype of the KV cache), or the model has no MTP layers or does not support draft heads.
    """
    if speculative and speculative.method == "mtp" and not model.num_mtp_layers:
        message = "method mtp: this model has no MTP layers (num_nextn_predict_layers); use another method"
        raise invalid("speculative_config", message)
    folder = draft_folder(speculative, options.model)
    if not speculative or not folder:
        return None
    if method := speculative.method if speculative.method in METHODS else head_method(folder):
        if model.model_impl == "transformers":
            message = "draft heads are not supported with model_impl transformers; use suffix or a draft model"
            raise PenstockError(Code.UNSUPPORTED, message, "speculative_config")
        return Draft(folder, method, None)
    if speculative.tree:
        message = f"draft models cannot draft trees: remove the token tree, or replace {folder} by EAGLE, Medusa or MTP"
        raise PenstockError(Code.UNSUPPORTED, message, "speculative_config")
    config = read_config(folder, options.model_impl)
    if config.has_vision:
        message = f"the draft model {folder} has image input, which is not supported; use a text model"
        raise PenstockError(Code.UNSUPPORTED, message, "speculative_config")
    if config.vocab_size != model.vocab_size:
        message = f"the draft model has {config.vocab_size} tokens in its vocabulary, but must have {model.vocab_size}"
        raise invalid("speculative_config", f"{message} like the served model; use another draft model")
    check_kv_cache_dtype(options.kv_cache_dtype, config)
    length = min(options.max_model_len or model.max_model_len, model.max_model_len)
    if (longest := config.max_model_len) < length:
        message = f"is {length}, and the draft model {folder} has a context of {longest} tokens: give at most {longest}"
        raise invalid("max_model_len", f"{message}, or another draft model", longest)
    return Draft(folder, "draft_model", config)


def _feature_bytes(model: Model) -> int:
    if model.vision is None:
        return 0
    return (1 + len(model.vision.deepstack)) * model.config.hidden_size * model.dtype.itemsize
