"""``AsyncLLM`` with a real engine process: streams, cancellation, overload, deadlines, and engines that die or stop."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq
from serving import children

from penstock import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    PenstockError,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
)
from penstock.core import Code
from penstock.engine.service import messages as engine_messages
from penstock.frontend.outputs import RequestOutput

STORY = [{"role": "user", "content": "Tell me a story."}]
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(num_gpu_blocks_override=200, **options) as llm:
        yield llm


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine, then check that no open file and no child process is left."""
    zmq.Context.instance().socket(zmq.DEALER).close()  # start ZeroMQ's threads now: their file descriptors stay open
    files, before = open_resources()
    asyncio.run(asyncio.wait_for(coroutine, 120))
    limit = time.monotonic() + 60
    while open_resources()[0] > files and time.monotonic() < limit:
        time.sleep(0.01)  # a background thread of ZeroMQ closes the sockets
    assert open_resources()[0] <= files
    assert open_resources()[1] == before


def open_resources() -> tuple[int, set[int]]:
    """Return the number of open file descriptors of this process, and the process ids of its children."""
    return len(list(Path("/proc/self/fd").iterdir())), set(children(os.getpid()))


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


async def first(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return await anext(stream)


def test_streamed_outputs_are_prefixes_of_llm_output() -> None:
    async def streams() -> None:
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, n=2)
        (expected,) = LLM(num_gpu_blocks_override=200).chat(STORY, params, use_tqdm=False)
        async with started() as llm:
            num_outputs = 0
            async for output in llm.chat(STORY, params):
                assert all(
                    whole.text.startswith(made.text)
                    for whole, made in zip(expected.outputs, output.outputs, strict=True)
                )
                num_outputs += 1
            assert [o.text for o in output.outputs] == [o.text for o in expected.outputs]
            assert [o.finish_reason for o in output.outputs] == [o.finish_reason for o in expected.outputs]
            assert num_outputs > 1  # a busy machine merges outputs
            repeated = await asyncio.gather(*(last(llm.chat(STORY, params)) for _ in range(20)))
            assert {o.outputs[0].text for o in repeated} == {expected.outputs[0].text}

    run(streams())


@pytest.mark.slow
def test_engine_starts_and_restarts_on_the_event_loop_of_uvloop() -> None:
    """uvloop, on which Ray Serve and many ASGI servers run, has fewer options of child processes than asyncio."""

    async def streams() -> None:
        params = SamplingParams(temperature=0, max_tokens=5)
        async with started() as llm:
            before = await last(llm.chat(STORY, params))
            await llm.restart()
            after = await last(llm.chat(STORY, params))
            assert after.outputs == before.outputs

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(streams(), 120))


@pytest.mark.slow
def test_closed_stream_is_aborted_and_timeout_ends_request() -> None:
    async def close_early() -> None:
        async with started(max_num_seqs=1) as llm:
            stream = llm.chat(STORY, LONG)
            await first(stream)
            await stream.aclose()
            answered = await last(llm.chat(STORY, SamplingParams(max_tokens=1)))
            assert answered.finished, "the closed stream did not free the only row"
            timed_out = await last(llm.chat(STORY, LONG, timeout=0.05))
            assert timed_out.outputs[0].finish_reason == "error"
            assert timed_out.outputs[0].failure is not None
            assert timed_out.outputs[0].failure.code is Code.TIMEOUT

    run(close_early())


@pytest.mark.slow
def test_invalid_text_or_timeout_is_refused_with_field() -> None:
    """The text is a lone surrogate, which Python's JSON decoder accepts; the timeout is NaN."""

    async def ask() -> None:
        async with started() as llm:
            for field, prompt, sampling, options in (
                ("cache_salt", "a", SamplingParams(), {"cache_salt": "mine\ud800"}),
                ("stop", "a", SamplingParams(stop=("\ud800",)), {}),
            ):
                with pytest.raises(PenstockError, match="is not valid text") as raised:
                    await last(llm.generate(prompt, sampling, **options))
                assert raised.value.failure.field == field
            with pytest.raises(PenstockError, match="timeout"):
                await last(llm.chat(STORY, LONG, timeout=float("nan")))
            assert (await last(llm.generate("a", SamplingParams(max_tokens=1), cache_salt="mine"))).finished

    run(ask())


@pytest.mark.slow
def test_requests_beyond_max_waiting_are_refused() -> None:
    async def flood() -> None:
        async with started(max_num_seqs=1, max_waiting=2) as llm:
            outputs = await asyncio.gather(*(last(llm.chat(STORY, LONG.replace(max_tokens=100))) for _ in range(8)))
            refused = [o.outputs[0].failure for o in outputs if o.outputs[0].failure]
            assert refused
            assert {failure.code for failure in refused} == {Code.OVERLOADED}
            assert all(len(o.outputs[0].token_ids) == 100 for o in outputs if not o.outputs[0].failure)

    run(flood())


@pytest.mark.slow
def test_streams_of_killed_engine_continue_in_restarted_engine() -> None:
    """The outputs are those of an undisturbed engine. A request that arrives during the restart waits."""
    params = [LONG.replace(max_tokens=500), LONG.replace(temperature=1.0, seed=3, n=2, max_tokens=400, logprobs=2)]

    async def kill() -> None:
        async with started() as llm:
            expected = [await last(llm.chat(STORY, one)) for one in params]
            streams = [llm.chat(STORY, one) for one in params]
            await asyncio.gather(*map(first, streams))
            os.kill(llm.ready.pid, signal.SIGKILL)
            *outputs, late = await asyncio.gather(
                *map(last, streams), last(llm.chat(STORY, LONG.replace(max_tokens=5)))
            )
            for output, undisturbed in zip(outputs, expected, strict=True):
                assert completions(output) == completions(undisturbed)
                assert [resume.reason for resume in output.resumes] == ["engine_died"]
            assert late.outputs[0].token_ids == expected[0].outputs[0].token_ids[:5]
            assert (await llm.gateway.engine_pool.ready()).pid != llm.ready.pid

    run(kill())


def completions(output: RequestOutput) -> list[tuple[Any, ...]]:
    """Return the parts of an output that do not depend on time and cache."""
    return [
        (one.index, one.text, one.token_ids, one.logprobs, one.finish_reason, one.failure) for one in output.outputs
    ]


@pytest.mark.slow
def test_killed_engine_without_resume_fails_its_streams_and_is_restarted() -> None:
    async def kill() -> None:
        async with started(resume=False) as llm:
            streams = [llm.chat(STORY, LONG) for _ in range(3)]
            await asyncio.gather(*map(first, streams))
            os.kill(llm.ready.pid, signal.SIGKILL)
            for output in await asyncio.gather(*map(last, streams)):
                assert output.outputs[0].failure is not None
                assert output.outputs[0].failure.retryable
            while True:
                try:
                    answered = await last(llm.chat(STORY, SamplingParams(temperature=0, max_tokens=5)))
                    break
                except PenstockError as error:
                    assert error.failure.retryable
                    await asyncio.sleep(0.05)  # clients wait before they retry
            assert len(answered.outputs[0].token_ids) == 5

    run(kill())


@pytest.mark.slow
def test_stopped_engine_drains_and_exits_with_status_0() -> None:
    async def stop() -> None:
        llm = AsyncLLM(num_gpu_blocks_override=200)
        await llm.__aenter__()
        stream = llm.chat(STORY, LONG.replace(max_tokens=200))
        await first(stream)
        status, output = await asyncio.gather(llm.close(), last(stream))
        assert status == 0
        assert len(output.outputs[0].token_ids) == 200

    run(stop())


@pytest.mark.slow
def test_slow_reader_gets_complete_output() -> None:
    """The reader is slower than the engine, and a stop string ends the text. A request id may be used again."""

    async def read() -> None:
        async with started() as llm:
            params = SamplingParams(temperature=0, max_tokens=40, stop=("Ottawa",))
            for _ in range(2):
                abandoned = llm.chat(STORY, LONG, request_id="mine")
                await first(abandoned)
                await abandoned.aclose()
                stream = llm.chat(
                    [{"role": "user", "content": "What is the capital of Canada?"}], params, request_id="mine"
                )
                first_output = await first(stream)
                await last(llm.chat(STORY, LONG.replace(max_tokens=100)))  # meanwhile, the unread stream ends
                output = [first_output, *[later async for later in stream]][-1]
                assert output.request_id == "mine"
                assert output.finished
                assert output.outputs[0].text == "The capital of Canada is "

    run(read())


@pytest.mark.slow
def test_requests_running_at_drain_timeout_fail() -> None:
    async def stop() -> None:
        llm = AsyncLLM(num_gpu_blocks_override=200, drain_timeout=0.0)
        await llm.__aenter__()
        streams = [llm.chat(STORY, LONG) for _ in range(2)]
        await asyncio.gather(*map(first, streams))
        status, *outputs = await asyncio.gather(llm.close(), *map(last, streams))
        assert status == 0
        for output in outputs:
            assert output.outputs[0].failure is not None
            assert output.outputs[0].failure.code is Code.UNAVAILABLE

    run(stop())


@pytest.mark.slow
def test_requests_time_out_and_clients_stay_registered_while_engine_is_stopped() -> None:
    """While the engine is stopped, keep-alive messages of clients still count, and a running and a new request time
    out."""

    async def stall() -> None:
        async with started() as llm:
            patient, running = llm.chat(STORY, LONG.replace(max_tokens=500)), llm.chat(STORY, LONG, timeout=2.0)
            await asyncio.gather(first(patient), first(running))
            os.kill(llm.ready.pid, signal.SIGSTOP)
            try:
                sent_late = llm.chat(STORY, LONG, timeout=0.2)
                async with asyncio.timeout(60):
                    _, *timed_out = await asyncio.gather(
                        asyncio.sleep(engine_messages.CLIENT_TIMEOUT + 0.5), last(running), last(sent_late)
                    )
            finally:
                os.kill(llm.ready.pid, signal.SIGCONT)
            for output in timed_out:
                assert output.outputs[0].failure is not None
                assert output.outputs[0].failure.code is Code.TIMEOUT
            assert len((await last(patient)).outputs[0].token_ids) == 500

    run(stall())


@pytest.mark.slow
def test_requests_of_hanging_engine_continue_in_restarted_engine() -> None:
    """The engine is killed. A request that arrives while it hangs waits for the new one."""

    async def hang() -> None:
        async with started(engine_iteration_timeout=4.0) as llm:
            expected = await last(llm.chat(STORY, LONG))
            stream = llm.chat(STORY, LONG)
            await first(stream)
            stopped = time.monotonic()
            os.kill(llm.ready.pid, signal.SIGSTOP)
            while llm.gateway.engine_pool.stats.heartbeat_age < 2:
                await asyncio.sleep(0.1)
            output, late = await asyncio.gather(last(stream), last(llm.chat(STORY, LONG.replace(max_tokens=5))))
            assert time.monotonic() - stopped < 50  # the default engine_iteration_timeout is a minute
            assert completions(output) == completions(expected)
            assert [resume.reason for resume in output.resumes] == ["engine_died"]
            assert late.outputs[0].token_ids == expected.outputs[0].token_ids[:5]
            assert (await llm.gateway.engine_pool.ready()).pid != llm.ready.pid

    run(hang())


def test_hanging_engine_without_resume_is_killed_and_restarted() -> None:
    """The open stream ends with an error. Requests are refused until the new engine is ready."""

    async def hang() -> None:
        async with started(engine_iteration_timeout=4.0, resume=False) as llm:
            stream = llm.chat(STORY, LONG)
            await first(stream)
            stopped = time.monotonic()
            os.kill(llm.ready.pid, signal.SIGSTOP)
            while llm.gateway.engine_pool.stats.heartbeat_age < 2:
                await asyncio.sleep(0.1)
            with pytest.raises(PenstockError, match="has not answered for") as refused:
                await last(llm.chat(STORY, LONG))
            assert refused.value.failure.retryable
            output = await last(stream)
            assert time.monotonic() - stopped < 50  # the default engine_iteration_timeout is a minute
            assert output.outputs[0].failure is not None
            assert output.outputs[0].failure.retryable
            assert (await llm.gateway.engine_pool.ready()).pid != llm.ready.pid
            answered = await last(llm.chat(STORY, SamplingParams(temperature=0, max_tokens=5)))
            assert len(answered.outputs[0].token_ids) == 5

    run(hang())


PARENT = """
import asyncio
from penstock import AsyncLLM

async def main():
    async with AsyncLLM(num_gpu_blocks_override=200) as llm:
        print(llm.ready.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
def test_engine_ends_when_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        engine = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    ended, _, _ = select.select([engine], [], [], 60)
    os.close(engine)
    parent.wait()
    assert ended


def test_failed_start_reports_reason(tmp_path: Path) -> None:
    async def fail() -> None:
        async with started(model=str(tmp_path)):
            pass

    with pytest.raises(PenstockError, match="is empty, so it is not a checkpoint"):
        run(fail())


@pytest.mark.slow
def test_output_kinds_are_parts_of_the_cumulative_outputs() -> None:
    """Also with FastDeploy's outputs, which keep their attributes."""

    async def ask() -> None:
        async with started(compat="fastdeploy", enable_logprob=True, speculation=False) as llm:
            params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
            expected = await last(llm.generate("Once upon a time", params))
            params.output_kind = RequestOutputKind.DELTA
            deltas = [output async for output in llm.generate("Once upon a time", params)]
            parts = [delta.outputs[0] for delta in deltas]
            assert len(deltas) > 1 and "".join(part.text for part in parts) == expected.outputs[0].text
            assert [token for part in parts for token in part.token_ids] == expected.outputs[0].token_ids
            assert [one for part in parts for one in part.logprobs or ()] == expected.outputs[0].logprobs
            params.output_kind = RequestOutputKind.FINAL_ONLY
            (final,) = [output async for output in llm.chat(STORY, params)]
            assert final.finished and final.error_code == 200 and final.outputs.text  # type: ignore[attr-defined]

    run(ask())


@pytest.mark.slow
def test_engine_of_engine_args_starts_on_first_use_and_ends_with_shutdown() -> None:
    """vLLM's form without a context manager: abort, encode, reset_prefix_cache and get_tokenizer, too."""

    async def ask() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(num_gpu_blocks_override=200))
        assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("Hi")) == "Hi"
        first, second = await asyncio.gather(  # both find an engine that is not started
            last(llm.generate(request_id="a", prompt="Once", sampling_params=SamplingParams(max_tokens=3))),
            last(llm.generate("Once", SamplingParams(max_tokens=3), "b")),
        )
        assert (first.request_id, second.request_id) == ("a", "b")
        stream = llm.generate("Once", SamplingParams(max_tokens=2000, ignore_eos=True), "c")
        output = await anext(stream)
        await llm.abort(["c", "unknown"])
        output = await last(stream)
        assert output.finished and output.outputs[0].failure and output.outputs[0].failure.code == Code.CANCELLED
        (pooled,) = [pooled async for pooled in llm.encode("Once", PoolingParams(), "d", pooling_task="token_embed")]
        assert pooled.outputs.data.shape[0] == len(pooled.prompt_token_ids)
        assert await llm.reset_prefix_cache() is True
        await llm.check_health()
        llm.shutdown()
        assert await llm.close() == 0
        with pytest.raises(PenstockError, match="this AsyncLLM is closed; create another one"):
            await last(llm.generate("a"))

    run(ask())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(5), "prompt: must be text, token ids, or a dict, is int 5"),
        (lambda llm: llm.generate("a", {"temperature": 0}), "sampling_params: must be SamplingParams"),
        (
            lambda llm: llm.generate("a", max_tokens=5),
            "max_tokens: is not an argument of generate; pass",
        ),
        (lambda llm: llm.generate("a", request_id=5), "request_id: must be a string, is int 5"),
        (lambda llm: llm.generate("a", lora_request="x"), "lora_request: must be LoRARequest"),
        (lambda llm: llm.chat([], tools=[]), "messages: is empty"),
        (lambda llm: llm.chat("Hi"), "messages: must be a list of messages"),
        (lambda llm: llm.chat([STORY, STORY]), "messages: has several chats: call chat for each"),
    ],
)
def test_wrong_call_is_refused_before_the_engine_starts(call: Callable[[AsyncLLM], Any], message: str) -> None:
    async def ask() -> None:
        with pytest.raises(PenstockError, match=message):
            await last(call(AsyncLLM()))

    run(ask())
