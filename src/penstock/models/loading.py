"""Progress bar of loading a model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from penstock.config.progress import track
from penstock.layers import BuildContext

logger = logging.getLogger(__name__)


def track_layers(context: BuildContext, layers: Sequence[int]) -> Iterable[int]:
    """Iterate over the layers to build with a progress bar, on rank 0. Building reads and packs the weights."""
    if context.group.rank:
        return layers
    return track("loading weights", layers, len(layers), "layer", logger)
