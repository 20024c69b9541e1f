"""Compare the bits of models run by transformers' modules on several ranks with those on one rank. Each rank is a
process, started by ``test_transformers_ranks.py``:

python transformers_ranks.py DESCRIPTOR RANK SIZE QUANTIZATION:FOLDER...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers_architectures import draw

from penstock.models.loader import LoadOptions, load_model
from penstock.models.model import Model
from penstock.models.read_config import read_config
from penstock.models.transformers.check import BLOCK_SIZE, Runs
from penstock.ops import cpu
from penstock.parallel import SINGLE_RANK, Group
from penstock.parallel.shared_memory import SharedMemoryGroup

LENGTH = 40
STEPS: list[list[tuple[int, int, int]]] = [
    [(0, 0, 17)],
    [(1, 0, LENGTH), (0, 17, LENGTH - 1)],
    [(0, LENGTH - 1, LENGTH)],
]


def load(folder: Path, group: Group, quantization: str) -> Model:
    options = LoadOptions(dtype=torch.float32, group=group, quantization=quantization, threads=1)
    return load_model(folder, cpu, options, read_config(folder, "transformers"))


@torch.inference_mode()
def results(model: Model, group: Group) -> list[Tensor]:
    """Logits of two sequences, one of which is computed in three steps."""
    ids = torch.tensor([draw(row, LENGTH) for row in range(2)])
    run = Runs(model, cpu, ids, [torch.arange(LENGTH)] * 2)
    found = []
    for parts in STEPS:
        with group.step():
            found.append(model.logits(run(*parts)))
    return found


def bytes_per_block(model: Model) -> int:
    return sum(spec.kv_heads * spec.head_dim for spec in model.kv_specs(BLOCK_SIZE))


def main() -> None:
    descriptor, rank, size = map(int, sys.argv[1:4])
    group = SharedMemoryGroup(descriptor, rank, size, timeout=120)
    cpu.set_threads(1)
    for argument in sys.argv[4:]:
        quantization, folder = argument.split(":")
        model = load(Path(folder), group, quantization)
        found, stored = results(model, group), bytes_per_block(model)
        if rank:
            continue
        whole = load(Path(folder), SINGLE_RANK, quantization)
        same = all(map(torch.equal, found, results(whole, SINGLE_RANK)))
        print(Path(folder).name, same, f"{stored / max(bytes_per_block(whole), 1):g}", flush=True)


if __name__ == "__main__":
    main()
