"""The KServe v2 protocol over gRPC, tested with Triton's client and compared with OpenAI's completions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from serving import Served
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

PROMPT = "Once upon a time"
REGION = f"/penstock_test_grpc_{os.getpid()}"
"""Name of the POSIX shared memory object, unique per test process."""
MODELS = ["ensemble", "tensorrt_llm_bls", "preprocessing", "tensorrt_llm", "postprocessing", "model"]
KINDS = {"int32": "INT32", "float32": "FP32", "uint64": "UINT64", "bool": "BOOL"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = ("--grpc-port", "0", "--exclude-input-in-output", "--api-server-count", "2")
    with Served("--num-gpu-blocks-override", "400", *flags) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address(served)) as client:
        yield client


def address(served: Served) -> str:
    return served.find(r"gRPC at (\S+)")[1]


def tensor(name: str, values: Any, kind: Any = object) -> triton.InferInput:
    array = np.array(values, dtype=kind)
    result = triton.InferInput(name, list(array.shape), KINDS.get(array.dtype.name, "BYTES"))
    return result.set_data_from_numpy(array)


def text_inputs(text: str, tokens: int, **more: tuple[Any, Any]) -> list[triton.InferInput]:
    inputs = [tensor("text_input", [[text.encode()]]), tensor("max_tokens", [[tokens]], np.int32)]
    return inputs + [tensor(name, [[value]], kind) for name, (value, kind) in more.items()]


def text_of(result: Any) -> str:
    return result.as_numpy("text_output")[0].decode()


def completion(served: Served, text: str, tokens: int) -> str:
    """Return the text of OpenAI's completions endpoint."""
    body = {"prompt": text, "temperature": 0, "max_tokens": tokens}
    return httpx.post(f"{served.url}/completions", json=body, timeout=60).json()["choices"][0]["text"]


def test_server_and_model_metadata_are_reported(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live(headers={"test": "1", "dummy": "2"}) and client.is_server_ready()
    assert client.get_server_metadata().name == "triton"
    assert not client.is_model_ready("wrong_model_name") and not client.is_model_ready("ensemble", "2")
    with pytest.raises(InferenceServerException, match="Request for unknown model"):
        client.get_model_metadata("wrong_model_name")
    assert [model.name for model in client.get_model_repository_index().models] == MODELS
    for name in MODELS:
        assert client.is_model_ready(name, "1")
        metadata, config = client.get_model_metadata(name), client.get_model_config(name).config
        head = 1 if config.max_batch_size else 0
        assert [(i.name, [*i.shape][head:]) for i in metadata.inputs] == [(i.name, [*i.dims]) for i in config.input]
        assert [o.name for o in metadata.outputs] == [o.name for o in config.output]
    assert client.get_model_config("ensemble").config.model_transaction_policy.decoupled
    assert client.get_log_settings().settings["log_info"].bool_param
    client.load_model("ensemble")
    with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED.*explicit"):
        client.unload_model("ensemble")


def test_settings_and_shared_memory_are_shared_by_all_api_processes(served: Served) -> None:
    """The 16 connections are spread over both API processes. A change through one is visible through all."""
    with contextlib.ExitStack() as stack:
        clients = []
        for i in range(16):
            channel_args = [("grpc.use_local_subchannel_pool", 1), ("penstock.test", i)]
            clients.append(
                stack.enter_context(triton.InferenceServerClient(address(served), channel_args=channel_args))
            )
        first, *others = clients
        first.update_log_settings({"log_verbose_level": 2, "log_format": "ISO8601"})
        for other in others:
            found = other.get_log_settings().settings
            assert found["log_verbose_level"].uint32_param == 2 and found["log_format"].string_param == "ISO8601"
        first.update_log_settings({"log_verbose_level": 0})
        first.update_trace_settings("ensemble", {"trace_rate": "5", "trace_level": ["OFF", "TIMESTAMPS"]})
        for other in others:
            found = other.get_trace_settings("ensemble").settings
            assert [*found["trace_rate"].value] == ["5"] and [*found["trace_level"].value] == ["OFF", "TIMESTAMPS"]
        assert [*first.update_trace_settings("ensemble", {"trace_rate": None}).settings["trace_rate"].value] == ["1000"]
        with pytest.raises(InferenceServerException, match="trace_file: can not be updated"):
            first.update_trace_settings(settings={"trace_file": "/tmp/x"})
        first.load_model("ensemble", config='{"max_batch_size": 4}')
        assert {other.get_model_config("ensemble").config.max_batch_size for other in others} == {4}
        first.load_model("ensemble")

        first.unregister_system_shared_memory()  # the first two calls of simple_grpc_shm_client.py
        first.unregister_cuda_shared_memory()
        region = shm.create_shared_memory_region("data", REGION, 4096)
        stack.callback(shm.destroy_shared_memory_region, region)
        first.register_system_shared_memory("data", REGION, 4096)
        ids = np.array([[5, 6, 7]], dtype=np.int32)
        shm.set_shared_memory_region(region, [ids])
        inputs = [triton.InferInput("input_ids", [1, 3], "INT32")]
        inputs[0].set_shared_memory("data", ids.nbytes)
        inputs += [tensor("input_lengths", [[3]], np.int32), tensor("request_output_len", [[5]], np.int32)]
        outputs = [triton.InferRequestedOutput(name) for name in ("output_ids", "sequence_length")]
        outputs[0].set_shared_memory("data", 1024, 512)
        plain = first.infer("tensorrt_llm", [tensor("input_ids", ids, np.int32), *inputs[1:]])
        for other in others[:4]:
            shm.set_shared_memory_region(region, [np.zeros(256, dtype=np.int32)], offset=512)
            result = other.infer("tensorrt_llm", inputs, outputs=outputs)
            output = result.get_output("output_ids")
            assert output.parameters["shared_memory_region"].string_param == "data"
            ids_in_region = shm.get_contents_as_numpy(region, np.int32, [*output.shape], 512)
            assert ids_in_region.tolist() == plain.as_numpy("output_ids").tolist()
            assert result.as_numpy("sequence_length").tolist() == plain.as_numpy("sequence_length").tolist()
        status = others[0].get_system_shared_memory_status().regions
        assert (status["data"].key, status["data"].byte_size) == (REGION, 4096)
        with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*Unable to find system shared memory region"):
            first.get_system_shared_memory_status("other")
        with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED.*CUDA shared memory is not supported"):
            first.register_cuda_shared_memory("cuda", b"aGFuZGxl", 0, 64)
        first.unregister_system_shared_memory("data")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'data'"):
            others[1].infer("tensorrt_llm", inputs)


def test_infer_returns_requested_output_and_counts_request(
    served: Served, client: triton.InferenceServerClient
) -> None:
    outputs = [triton.InferRequestedOutput("text_output")]
    result = client.infer("ensemble", text_inputs(PROMPT, 8), outputs=outputs, request_id="mine")
    assert text_of(result) == completion(served, PROMPT, 8)
    assert result.get_response().id == "mine"
    assert [output.name for output in result.get_response().outputs] == ["text_output"]
    before = client.get_inference_statistics("ensemble").model_stats[0].inference_count
    assert before >= 1
    client.infer("ensemble", text_inputs(PROMPT, 2))
    assert client.get_inference_statistics("ensemble").model_stats[0].inference_count == before + 1


def test_typed_tensor_contents_are_accepted(served: Served) -> None:
    """Clients generated from the protocol's .proto file send typed contents instead of raw bytes."""
    request = pb.ModelInferRequest(model_name="ensemble")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(PROMPT.encode())
    request.inputs.add(name="max_tokens", datatype="INT32", shape=[1]).contents.int_contents.append(8)
    with grpc.insecure_channel(address(served)) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert answer.raw_output_contents[0][4:].decode() == completion(served, PROMPT, 8)


@pytest.mark.parametrize("empty_last", [False, True])
def test_stream_chunks_add_up_to_whole_answer(served: Served, empty_last: bool) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(address(served)) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        inputs = text_inputs(PROMPT, 30, stream=(True, np.bool_))
        client.async_stream_infer("ensemble", inputs, request_id="7", enable_empty_final_response=empty_last)
        chunks, last = [], False
        while not last:
            result, error = answers.get(timeout=60)
            assert error is None
            response = result.get_response()
            last = response.parameters["triton_final_response"].bool_param
            assert response.id == "7" and bool(response.outputs) is not (last and empty_last)
            chunks += [text_of(result)] if response.outputs else []
        client.stop_stream()
    assert "".join(chunks) == completion(served, PROMPT, 30)


@pytest.mark.parametrize("stream", [False, True])
def test_rows_and_sequences_are_answered_separately(served: Served, stream: bool) -> None:
    """The client assembles the texts as TensorRT-LLM's end_to_end_grpc_client.py does."""
    texts = [PROMPT, "What is the capital of France?"]
    inputs = [tensor("text_input", [[text.encode()] for text in texts])]
    same = {"max_tokens": (12, np.int32), "num_return_sequences": (3, np.int32), "stream": (stream, np.bool_)}
    same |= {"temperature": (0.9, np.float32), "top_p": (0.95, np.float32), "random_seed": (5, np.uint64)}
    inputs += [tensor(name, [[value]] * 2, kind) for name, (value, kind) in same.items()]
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(address(served)) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("ensemble", inputs)
        client.stop_stream()  # the call returns after the server has sent all responses
    found = [[""] * 3 for _ in texts]
    while not answers.empty():
        result, error = answers.get()
        assert error is None
        row, sequence = result.as_numpy("batch_index")[0][0], result.as_numpy("sequence_index")[0][0]
        found[row][sequence] += result.as_numpy("text_output")[0].decode()
    for text, outputs in zip(texts, found, strict=True):
        body = {"prompt": text, "max_tokens": 12, "n": 3, "temperature": 0.9, "top_p": 0.95, "top_k": 0, "seed": 5}
        choices = httpx.post(f"{served.url}/completions", json=body, timeout=60).json()["choices"]
        assert outputs == [choice["text"] for choice in choices]


@pytest.mark.parametrize(
    ("inputs", "model", "message"),
    [
        (text_inputs(PROMPT, 0), "ensemble", "max_tokens: must be at least 1"),
        (text_inputs(PROMPT, 4), "other", "unknown model: 'other'"),
        (text_inputs(PROMPT, 4)[:1], "ensemble", "max_tokens: is missing"),
        (text_inputs(PROMPT, 4, max_token=(3, np.int32)), "ensemble", "did you mean max_tokens"),
        (text_inputs(PROMPT, 4, top_p=(2.0, np.float32)), "ensemble", "top_p: must be at most 1"),
    ],
)
def test_invalid_input_is_reported_and_stream_continues(
    served: Served, client: triton.InferenceServerClient, inputs: list[Any], model: str, message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message):
        client.infer(model, inputs)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(address(served)) as streaming:
        streaming.start_stream(lambda result, error: answers.put((result, error)))
        streaming.async_stream_infer(model, inputs)
        _, error = answers.get(timeout=60)
        assert message in str(error)
        streaming.async_stream_infer("ensemble", text_inputs(PROMPT, 4))
        result, error = answers.get(timeout=60)
        assert error is None and text_of(result) == completion(served, PROMPT, 4)


def test_unary_call_rejects_stream_input(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT.*stream: .*ModelStreamInfer"):
        client.infer("ensemble", text_inputs(PROMPT, 4, stream=(True, np.bool_)))


def test_fifty_requests_on_one_stream_are_answered(served: Served) -> None:
    async def ask() -> dict[str, str]:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            for i in range(50):
                inputs = text_inputs(f"{PROMPT} {i}", 20, stream=(True, np.bool_))
                yield {"model_name": "ensemble", "inputs": inputs, "request_id": str(i)}

        found: dict[str, str] = {}
        async with triton_aio.InferenceServerClient(address(served)) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None
                found[result.get_response().id] = found.get(result.get_response().id, "") + text_of(result)
        return found

    found = asyncio.run(ask())
    assert len(found) == 50
    for i in (0, 17, 49):
        assert found[str(i)] == completion(served, f"{PROMPT} {i}", 20)


def test_disconnect_or_deadline_cancels_requests(served: Served) -> None:
    seen = len(served.lines)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(address(served)) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("ensemble", text_inputs(PROMPT, 1500, stream=(True, np.bool_), end_id=(-1, np.int32)))
        assert answers.get(timeout=60)[1] is None
        client.stop_stream(cancel_requests=True)
        served.find(r"gRPC ModelStreamInfer 'ensemble' .*error=cancelled", after=seen)
        with pytest.raises(InferenceServerException, match="Deadline"):
            # one second is enough for the request to arrive, but not to be completed
            inputs = text_inputs(PROMPT, 1500, end_id=(-1, np.int32), num_return_sequences=(16, np.int32))
            client.infer("ensemble", inputs, client_timeout=1)
    served.find(r"gRPC ModelInfer 'ensemble' .*error=cancelled", after=seen)


def test_api_key_is_required_and_shutdown_drains_stream(served: Served, tmp_path: Any) -> None:
    flags = ("--num-gpu-blocks-override", "200", "--grpc-port", "0", "--api-key", "secret")
    with Served(*flags) as other, triton.InferenceServerClient(address(other)) as client:
        assert client.is_server_live() and client.is_server_ready()
        for refused in (client.get_server_metadata, lambda: client.infer("ensemble", text_inputs(PROMPT, 4))):
            with pytest.raises(InferenceServerException, match=r"UNAUTHENTICATED.*API key"):
                refused()
        key = {"authorization": "Bearer secret"}
        assert text_of(client.infer("ensemble", text_inputs(PROMPT, 4), headers=key)).startswith(PROMPT)

        port = address(other).rpartition(":")[2]
        command = [sys.executable, "-m", "penstock.cli.main", "serve", "--host", "127.0.0.1", "--port", "0"]
        second = subprocess.run([*command, "--grpc-port", port], capture_output=True, text=True, timeout=60)
        assert second.returncode == 2 and f"grpc_port: cannot listen on 127.0.0.1:{port}" in second.stderr

        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)), headers=key)
        inputs = text_inputs(PROMPT, 300, stream=(True, np.bool_), end_id=(-1, np.int32))
        client.async_stream_infer("ensemble", inputs)
        assert answers.get(timeout=60)[1] is None
        other.terminate()
        last = False
        while not last:  # the server completes the open request before it exits
            result, error = answers.get(timeout=60)
            assert error is None, error
            last = result.get_response().parameters["triton_final_response"].bool_param
        assert other.ended() == 0
    socket.create_server(("127.0.0.1", int(port))).close()  # succeeds only if the port is free again


def test_ignored_parameters_are_reported_in_trailing_metadata(
    served: Served, client: triton.InferenceServerClient
) -> None:
    """``x-penstock-ignored`` has the value of the HTTP header; a stream sends it once, for all its requests."""
    request = pb.ModelInferRequest(model_name="ensemble")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"A")
    request.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1]).contents.int_contents.append(1)
    request.parameters["priority"].int64_param = 1
    with grpc.insecure_channel(address(served)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        _, call = stub.ModelInfer.with_call(request)
        assert "x-penstock-ignored" not in dict(call.trailing_metadata())
        request.parameters["prioritee"].int64_param = 1
        _, call = stub.ModelInfer.with_call(request)
        assert dict(call.trailing_metadata())["x-penstock-ignored"] == "parameters.prioritee"
        other = pb.ModelInferRequest()
        other.CopyFrom(request)
        other.parameters["top\nk"].int64_param = 1
        stream = stub.ModelStreamInfer(iter([request, other]))
        assert all(not response.error_message for response in stream)
        metadata = dict(stream.trailing_metadata())
        assert metadata["x-penstock-ignored"].split(", ") == ["parameters.prioritee", "parameters.top?k"]
        assert metadata["server"].startswith("penstock/")
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["A"]}]}
    body["inputs"].append({"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [1]})  # type: ignore[dict-item]
    answer = httpx.post(f"{served.root}/v2/models/ensemble/infer", json=body | {"parameters": {"prioritee": 1}})
    assert answer.headers["x-penstock-ignored"] == "parameters.prioritee"


def test_probes_are_answered_while_request_memory_is_exhausted(served: Served) -> None:
    """200 open calls without a message reserve all request memory of a client. Only ``ModelInfer`` needs such a
    reservation."""

    async def run() -> None:
        async with grpc.aio.insecure_channel(address(served)) as channel:
            infer = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
            waiting = [infer() for _ in range(200)]
            for method, request, kind in (
                ("ModelReady", pb.ModelReadyRequest(name="ensemble"), pb.ModelReadyResponse),
                ("ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse),
            ):
                call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
                assert kind.FromString(await call(request.SerializeToString(), timeout=40))
            with pytest.raises(grpc.RpcError, match="body: has 65540 bytes; the maximum is 65536"):
                await call(b"\x0a\x80\x80\x04" + b"x" * 2**16, timeout=40)
            for call_in_progress in waiting:
                call_in_progress.cancel()
            status = grpc.StatusCode.RESOURCE_EXHAUSTED
            while status is grpc.StatusCode.RESOURCE_EXHAUSTED:  # until the server has processed the cancellations
                with pytest.raises(grpc.RpcError) as refused:
                    await channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\xff\xff", timeout=40)
                status = refused.value.code()
            assert status is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())


def test_malformed_message_is_rejected_and_logged(served: Served) -> None:
    """The call ends with an error status, and the log gets a line for the rejected request."""
    seen = len(served.lines)
    with grpc.insecure_channel(address(served)) as channel:
        for method in ("ModelInfer", "ServerMetadata"):
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(b"\xff\xff")
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert raised.value.details() == "body: is not a valid message of this method"
        (answer,) = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([b"\xff\xff"]))
        assert "is not a valid message" in pb.ModelStreamInferResponse.FromString(answer).error_message
    served.find(r"gRPC ModelStreamInfer.*error=invalid", after=seen)
    assert not [line for line in served.lines[seen:] if "Traceback" in line]
