"""Options of ``penstock bench serve``, under the names of ``vllm bench serve`` where it has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from penstock.config.option import option
from penstock.core.errors import invalid

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
"""Metrics of a request that ``--goodput`` can limit."""
PICTURES = (".png", ".svg", ".pdf")


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a load test."""

    base_url: str = "http://127.0.0.1:8000"
    """URL of the server."""
    endpoint: str = "/v1/completions"
    """Path of the API. /v1/completions gets token ids, so that input lengths are exact; /v1/chat/completions gets
    common words of about one token each."""
    model: Annotated[str, option(empty="the first that the server lists")] = ""
    """Name of the model on the server."""
    header: tuple[str, ...] = ()
    """Headers of all requests, each as KEY=VALUE."""
    api_key: Annotated[str, option(empty="$OPENAI_API_KEY")] = ""
    """API key of the server."""
    dataset_name: Literal["random", "trace"] | None = None
    """random prompts, or the lengths, arrival times and shared prefixes of a trace. Default: trace if dataset_path is
    set, otherwise random."""
    dataset_path: str = ""
    """Trace file: JSONL as Mooncake's (timestamp, input_length, output_length, hash_ids; equal ids become equal blocks
    of 512 tokens) or CSV as Azure's (TIMESTAMP,ContextTokens,GeneratedTokens)."""
    num_prompts: Annotated[int, option(ge=1)] = 100
    """Number of requests; with a trace, the maximum number, from its beginning."""
    random_input_len: Annotated[int, option("tokens", ge=1)] = 128
    """Length of random prompts."""
    random_output_len: Annotated[int, option("tokens", ge=1)] = 64
    """Number of tokens to generate for random prompts."""
    random_prefix_len: Annotated[int, option("tokens", ge=0)] = 0
    """Length of a prefix that all random prompts share, in addition to random_input_len."""
    max_input_len: Annotated[int, option("tokens", ge=0)] = 0
    """Maximum length to which prompts of a trace are clipped; 0: not clipped."""
    max_output_len: Annotated[int, option("tokens", ge=0)] = 0
    """Maximum length to which outputs of a trace are clipped; 0: not clipped."""
    random_range_ratio: Annotated[float, option(ge=0, lt=1)] = 0.0
    """Random lengths are uniform between 1 - ratio and 1 + ratio times random_input_len and random_output_len."""
    vocab_size: Annotated[int, option(ge=2)] = 3000
    """Exclusive upper bound of the token ids in prompts, which begin at 1000."""
    ignore_eos: bool = False
    """Generate the full output length, if the server supports ignore_eos."""
    temperature: float = 0.0
    """Sampling temperature; 0: greedy."""
    extra_body: str = "{}"
    """Additional fields of all requests, as JSON."""
    seed: Annotated[int, option(ge=0)] = 0
    """Seed of lengths, prompts and arrival times; change it to avoid hits in a prefix cache."""
    request_rate: Annotated[float, option(ge=0)] = 0.0
    """Requests per second; inf: as fast as max_concurrency allows. 0: inf, or the times of the trace."""
    burstiness: Annotated[float, option(gt=0)] = 1.0
    """Shape of the gamma-distributed gaps between requests: 1 is a Poisson process, less is burstier, inf is even."""
    max_concurrency: Annotated[int, option(ge=0)] = 0
    """Maximum number of concurrent requests; the client's waiting time is not part of latencies. 0: no limit."""
    trace_speedup: Annotated[float, option(gt=0)] = 1.0
    """Factor that divides the arrival times of a trace: 2 sends its requests twice as fast."""
    num_warmups: Annotated[int, option(ge=0)] = 1
    """Number of warm-up requests, which are not measured."""
    goodput: tuple[str, ...] = ()
    """Latency limits as METRIC:MILLISECONDS, such as ttft:500 tpot:50 e2el:2000; requests within all limits count as
    goodput."""
    percentile_metrics: str = ",".join(METRICS)
    """Latency metrics to report, separated by commas."""
    metric_percentiles: str = "90,95,99"
    """Percentiles to report in addition to mean and median, separated by commas."""
    json: str = ""
    """File for the results as JSON; empty: no file, -: print JSON instead of the table."""
    picture: str = ""
    """File for a plot of latencies and load over time (png, svg or pdf); empty: no plot."""

    def check(self) -> None:
        """Raise ``PenstockError`` (``invalid``) for lists that cannot be parsed, and files that cannot be written."""
        for name, path in (("json", Path(self.json)), ("picture", Path(self.picture))):
            if str(path) not in (".", "-") and (path.is_dir() or not os.access(path.parent, os.W_OK)):
                raise invalid(name, f"{path} cannot be written: set a file in a writable folder")
        if self.picture and not self.picture.endswith(PICTURES):
            raise invalid("picture", f"{self.picture} is not one of {', '.join(PICTURES)}")
        _ = self.headers, self.body, self.limits, self.metrics, self.percentiles

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers by name."""
        return dict(_pair("header", text, "=") for text in self.header)

    @property
    def body(self) -> dict[str, Any]:
        """``extra_body`` as a dict. Raises ``PenstockError`` (``invalid``) if it is not a JSON object."""
        try:
            return msgspec.json.decode(self.extra_body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise invalid("extra_body", f"must be a JSON object: {error}") from error

    @property
    def limits(self) -> dict[str, float]:
        """Maximum milliseconds of a request by metric (``goodput``)."""
        pairs = dict(_pair("goodput", text, ":") for text in self.goodput)
        if unknown := pairs.keys() - set(GOODPUT_METRICS):
            raise invalid("goodput", f"{min(unknown)} is not one of {', '.join(GOODPUT_METRICS)}")
        return {metric: _number("goodput", text, msgspec.Meta(gt=0)) for metric, text in pairs.items()}

    @property
    def metrics(self) -> list[str]:
        """Names in ``percentile_metrics``, in the order of ``METRICS``."""
        given = self.percentile_metrics.split(",")
        if unknown := set(given) - set(METRICS):
            raise invalid("percentile_metrics", f"{min(unknown)} is not one of {', '.join(METRICS)}")
        return [metric for metric in METRICS if metric in given]

    @property
    def percentiles(self) -> list[float]:
        """``metric_percentiles`` as numbers."""
        return [
            _number("metric_percentiles", text, msgspec.Meta(ge=0, le=100))
            for text in self.metric_percentiles.split(",")
        ]


def _pair(name: str, text: str, mark: str) -> tuple[str, str]:
    key, separator, value = text.partition(mark)
    if not separator:
        raise invalid(name, f"{text!r} must contain {mark!r}")
    return key, value


def _number(name: str, text: str, bounds: msgspec.Meta) -> float:
    try:
        number: float = msgspec.convert(text, Annotated[float, bounds], strict=False)
    except msgspec.ValidationError as error:
        raise invalid(name, f"{text} is wrong: {error}") from error
    return number
