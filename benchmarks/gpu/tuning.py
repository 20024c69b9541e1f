"""Tuning of matrix products: time tiles that are not in the table, and report faster ones."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from shapes import FORMATS, Scale
from timing import seconds_of_many

from penstock.core.quantization import SCHEMES
from penstock.ops.cuda import matrix, tiles
from penstock.ops.cuda.launch import architecture, sm_count

TOKENS = (1, 8, 64, 256, 2048)


def run(scale: Scale, seconds: float = 240.0) -> dict[str, Any]:
    """For each matrix product of the last model and each number of tokens, time the chosen tile and the fastest other
    tile. Ends after ``seconds``."""
    device, model = torch.device(scale.device), scale.models[-1]
    dtype = getattr(torch, scale.dtype)
    shapes = {
        "qkv": (model.hidden, (model.heads + 2 * model.kv_heads) * model.head_dim, False),
        "o": (model.heads * model.head_dim, model.hidden, False),
        "gate_up": (model.hidden, 2 * model.inter, True),
        "down": (model.inter, model.hidden, False),
        "head": (model.hidden, model.vocab, False),
    }
    rows: list[dict[str, Any]] = []
    ends = time.monotonic() + seconds
    choose, count = matrix._tile, 1 if scale.interpret else 10
    try:
        for format, (name, (inputs, outputs, gated)) in product(scale.formats, shapes.items()):
            layer = SCHEMES[FORMATS[format]].layers
            weight = torch.randn(outputs, inputs, device=device, dtype=torch.float32).to(dtype)
            packed = matrix.pack([weight], None, layer)
            for tokens in TOKENS[:2] if scale.interpret else TOKENS:
                x = torch.randn(tokens, inputs, device=device).to(dtype)
                op = partial(matrix.linear_activation_and_mul, function="silu") if gated else matrix.linear
                call = partial(op, x, packed)
                x_bytes = 1 if layer.activation_bits else x.itemsize
                chosen = tiles.choose_tile(architecture(device), sm_count(device), tokens, outputs, x_bytes, layer)
                matrix._tile = choose
                expected = call()
                row = {"format": format, "matrix": name, "tokens": tokens, "chosen": asdict(chosen)}
                row["microseconds"] = seconds_of_many(call, device, count) * 1e6
                best, least = None, float("inf")
                for tile in _others(chosen, tiles.sizes(architecture(device), x_bytes, layer)):
                    if time.monotonic() > ends:
                        return {"rows": rows, "ended": "no time left"}
                    matrix._tile = lambda *_, tile=tile: tile
                    try:
                        same = torch.equal(call(), expected)
                        taken = seconds_of_many(call, device, count) * 1e6
                    except Exception:
                        continue  # the tile needs too much shared memory
                    if not same:
                        row.setdefault("other bits", []).append(asdict(tile))
                    if taken < least:
                        best, least = tile, taken
                if best:
                    row |= {"fastest other": asdict(best), "its microseconds": least}
                rows.append(row)
    finally:
        matrix._tile = choose
    return {"rows": rows}


def _others(chosen: tiles.Tile, sizes: tuple[tiles.Size, ...]) -> list[tiles.Tile]:
    """Tiles with other sizes and the same number of stages, and with the same sizes and other numbers of stages."""
    found = [
        tiles.Tile(size.bn, size.bt, size.bk, rows, size.bn // 16, stages)
        for size in sizes
        for rows in ((64, 32, 16) if size.bn == 64 else (size.bn,))
        for stages in (chosen.num_stages, 3)
    ]
    found += [replace(chosen, num_stages=stages) for stages in (2, 3, 4, 5, 6, 8, 12)]
    return [tile for tile in dict.fromkeys(found) if tile != chosen]
