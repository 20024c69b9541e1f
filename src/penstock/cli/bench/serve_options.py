"""Options of ``penstock bench serve``, under the names of ``vllm bench serve`` where it has them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from penstock.config.option import option
from penstock.core.errors import invalid

from .dataset_options import DatasetOptions
from .option_values import check_writable, json_object, number, pair

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
REPORTED = "ttft,tpot,itl,e2el"
"""Default of ``percentile_metrics``."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
"""Metrics of a request that ``--goodput`` can limit."""
PICTURES = (".png", ".svg", ".pdf")
ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
}
"""Path of the API by backend."""


class ServeOptions(DatasetOptions, frozen=True, kw_only=True):
    """Options of a load test, in addition to those of its prompts."""

    base_url: str = "http://127.0.0.1:8000"
    """URL of the server."""
    backend: Literal["openai", "vllm", "openai-chat", "openai-embeddings"] | None = None
    """API: completions (openai, vllm), chats, or embeddings. Default: by endpoint."""
    endpoint: Annotated[str, option(empty="by backend")] = ""
    """Path of the API. /v1/completions and /v1/embeddings get token ids, so that input lengths are exact;
    /v1/chat/completions gets common words of about one token each."""
    model: Annotated[str, option(empty="the first that the server lists")] = ""
    """Name of the model on the server."""
    tokenizer: Annotated[str, option(empty="the same as model")] = ""
    """Name of the tokenizer in the results; the server counts tokens."""
    served_model_name: Annotated[str, option(empty="the same as model")] = ""
    """Name of the model in requests, if results are to have another one (model)."""
    lora_modules: tuple[str, ...] = ()
    """Names of adapters on the server; each request uses one of them instead of the model."""
    lora_assignment: Literal["random", "round-robin"] = "random"
    """Choice of a request's adapter."""
    header: tuple[str, ...] = ()
    """Headers of all requests, each as KEY=VALUE."""
    request_id_prefix: Annotated[str, option(empty="no header")] = ""
    """Prefix of the header X-Request-Id; the number of the request follows it."""
    api_key: Annotated[str, option(empty="$OPENAI_API_KEY")] = ""
    """API key of the server."""
    insecure: bool = False
    """Accept any certificate of an https server."""
    chat_template: bool = False
    """Send the prompts of sharegpt, custom and sonnet to /v1/completions with the model's chat template, which the
    server's /tokenize applies."""
    chat_template_kwargs: str = "{}"
    """Variables of the chat template, as JSON."""
    vocab_size: Annotated[int, option(ge=2)] = 3000
    """Exclusive upper bound of the token ids in prompts, which begin at 1000."""
    ignore_eos: bool = False
    """Generate the full output length, if the server supports ignore_eos."""
    temperature: Annotated[float | None, option(empty="the server's")] = 0.0
    """Sampling temperature; 0: greedy."""
    extra_body: str = "{}"
    """Additional fields of all requests, as JSON."""
    request_rate: Annotated[float, option("requests/s", ge=0)] = 0.0
    """Requests per second; inf: as fast as max_concurrency allows. 0: inf, or the times of the trace."""
    burstiness: Annotated[float, option(gt=0)] = 1.0
    """Shape of the gamma-distributed gaps between requests: 1 is a Poisson process, less is burstier, inf is even."""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    """Change the request rate during the load, from ramp_up_start_rps to ramp_up_end_rps. Default: constant."""
    ramp_up_start_rps: Annotated[float, option("requests/s", ge=0)] = 0.0
    """Request rate at the beginning."""
    ramp_up_end_rps: Annotated[float, option("requests/s", ge=0)] = 0.0
    """Request rate at the end."""
    max_concurrency: Annotated[int, option(ge=0)] = 0
    """Maximum number of concurrent requests; the client's waiting time is not part of latencies. 0: no limit."""
    num_warmups: Annotated[int, option(ge=0)] = 1
    """Number of warm-up requests, which are not measured."""
    ready_timeout: Annotated[float, option("seconds", ge=0)] = 0.0
    """Time to wait until the server answers a request; 0: do not wait."""
    goodput: tuple[str, ...] = ()
    """Latency limits as METRIC:MILLISECONDS, such as ttft:500 tpot:50 e2el:2000; requests within all limits count as
    goodput."""
    percentile_metrics: Annotated[str, option(empty=f"{REPORTED}; e2el for embeddings")] = ""
    """Latency metrics to report, separated by commas: ttft, tpot, itl, e2el, and, with the time that requests wait for
    max_concurrency, client_queue_time and e2el_including_client_queue."""
    metric_percentiles: str = "90,95,99"
    """Percentiles to report in addition to mean and median, separated by commas."""
    json: str = ""
    """File for the results as JSON; empty: no file, -: print JSON instead of the table. {model} and {date} in the name
    are replaced."""
    append_result: bool = False
    """Append the results to the file as another line."""
    save_detailed: bool = False
    """Add the lengths, times, output and error of each request to the JSON results."""
    metadata: tuple[str, ...] = ()
    """Additional fields of the JSON results, each as KEY=VALUE."""
    label: Annotated[str, option(empty="none")] = ""
    """Label of the run in the JSON results."""
    picture: str = ""
    """File for a plot of latencies and load over time (png, svg or pdf); empty: no plot."""
    progress: bool = True
    """Show a progress bar in a terminal."""

    def check(self) -> None:
        """Raise ``PenstockError`` (``invalid``) for contradictions, texts that cannot be parsed, and files that cannot
        be written."""
        self.check_dataset()
        for name, path in (("json", self.json), ("picture", self.picture)):
            if path not in ("", "-"):
                check_writable(name, Path(path))
        if self.picture and not self.picture.endswith(PICTURES):
            raise invalid("picture", f"{self.picture} is not one of {', '.join(PICTURES)}")
        if self.ramp_up_strategy and not (self.ramp_up_start_rps and self.ramp_up_end_rps):
            raise invalid("ramp_up_strategy", "requires ramp_up_start_rps and ramp_up_end_rps above 0")
        if self.ramp_up_strategy and 0 < self.request_rate < math.inf:
            raise invalid("request_rate", "cannot be combined with ramp_up_strategy, which sets the rate: remove it")
        if self.embeddings and (unknown := {*self.metrics, *self.limits} & {"ttft", "tpot", "itl"}):
            raise invalid("percentile_metrics", f"{min(unknown)} is not measured for embeddings: use e2el")
        _ = self.headers, self.body, self.limits, self.metrics, self.percentiles, self.fields, self.template_kwargs

    @property
    def api(self) -> str:
        """Path of the API."""
        return self.endpoint or ENDPOINTS[self.backend or "openai"]

    @property
    def embeddings(self) -> bool:
        """True if requests compute embeddings."""
        return self.kind == "openai-embeddings"

    @property
    def kind(self) -> str:
        """API by ``endpoint`` or ``backend``: ``openai``, ``openai-chat`` or ``openai-embeddings``."""
        kinds = {"/chat/completions": "openai-chat", "/embeddings": "openai-embeddings"}
        return next((kind for path, kind in kinds.items() if self.api.endswith(path)), "openai")

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers by name."""
        return dict(pair("header", text, "=") for text in self.header)

    @property
    def body(self) -> dict[str, Any]:
        """``extra_body`` as a dict. Raises ``PenstockError`` (``invalid``) if it is not a JSON object."""
        return json_object("extra_body", self.extra_body)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """``chat_template_kwargs`` as a dict. Raises ``PenstockError`` (``invalid``) if it is not a JSON object."""
        return json_object("chat_template_kwargs", self.chat_template_kwargs)

    @property
    def fields(self) -> dict[str, str]:
        """``metadata`` as a dict."""
        return dict(pair("metadata", text, "=") for text in self.metadata)

    @property
    def limits(self) -> dict[str, float]:
        """Maximum milliseconds of a request by metric (``goodput``)."""
        pairs = dict(pair("goodput", text, ":") for text in self.goodput)
        if unknown := pairs.keys() - set(GOODPUT_METRICS):
            raise invalid("goodput", f"{min(unknown)} is not one of {', '.join(GOODPUT_METRICS)}")
        return {metric: number("goodput", text, msgspec.Meta(gt=0)) for metric, text in pairs.items()}

    @property
    def metrics(self) -> list[str]:
        """Names in ``percentile_metrics``, in the order of ``METRICS``."""
        given = (self.percentile_metrics or ("e2el" if self.embeddings else REPORTED)).split(",")
        if unknown := set(given) - set(METRICS):
            raise invalid("percentile_metrics", f"{min(unknown)} is not one of {', '.join(METRICS)}")
        return [metric for metric in METRICS if metric in given]

    @property
    def percentiles(self) -> list[float]:
        """``metric_percentiles`` as numbers."""
        return [
            number("metric_percentiles", text, msgspec.Meta(ge=0, le=100))
            for text in self.metric_percentiles.split(",")
        ]
