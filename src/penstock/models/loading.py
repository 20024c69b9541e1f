"""Progress bar for loading a model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from penstock.config.progress import track
from penstock.layers import BuildContext

logger = logging.getLogger(__name__)


def track_layers(context: BuildContext, layers: Sequence[int]) -> Iterable[int]:
    """Iterate over the layers to build; on rank 0 with a progress bar. Building a layer reads and packs its weights."""
    if context.group.rank:
        return layers
    return track("loading weights", layers, len(layers), "layer", logger)
