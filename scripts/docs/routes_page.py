"""Reference page of all HTTP routes, from the OpenAPI document."""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import Any

import httpx2

Schema = dict[str, Any]
FAMILIES = {
    "/v1/messages": "Anthropic",
    "/v1/": "OpenAI, with extensions of vLLM and others",
    "/v2": "KServe v2, Triton, TensorRT-LLM",
    "/api/": "Ollama",
    "": "Others: vLLM, SGLang, llama-server, TGI, Cohere, PaddleNLP, FastDeploy, BladeLLM, health, metrics",
}
"""Headings of routes by path prefix; the first match is used."""


def openapi_document() -> Schema:
    """OpenAPI document of a server with all options that add routes."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # Metrics() needs this variable
        return asyncio.run(_get_document(folder))


async def _get_document(folder: str) -> Schema:
    from penstock.config.options import Configuration, EngineOptions, ServerOptions
    from penstock.serve.app import build
    from penstock.serve.dialects import kserve, paddlenlp
    from penstock.serve.metrics import Metrics
    from penstock.serve.models.manager import ModelManager
    from penstock.serve.models.served_models import ServedModels
    from penstock.serve.process.api_server import open_storage

    options = ServerOptions(allow_runtime_lora_updating=True, server_dev_mode=True, storage_dir=folder)
    configuration = Configuration(engine=EngineOptions(role="router"), server=options)
    served = ServedModels(options, Metrics())
    manager = ModelManager(served, lambda _: None)
    repository = kserve.ModelRepository(served, manager, [paddlenlp.PaddleNLPModel(served)])
    app = build(
        served,
        repository,
        configuration=configuration,
        register=manager.register,
        storage=open_storage(configuration, served),
    )
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://server") as client:
        response = await client.get("/openapi.json")
        document: Schema = response.raise_for_status().json()
        return document


def routes_page() -> str:
    """Markdown page with a table of routes per API, and the fields of each request."""
    document = openapi_document()
    tables: dict[str, list[str]] = {title: [] for title in FAMILIES.values()}
    bodies: set[str] = set()
    for path, operations in document["paths"].items():
        title = next(title for start, title in FAMILIES.items() if path.startswith(start))
        for method, operation in operations.items():
            body = _body(operation)
            bodies.add(body)
            tables[title].append(f"| {method.upper()} | `{path}` | {_cell(operation['summary'])} | {_linked(body)} |")
    parts = [
        "# HTTP routes\n\n"
        "A server lists its routes at `/openapi.json`, with the schemas of requests and responses. This page has the\n"
        "routes of a server with `--allow-runtime-lora-updating`, `--server-dev-mode`, `--storage-dir` and\n"
        "`--role router`, and the fields of each request. [Dialects](../dialects.md) describes the APIs' systems."
    ]
    head = "| method | path | meaning | request |\n|---|---|---|---|\n"
    parts += [f"## {title}\n\n{head}" + "\n".join(sorted(rows)) for title, rows in tables.items()]
    parts.append("## Requests")
    schemas = document["components"]["schemas"]
    parts += [_fields(name, schemas[name]) for name in sorted(bodies - {""})]
    return "\n\n".join(parts) + "\n"


def _body(operation: Schema) -> str:
    """Name of the schema of an operation's request body; empty if the operation has no body."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return str(content.get("schema", {}).get("$ref", "")).rpartition("/")[2]


def _fields(name: str, schema: Schema) -> str:
    rows = []
    for field, described in schema.get("properties", {}).items():
        default = f"`{described['default']!r}`" if "default" in described else ""
        needed = "required" if field in schema.get("required", ()) else default
        rows.append(f"| `{field}` | {_cell(_type(described))} | {needed.replace('|', chr(92) + '|')} |")
    about = _cell(schema.get("description", "").split("\n\n")[0].replace("``", "`"))
    return "\n".join([f"### {name}", "", about, "", "| field | type | default |", "|---|---|---|", *rows])


def _type(schema: Schema) -> str:
    """Short description of a JSON schema's type, for a table cell."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(option) for option in schema["anyOf"]))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array" and isinstance(schema.get("items"), dict):
        return f"array of {_type(schema['items'])}"
    return str(schema.get("type", "any"))


def _linked(body: str) -> str:
    """Link to the heading of a schema's fields."""
    return f"[{body}](#{body.lower().replace('.', '')})" if body else ""


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")
