"""Heads after pooling: the classifier of a checkpoint, and the dense layers of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from penstock.checkpoint.model_config import ModelConfig
from penstock.checkpoint.sentence_transformers import DenseModule, read_dense_modules
from penstock.layers import BuildContext, PoolerHead
from penstock.layers.pooler import PoolerLayer, dense

from .registry import Family
from .weights import Checkpoint


def build_heads(context: BuildContext, config: ModelConfig, family: Family, folder: Path) -> Mapping[str, PoolerHead]:
    """Build the pooling heads of a checkpoint (``Model.heads``): ``classifier`` and ``dense``, if it has them."""
    heads = {}
    if config.num_labels:
        heads["classifier"] = family.build_classifier(context, config)
    if modules := read_dense_modules(folder):
        layers = [_dense(context, module) for module in modules]
        heads["dense"] = PoolerHead(layers, modules[-1].outputs)
    return heads


def _dense(context: BuildContext, module: DenseModule) -> PoolerLayer:
    module_context = replace(context, weights=Checkpoint(module.folder), output=None)
    return dense(module_context, "linear", module.inputs, module.outputs, module.function, module.bias)


def score_classifier(context: BuildContext, config: ModelConfig) -> PoolerHead:
    """Build the classifier of a decoder: a matrix without bias (``score``)."""
    return PoolerHead([dense(context, "score", config.hidden_size, config.num_labels, bias=False)], config.num_labels)
