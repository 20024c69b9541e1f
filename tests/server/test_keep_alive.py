"""Keep-alive times in one API process, without an engine process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import scripted_server

from penstock.config.options import ServerOptions
from penstock.engine.service.pool import EnginePool
from penstock.serve.models.keep_alive import IdleRequests, KeepAlive


def engine_pool() -> EnginePool:
    ignore: Any = lambda *arguments: None  # noqa: E731
    return EnginePool((), ignore, ignore, lambda name: (), ignore, ignore, dict, ignore, 0)


async def several_steps() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


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
        await several_steps()
        keep_alive.close()
        return reports

    assert asyncio.run(run()) == 1


@pytest.mark.parametrize(("key", "is_unloaded"), [((), False), (("admin",), False), (("admin",), True)])
def test_unload_request_has_no_effect_where_clients_may_not_unload(
    key: tuple[str, ...], is_unloaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that unloads no models, or only for clients with the admin key. The answer says what is loaded."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))

    async def run() -> str:
        async with scripted_server(server_options=ServerOptions(admin_api_key=key)) as server:
            loads = 0

            async def load() -> None:
                nonlocal loads
                loads += 1

            server.served.keep_alive = KeepAlive(server.engines, IdleRequests(nothing, nothing, load) if key else None)
            server.engines.hold(is_unloaded)
            body = {"model": "default", "prompt": "", "keep_alive": 0}
            answer = await server.http.post("/api/generate", json=body)
            assert loads == 0
            return str(answer.json()["done_reason"])

    assert asyncio.run(run()) == ("unload" if is_unloaded else "load")


def test_model_is_not_reported_as_idle_while_it_loads_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))

    async def run() -> None:
        options = ServerOptions(allow_runtime_lora_updating=True, admin_api_key=("admin",))
        async with scripted_server(server_options=options) as server:
            reports = 0

            async def report() -> None:
                nonlocal reports
                reports += 1

            async def load_adapter(name: str, path: str) -> None:
                keep_alive.set(0)
                await several_steps()
                assert not reports

            keep_alive = server.served.keep_alive = KeepAlive(server.engines, IdleRequests(report, nothing, nothing))
            server.engines.load_adapter = load_adapter  # type: ignore[method-assign]
            body = {"lora_name": "a", "lora_path": str(tmp_path)}
            headers = {"Authorization": "Bearer admin"}
            answer = await server.http.post("/v1/load_lora_adapter", json=body, headers=headers)
            assert answer.status_code == 200
            await several_steps()
            assert reports == 1
            keep_alive.close()

    asyncio.run(run())
