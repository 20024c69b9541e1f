"""Outcomes of requests while disaggregated prefill and decode instances fail (table in docs/reliability.md).

python benchmarks/reliability_pd.py        # about six minutes on two cores
python benchmarks/reliability_pd.py --only SIGSTOP

Clients of two routers send requests in several API dialects; an answer is right if it equals the answer of a single
instance byte for byte. Two prefill and two decode instances serve the built-in model. After each row no KV block and no
transfer buffer slot is in use, and no additional processes and files exist. Rows with a cut or slow network need
network namespaces, and are skipped without them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

import kv_proxy
import namespaces
import pd_storm
from namespaces import Namespaces
from pd_storm import ENGINE_TIMEOUT, KV_TIMEOUT, Deployment, FaultResult, Instance, Outcome, Right, in_thread
from serving import Served
from tqdm import tqdm

Scenario = Callable[[Deployment, Right], Awaitable[FaultResult]]
COLUMNS = (Outcome.RIGHT, Outcome.ERROR, Outcome.BROKEN, Outcome.WRONG, Outcome.LOST)
LONG_STOP = ENGINE_TIMEOUT + 9
"""Duration of a long SIGSTOP in seconds; ZeroMQ detects a stopped process after 8 s."""
MAY_FAIL = (" router,", "of a router", "--kv-load-failure fail")
"""Parts of the names of scenarios in which requests may fail."""
TIGHT = ("--max-model-len", "512", "--num-gpu-blocks-override", "10")


def killed(role: str, kind: str) -> Scenario:
    """Kill (-9) a process of the first instance with a role."""

    async def scenario(deployment: Deployment, right: Right) -> FaultResult:
        victim = first(deployment, role)
        return await pd_storm.run_with_fault(
            deployment, right, victim, lambda: in_thread(victim.kill, *victim.served.pids[kind][:1]), lasts=1
        )

    return scenario


def gone(role: str) -> Scenario:
    """Kill (-9) all processes of the first instance with a role, and restart the instance after five seconds."""

    async def scenario(deployment: Deployment, right: Right) -> FaultResult:
        victim = first(deployment, role)
        return await pd_storm.run_with_fault(
            deployment, right, victim, lambda: in_thread(victim.kill), lambda: in_thread(victim.restart), lasts=5
        )

    return scenario


def stopped(role: str, seconds: float) -> Scenario:
    async def scenario(deployment: Deployment, right: Right) -> FaultResult:
        victim = first(deployment, role)
        pid = victim.engine
        return await pd_storm.run_with_fault(
            deployment,
            right,
            victim,
            lambda: in_thread(pd_storm.suspend, pid),
            lambda: in_thread(pd_storm.resume, pid),
            seconds,
        )

    return scenario


def cut(one: int, other: int, role: str, seconds: float) -> Scenario:
    """Drop all packets between two machines for some seconds."""

    async def scenario(deployment: Deployment, right: Right) -> FaultResult:
        machines = deployment.machines
        assert machines
        return await pd_storm.run_with_fault(
            deployment,
            right,
            first(deployment, role),
            lambda: in_thread(machines.separate, one, other),
            lambda: in_thread(machines.separate, one, other, False),
            seconds,
        )

    return scenario


def slow(nodes: Sequence[int], rate: str) -> Scenario:
    async def scenario(deployment: Deployment, right: Right) -> FaultResult:
        machines = deployment.machines
        assert machines

        async def fault() -> None:
            for node in nodes:
                machines.slow_down(node, rate)

        async def heal() -> None:
            for node in nodes:
                machines.speed_up(node)

        return await pd_storm.run_with_fault(deployment, right, first(deployment, "prefill"), fault, heal, 10)

    return scenario


def steady(seconds: float = 8, clients: int = 16) -> Scenario:
    """Run without an injected fault; a fault may be part of the setup."""

    async def scenario(deployment: Deployment, right: Right) -> FaultResult:
        row = await pd_storm.run_with_fault(deployment, right, None, nothing, lasts=seconds, clients=clients)
        assert row.transfers
        return row

    return scenario


async def cut_connections(deployment: Deployment, right: Right) -> FaultResult:
    """Cut every KV connection twice a second."""

    async def cut_again() -> None:
        while True:
            for proxy in deployment.proxies:
                proxy.cut()
            await asyncio.sleep(0.5)

    cutting: list[asyncio.Task[None]] = []

    async def fault() -> None:
        cutting.append(asyncio.create_task(cut_again()))

    async def heal() -> None:
        cutting[0].cancel()

    return await pd_storm.run_with_fault(deployment, right, first(deployment, "prefill"), fault, heal, 10)


def replaced(*roles: str) -> Scenario:
    """Restart every server with these roles with SIGTERM, one after the other."""

    async def scenario(deployment: Deployment, right: Right) -> FaultResult:
        async def replace_all() -> None:
            for one in [*deployment.instances, *deployment.routers]:
                if one.role in roles:
                    await in_thread(one.replace)
                    await deployment.ready()

        replacing: list[asyncio.Task[None]] = []

        async def fault() -> None:
            replacing.append(asyncio.create_task(replace_all()))

        async def heal() -> None:
            await replacing[0]

        return await pd_storm.run_with_fault(deployment, right, None, fault, heal)

    return scenario


async def nothing() -> None:
    """Inject no fault."""


def first(deployment: Deployment, role: str) -> Instance:
    return (deployment.routers if role == "router" else deployment.with_role(role))[0]


SETUPS: dict[str, tuple[dict[str, Any], dict[str, Scenario]]] = {
    "one host": (
        {},
        {
            "no fault": steady(),
            "kill -9 of a prefill engine": killed("prefill", "engine"),
            "kill -9 of a decode engine": killed("decode", "engine"),
            "kill -9 of a prefill instance": gone("prefill"),
            "kill -9 of a decode instance": gone("decode"),
            "kill -9 of a router's API process": killed("router", "api"),
            "kill -9 of a router": gone("router"),
            "SIGSTOP of a prefill engine, 6 s": stopped("prefill", 2 * KV_TIMEOUT),
            "SIGSTOP of a prefill engine, 15 s": stopped("prefill", LONG_STOP),
            "SIGSTOP of a decode engine, 15 s": stopped("decode", LONG_STOP),
            "SIGTERM of every instance, one after the other": replaced("prefill", "decode"),
            "SIGTERM of every router, one after the other": replaced("router"),
        },
    ),
    "hosts": (
        {"machines": 5},
        {
            "network between a prefill and a decode instance cut for 8 s": cut(1, 3, "prefill", 8),
            "network between the router and a decode instance cut for 15 s": cut(0, 3, "decode", 15),
            "network between the router and a prefill instance cut for 15 s": cut(0, 1, "prefill", 15),
            "prefill instances send 1 Mbit/s for 10 s": slow((1, 2), "1mbit"),
        },
    ),
    "lossy": ({"fault": kv_proxy.lossy(0.05)}, {"5 % of KV messages lost, delayed or duplicated": steady()}),
    "noisy": ({"fault": kv_proxy.flipped_bit(0.05)}, {"one flipped bit in 5 % of the KV messages": steady()}),
    "cut": ({"fault": kv_proxy.lossy(0)}, {"KV connections cut every 0.5 s": cut_connections}),
    "fail": (
        {"prefill": 1, "decode_flags": ("--kv-load-failure", "fail")},
        {"kill -9 of the only prefill engine, with --kv-load-failure fail": killed("prefill", "engine")},
    ),
    "P": ({"prefill": 1, "prefill_flags": TIGHT}, {"few KV blocks in the prefill instance": steady()}),
    "D": ({"decode": 1, "decode_flags": TIGHT}, {"few KV blocks in the decode instance": steady()}),
    "buffer of P": (
        {"prefill": 1, "prefill_flags": ("--kv-buffer-size", pd_storm.SLOT_BYTES)},
        {"a prefill buffer of one slot": steady()},
    ),
    "buffer of D": (
        {"decode": 1, "decode_flags": ("--kv-buffer-size", pd_storm.SLOT_BYTES)},
        {"a decode buffer of one slot": steady()},
    ),
}


async def run(only: str) -> tuple[list[str], list[str]]:
    """Run the scenarios. Returns the lines of the table, and the names of scenarios with unexpected failures."""
    lines = [
        f"| fault | sent | {' | '.join(COLUMNS)} | answers after, s | repaired after, s | longest pause, s |",
        f"|---|---:|{'---:|' * (len(COLUMNS) + 3)}",
    ]
    total, failed = dict.fromkeys(COLUMNS, 0), []
    with Served(*pd_storm.SERVER_OPTIONS) as single:
        right = await pd_storm.right_answers(single.root, pd_storm.questions(60))
    count = sum(only in name for _, scenarios in SETUPS.values() for name in scenarios)
    with tqdm(total=count, desc="rows", unit="row") as progress:
        for setup, scenarios in SETUPS.values():
            wanted = {name: scenario for name, scenario in scenarios.items() if only in name}
            if not wanted:
                continue
            if "machines" in setup and (reason := namespaces.unavailable_reason()):
                print(reason, file=sys.stderr)
                continue
            for name, row in (await rows(setup, wanted, right, progress)).items():
                lines.append(line_of(name, row.counts, row))
                for outcome in COLUMNS:
                    total[outcome] += row.counts[outcome]
                if row.counts[Outcome.RIGHT] < len(row.replies) and not any(part in name for part in MAY_FAIL):
                    failed.append(name)
    return [*lines, line_of("**all**", total)], failed


async def rows(
    setup: dict[str, Any], scenarios: dict[str, Scenario], right: Right, progress: Any
) -> dict[str, FaultResult]:
    """Run scenarios on one deployment; returns their results by name."""
    found = {}
    options = {"prefill": 2, "decode": 2, "routers": 2, **setup}
    with (
        tempfile.TemporaryDirectory() as folder,
        Namespaces(options["machines"]) if "machines" in options else nullcontext() as machines,
        machines.inside(0) if machines else nullcontext(),
        Deployment(Path(folder), **options | {"machines": machines}) as deployment,
    ):
        for name, scenario in scenarios.items():
            row = found[name] = await scenario(deployment, right)
            print(line_of(name, row.counts, row), int(row.transfers), file=sys.stderr)
            for one in row.replies:
                if one.outcome is not Outcome.RIGHT:
                    print(f"    {one.outcome}: {one.message[:300]}", file=sys.stderr)
            progress.update()
    return found


def line_of(name: str, counts: dict[Outcome, int], row: FaultResult | None = None) -> str:
    cells = [str(sum(counts.values())), *(str(counts[outcome]) for outcome in COLUMNS)]
    cells.append(f"{row.answered:.2f}" if row else "")
    cells.append(f"{row.repaired:.1f}" if row and row.repaired is not None else "")
    cells.append(f"{row.longest_pause:.2f}" if row else "")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only rows whose name contains this text")
    lines, failed = asyncio.run(run(parser.parse_args().only))
    print("\n".join(lines))
    if failed:
        sys.exit(f"not all requests were answered right in: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
