"""Quantization of a checkpoint layer by layer (``penstock quantize``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock import ops
from penstock.checkpoint.engine_config import read_engine_config
from penstock.checkpoint.kv_spec import KV_QUANTIZATION
from penstock.checkpoint.model_config import PADDED_TO
from penstock.config.progress import Progress, print_line
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.quantization import fitting_group_size
from penstock.models import ModelConfig, read_config
from penstock.models.adapted import stored_matrix
from penstock.models.model import Model
from penstock.models.registry import find_family
from penstock.models.weights import Checkpoint, find_gguf
from penstock.ops import Ops, reference
from penstock.ops.cores import usable_cores
from penstock.text import Tokenizer
from penstock.version import __version__

from .fold import SCALING, can_scale
from .layer import LayerQuantizer, Observations, QuantizedLayer, check_shape, is_ignored
from .options import METHODS, QuantizeOptions
from .quality import compare, relative_error
from .report import make_report, write_report
from .stage import CPU, ChangedWeights, build_stage, hidden_states, matrix_names, run_stage
from .state import RunState, finished_report
from .statistics import InputObserver, InputStatistics
from .texts import read_samples, split_samples, texts_digest
from .threads import torch_threads
from .writer import CheckpointWriter, encode_layer, layer_prefix, read_tensors

logger = logging.getLogger(__name__)

AT_LOAD = ": use --quantization, which quantizes at load"
"""Advice for models that ``penstock quantize`` does not support."""
CALIBRATION, ORIGINAL, QUANTIZED = "calibration", "original", "quantized"
"""Streams of hidden states: calibration samples; evaluation samples, in the original and in the quantized model."""


def quantize(
    model: Path, output: Path, options: QuantizeOptions, *, threads: int = 0, progress: bool = True
) -> dict[str, Any]:
    """Write a quantized checkpoint and its report. Resumes an interrupted run.

    Args:
        model: folder of the checkpoint.
        output: output folder: new, empty, or of an earlier run with the same options.
        threads: number of threads; 0: one per usable core. A resumed run uses the number of its first start.
        progress: show a progress bar.

    Returns:
        The report, as in ``quantization_report.json``.

    Raises ``PenstockError`` for invalid options, and for a damaged or unsupported checkpoint.
    """
    options.check()
    config = read_config(model)
    if config.quantization_config is not None:
        raise invalid("model", f"{model} is already quantized: use the original checkpoint")
    if find_gguf(model):
        raise invalid("model", f"{model} has a GGUF file: use the original Hugging Face checkpoint")
    if read_engine_config(model):
        raise invalid("model", f"{model} is an engine folder: use the checkpoint that it was built from")
    _check_model(config, model, options)
    checkpoint = Checkpoint(model)
    if config.experts and any(name.endswith(config.experts.fused.tensors) for name in checkpoint.names):
        raise _unsupported(f"{model} has all experts of a layer in one tensor{AT_LOAD}")
    if not any(name.startswith(prefix := layer_prefix(checkpoint)) for name in checkpoint.names):
        raise _unsupported(f"{model} has no tensors {prefix}*, which penstock quantize requires{AT_LOAD}")
    _check_ignored(options, checkpoint)
    shapes = _matrix_shapes(config, checkpoint, options)
    options = _fit_sizes(options, [inputs for _, inputs in shapes.values()])
    for name, (outputs, inputs) in shapes.items():
        check_shape(name, outputs, inputs, options.format, options.file_format)
    job = {
        "penstock": __version__,
        "checkpoint": checkpoint.version,
        "texts": texts_digest(options.calib_dataset, model),
        **msgspec.json.decode(msgspec.json.encode(options)),
    }
    if (report := finished_report(output, job)) is not None:
        return report
    state = RunState(output, job, {"threads": threads or usable_cores()})
    run = _Run(model, options, config, checkpoint, state)
    with torch_threads(1):
        run.quantize_layers(progress)
    layers = [layer for number in range(config.num_layers) if (layer := state.layer(number))]
    writer = CheckpointWriter(model, output, config, checkpoint, options, state)
    report = make_report(job, layers, run.sizes, writer.write_weights(progress))
    write_report(report, output, state)
    writer.write_config()
    state.close()
    return report


def _check_model(config: ModelConfig, model: Path, options: QuantizeOptions) -> None:
    """Raise ``PenstockError`` (``unsupported``) for models that cannot be calibrated."""
    family, head_dim = config.architecture, config.stored_head_dim
    for is_unsupported, message in (
        (config.has_vision, f"{model} has image input, which penstock quantize does not support{AT_LOAD}"),
        (config.speech, f"{model} has audio input, which penstock quantize does not support"),
        (config.layer_heads, f"{family} has layers with different heads, which cannot be calibrated{AT_LOAD}"),
        (config.residual_streams > 1, f"{family} has several residual streams, which cannot be calibrated{AT_LOAD}"),
        (head_dim, f"{model} has head_dim {head_dim}, which must be a multiple of {PADDED_TO}{AT_LOAD}"),
        (config.latent, f"{family} has multi-head latent attention, which cannot be calibrated{AT_LOAD}"),
        (config.raw.get("num_mem_blocks"), f"layers of {family} share matrices, which cannot be calibrated{AT_LOAD}"),
    ):
        if is_unsupported:
            raise _unsupported(message)
    if options.method in SCALING and (find_family(family).find_stored or not can_scale(config)):
        message = f"{options.method} scales the norms before matrices, which is not supported for {family}"
        raise _unsupported(f"{message}: use --method gptq or wint4", "--method")


def _unsupported(message: str, field: str = "model") -> PenstockError:
    return PenstockError(Code.UNSUPPORTED, message, field)


def _check_ignored(options: QuantizeOptions, checkpoint: Checkpoint) -> None:
    """Raise ``PenstockError`` (``invalid``) for a pattern without a match, except "lm_head" (tied embeddings)."""
    names = [*(name.removesuffix(".weight") for name in checkpoint.names), "lm_head"]
    for pattern in options.ignore:
        if not any(is_ignored(name, [pattern]) for name in names):
            message = f"{pattern} matches no matrix: use a name or pattern such as down_proj or 'layers.0.*'"
            raise invalid("--ignore", message)


def _matrix_shapes(config: ModelConfig, checkpoint: Checkpoint, options: QuantizeOptions) -> dict[str, tuple[int, ...]]:
    """Shape ``(outputs, inputs)`` of each matrix that is quantized, by its name in the checkpoint."""
    names = matrix_names(config, reference, checkpoint, torch.float32)
    return {name: checkpoint.shape(f"{name}.weight") for name in names if not is_ignored(name, options.ignore)}


def _fit_sizes(options: QuantizeOptions, inputs: Sequence[int]) -> QuantizeOptions:
    """Reduce group size and rotation to divisors of the numbers of inputs of all matrices. If no supported group size
    divides them, the group size is unchanged, and ``check_shape`` raises."""
    common = math.gcd(*inputs)
    wanted, rotation = options.format.group_size, options.format.rotation
    if rotation and (block := math.gcd(rotation, common)) != rotation:
        block = block if block > 1 else 0
        message = "rotation %d does not divide the number of inputs of every matrix: using %d (0: no rotation)"
        logger.warning(message, rotation, block)
        options = msgspec.structs.replace(options, rotation=block)
    fitting = fitting_group_size(wanted, common)
    if wanted and not options.group_size and (power := math.gcd(wanted, common)) % 8 == 0:
        fitting = power  # without --group-size, a power of two is chosen: kernels of other systems support few sizes
    if fitting != wanted:
        logger.warning("group size %d does not divide the number of inputs of every matrix: using %d", wanted, fitting)
        options = msgspec.structs.replace(options, group_size=fitting)
    return options


class _Run:
    """A run that quantizes the layers of a checkpoint one by one."""

    def __init__(
        self, model: Path, options: QuantizeOptions, config: ModelConfig, checkpoint: Checkpoint, state: RunState
    ) -> None:
        self._options = options
        self._method = METHODS[options.method]
        self._config = config
        self._checkpoint = checkpoint
        self._state = state
        self._ops: Ops = ops.backend(CPU)
        self._threads = state.details["threads"]
        self._ops.set_threads(self._threads)
        self._dtype = torch.bfloat16 if config.dtype == "float16" else getattr(torch, config.dtype)
        self._kv_quantization = KV_QUANTIZATION[options.kv_cache_dtype]
        has_kernels = not options.format.activation_bits or self._ops.supports(options.format, self._dtype)
        self._quantized_ops: Ops = self._ops if has_kernels and self._kv_quantization != "fp8" else reference
        self._samples = self._read_samples(model)
        self.sizes = {
            "calibration_samples": len(self._samples[CALIBRATION]),
            "measured_samples": len(self._samples[ORIGINAL]),
            "sample_tokens": self._samples[ORIGINAL].shape[1],
        }

    def _read_samples(self, model: Path) -> dict[str, Tensor]:
        """Read the token ids of each stream, ``[samples, tokens]``."""
        options, config = self._options, self._config
        count, length = options.calib_size + options.eval_size, min(options.calib_seq_len, config.max_model_len)
        texts = options.calib_texts or options.calib_dataset
        samples = read_samples(texts, Tokenizer(model), count, length, options.seed)
        if int(samples.max()) >= config.vocab_size:
            message = f"the tokenizer of {model} has token id {int(samples.max())}; it must be below vocab_size,"
            raise invalid("model", f"{message} {config.vocab_size}")
        calibration, evaluation = split_samples(samples, options.calib_size, options.eval_size)
        if not self._method.calibrates:
            calibration = calibration[:0]
        return {CALIBRATION: calibration, ORIGINAL: evaluation, QUANTIZED: evaluation}

    def quantize_layers(self, progress: bool) -> None:
        """Quantize all layers that an earlier run has not finished."""
        layers, finished = self._config.num_layers, 0
        while finished < layers and self._state.layer(finished) is not None:
            finished += 1
        repeated = len(self._samples[CALIBRATION]) if self._method.sequential else 0
        per_layer = sum(map(len, self._samples.values())) + repeated
        total = layers * per_layer - repeated
        done = min(finished * per_layer, total)
        with Progress("samples", total, "sample", print_line("quantize"), done, progress) as bar:
            for number in range(finished, layers):
                bar.update(0, f"layer {number + 1} of {layers}")
                self._quantize_layer(number, bar.update)

    @torch.inference_mode()
    def _quantize_layer(self, number: int, progress: Callable[[int], object]) -> None:
        """Quantize a layer, and compute the inputs of the next layer."""
        is_last = number == self._config.num_layers - 1
        before = self._samples if number == 0 else {name: self._open(number - 1, name) for name in self._samples}
        after = {name: self._open(number, name, new=True) for name in self._samples}
        sequential = self._method.sequential
        observed = self._run_original(number, before, after, progress)
        prefix = f"{layer_prefix(self._checkpoint)}{number}."
        stored = read_tensors(self._checkpoint, prefix)
        quantizer = LayerQuantizer(self._ops, self._config, self._options, prefix, stored, observed, self._threads)
        layer = quantizer.quantize()
        stage, backend = self._build(number, self._quantized_ops, layer), self._quantized_ops
        with torch_threads(self._threads if backend is reference else 1):
            run_stage(stage, backend, before[QUANTIZED], after[QUANTIZED], self._kv_quantization, progress)
        if sequential and not is_last:
            run_stage(stage, backend, before[CALIBRATION], after[CALIBRATION], "", progress)
        result: dict[str, Any] = {"error": relative_error(after[ORIGINAL], after[QUANTIZED]), "matrices": layer.errors}
        if is_last:
            del stage
            # Original and quantized hidden states need the same head and backend: backends round differently.
            head = self._build(number, self._ops, QuantizedLayer())
            result["quality"] = compare(head, after[ORIGINAL], after[QUANTIZED], self._samples[ORIGINAL])
        tensors = encode_layer(layer, stored, self._options.file_format)
        self._state.write(self._state.layer_tensors(number), partial(save_file, tensors))
        self._state.finish_layer(number, result)

    def _run_original(
        self,
        number: int,
        before: dict[str, Tensor],
        after: dict[str, Tensor],
        progress: Callable[[int], object],
    ) -> Observations:
        """Compute the original layer. Returns statistics of the inputs of the layer's matrices."""
        observed = CALIBRATION if self._method.calibrates else ORIGINAL
        observer = InputObserver(self._ops, self._samples[observed].numel(), self._options.method == "gptq")
        stage = self._build(number, self._ops, QuantizedLayer(), observer)
        discards = observed == CALIBRATION and self._method.sequential
        run_stage(stage, self._ops, before[observed], None if discards else after[observed], "", progress)
        observer.finish()
        if observed != ORIGINAL:
            run_stage(stage, self._ops, before[ORIGINAL], after[ORIGINAL], "", progress)
        return self._by_stored_matrix(observer.statistics)

    def _by_stored_matrix(self, observed: Observations) -> Observations:
        """Statistics by names in the checkpoint, which may have several matrices with the same input in one tensor."""
        found, seen = dict[tuple[str, ...], InputStatistics](), set[str]()
        for names, statistics in observed.items():
            located = dict.fromkeys(stored_matrix(self._checkpoint, self._config, name) for name in names)
            if new := tuple(name for name in located if name not in seen):
                found[new] = statistics
                seen.update(new)
        return found

    def _build(self, number: int, backend: Ops, layer: QuantizedLayer, observer: InputObserver | None = None) -> Model:
        weights = ChangedWeights(self._checkpoint, layer.changed, layer.quantized)
        max_len = self._samples[ORIGINAL].shape[1]
        return build_stage(self._config, backend, weights, number, self._dtype, max_len, observer)

    def _open(self, number: int, stream: str, new: bool = False) -> Tensor:
        """Map the hidden states of a stream after a layer."""
        path = self._state.hidden_states(number, stream)
        return hidden_states(path, (*self._samples[stream].shape, self._config.hidden_size), self._dtype, new)
