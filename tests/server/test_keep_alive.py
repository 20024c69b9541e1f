"""Keep-alive times in one API process, with an engine pool that has no engine."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.engine.service.pool import EnginePool
from penstock.serve.models.keep_alive import IdleRequests, KeepAlive


def engine_pool() -> EnginePool:
    ignore: Any = lambda *arguments: None  # noqa: E731
    return EnginePool((), ignore, ignore, lambda name: (), ignore, ignore, dict, ignore, 0)


async def nothing(*arguments: object) -> None: ...


def test_refused_unload_is_not_repeated_at_once() -> None:
    """The supervisor refuses to unload a model while another API process has a request."""

    async def run() -> int:
        pool, reports = engine_pool(), 0

        async def refuse() -> None:
            nonlocal reports
            reports += 1
            pool.hold(True)
            keep_alive.release()

        keep_alive = KeepAlive(pool, IdleRequests(refuse, nothing, nothing))
        keep_alive.set(0)
        for _ in range(200):
            await asyncio.sleep(0)
        keep_alive.close()
        return reports

    assert asyncio.run(run()) == 1
