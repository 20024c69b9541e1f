"""Random requests of every dialect while engines are killed and replaced: each answer equals that of an undisturbed
server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from serving import Served
from storm import read_metrics
from test_kserve_grpc import address, tensor, text_inputs
from test_lora import adapter

from penstock import demo

COUNT = int(os.environ.get("PENSTOCK_RESUMED_ANSWERS", "90"))
"""Number of requests per number of replicas."""
PER_SERVER = 90
"""Number of requests per server with killed engines."""
NUM_KILLS = 2
"""Number of kills per server: three deaths of an engine in a minute would end it, and a third death in steps with the
same request would fail this request."""
CONCURRENCY = 16
TIMEOUT = 300.0
TOPICS = ("the sea", "a fox", "bread", "the moon", "两只狐狸", "a harbour", "winter 🦊", "a clock", "bridges", "Canada")
STOPS = (" and", ".", " the", "fox", "月", "e")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = "([a-z]{3,9} ){6,12}[0-9]{2,4}"
GRAMMAR = 'start: "<" WORD+ ">"\nWORD: /[a-z]{2,6} /'
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
TOOL = {"name": "look", "description": "Look up a person.", "parameters": SCHEMA}
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 20}
BEAMS |= dict.fromkeys(("stop", "top_k", "top_p"))
NAMED_SCHEMA = {"name": "person", "schema": SCHEMA, "strict": True}
IGNORED = re.compile(
    r"id|\w+_id|created|created_at|completed_at|sequence_number|obfuscation|timings|\w+_duration|\w*cache\w*|"
    r"prompt_tokens_details|input_tokens_details|input_tokens|send_idx"
)
"""Names of fields that differ between equal answers: ids, times, counts of cached tokens and of chunks."""
KEPT = ("token_id",)
JOINED = frozenset(
    "text content reasoning reasoning_content arguments thinking partial_json response token text_output delta".split()
)
"""Names of text fields of which a stream's events have consecutive parts."""


class Request(NamedTuple):
    """A request of a dialect."""

    dialect: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    repeatable: bool
    """True if it is greedy or has a seed: its answer is always the same."""


class Sampling(NamedTuple):
    """Parameters that most dialects have; None: not in the request."""

    text: str
    max_tokens: int
    temperature: float
    seed: int | None
    stop: list[str] | None
    top_k: int | None
    top_p: float | None
    repetition: float | None
    presence: float | None
    frequency: float | None
    ignore_eos: bool

    @classmethod
    def draw(cls, rng: Random) -> Sampling:
        def sometimes(value: Any, share: float = 0.25) -> Any:
            return value if rng.random() < share else None

        temperature = rng.choice((0.0, 0.0, round(rng.uniform(0.3, 1.2), 2)))
        seed = sometimes(rng.randint(0, 2**31 - 1), 0.8) if temperature else sometimes(7)
        repeatable = seed is not None or not temperature
        return cls(
            text=f"Number {rng.randint(0, 99)}: a story about {rng.choice(TOPICS)} and its days. " * rng.randint(1, 5),
            max_tokens=rng.choice((1, 20, 60, 120, 250)) if repeatable else 60,
            temperature=temperature,
            seed=seed,
            stop=sometimes(rng.sample(STOPS, rng.randint(1, 2))) if repeatable else None,
            top_k=sometimes(rng.randint(2, 50)) if temperature else None,
            top_p=sometimes(round(rng.uniform(0.5, 0.95), 2)) if temperature else None,
            repetition=sometimes(round(rng.uniform(1.01, 1.3), 2)),
            presence=sometimes(round(rng.uniform(-1, 1.5), 2)),
            frequency=sometimes(round(rng.uniform(-0.5, 1), 2)),
            ignore_eos=not repeatable or rng.random() < 0.7,
        )

    def fields(self, **names: str) -> dict[str, Any]:
        """Return the parameters that are in the request.

        Args:
            names: name of each parameter in the dialect.
        """
        values = {name: getattr(self, parameter) for parameter, name in names.items()}
        return {name: value for name, value in values.items() if value is not None and value is not False}


OPENAI = dict(
    max_tokens="max_tokens", temperature="temperature", seed="seed", stop="stop", top_k="top_k", top_p="top_p",
    repetition="repetition_penalty", presence="presence_penalty", frequency="frequency_penalty",
    ignore_eos="ignore_eos",
)  # fmt: skip


def question(drawn: Sampling) -> list[dict[str, str]]:
    return [{"role": "user", "content": drawn.text}]


def common_features(rng: Random, drawn: Sampling) -> list[dict[str, Any]]:
    """Features of OpenAI's completions and chats."""
    return [
        {},
        {"n": 3},
        {"min_tokens": drawn.max_tokens // 2},
        {"guided_json": SCHEMA, "max_tokens": 80},
        {"guided_regex": REGEX, "max_tokens": 80},
        {"guided_grammar": GRAMMAR, "max_tokens": 40},
        {"cache_salt": f"salt {rng.randint(0, 2)}"},
        {"model": "sailor"},
        {"logit_bias": {str(rng.randint(10, 200)): rng.choice((-100, -3, 4))}},
        {"bad_words": [rng.choice(STOPS).strip()]},
        {"min_p": 0.05},
    ]


def draw_completion(rng: Random, drawn: Sampling, stream: bool) -> tuple[str, dict[str, Any]]:
    features = [
        *common_features(rng, drawn),
        {"logprobs": 3},
        {"logprobs": 2, "n": 2},
        {"prompt_logprobs": 2},
        {"prompt_logprobs": 1, "logprobs": 1, "n": 2},
        {"echo": True, "logprobs": 2},
        {"prompt": [drawn.text, "The sea"], "n": 2},
        BEAMS,
    ]
    if not stream:
        features += [{"best_of": 4, "n": 2, "temperature": 0.9, "seed": 11}]
    else:
        features += [{"stream_options": {"include_usage": True}}]
    return "/v1/completions", {"prompt": drawn.text, **drawn.fields(**OPENAI)} | rng.choice(features)


def draw_chat(rng: Random, drawn: Sampling, stream: bool) -> tuple[str, dict[str, Any]]:
    features = [
        *common_features(rng, drawn),
        {"logprobs": True, "top_logprobs": 3, "n": 2},
        {"prompt_logprobs": 1},
        {"response_format": {"type": "json_schema", "json_schema": NAMED_SCHEMA}, "max_tokens": 80},
        {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "max_tokens": 90},
        {**THINKING, "reasoning_max_tokens": rng.randint(1, 20)},
        {**THINKING, "reasoning_max_tokens": rng.randint(1, 20), "guided_json": SCHEMA, "max_tokens": 120},
        {**THINKING, "n": 2, "logprobs": True},
    ]
    return "/v1/chat/completions", {"messages": question(drawn), **drawn.fields(**OPENAI)} | rng.choice(features)


def draw_response(rng: Random, drawn: Sampling, stream: bool) -> tuple[str, dict[str, Any]]:
    names = dict(max_tokens="max_output_tokens", temperature="temperature", seed="seed", ignore_eos="ignore_eos")
    form = {"text": {"format": {"type": "json_schema", **NAMED_SCHEMA}}, "max_output_tokens": 90}
    features: list[dict[str, Any]] = [{}, form, {"reasoning": {"effort": "high"}}]
    return "/v1/responses", {"input": question(drawn), **drawn.fields(**names)} | rng.choice(features)


def draw_message(rng: Random, drawn: Sampling, stream: bool) -> tuple[str, dict[str, Any]]:
    names = dict(
        max_tokens="max_tokens", temperature="temperature", stop="stop_sequences", top_k="top_k", top_p="top_p",
        ignore_eos="ignore_eos",
    )  # fmt: skip
    features: list[dict[str, Any]] = [{}, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}]
    features += [{"thinking": {"type": "adaptive"}, "max_tokens": 150}]
    tools = [{"name": "look", "input_schema": SCHEMA}]
    features += [{"tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 90}]
    return "/v1/messages", {"model": "default", "messages": question(drawn), **drawn.fields(**names)} | rng.choice(
        features
    )


def draw_vllm(rng: Random, drawn: Sampling, stream: bool) -> tuple[str, dict[str, Any]]:
    features: list[dict[str, Any]] = [{}, {"n": 2}, {"guided_json": SCHEMA, "max_tokens": 80}]
    features += [BEAMS] * (not stream)
    return "/generate", {"prompt": drawn.text, **drawn.fields(**OPENAI)} | rng.choice(features)


def draw_tgi(rng: Random, drawn: Sampling, stream: bool) -> tuple[str, dict[str, Any]]:
    names = dict(
        max_tokens="max_new_tokens", seed="seed", stop="stop", top_k="top_k", top_p="top_p",
        repetition="repetition_penalty", frequency="frequency_penalty",
    )  # fmt: skip
    parameters = drawn.fields(**names)
    if drawn.temperature:
        parameters |= {"do_sample": True, "temperature": drawn.temperature}
    details = {"details": True, "decoder_input_details": not stream, "top_n_tokens": 3}
    features: list[dict[str, Any]] = [{}, details, {"grammar": {"type": "json", "value": SCHEMA}}]
    body = {"inputs": drawn.text, "parameters": parameters | rng.choice(features)}
    return "/generate_stream" if stream else "/generate", body


def draw_ollama(rng: Random, drawn: Sampling, stream: bool) -> tuple[str, dict[str, Any]]:
    names = OPENAI | {"max_tokens": "num_predict", "repetition": "repeat_penalty"}
    options = drawn.fields(**{name: names[name] for name in OPENAI if name != "ignore_eos"})
    body = {"model": "penstock-demo", "options": options}
    features: list[dict[str, Any]] = [{}, {"format": SCHEMA}, {"logprobs": True, "top_logprobs": 2}]
    if rng.random() < 0.5:
        return "/api/generate", body | {"prompt": drawn.text, "raw": rng.random() < 0.5} | rng.choice(features)
    return "/api/chat", body | {"messages": question(drawn)} | rng.choice([*features, {"think": True}])


def draw_llama_server(rng: Random, drawn: Sampling, stream: bool) -> tuple[str, dict[str, Any]]:
    names = OPENAI | {"max_tokens": "n_predict", "repetition": "repeat_penalty"}
    features: list[dict[str, Any]] = [{}, {"n_probs": 3}, {"json_schema": SCHEMA}, {"return_tokens": True}]
    return "/completion", {"prompt": drawn.text, **drawn.fields(**names)} | rng.choice(features)


def draw_paddlenlp(rng: Random, drawn: Sampling, stream: bool) -> tuple[str, dict[str, Any]]:
    names = dict(
        max_tokens="max_dec_len", temperature="temperature", seed="seed", top_p="topp", repetition="penalty_score",
        presence="presence_score", frequency="frequency_score",
    )  # fmt: skip
    features: list[dict[str, Any]] = [{}, {"min_dec_len": drawn.max_tokens}, {"return_usage": True}]
    return "/v1/chat/completions", {"text": drawn.text, **drawn.fields(**names)} | rng.choice(features)


def draw_bladellm(rng: Random, drawn: Sampling, stream: bool) -> tuple[str, dict[str, Any]]:
    path, body = draw_chat(rng, drawn._replace(top_p=None), stream)
    kept = {name: body[name] for name in body if name in {*OPENAI.values(), "messages", "n", "logprobs"}}
    return path, kept


def draw_kserve(rng: Random, drawn: Sampling, stream: bool) -> tuple[str, dict[str, Any]]:
    names = dict(
        max_tokens="max_tokens", temperature="temperature", seed="random_seed", top_k="top_k", top_p="top_p",
        stop="stop_words", repetition="repetition_penalty", presence="presence_penalty",
        frequency="frequency_penalty",
    )  # fmt: skip
    body = {"text_input": drawn.text, **drawn.fields(**names)}
    features: list[dict[str, Any]] = [{}, {"return_log_probs": True}, {"min_length": drawn.max_tokens}]
    return f"/v2/models/ensemble/generate{'_stream' * stream}", body | rng.choice(features)


def draw_grpc(rng: Random, drawn: Sampling, stream: bool) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = drawn.fields(text="text_input", max_tokens="max_tokens", temperature="temperature")
    return "grpc", body | drawn.fields(seed="random_seed", repetition="repetition_penalty")


DIALECTS: dict[str, Callable[[Random, Sampling, bool], tuple[str, dict[str, Any]]]] = {
    "completions": draw_completion,
    "chat": draw_chat,
    "responses": draw_response,
    "anthropic": draw_message,
    "vllm": draw_vllm,
    "tgi": draw_tgi,
    "ollama": draw_ollama,
    "llama-server": draw_llama_server,
    "paddlenlp": draw_paddlenlp,
    "bladellm": draw_bladellm,
    "kserve": draw_kserve,
    "grpc": draw_grpc,
}


def draw_request(rng: Random, number: int) -> Request:
    dialect = ("completions", "chat", *DIALECTS)[number % (len(DIALECTS) + 2)]
    drawn, stream = Sampling.draw(rng), rng.random() < 0.6
    path, body = DIALECTS[dialect](rng, drawn, stream)
    body = {name: value for name, value in body.items() if value is not None}
    if any(name in str(body) for name in ("guided_", "schema", "tool_choice", "'format'", "'n':")):
        body.pop("ignore_eos", None)  # not with guided decoding
        if "n" in body and not body.get("use_beam_search") and not body.get("temperature"):
            body |= {"temperature": 0.8, "seed": number}  # greedy sequences would be equal
    seed = body.get("seed", drawn.seed if dialect != "anthropic" else None)  # Anthropic has no seed
    repeatable = seed is not None or not body.get("temperature", drawn.temperature)
    headers = {"Authorization": "TOKEN"} if dialect == "bladellm" else {}
    return Request(dialect, path, body | {"stream": stream}, headers, repeatable)


# --- Answers ----------------------------------------------------------------------------------------------------------


def fold(dialect: str, events: list[Any]) -> Any:
    """Return the content of an answer independent of how a stream has grouped its tokens: the value of each field by
    its path. Parts of texts and lists are joined; of other fields the last value is kept."""
    if dialect == "vllm":
        events = events[-1:]  # each event has the whole text
    if dialect == "tgi" and len(events) > 1:
        text = "".join(event["token"]["text"] for event in events)  # an event may have text of the token before it
        tokens = [{path: value for path, value in leaves((), event) if path[-1] != "text"} for event in events]
        return [*tokens, {("text",): text}]
    found: dict[tuple[Any, ...], Any] = {}
    for event in events:
        names = ("type", "index", "output_index", "content_index", "sequence_id")
        prefix = tuple(event.get(name) for name in names) if isinstance(event, dict) else ()
        for path, value in leaves(prefix, event):
            if path[0] == "message_start" and "usage" in path:
                continue  # the first chunk's tokens
            if dialect == "llama-server" and path[-1] == "tokens" and len(events) > 1:
                continue  # the chunks decide which tokens without text are among them
            if path[-1] == "output_log_probs":
                value = value if isinstance(value, list) else [value]
                if not any(value):  # zeros stand for log probabilities that were not requested
                    continue
            if isinstance(value, list) or (isinstance(value, str) and path[-1] in JOINED):
                found[path] = found[path] + value if found.get(path) is not None else value
            elif value is not None or path not in found:
                found[path] = value
    return found


def leaves(path: tuple[Any, ...], value: Any) -> Iterable[tuple[tuple[Any, ...], Any]]:
    """Yield each scalar and each list of a document with its path. Elements of a list with an index have paths of their
    own."""
    if isinstance(value, dict):
        for name, member in value.items():
            if name in KEPT or not IGNORED.fullmatch(name):
                yield from leaves((*path, name), member)
    elif isinstance(value, list) and value and all(isinstance(one, dict) and "index" in one for one in value):
        for one in value:
            yield from leaves((*path, one["index"]), one)
    elif isinstance(value, list):
        yield path, [dict(leaves((), one)) if isinstance(one, dict) else one for one in value]
    else:
        yield path, value


def parse_events(data: bytes) -> list[Any]:
    """Return the documents of a response: JSON, server-sent events, JSON lines, or documents separated by zeros."""
    lines = data.replace(b"\0", b"\n").decode().split("\n")
    lines = [line.removeprefix("data:").strip() for line in lines if not line.startswith((":", "event:"))]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


class Asker:
    """Sends requests to a server.

    Attributes:
        received: number of parts of responses received so far.
    """

    def __init__(self, served: Served, grpc_address: str) -> None:
        self._served, self._grpc_address = served, grpc_address
        self.received = 0

    async def ask_all(self, requests: list[Request]) -> list[Any]:
        semaphore = asyncio.Semaphore(CONCURRENCY)
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            triton.InferenceServerClient(self._grpc_address) as grpc,
        ):

            async def ask(request: Request) -> Any:
                async with semaphore:
                    if request.dialect == "grpc":
                        return await self._infer(grpc, request)
                    return await self._post(session, request)

            return await asyncio.gather(*map(ask, requests))

    async def _post(self, session: aiohttp.ClientSession, request: Request) -> Any:
        data = b""
        url = self._served.root + request.path
        async with session.post(url, json=request.body, headers=request.headers) as response:
            async for part in response.content.iter_any():
                data += part
                self.received += 1
            assert response.status == 200, (request, response.status, data[:1000])
        return fold(request.dialect, parse_events(data))

    async def _infer(self, client: triton.InferenceServerClient, request: Request) -> Any:
        body = request.body
        inputs = text_inputs(body["text_input"], body["max_tokens"])
        inputs += [
            tensor("stream", [[body["stream"]]], bool),
            tensor("temperature", [[body["temperature"]]], np.float32),
        ]
        if "random_seed" in body:
            inputs.append(tensor("random_seed", [[body["random_seed"]]], np.uint64))
        if "repetition_penalty" in body:
            inputs.append(tensor("repetition_penalty", [[body["repetition_penalty"]]], np.float32))

        async def send() -> Any:
            yield {"model_name": "ensemble", "inputs": inputs, "enable_empty_final_response": True}

        events = []
        async for result, error in client.stream_infer(send()):
            assert error is None, (request, error)
            self.received += 1
            events.append(message_fields(result))
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        return fold(request.dialect, events)


def message_fields(result: triton.InferResult) -> dict[str, Any]:
    """Return the fields of a gRPC response: a text, a list of log probabilities, and other values as JSON."""
    response = result.get_response()
    fields: dict[str, Any] = {"model_name": response.model_name, "model_version": response.model_version}
    fields |= {f"parameter {name}": str(value) for name, value in response.parameters.items()}
    for output in response.outputs:
        array = result.as_numpy(output.name)
        fields[f"datatype of {output.name}"] = output.datatype
        if array is None:
            continue
        if output.name == "text_output":
            fields[output.name] = "".join(part.decode() for part in array.flatten())
        elif output.name == "output_log_probs":
            fields[output.name] = array.flatten().tolist()
        elif array.size:
            fields[output.name] = json.dumps(array.tolist())
    return fields


async def kill_engines(served: Served, asker: Asker, rng: Random) -> None:
    """Kill the oldest engine ``NUM_KILLS`` times, and replace all engines once (SIGHUP), in random order, each time
    after a random number of received parts."""
    faults = [signal.SIGKILL] * NUM_KILLS + [signal.SIGHUP]
    rng.shuffle(faults)
    for fault in faults:
        threshold = asker.received + rng.randint(30, 250)
        while asker.received < threshold:
            await asyncio.sleep(rng.uniform(0.0, 0.1))
        os.kill(served.pids["engine"][0] if fault == signal.SIGKILL else served.pid, fault)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options of all servers."""
    folder: Path = tmp_path_factory.mktemp("sailor")
    sailor = adapter(demo.CHAT, folder, r=4, target_modules=["q_proj", "down_proj"])
    blocks = ("--num-gpu-blocks-override", "400", "--grpc-port", "0", "--exclude-input-in-output")
    return (*blocks, "--lora-modules", f"sailor={sailor}")


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_answers_equal_undisturbed_ones_while_engines_are_killed_and_replaced(
    flags: tuple[str, ...], replicas: int
) -> None:
    rng = Random(f"resumed answers: {replicas}")
    requests = [draw_request(rng, number) for number in range(COUNT)]
    with Served(*flags) as undisturbed:
        expected = asyncio.run(Asker(undisturbed, address(undisturbed)).ask_all(requests))

    async def disturbed(served: Served, some: list[Request]) -> list[Any]:
        asker = Asker(served, address(served))
        killing = asyncio.create_task(kill_engines(served, asker, rng))
        answers = await asker.ask_all(some)
        assert killing.done(), "all requests ended before the last kill"
        await killing
        num_resumed = (await read_metrics(served))["penstock:requests_resumed_total"]
        print(f"{replicas} engines: {num_resumed:.0f} of {len(some)} requests continued in another engine")
        await asyncio.to_thread(served.find, "was replaced by")
        return answers

    answers: list[Any] = []
    for start in range(0, COUNT, PER_SERVER):
        with Served(*flags, "--data-parallel-size", str(replicas)) as served:
            answers += asyncio.run(disturbed(served, requests[start : start + PER_SERVER]))
    different = [
        (request, answer, right)
        for request, answer, right in zip(requests, answers, expected, strict=True)
        if (answer != right if request.repeatable else not answer or errors_of(answer))
    ]
    assert not different, (len(different), *different[:3])


def errors_of(answer: Any) -> list[Any]:
    """Return the values of an answer's fields whose names contain ``error``."""
    events = answer if isinstance(answer, list) else [answer]
    return [value for event in events for path, value in event.items() if value and "error" in str(path)]
