"""Random faults in checkpoints of all formats: each raises a one-line error, and no code in a file runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from quantized import KINDS, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock import ops
from penstock.core import Code, PenstockError
from penstock.models.loader import load_model

DRAWS = int(os.environ.get("PENSTOCK_BROKEN_CHECKPOINTS", "40"))
MODEL, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
OPTIONAL = ("g_idx", "weight_shape", "weight_format")
OTHER_DTYPES = {torch.int32: torch.int16, torch.int64: torch.float32, torch.int8: torch.int16, torch.uint8: torch.int32}
ODD: list[Any] = [
    *(None, 0, -1, -7, 1, 3, 13, 10**6, 10**9, 2**40, 1.5, 1e-300, 1e300, float("nan"), float("inf"), -1e9),
    *("128", "load", "", True, [], {}, [128], [None], [float("nan")], {"a": 1}),
]


class Bomb:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def change(folder: Path, choose: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = load_file(folder / MODEL)
    save_file({name: tensor.contiguous() for name, tensor in choose(tensors).items()}, folder / MODEL)


def one_of(rng: Random, tensors: dict[str, Tensor], kind: Callable[[str, Tensor], bool] = lambda *_: True) -> str:
    return rng.choice([name for name, tensor in sorted(tensors.items()) if kind(name, tensor)])


def missing(rng: Random, folder: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors.pop(one_of(rng, tensors, lambda name, _: not name.endswith(OPTIONAL)))
        return tensors

    change(folder, drop)


def wrong_shape(rng: Random, folder: Path) -> None:
    def grow(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = one_of(rng, tensors, lambda name, _: not name.endswith("weight_format"))
        grown = tensors[name].reshape(1) if tensors[name].dim() == 0 else tensors[name]
        return tensors | {name: torch.cat((grown, grown[:1]))}

    change(folder, grow)


def wrong_dtype(rng: Random, folder: Path) -> None:
    def cast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = one_of(rng, tensors)
        return tensors | {name: tensors[name].to(OTHER_DTYPES.get(tensors[name].dtype, torch.int32))}

    change(folder, cast)


def not_finite(rng: Random, folder: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        scales = ("scale", "scales", "scale_inv", "SCB", "absmax")
        name = one_of(rng, tensors, lambda name, tensor: name.endswith(scales) and tensor.is_floating_point())
        spoilt = tensors[name].float().clone()
        spoilt.view(-1)[rng.randrange(spoilt.numel())] = rng.choice([float("nan"), float("inf"), -float("inf")])
        return tensors | {name: spoilt}

    change(folder, spoil)


def truncated(rng: Random, folder: Path) -> None:
    content = (folder / MODEL).read_bytes()
    (folder / MODEL).write_bytes(content[: rng.choice([0, 5, 8, 100, len(content) // 2, len(content) - 1])])


def bad_header(rng: Random, folder: Path) -> None:
    content = (folder / MODEL).read_bytes()
    length = rng.choice([0, 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
    (folder / MODEL).write_bytes(length.to_bytes(8, "little") + content[8:])


def noise_in_header(rng: Random, folder: Path) -> None:
    content = bytearray((folder / MODEL).read_bytes())
    for _ in range(rng.randrange(1, 8)):
        content[rng.randrange(8, int.from_bytes(content[:8], "little"))] = rng.randrange(256)
    (folder / MODEL).write_bytes(content)


def noise_in_tensors(rng: Random, folder: Path) -> None:
    """Set random bytes in tensors: indices out of range, invalid descriptions, arbitrary numbers."""

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = one_of(rng, tensors, lambda name, tensor: tensor.dim() > 0)
        raw = tensors[name].contiguous().view(torch.uint8).clone()
        for _ in range(rng.randrange(1, 20)):
            raw.view(-1)[rng.randrange(raw.numel())] = rng.randrange(256)
        return tensors | {name: raw.view(tensors[name].dtype)}

    change(folder, spoil)


def odd_config(rng: Random, folder: Path) -> None:
    """Change a field of ``quantization_config``, at any depth."""
    config = json.loads((folder / CONFIG).read_text())
    place = config["quantization_config"]
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.3:
            break
        place = place[key]
    place[key] = rng.choice(ODD)
    (folder / CONFIG).write_text(json.dumps(config))


def odd_field(rng: Random, folder: Path) -> None:
    """Change or remove a field of ``config.json``, or of an object in it."""
    config = json.loads((folder / CONFIG).read_text())
    place, key = config, rng.choice(sorted(config))
    if isinstance(place[key], dict) and place[key] and rng.random() < 0.8:
        place = place[key]
        key = rng.choice(sorted(place))
    if rng.random() < 0.1:
        del place[key]
    else:
        place[key] = rng.choice(ODD)
    (folder / CONFIG).write_text(json.dumps(config))


def unknown_method(rng: Random, folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config["quantization_config"]["quant_method"] = rng.choice(["aqlm", "exl3", "", 0, 4, [], "GPTQ", "nvfp4"])
    (folder / CONFIG).write_text(json.dumps(config))


def bad_index(rng: Random, folder: Path) -> None:
    names = dict.fromkeys(load_file(folder / MODEL), MODEL)
    tricks = ["../" + MODEL, "/etc/passwd", "", ".", "..", "none.safetensors", CONFIG, 5, None, "a/../" + MODEL, "a\0b"]
    names[rng.choice(sorted(names))] = rng.choice(tricks)  # type: ignore[arg-type, assignment]
    index: Any = rng.choice([{"weight_map": names}] * 5 + [{"weight_map": []}, [], {}, {"weight_map": {}}])
    (folder / INDEX).write_text(json.dumps(index))


def pickled_code(rng: Random, folder: Path) -> None:
    tensors: dict[str, Any] = dict(load_file(folder / MODEL))
    (folder / MODEL).unlink()
    tensors[rng.choice(sorted(tensors))] = Bomb(folder / "exploded")
    path = folder / "pytorch_model.bin"
    if rng.random() < 0.7:
        torch.save(tensors, path)
    else:
        path.write_bytes(pickle.dumps(tensors))


BREAK = (missing, wrong_shape, wrong_dtype, not_finite, truncated, bad_header, unknown_method, bad_index, pickled_code)
"""Faults that prevent the load of any checkpoint."""
ALTER = (noise_in_header, noise_in_tensors, odd_config, odd_field)
"""Changes after which a checkpoint may still be loaded."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function that returns the folder of a valid checkpoint for a kind of quantization."""

    @cache
    def folder(kind: str) -> Path:
        path = tmp_path_factory.mktemp("whole")
        quantize(path, KINDS[kind])
        return path

    return folder


@pytest.mark.parametrize("seed", range(DRAWS))
def test_broken_checkpoint_raises_one_line_error(seed: int, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    rng = Random(seed)
    kinds, faults = sorted(KINDS), (*BREAK, *ALTER)
    fault = faults[seed % len(faults)]
    folder = shutil.copytree(checkpoints(rng.choice(kinds)), tmp_path / "broken")
    fault(rng, folder)
    error = None
    try:
        load_model(folder, ops.backend(torch.device("cpu"), rng.choice(["reference", "auto"])))
    except PenstockError as raised:
        error = raised
    assert not (folder / "exploded").exists()
    if fault in BREAK:
        assert error
    if error:
        assert error.failure.code in (Code.INVALID, Code.UNSUPPORTED)
        assert "\n" not in str(error) and len(str(error)) <= 500
