"""Options of ``penstock bench latency|throughput``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from penstock.config.option import option

from .dataset_options import DatasetOptions
from .option_values import check_writable


class OfflineOptions(DatasetOptions, frozen=True, kw_only=True):
    """Options of both benchmarks."""

    n: Annotated[int, option("sequences", ge=1)] = 1
    """Number of sequences to generate per prompt, sampled at temperature 1 if there are several."""
    use_beam_search: bool = False
    """Search for the n most likely sequences instead of sampling."""
    detokenize: bool = False
    """Convert output tokens to text, as part of the measured time."""
    output_json: str = ""
    """File for the results as JSON; empty: no file."""

    def check(self) -> None:
        """Raise ``PenstockError`` (``invalid``) if the file cannot be written, or that of the dataset is missing."""
        self.check_dataset()
        if self.output_json:
            check_writable("output_json", Path(self.output_json))


class LatencyOptions(OfflineOptions, frozen=True, kw_only=True):
    """Options of ``bench latency``, whose prompts are random."""

    input_len: Annotated[int, option("tokens", ge=1)] = 128
    """Length of each prompt."""
    output_len: Annotated[int, option("tokens", ge=1)] = 64
    """Number of tokens to generate for each prompt."""
    batch_size: Annotated[int, option("prompts", ge=1)] = 1
    """Number of prompts in the batch."""
    num_iters_warmup: Annotated[int, option(ge=0)] = 1
    """Number of repetitions before the measured ones."""
    num_iters: Annotated[int, option(ge=1)] = 5
    """Number of measured repetitions."""


class ThroughputOptions(OfflineOptions, frozen=True, kw_only=True):
    """Options of ``bench throughput``."""

    num_prompts: Annotated[int, option(ge=1)] = 64
    """Number of prompts, all of which are queued at the start."""
