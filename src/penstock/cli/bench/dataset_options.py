"""Options of the prompts of a benchmark."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.config.option import option
from penstock.core.errors import invalid

GENERATED = ("random", "prefix_repetition")
"""Datasets without a file."""
LENGTHS = {
    "random": (128, 64, 0),
    "prefix_repetition": (256, 128, 256),
    "sonnet": (550, 150, 200),
    "custom": (0, 256, 0),
    "sharegpt": (0, 0, 0),
    "burstgpt": (0, 0, 0),
    "trace": (0, 0, 0),
}
"""Tokens of prompt, output and shared prefix by dataset; 0: those of the file."""


class DatasetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the prompts of a benchmark."""

    dataset_name: Literal["random", "prefix_repetition", "trace", "sharegpt", "custom", "sonnet", "burstgpt"] | None = (
        None
    )
    """random: random prompts; prefix_repetition: random prompts that share prefixes; trace: lengths, arrival times and
    shared prefixes of a trace; sharegpt, custom, sonnet: prompts of a file; burstgpt: lengths of a file. Default: trace
    if dataset_path is set, otherwise random."""
    dataset_path: str = ""
    """File of the dataset. trace: JSONL as Mooncake's (timestamp, input_length, output_length, hash_ids; equal ids
    become equal blocks of tokens) or CSV as Azure's (TIMESTAMP,ContextTokens,GeneratedTokens). sharegpt: JSON list of
    objects with conversations. custom: JSONL with prompt and, optionally, output_tokens. sonnet: lines of text.
    burstgpt: CSV with Model, Request tokens, Response tokens."""
    shuffle: bool = True
    """Take the rows of sharegpt, custom and burstgpt in random order."""
    oversample: bool = True
    """Repeat prompts if sharegpt, custom or burstgpt has fewer than num_prompts."""
    num_prompts: Annotated[int, option(ge=1)] = 100
    """Number of requests; with a trace, the maximum number, from its beginning."""
    input_len: Annotated[int, option("tokens", ge=0)] = 0
    """Length of prompts without the shared prefix of random and prefix_repetition, or with that of sonnet; 0: 128
    (sonnet: 550, prefix_repetition: 256)."""
    output_len: Annotated[int, option("tokens", ge=0)] = 0
    """Number of tokens to generate; 0: 64 (prefix_repetition: 128, sonnet: 150, other files: the length in
    the file, or 256)."""
    prefix_len: Annotated[int, option("tokens", ge=-1)] = -1
    """Length of a prefix that prompts share; -1: 0 (sonnet: 200, prefix_repetition: 256)."""
    num_prefixes: Annotated[int, option(ge=1)] = 10
    """Number of different prefixes of prefix_repetition."""
    max_input_len: Annotated[int, option("tokens", ge=0)] = 0
    """Maximum length to which prompts of a trace are clipped; 0: not clipped."""
    max_output_len: Annotated[int, option("tokens", ge=0)] = 0
    """Maximum length to which outputs of a trace are clipped; 0: not clipped."""
    range_ratio: Annotated[float, option(ge=0, lt=1)] = 0.0
    """Random lengths are uniform between 1 - ratio and 1 + ratio times input_len and output_len."""
    seed: Annotated[int, option(ge=0)] = 0
    """Seed of lengths, prompts and arrival times; change it to avoid hits in a prefix cache."""
    trace_speedup: Annotated[float, option(gt=0)] = 1.0
    """Factor that divides the arrival times of a trace: 2 sends its requests twice as fast."""
    trace_block_size: Annotated[int, option("tokens", ge=1)] = 512
    """Tokens per hash id of a JSONL trace."""
    trace_time_unit: Annotated[float, option("seconds", gt=0)] = 0.001
    """Unit of the times in a JSONL trace."""

    def check_dataset(self) -> None:
        """Raise ``PenstockError`` (``invalid``) if the dataset needs a file, or has none."""
        if bool(self.dataset_path) == (self.dataset in GENERATED):
            problem = "cannot be combined with" if self.dataset_path else "is required with"
            raise invalid("dataset_path", f"{problem} dataset_name {self.dataset}")

    @property
    def dataset(self) -> str:
        """Name of the dataset."""
        return self.dataset_name or ("trace" if self.dataset_path else "random")

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Tokens of prompt, output and shared prefix; 0: those of the file."""
        prompt, output, prefix = LENGTHS[self.dataset]
        return self.input_len or prompt, self.output_len or output, prefix if self.prefix_len < 0 else self.prefix_len
