"""Write an equivalent copy of the demo model with outliers in its activations, as in large models.

python outliers.py ../../src/penstock/demo/chat /tmp/planted
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from random import Random

from safetensors.torch import load_file, save_file

FOLLOWING = {
    "input_layernorm": [f"self_attn.{part}_proj" for part in "qkv"],
    "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
}
"""Matrices that multiply the output of each norm of a layer."""


def plant(model: Path, folder: Path, factor: int = 64, channels: int = 4) -> None:
    """Copy a checkpoint. Some channels of each norm are scaled up, and the weights that multiply them scaled down.

    Args:
        factor: power of two, so that nothing is rounded.
        channels: number of scaled channels per norm.
    """
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tensors, rng = load_file(folder / "model.safetensors"), Random(0)
    for name in sorted(tensors):
        prefix, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm in FOLLOWING:
            chosen = rng.sample(range(len(tensors[name])), channels)
            tensors[name][chosen] *= factor
            for matrix in FOLLOWING[norm]:
                tensors[f"{prefix}.{matrix}.weight"][:, chosen] /= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    plant(args.model, args.folder)


if __name__ == "__main__":
    main()
