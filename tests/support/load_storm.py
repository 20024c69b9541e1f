"""The largest requests of one client to every endpoint: bodies with the maximum number of elements, and with more."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grpc
import httpx
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

MIB = 2**20
VALID: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "prompt": "a",
    "input": "a",
    "inputs": "a",
    "query": "a",
    "documents": ["a"],
    "text_1": "a",
    "text_2": "a",
    "tokens": [1],
    "texts": ["a"],
    "content": "a",
    "model": "default",
    "max_tokens": 1,
    "endpoint": "/v1/completions",
    "input_file_id": "file-1",
    "completion_window": "24h",
    "lora_name": "a",
    "lora_path": "a",
}
"""Valid values of required fields, by name."""


def texts(size: int) -> Any:
    return ["a"] * min(size // 4, 1_000_000)


def numbers(size: int) -> Any:
    return [1] * min(size // 2, 1_000_000)


def objects(size: int) -> Any:
    return [{"type": "text", "text": "a", "role": "user", "content": "a"}] * min(size // 60, 65_000)


def nested_lists(size: int) -> Any:
    return [[1]] * min(size // 4, 65_000)


def members(size: int) -> Any:
    return {str(number): 1 for number in range(min(size // 12, 250_000))}


def nested_objects(size: int) -> Any:
    properties = {f"p{number}": {"type": "string"} for number in range(min(size // 30, 60_000))}
    return {"type": "object", "properties": properties}


def text(size: int) -> Any:
    return "a " * (size // 2)


def wide_text(size: int) -> Any:
    return "\U0001f600" + "a " * (size // 2)


def json_text(size: int) -> Any:
    return '{"a":[' + "1," * (size // 2) + "1]}"


def message_parts(size: int) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}] * min(size // 30, 65_000)}]


def images(size: int) -> Any:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    return [{"role": "user", "content": [part] * min(size // 48, 32_000)}]


def tool_arguments(size: int) -> Any:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json_text(size // 16)}}
    return [*VALID["messages"], {"role": "assistant", "tool_calls": [call] * 16}]


def tools(size: int) -> Any:
    function = {"name": "f", "description": "a", "parameters": {"type": "object"}}
    return [{"type": "function", "function": function}] * min(size // 110, 16_000)


SHAPES: tuple[Callable[[int], Any], ...] = (
    *(texts, numbers, objects, nested_lists, members, nested_objects, text, wide_text, json_text),
    *(message_parts, images, tool_arguments, tools),
)
REFUSED: tuple[Callable[[int], bytes], ...] = (
    lambda size: b'{"a":[' + b"{}," * (70_000 if size > 250_000 else size // 3) + b"{}]}",
    lambda size: b'{"messages":[{"role":"user","content":[' + b'{"type":"text"},' * (size // 17) + b"{}]}]}",
    lambda size: b"[" * (size - 1),
    lambda size: b'"' * (size - 1),
    lambda size: b'{"a":"' + b"\\\\" * (size // 2 - 8) + b'"}',
)
"""Functions that create a body of a given size that every endpoint refuses."""


class Body(NamedTuple):
    """A request body. It is built when it is sent: the bodies of all endpoints together do not fit into memory."""

    path: str
    name: str
    fields: dict[str, Any]
    """All fields except the large one."""
    field: str
    """Name of the large field; empty for one of ``REFUSED``."""
    shape: int
    """Index in ``SHAPES`` or ``REFUSED``."""
    size: int

    def content(self) -> bytes:
        """Encode the body, with at most ``size`` bytes."""
        if not self.field:
            return REFUSED[self.shape](self.size)
        document = {**self.fields, self.field: SHAPES[self.shape](self.size - 300)}
        return json.dumps(document, separators=(",", ":")).encode()[: self.size]


def json_paths(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Schema of the JSON request of each path of an OpenAPI document."""
    found: dict[str, dict[str, Any]] = {}
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if body:
            reference = body["schema"].get("$ref", "").rpartition("/")[2]
            found[path] = document["components"]["schemas"].get(reference, {})
    return found


def bodies(path: str, schema: dict[str, Any], size: int, draw: random.Random) -> Iterator[Body]:
    """Bodies for a path: each field in a random shape (messages and prompts in all shapes), and one of ``REFUSED``."""
    required = {name: VALID.get(name, "a") for name in schema.get("required", ())}
    for field in schema.get("properties", {"text_input": {}}):
        all_shapes = field in ("messages", "prompt", "input")
        for shape in range(len(SHAPES)) if all_shapes else [draw.randrange(len(SHAPES))]:
            yield Body(path, f"{field}: {SHAPES[shape].__name__}", required, field, shape, size)
    number = draw.randrange(len(REFUSED))
    yield Body(path, f"refused {number}", {}, "", number, size)


def send(root: str, headers: dict[str, str], bodies: Sequence[Body], concurrency: int, times: int) -> Counter[Any]:
    """Send each body ``times`` times; return the number of responses by status, 0 for a closed connection."""
    contents = {body.name: body.content() for body in bodies} if times > 1 else {}

    def send_one(body: Body) -> int:
        path = body.path.replace("{name}", "ensemble")
        try:
            with client.stream("POST", root + path, content=contents.get(body.name) or body.content()) as response:
                return response.status_code  # a stream is not read
        except httpx.HTTPError:  # the server may refuse a body before it has read it completely
            return 0

    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=0)
    with (
        httpx.Client(headers=headers, timeout=300, limits=limits, verify=False) as client,
        ThreadPoolExecutor(concurrency) as threads,
    ):
        return Counter(threads.map(send_one, [body for body in bodies for _ in range(times)]))


def count_ok(root: str, headers: dict[str, str], path: str, times: int) -> int:
    """GET a path on ``times`` connections at once; return the number of responses with status 200."""
    host, _, port = root.rpartition("/")[2].rpartition(":")
    lines = [f"GET {path} HTTP/1.1", "host: x", "connection: close", *map(": ".join, headers.items())]
    request = "\r\n".join([*lines, "", ""]).encode()

    async def get() -> bool:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        response = await reader.read()
        writer.close()
        return response.startswith(b"HTTP/1.1 200")

    async def run() -> int:
        return sum(await asyncio.gather(*(get() for _ in range(times))))

    return asyncio.run(run())


def in_subprocess(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function called in a new process, so that its load does not disturb this process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def send_forms(url: str, headers: dict[str, str], times: int) -> Counter[int]:
    """Send forms with many large fields, all at once."""
    fields = {f"f{i}": "a" * (MIB - 1) for i in range(190)}

    def send_form(_: int) -> int:
        try:
            files = {"file": ("a", b"a")}
            return httpx.post(f"{url}/files", data=fields, files=files, headers=headers, timeout=300).status_code
        except httpx.HTTPError:
            return 0

    with ThreadPoolExecutor(times) as threads:
        return Counter(threads.map(send_form, range(times)))


def send_messages(address: str, headers: dict[str, str], times: int, size: int) -> Counter[str]:
    """Send gRPC messages, 40 at once, each on a new connection; return the number of calls by status."""
    request = pb.ModelInferRequest(model_name="ensemble", raw_input_contents=[b"x" * size])

    def send_message(_: int) -> str:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, options) as channel:
            try:
                service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, metadata=[*headers.items()])
            except grpc.RpcError as error:
                return str(error.code())
        return "OK"

    with ThreadPoolExecutor(40) as threads:
        return Counter(threads.map(send_message, range(times)))
