"""Profile of PaddleNLP: environment variables of ``start_server``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.config.addresses import own_index
from penstock.core.errors import invalid

from . import COMBINED, Alias, DerivedMetric, Profile, Settings, ignored, same, share

OLD = {
    "HTTP_PORT": "HEALTH_HTTP_PORT",
    "GRPC_PORT": "SERVICE_GRPC_PORT",
    "METRICS_PORT": "METRICS_HTTP_PORT",
    "INTER_QUEUE_PORT": "INTER_PROC_PORT",
    "PUSH_MODE_HTTP_PORT": "SERVICE_HTTP_PORT",
}
"""Current names of variables, by the names used before version 3.0."""
FORMATS = {"weight_only_int8": "wint8", "weight_only_int4": "wint4", "a8w8": "w8a8"}
"""``quantization`` by the format in the third part of a model's name."""

NODES = r"-(\d+)nodes\Z"
"""Pattern of the number of nodes at the end of a model's name."""


def nodes_named(name: str) -> int | None:
    """Number of nodes in a model's name; None if the name has no number of nodes."""
    found = re.search(NODES, [*name.strip("/").split("/"), ""][1])
    return int(found[1]) if found else None


def model_named(name: str) -> Mapping[str, Any]:
    """Parse a model's name, ``org/model`` or ``org/model/format``, to settings. The format becomes ``quantization`` (at
    load); the number of nodes is dropped, as it does not change the checkpoint.

    Raises ``ValueError`` for an invalid name, or an unsupported format.
    """
    parts = name.strip("/").split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError("it must be org/model or org/model/format")
    model = re.sub(NODES, "", parts[1])
    result: dict[str, Any] = {"model": f"{parts[0]}/{model.removesuffix('-MTP')}"}
    if model.endswith("-MTP"):
        result["speculative_config"] = '{"method": "mtp"}'
    if len(parts) == 3:
        if parts[2] not in FORMATS:
            raise ValueError(f"the format {parts[2]} is not supported, only {', '.join(FORMATS)}")
        result["quantization"] = FORMATS[parts[2]]
    return result


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("it must be 0 or 1")
    return text == "1"


def _at_most(maximum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not 1 <= int(text) <= maximum:
            raise ValueError(f"it must be from 1 to {maximum}")
        return int(text)

    return read


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65535:
        raise ValueError("it must be a port from 1 to 65535")
    return port


def _http_port(text: str) -> int:
    """Parse a port; -1: no HTTP."""
    return -1 if text == "-1" else _port(text)


def _handled_elsewhere(read: Callable[[str], object] = str) -> Alias:
    """Alias without a setting: ``read`` checks the value, and other code uses it."""

    def settings(text: str) -> Mapping[str, Any]:
        read(text)
        return {}

    return Alias(read=settings)


def _check(given: Mapping[str, str]) -> None:
    """Raise ``PenstockError`` (``invalid``) for contradictory variables."""
    for old, new in OLD.items():
        if old in given and given.get(new, given[old]) != given[old]:
            message = f"is {given[new]}, but {old} (the former name) is {given[old]}: set only one of them"
            raise invalid(new, message)
    ranks, nodes = _count(given, "MP_NUM"), _count(given, "MP_NNODE")
    _check_nodes(given, nodes)
    if ranks % nodes and "MP_NUM" in given:
        raise invalid("MP_NUM", f"{ranks} is not a multiple of MP_NNODE ({nodes})")
    devices = [device for device in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
    if devices and "MP_NUM" in given and len(devices) != ranks // nodes:
        needed = f"MP_NUM={ranks} on MP_NNODE={nodes} nodes needs {ranks // nodes}"
        raise invalid("CUDA_VISIBLE_DEVICES", f"has {len(devices)} devices, but {needed}")
    named = nodes_named(given.get("model_name", ""))
    if named not in (None, nodes):
        raise invalid("model_name", f"{given['model_name']} is for {named} nodes, but MP_NNODE is {nodes}", nodes)


def _addresses(given: Mapping[str, str]) -> tuple[list[str], str]:
    """Parse ``POD_IPS`` (all nodes) and ``POD_0_IP`` (node 0)."""
    ips = [ip.strip() for ip in given.get("POD_IPS", "").split(",") if ip.strip()]
    return ips, given.get("POD_0_IP", "").strip()


def _nodes(given: Mapping[str, str]) -> Settings:
    """Settings of a multi-node server. Node 0 has the address ``POD_0_IP``; the next nodes follow ``POD_IPS``."""
    nodes = _count(given, "MP_NNODE")
    if nodes == 1:
        return
    ips, first = _addresses(given)
    order = [first, *(ip for ip in ips if ip != first)]
    own = own_index(order)
    if own is None:
        raise invalid("POD_IPS", f"none of {', '.join(ips)} is an address of this machine")
    yield "nnodes", nodes, "MP_NNODE"
    yield "node_rank", own, "POD_IPS"
    yield "master_addr", first, "POD_0_IP"


def _check_nodes(given: Mapping[str, str], nodes: int) -> None:
    ips, first = _addresses(given)
    if nodes > 1 and not (ips and first):
        name = "POD_0_IP" if ips else "POD_IPS"
        about = "the address of node 0" if ips else "the addresses of all nodes"
        raise invalid(name, f"must be set to {about}, as MP_NNODE is {nodes}")
    if first and first not in ips:
        raise invalid("POD_0_IP", f"{first} is not among POD_IPS ({', '.join(ips) or 'none'})")
    if ips and len(ips) != nodes:
        raise invalid("POD_IPS", f"has {len(ips)} addresses, but MP_NNODE is {nodes}", nodes)


def _count(given: Mapping[str, str], name: str) -> int:
    text = given.get(name, "1")
    if not text.isdecimal() or not int(text):
        raise invalid(name, f"{text!r} is not a positive integer")
    return int(text)


_names: dict[str, Alias] = {
    "MODEL_DIR": Alias("model"),
    "model_name": Alias(read=model_named),
    "MP_NUM": Alias("tensor_parallel_size"),
    "MP_NNODE": COMBINED,
    "POD_IPS": COMBINED,
    "POD_0_IP": COMBINED,
    "CUDA_VISIBLE_DEVICES": _handled_elsewhere(),
    "HEALTH_HTTP_PORT": Alias("health_port", _port),
    "SERVICE_GRPC_PORT": Alias("grpc_port", _port),
    "METRICS_HTTP_PORT": Alias("metrics_port", _port),
    "INTER_PROC_PORT": Alias("master_port", _port),
    "SERVICE_HTTP_PORT": Alias("port", _http_port),
    "DISABLE_STREAMING": Alias("disable_streaming", _switch),
    "MAX_SEQ_LEN": Alias("max_prompt_len", _at_most(2**31 - 1)),
    "MAX_DEC_LEN": Alias("max_output_len", _at_most(2**31 - 1)),
    "BATCH_SIZE": Alias("max_num_seqs", _at_most(128)),
    "BLOCK_BS": Alias("kv_cache_sequences", float),
    "BLOCK_RATIO": Alias("kv_cache_ratio", float),
    "MAX_CACHED_TASK_NUM": Alias("max_waiting"),
    "PUSH_MODE_HTTP_WORKERS": Alias("api_server_count", _at_most(8)),
    "USE_WARMUP": Alias("use_warmup", _switch),
    "USE_HF_TOKENIZER": Alias("template_text", lambda text: not _switch(text)),
    "USE_CACHE_KV_INT8": Alias("kv_cache_dtype", lambda text: "int8" if _switch(text) else "auto"),
    "OUTPUT_LOG_TO_CONSOLE": _handled_elsewhere(_switch),
    "tag": ignored("checkpoints do not depend on a version of PaddleNLP"),
}

BATCH_AND_BLOCKS = "Running sequences (batch_size) and free KV blocks (block_num), and their maximums."


PROFILE = Profile(
    name="paddlenlp",
    title="PaddleNLP",
    defaults={
        "model": "/models/",
        "port": 9965,
        "health_port": 8110,
        "grpc_port": 8811,
        "metrics_port": 8722,
        "max_prompt_len": 8192,
        "max_output_len": 1024,
        "max_num_seqs": 50,
        "max_waiting": 128,
        "kv_cache_sequences": 50,
        "kv_cache_ratio": 0.75,
        "enable_prefix_caching": False,
    },
    variables={old: _names[new] for old, new in OLD.items()} | _names,
    check=_check,
    together=_nodes,
    metrics={
        f"inference_server_metrics.{name}": metric
        for name, metric in {
            "batch_size": same(BATCH_AND_BLOCKS, "num_requests_running"),
            "max_batch_size": DerivedMetric(BATCH_AND_BLOCKS, lambda metrics, options: options.max_num_seqs),
            "block_num": same(BATCH_AND_BLOCKS, "kv_blocks_free"),
            "max_block_num": same(BATCH_AND_BLOCKS, "kv_blocks"),
            "available_resource": share(BATCH_AND_BLOCKS, "kv_blocks_free", "kv_blocks"),
        }.items()
    },
)
