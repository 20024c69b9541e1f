"""JSON results of a load test, with the keys and file names of ``vllm bench serve``."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.config.secrets import public_url

from .serve_options import ServeOptions

DATE = "%Y%m%d-%H%M%S"


def conditions(options: ServeOptions, model: str, num_prompts: int) -> dict[str, Any]:
    """Parameters of the load, under vLLM's names where it has them, and ``metadata``."""
    rate = options.request_rate or (None if options.dataset == "trace" else math.inf)
    ramp = {
        "ramp_up_strategy": options.ramp_up_strategy,
        "ramp_up_start_rps": options.ramp_up_start_rps,
        "ramp_up_end_rps": options.ramp_up_end_rps,
    }
    return {
        "bench": "serve",
        "date": datetime.now().strftime(DATE),
        "endpoint_type": options.backend or options.kind,
        "backend": options.backend or options.kind,
        "label": options.label or None,
        "model_id": model,
        "tokenizer_id": options.tokenizer or model,
        "num_prompts": num_prompts,
        **options.fields,
        "base_url": public_url(options.base_url),
        "endpoint": options.api,
        "dataset_name": options.dataset,
        "dataset_path": options.dataset_path or None,
        "request_rate": "inf" if rate == math.inf else rate,
        "burstiness": "inf" if math.isinf(options.burstiness) else options.burstiness,
        "max_concurrency": options.max_concurrency or None,
        **(ramp if options.ramp_up_strategy else {}),
        "trace_speedup": options.trace_speedup,
        "ignore_eos": options.ignore_eos,
        "seed": options.seed,
        "goodput": options.limits,
    }


def write(options: ServeOptions, results: dict[str, Any]) -> None:
    """Write the results as a line of JSON to the file ``json``, or append the line."""
    model = str(results["model_id"]).rpartition("/")[2]
    path = Path(options.json.replace("{model}", model).replace("{date}", results["date"]))
    with path.open("a" if options.append_result else "w", encoding="utf-8") as file:
        if file.tell():
            file.write("\n")
        json.dump(results, file)
