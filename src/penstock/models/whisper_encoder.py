"""Whisper's audio encoder (Radford et al., 2022): two convolutions, and layers with bidirectional attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.checkpoint.speech import SpeechConfig
from penstock.layers import BuildContext, LayerNorm
from penstock.layers.vision import HeadThreads, Linear
from penstock.quant import PackedMatrix

WIDTH = 3
"""Kernel size of the convolutions in frames."""
EPS = 1e-5


class WhisperEncoder:
    """Encoder of independent windows of audio.

    Args:
        context: result of ``tower_context``.
        name: name of the encoder in the checkpoint.
        size: hidden size.
    """

    def __init__(self, context: BuildContext, name: str, config: SpeechConfig, size: int) -> None:
        self._dtype, self._device = context.dtype, context.device
        self._convolutions = [
            _Convolution(context, f"{name}.conv1", config.num_bins, size, stride=1),
            _Convolution(context, f"{name}.conv2", size, size, stride=2),
        ]
        self._positions = context.read_weight(f"{name}.embed_positions.weight", config.num_positions, size).clone()
        threads = HeadThreads(context)
        self._layers = [
            _Layer(context, f"{name}.layers.{number}", config, size, threads) for number in range(config.num_layers)
        ]
        self._norm = LayerNorm(context, f"{name}.layer_norm", size, EPS, bias=True)

    def __call__(self, features: Tensor) -> Tensor:
        """Encode ``[bins, frames]`` float32 to ``[frames / 2, size]``."""
        x = features.to(self._device, self._dtype).T.contiguous()
        for convolution in self._convolutions:
            x = convolution(x)
        x = x + self._positions
        for layer in self._layers:
            x = layer(x)
        return self._norm(x)


class _Convolution:
    """A convolution over time with GELU, computed as a matrix product with the ``WIDTH`` frames of each output."""

    def __init__(self, context: BuildContext, name: str, inputs: int, outputs: int, stride: int) -> None:
        weight = context.read_weight(f"{name}.weight", outputs, inputs, WIDTH).flatten(1).contiguous()
        bias = context.read_weight(f"{name}.bias", outputs)
        self._matrix = PackedMatrix(context.ops, context.ops.pack([weight], bias))
        self._stride = stride

    def __call__(self, x: Tensor) -> Tensor:
        """Convolve ``[frames, inputs]`` to ``[frames / stride, outputs]``."""
        padded = F.pad(x, (0, 0, WIDTH // 2, WIDTH // 2))
        seen = padded.unfold(0, WIDTH, self._stride)  # [frames / stride, inputs, WIDTH]
        return F.gelu(self._matrix.linear(seen.flatten(1).contiguous()))


class _Layer:
    """Encoder layer: attention and MLP, with pre-norm."""

    def __init__(self, context: BuildContext, name: str, config: SpeechConfig, size: int, threads: HeadThreads) -> None:
        self._heads, self._threads = config.num_heads, threads
        attention = f"{name}.self_attn"
        self._attention_norm = LayerNorm(context, f"{name}.self_attn_layer_norm", size, EPS, bias=True)
        self._projections = [
            Linear(context, f"{attention}.{part}_proj", size, size, bias=part != "k") for part in "qkv"
        ]
        self._output = Linear(context, f"{attention}.out_proj", size, size)
        self._mlp_norm = LayerNorm(context, f"{name}.final_layer_norm", size, EPS, bias=True)
        self._fc1 = Linear(context, f"{name}.fc1", size, config.intermediate_size)
        self._fc2 = Linear(context, f"{name}.fc2", config.intermediate_size, size)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer, ``[positions, size]`` to ``[positions, size]``."""
        x = x + self._attend(self._attention_norm(x))
        return x + self._fc2(F.gelu(self._fc1(self._mlp_norm(x))))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).view(len(x), self._heads, -1).transpose(0, 1)[:, None].contiguous()
            for project in self._projections
        )
        attended = self._threads.attend(q, k, v)  # [heads, 1, positions, head_dim]
        return self._output(attended[:, 0].transpose(0, 1).flatten(1).contiguous())


def largest_activation(config: SpeechConfig, size: int) -> int:
    """Approximate maximum memory of the encoder's activations in bytes: the float32 inputs of the convolutions, or the
    activations of a layer."""
    frames = config.num_frames * config.num_bins * WIDTH + config.num_positions * size * WIDTH
    layer = config.num_positions * (2 * config.intermediate_size + 6 * size)
    return torch.float32.itemsize * max(frames, layer)
