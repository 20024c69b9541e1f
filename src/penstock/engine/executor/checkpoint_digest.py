"""What nodes compare of their checkpoints."""

from __future__ import annotations

import hashlib
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 256, 2**14
"""What ``sampled_digest`` reads of each file besides its header."""


def sampled_digest(folder: Path) -> str:
    """Identifies the contents of a checkpoint on any machine, by ``config.json``, and by names, sizes, headers and
    evenly spread parts of its files: weights that were trained differ nearly everywhere."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as content:
            header = int.from_bytes(content.read(8), "little") if path.suffix == ".safetensors" else size
            content.seek(0)
            digest.update(content.read(min(header + 8, size)))
            for sample in range(SAMPLES):
                content.seek(max(size - SAMPLE_BYTES, 0) * sample // (SAMPLES - 1))
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()
