"""Unloading and loading of engine processes by the supervisor, without API processes, which agree to everything."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from serving import children

from penstock import demo
from penstock.config.options import Configuration, EngineOptions
from penstock.engine.service.control import RestartEngines
from penstock.engine.service.engine_processes import EngineProcesses
from penstock.serve.models.messages import ModelEntry, Request
from penstock.serve.process.api_processes import ApiProcesses
from penstock.serve.process.supervised_models import SupervisedModels

pytestmark = pytest.mark.slow
NAME = "demo"
OPTIONS = EngineOptions(model=str(demo.CHAT), num_gpu_blocks_override=100)


async def refuse(request: Request) -> None:
    raise AssertionError(request)


@asynccontextmanager
async def loaded_model() -> AsyncIterator[SupervisedModels]:
    entry = ModelEntry(names=(NAME,), configuration=Configuration(engine=OPTIONS), kserve={})
    models = SupervisedModels([entry], lambda configuration: configuration, ApiProcesses([], refuse))
    try:
        async with asyncio.timeout(120):
            await models.load(NAME)
            yield models
    finally:
        models.kill()
        await models.close()


def test_model_is_not_unloaded_between_its_load_and_the_restart_for_which_it_was_loaded() -> None:
    async def run() -> None:
        async with loaded_model() as models:
            await models.unload_idle(NAME)
            assert models.states == {NAME: "unloaded"}
            restart = asyncio.create_task(models.operate(NAME, RestartEngines()))
            await asyncio.sleep(0)  # ``operate`` is loading the model
            await asyncio.gather(restart, models.unload_idle(NAME))
            assert models.states == {NAME: "ready"}

    asyncio.run(run())


def test_cancelled_unload_leaves_no_task() -> None:
    async def run() -> None:
        async with loaded_model() as models:
            for _ in range(20):
                await asyncio.sleep(0)  # the engine's watch starts its tasks
            tasks = asyncio.all_tasks()
            unload = asyncio.create_task(models.unload_idle(NAME))
            await asyncio.sleep(0)  # ``unload_idle`` waits for the API processes
            unload.cancel()
            await asyncio.gather(unload, return_exceptions=True)
            assert asyncio.all_tasks() == tasks

    asyncio.run(run())


def test_unload_ends_engine_process_that_is_being_restarted() -> None:
    async def run() -> None:
        others = children(os.getpid())
        engines = EngineProcesses(OPTIONS)
        await engines.start()
        watch = asyncio.create_task(engines.watch())
        os.kill(engines.pid(0), signal.SIGKILL)
        while engines.reports:
            await asyncio.sleep(0)
        await engines.unload()
        assert children(os.getpid()) == others
        await engines.load()
        assert {*children(os.getpid())} == {*others, engines.pid(0)}
        await engines.close()
        await watch

    asyncio.run(run())
