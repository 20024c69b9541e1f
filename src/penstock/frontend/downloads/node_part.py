"""Selection of the weight files that a node needs: those with tensors of its pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.checkpoint.config_json import CONFIG, read_config_json
from penstock.checkpoint.stored_tensors import INDEX, Index
from penstock.config.options import EngineOptions
from penstock.core.errors import invalid
from penstock.core.json_files import read_text_file
from penstock.engine.executor.layout import ranks_of
from penstock.engine.executor.rendezvous import check_nodes
from penstock.planning.model_size import model_size_of
from penstock.planning.pipeline import split_layers

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
NEEDED_FIRST = (CONFIG, INDEX)
"""Files to fetch first: the weight files are selected by their content."""


def stages_of_node(options: EngineOptions) -> set[int]:
    """Pipeline stages with ranks on the node ``node_rank``. Raises ``PenstockError`` as ``check_nodes``."""
    check_nodes(options)
    ranks = ranks_of(options.tensor_parallel_size, options.pipeline_parallel_size, options.nnodes)
    return {rank.stage for rank in ranks if rank.node == options.node_rank}


def weight_files_of_node(folder: Path, options: EngineOptions) -> Callable[[str], bool] | None:
    """Filter for the paths of the weight files that a node needs; None: it needs all files.

    With tensor parallelism alone every node reads a part of every tensor, and needs all files.

    Args:
        folder: folder with those files of ``NEEDED_FIRST`` that the checkpoint has.

    Raises ``PenstockError`` (``invalid``) for an impossible parallel configuration, or a malformed index.
    """
    stages = stages_of_node(options)
    if len(stages) == options.pipeline_parallel_size or not (folder / INDEX).exists():
        return None
    size = model_size_of(read_config_json(folder))
    quantization = size.quantization if options.quantization == "none" else options.quantization
    split = split_layers(
        size, options.pipeline_parallel_size, options.pipeline_parallel_layers, quantization, options.dtype
    )
    layers = {layer for stage in stages for layer in split[stage]}
    at_an_end = 0 in layers or size.num_layers - 1 in layers
    try:
        tensors = msgspec.json.decode(read_text_file(folder / INDEX), type=Index).weight_map
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid("model", f"{folder / INDEX} is malformed ({error}): download it again") from error

    def is_needed(name: str) -> bool:
        layer = LAYER.search(name)
        if not layer:
            return at_an_end  # embedding, final norm and LM head
        return min(int(layer[1]), size.num_layers - 1) in layers  # MTP layers belong to the last stage

    needed = {file for name, file in tensors.items() if is_needed(name)}
    known = set(tensors.values())
    return lambda path: path in needed or path not in known
