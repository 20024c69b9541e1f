"""Weight updates and sleep while an engine process serves: each token is computed with the old or the new weights."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SMALL, save
from safetensors.torch import load_file, save_file
from test_weights import perturbed
from transformers import Qwen3Config

from penstock import LLM, AsyncLLM, PenstockError
from penstock.core import Code, SamplingParams
from penstock.frontend.outputs import RequestOutput

OPTIONS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 300, "weight_cache_dir": "none"}
PROMPT = list(range(5, 45))


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("weights") / "old"
    save(Qwen3Config(**SMALL, head_dim=32, sliding_window=None), folder)
    return folder, perturbed(folder, folder.parent / "new")


class Oracle:
    """Reference engine: returns the tokens that a new engine generates with the weights of a folder."""

    def __init__(self, folder: Path) -> None:
        self._llm = LLM(folder, **OPTIONS)
        self.version = self._llm.engine.info.weights_version

    def __call__(self, prompt: list[int], tokens: int) -> list[int]:
        if not tokens:
            return []
        return self._llm.generate(prompt, greedy(tokens), use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def oracles(folders: tuple[Path, Path]) -> Iterator[tuple[Oracle, Oracle]]:
    yield Oracle(folders[0]), Oracle(folders[1])


@asynccontextmanager
async def started(folder: Path, **options: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(folder, log_level="error", **OPTIONS | options) as llm:
        yield llm


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 100))


class Stream:
    """A request whose output is collected in a background task."""

    def __init__(self, llm: AsyncLLM, tokens: int, prompt: list[int] | None = None) -> None:
        self._outputs = llm.generate(prompt or PROMPT, greedy(tokens))
        self._started = asyncio.Event()
        self.output: RequestOutput | None = None
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> RequestOutput:
        async for output in self._outputs:
            self.output = output
            self._started.set()
        assert self.output
        return self.output

    async def started_generating(self) -> None:
        await self._started.wait()

    async def tokens(self) -> list[int]:
        output = await self.task
        assert not output.outputs[0].failure
        return output.outputs[0].token_ids


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("address", ["", "127.0.0.1:0"])
def test_restarted_engine_continues_requests(folders: tuple[Path, Path], address: str, oracles: Any) -> None:
    """With an address for other hosts, the old process has to end before the new one starts."""

    async def check() -> None:
        async with started(folders[0], engine_address=address) as llm:
            for _ in range(2):
                pid, streams = llm.gateway.engine_pool.reports[0].pid, [Stream(llm, 150) for _ in range(4)]
                await streams[0].started_generating()
                await llm.restart()
                assert [await stream.tokens() for stream in streams] == 4 * [oracles[0](PROMPT, 150)]
                assert llm.gateway.engine_pool.reports[0].pid != pid
            with pytest.raises(PenstockError, match="not a folder"):
                await llm.update_weights(folders[0] / "missing", running="restart")
            assert await Stream(llm, 20).tokens() == oracles[0](PROMPT, 20)
            assert await llm.update_weights(folders[1], running="restart") == oracles[1].version
            assert await Stream(llm, 20).tokens() == oracles[1](PROMPT, 20)

    run(check())


@pytest.mark.slow
def test_running_requests_finish_before_engine_restarts_with_other_weights(
    folders: tuple[Path, Path], oracles: tuple[Oracle, Oracle]
) -> None:
    """With an address for other hosts, the old process has to end first."""

    async def check() -> None:
        async with started(folders[0], engine_address="127.0.0.1:0", resume_timeout=5.0) as llm:
            streams = [Stream(llm, 300) for _ in range(4)]
            await streams[0].started_generating()
            assert await llm.update_weights(folders[1], running="restart") == oracles[1].version
            assert [await stream.tokens() for stream in streams] == 4 * [oracles[0](PROMPT, 300)]

    run(check())


@pytest.mark.slow
@pytest.mark.parametrize("address", ["", "127.0.0.1:0"])
def test_restart_may_be_cancelled_or_followed_by_close(folders: tuple[Path, Path], address: str, oracles: Any) -> None:
    async def check() -> None:
        async with started(folders[0], engine_address=address) as llm:
            restarting = asyncio.ensure_future(llm.restart())
            await asyncio.wait([restarting], timeout=0.4)
            restarting.cancel()
            await asyncio.wait([restarting])
            assert await Stream(llm, 20).tokens() == oracles[0](PROMPT, 20)
            while True:
                try:
                    await llm.restart()
                    break
                except PenstockError as error:  # the cancelled restart is still starting its process
                    assert error.failure.code is Code.UNAVAILABLE
                    await asyncio.sleep(0.1)
            assert await Stream(llm, 20).tokens() == oracles[0](PROMPT, 20)
            restarting = asyncio.ensure_future(llm.restart())
            await asyncio.wait([restarting], timeout=0.4)
        with pytest.raises(PenstockError):
            await restarting

    run(check())


@pytest.mark.slow
def test_replicas_keep_weights_if_others_cannot_be_loaded_by_restart(folders: tuple[Path, Path], oracles: Any) -> None:
    async def check() -> None:
        async with started(folders[0], engine_address="127.0.0.1:0", data_parallel_size=2) as llm:
            with pytest.raises(PenstockError, match="not a folder"):
                await llm.update_weights(folders[0] / "missing", running="restart")
            streams = [Stream(llm, 50) for _ in range(4)]
            assert [await stream.tokens() for stream in streams] == 4 * [oracles[0](PROMPT, 50)]
            assert len(llm.gateway.engine_pool.reports) == 2

    run(check())


@pytest.mark.slow
def test_requests_during_update_pause_and_sleep_get_expected_tokens(
    folders: tuple[Path, Path], oracles: tuple[Oracle, Oracle]
) -> None:
    old, new = oracles

    async def scenario() -> None:
        async with started(folders[0], enable_prefix_caching=True) as llm:
            running = Stream(llm, 300)
            await running.started_generating()
            updating = asyncio.ensure_future(llm.update_weights(folders[1], "finish"))
            assert await running.tokens() == old(PROMPT, 300)
            assert (await running.task).weights_versions == [old.version]
            assert await updating == new.version
            later = Stream(llm, 20)
            assert await later.tokens() == new(PROMPT, 20)
            assert (await later.task).weights_versions == [new.version]

            running = Stream(llm, 300)
            await running.started_generating()
            await llm.pause_generation("keep")  # the request has generated only a part of its tokens
            assert await llm.update_weights(folders[0], "recompute") == old.version
            await llm.resume_generation()
            tokens, output = await running.tokens(), await running.task
            assert output.weights_versions == [new.version, old.version]
            before = new(PROMPT, 300)
            changed = next(i for i, (token, other) in enumerate(zip(tokens, before, strict=True)) if token != other)
            candidates = range(changed, changed - 3, -1)  # the first new tokens may be equal
            assert any(tokens[i:] == old(PROMPT + before[:i], 300 - i) for i in candidates)

            broken = folders[0].parent / "broken"
            shutil.copytree(folders[1], broken)
            tensors = load_file(broken / "model.safetensors")
            tensors["model.norm.weight"][3] = float("nan")
            save_file(tensors, broken / "model.safetensors")
            running = Stream(llm, 200)
            await running.started_generating()
            with pytest.raises(PenstockError, match="not finite"):
                await llm.update_weights(broken)
            assert await running.tokens() == old(PROMPT, 200)

            await llm.pause_generation("keep")
            assert await llm.is_paused()
            waiting = Stream(llm, 20)
            await asyncio.sleep(0.1)
            assert not waiting.output
            await llm.resume_generation()
            assert not await llm.is_paused()
            assert await waiting.tokens() == old(PROMPT, 20)

            running = Stream(llm, 200)
            await running.started_generating()
            await llm.sleep(2, "keep")
            assert await llm.is_sleeping()
            with pytest.raises(PenstockError, match="sleeps"):
                await Stream(llm, 5).task
            await llm.wake_up(["weights"])
            assert await llm.is_sleeping()
            await llm.wake_up()
            assert not await llm.is_sleeping()
            assert await running.tokens() == old(PROMPT, 200)

    run(scenario())


@pytest.mark.thorough
def test_killed_engine_restarts_with_updated_weights_and_sleep_state(
    folders: tuple[Path, Path], oracles: tuple[Oracle, Oracle]
) -> None:
    old, new = oracles
    copy = folders[0].parent / "copy"
    shutil.copytree(folders[1], copy)

    async def kill(llm: AsyncLLM) -> None:
        pid = llm.gateway.engine_pool.reports[0].pid
        os.kill(pid, signal.SIGKILL)
        while not llm.gateway.engine_pool.reports or llm.gateway.engine_pool.reports[0].pid == pid:
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with started(folders[0]) as llm:
            await llm.resume_generation()
            running = Stream(llm, 1500)
            await running.started_generating()
            updating = asyncio.ensure_future(llm.update_weights(copy, "finish"))
            await asyncio.sleep(0)
            with pytest.raises(PenstockError, match="weights are being loaded"):
                await llm.sleep()
            await kill(llm)
            with pytest.raises(PenstockError):
                await updating
            assert await running.tokens() == old(PROMPT, 1500)
            await llm.resume_generation()  # a sleeping engine would refuse this call
            assert await Stream(llm, 20).tokens() == old(PROMPT, 20)
            await llm.update_weights(copy)
            await llm.sleep(1)
            await kill(llm)
            while not await llm.is_sleeping():
                await asyncio.sleep(0.01)
            await llm.wake_up()
            assert await Stream(llm, 20).tokens() == new(PROMPT, 20)
            shutil.rmtree(copy)
            with pytest.raises(PenstockError, match="is not a folder"):
                await llm.update_weights()
            assert await Stream(llm, 20).tokens() == new(PROMPT, 20)

    run(scenario())


@pytest.mark.thorough
def test_replicas_are_updated_together_or_not_at_all(
    folders: tuple[Path, Path], oracles: tuple[Oracle, Oracle]
) -> None:
    old, new = oracles

    async def check_all_replicas(llm: AsyncLLM, oracle: Oracle) -> None:
        """Check that requests of both replicas get the tokens and the weights version of the oracle."""
        prompts = [[number, *PROMPT] for number in range(12)]
        streams = [Stream(llm, 10, prompt) for prompt in prompts]
        assert [await stream.tokens() for stream in streams] == [oracle(prompt, 10) for prompt in prompts]
        assert {tuple((await stream.task).weights_versions) for stream in streams} == {(oracle.version,)}

    async def scenario() -> None:
        async with started(folders[0], data_parallel_size=2) as llm:
            reports = lambda: {report.pid for report in llm.gateway.engine_pool.reports}  # noqa: E731

            async def replaced(before: set[int]) -> None:
                while len(reports() - before) < 1 or len(reports()) < 2:
                    await asyncio.sleep(0.01)

            assert await llm.update_weights(folders[1]) == new.version
            await check_all_replicas(llm, new)
            os.kill(min(before := reports()), signal.SIGKILL)
            await replaced(before)
            await check_all_replicas(llm, new)
            running = Stream(llm, 1500)
            await running.started_generating()
            updating = asyncio.ensure_future(llm.update_weights(folders[0]))
            os.kill(max(before := reports()), signal.SIGKILL)
            with suppress(PenstockError):
                await updating
            await replaced(before)
            with suppress(PenstockError):
                await running.task
            states = llm.gateway.engine_pool.states
            assert len({state.weights_version for state in states}) == 1
            await check_all_replicas(llm, old if states[0].weights_version == old.version else new)
            await llm.sleep(2)
            assert all(state.asleep for state in llm.gateway.engine_pool.states)
            await llm.wake_up()
            await check_all_replicas(llm, old if states[0].weights_version == old.version else new)

    run(scenario())


@pytest.mark.thorough
def test_engine_restarts_with_weights_of_model_if_update_is_gone(
    folders: tuple[Path, Path], oracles: tuple[Oracle, Oracle]
) -> None:
    gone = folders[0].parent / "gone"
    shutil.copytree(folders[1], gone)

    async def scenario() -> None:
        async with started(folders[0]) as llm:
            await llm.update_weights(gone)
            shutil.rmtree(gone)
            pid = llm.gateway.engine_pool.reports[0].pid
            os.kill(pid, signal.SIGKILL)
            while not (reports := llm.gateway.engine_pool.reports) or reports[0].pid == pid:
                await asyncio.sleep(0.01)
            stream = Stream(llm, 20)
            assert await stream.tokens() == oracles[0](PROMPT, 20)
            assert (await stream.task).weights_versions == [oracles[0].version]

    run(scenario())
