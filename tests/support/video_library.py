"""transformers' video processors without torchvision, which is replaced by the PyTorch operators that it calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from image_checkpoints import video_processor
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, image_processing_backends, video_processing_utils


def _resize(image: Tensor, size: tuple[int, int], interpolation: int, antialias: bool) -> Tensor:
    assert interpolation == 3
    flat = F.interpolate(image.flatten(0, -4), size=size, mode="bicubic", antialias=antialias)
    return flat.unflatten(0, image.shape[:-3])


def _normalize(image: Tensor, mean: Tensor, std: Tensor, inplace: bool) -> Tensor:
    return (image - mean[:, None, None]) / std[:, None, None]


@contextmanager
def library() -> Iterator[None]:
    """Context in which transformers' video processors work without torchvision."""
    names = "torchvision torchvision.transforms torchvision.transforms.v2 torchvision.transforms.v2.functional".split()
    functions: Any = ModuleType(names[-1])
    functions.resize, functions.normalize = _resize, _normalize
    functions.grayscale_to_rgb = lambda image: image
    functions.InterpolationMode = type("InterpolationMode", (), {"LANCZOS": 1, "BICUBIC": 3})
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, functions if name == names[-1] else ModuleType(name))
        for module in (image_processing_backends, video_processing_utils):
            patch.setattr(module, "tvF", functions, raising=False)
        patch.setattr(image_processing_backends, "pil_torch_interpolation_mapping", {3: 3})
        yield


def processor_of(model: PreTrainedModel) -> Any:
    """transformers' video processor of a model. Use it within ``library``."""
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    kind = Qwen3VLVideoProcessor if "qwen3" in model.config.model_type else Qwen2VLVideoProcessor
    return kind(do_sample_frames=True, cap_pixels_per_frame=False, **video_processor(model))


def process(model: PreTrainedModel, frames: Any, video_fps: float, **kwargs: Any) -> dict[str, Any]:
    """Output of transformers' video processor for an array of frames."""
    with library():
        metadata = {"total_num_frames": len(frames), "fps": video_fps}
        processor = processor_of(model)
        if "num_frames" in kwargs:
            processor.fps = None
        output = processor([torch.from_numpy(frames)], video_metadata=[metadata], return_metadata=True, **kwargs)
    return dict(output)
