"""The options of ``penstock bench serve``, under the names that ``vllm bench serve`` gives them where it has them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from penstock.config.option import option
from penstock.core.errors import invalid

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
"""Latency metrics of a single request, for which ``--goodput`` takes a limit."""
PICTURES = (".png", ".svg", ".pdf")


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a load test."""

    base_url: str = "http://127.0.0.1:8000"
    """Address of the server."""
    endpoint: str = "/v1/completions"
    """/v1/completions gets token ids, so that input lengths are exact; /v1/chat/completions gets common words, about a
    token each, in the model's template."""
    model: Annotated[str, option(empty="the first that the server lists")] = ""
    """Name of the model, as the server calls it."""
    header: tuple[str, ...] = ()
    """KEY=VALUE, sent with every request."""
    api_key: Annotated[str, option(empty="$OPENAI_API_KEY")] = ""
    """The server's key."""
    dataset_name: Literal["random", "trace"] | None = None
    """Random prompts, or a trace's lengths, times and shared prefixes; trace if a path is given."""
    dataset_path: str = ""
    """The trace: JSONL like Mooncake's (timestamp, input_length, output_length, hash_ids; equal ids become equal blocks
    of 512 tokens) or CSV like Azure's (TIMESTAMP,ContextTokens,GeneratedTokens)."""
    num_prompts: Annotated[int, option(ge=1)] = 100
    """Number of requests; the trace's first, too."""
    random_input_len: Annotated[int, option("tokens", ge=1)] = 128
    """Length of random prompts."""
    random_output_len: Annotated[int, option("tokens", ge=1)] = 64
    """Length of their outputs."""
    random_prefix_len: Annotated[int, option("tokens", ge=0)] = 0
    """Further tokens with which all prompts begin."""
    max_input_len: Annotated[int, option("tokens", ge=0)] = 0
    """Clip the trace's prompts to this; 0 does not."""
    max_output_len: Annotated[int, option("tokens", ge=0)] = 0
    """Clip the trace's outputs to this; 0 does not."""
    random_range_ratio: Annotated[float, option(ge=0, lt=1)] = 0.0
    """Random lengths lie evenly between 1 - ratio and 1 + ratio times these."""
    vocab_size: Annotated[int, option(ge=2)] = 3000
    """Token ids in prompts are 1000 to below this."""
    ignore_eos: bool = False
    """Generate the full length, where the server can."""
    temperature: float = 0.0
    """0 is greedy."""
    extra_body: str = "{}"
    """More fields of each request, as JSON."""
    seed: Annotated[int, option(ge=0)] = 0
    """Seed of lengths, texts and arrivals; take another to miss a prefix cache that has seen this one."""
    request_rate: Annotated[float, option(ge=0)] = 0.0
    """Arrivals a second; inf sends as fast as --max-concurrency lets. 0 is inf, or the times of the trace."""
    burstiness: Annotated[float, option(gt=0)] = 1.0
    """Shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts, inf evenly."""
    max_concurrency: Annotated[int, option(ge=0)] = 0
    """Requests at the same time; others wait here, which is in no latency. 0 is no limit."""
    trace_speedup: Annotated[float, option(gt=0)] = 1.0
    """Play a trace this many times as fast."""
    num_warmups: Annotated[int, option(ge=0)] = 1
    """Requests before, not measured."""
    goodput: tuple[str, ...] = ()
    """METRIC:MS. Count requests within all these milliseconds, as in ttft:500 tpot:50 e2el:2000."""
    percentile_metrics: str = ",".join(METRICS)
    """What to report."""
    metric_percentiles: str = "90,95,99"
    """Percentiles besides mean and median."""
    json: str = ""
    """File to write the results to; - prints them in place of the table."""
    picture: str = ""
    """File to draw latencies and the course of the load to (png, svg or pdf)."""

    def check(self) -> None:
        """Raises ``PenstockError`` (``invalid``) for lists that cannot be read, and files that cannot be written."""
        for name, path in (("json", Path(self.json)), ("picture", Path(self.picture))):
            if str(path) not in (".", "-") and (path.is_dir() or not os.access(path.parent, os.W_OK)):
                raise invalid(name, f"{path} cannot be written")
        if self.picture and not self.picture.endswith(PICTURES):
            raise invalid("picture", f"{self.picture} is not one of {', '.join(PICTURES)}")
        _ = self.headers, self.body, self.limits, self.metrics, self.percentiles

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers by name."""
        return dict(_pair("header", text, "=") for text in self.header)

    @property
    def body(self) -> dict[str, Any]:
        """``extra_body`` by field."""
        try:
            return msgspec.json.decode(self.extra_body, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise invalid("extra_body", f"must be a JSON object: {error}") from error

    @property
    def limits(self) -> dict[str, float]:
        """Milliseconds that a request may take, by metric."""
        pairs = dict(_pair("goodput", text, ":") for text in self.goodput)
        if unknown := pairs.keys() - set(GOODPUT_METRICS):
            raise invalid("goodput", f"{min(unknown)} is not one of {', '.join(GOODPUT_METRICS)}")
        return {metric: _number("goodput", text, msgspec.Meta(gt=0)) for metric, text in pairs.items()}

    @property
    def metrics(self) -> list[str]:
        """Latencies to report."""
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
        raise invalid(name, f"{text} has no {mark}")
    return key, value


def _number(name: str, text: str, bounds: msgspec.Meta) -> float:
    try:
        number: float = msgspec.convert(text, Annotated[float, bounds], strict=False)
    except msgspec.ValidationError as error:
        raise invalid(name, f"{text} is wrong: {error}") from error
    return number
