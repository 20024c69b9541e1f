"""Bandwidth of KV transfers between two processes over shared memory and TCP, compared with memcpy and iperf3 (if
installed) on the same cores, alternating.

python benchmarks/kv_transfer.py

A transfer is timed from its request to its last verified slot, including checksums on both sides. The sender runs on
the first core, the receiver on the second.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from penstock.engine.kv_transfer.buffer import SLOT_TOKENS, TransferBuffer
from penstock.engine.kv_transfer.endpoint import Endpoint
from penstock.engine.kv_transfer.link import KVTransferOptions
from penstock.engine.kv_transfer.messages import Instance, Start, slot_hashes
from penstock.engine.kv_transfer.receiver import Arrived, Broken, Completed, Pull, new_transfer_id
from penstock.engine.kv_transfer.sender import Exported

SECRET = b"of this benchmark's processes"
LAYERS, HEADS, VECTOR_BYTES = 28, 8, 256
"""KV cache shape of Qwen3-0.6B in bfloat16."""
LAYER_BYTES = 2 * SLOT_TOKENS * HEADS * VECTOR_BYTES
INSTANCE = Instance(weights_version="w", fingerprint="f", layers=[(HEADS, VECTOR_BYTES)] * LAYERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--slots", type=int, default=32, help=f"slots of {SLOT_TOKENS} tokens per transfer (default: 32)"
    )
    parser.add_argument("--transfers", type=int, default=8, help="transfers per round (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    args = parser.parse_args()
    size = args.slots * LAYERS * LAYER_BYTES
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        rates["memcpy"].append(memcpy_rate(size))
        for transport in ("shared memory", "TCP", *(("NIXL",) if find_spec("nixl_cu12") else ())):
            rates[transport] += transfer_rates(transport, args.slots, args.transfers)
        if shutil.which("iperf3"):
            rates["iperf3"].append(iperf3_rate())
    print(f"transfers of {size / 2**20:.0f} MiB, GB/s")
    print("| | median | lowest | highest |\n|---|---:|---:|---:|")
    for name, found in rates.items():
        print(f"| {name} | {statistics.median(found):.2f} | {min(found):.2f} | {max(found):.2f} |")
    middle = {name: statistics.median(found) for name, found in rates.items()}
    print(f"shared memory / memcpy: {middle['shared memory'] / middle['memcpy']:.2f}")
    if "iperf3" in middle:
        print(f"TCP / iperf3: {middle['TCP'] / middle['iperf3']:.2f}")


def memcpy_rate(size: int) -> float:
    """Bandwidth in GB/s of a copy on the receiver's core, to memory that is already paged in."""
    bind(1)
    source, target = np.full(size, 1, np.uint8), np.zeros(size, np.uint8)
    target[:] = source
    begun = time.perf_counter()
    target[:] = source
    seconds = time.perf_counter() - begun
    os.sched_setaffinity(0, CORES)
    return size / seconds / 1e9


def iperf3_rate() -> float:
    """Bandwidth in GB/s of one TCP connection over loopback."""
    server = subprocess.Popen(["iperf3", "-s", "-1", "-p", "5399", "-A", first_core(0)], stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        command = ["iperf3", "-c", "127.0.0.1", "-p", "5399", "-t", "3", "-J", "-A", first_core(1)]
        report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    finally:
        server.wait()
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8e9


CORES = os.sched_getaffinity(0)


def first_core(process: int) -> str:
    return str(sorted(CORES)[process % len(CORES)])


def bind(process: int) -> None:
    os.sched_setaffinity(0, {int(first_core(process))})


def options(transport: str, **more: Any) -> KVTransferOptions:
    name = {"shared memory": "auto", "TCP": "tcp", "NIXL": "nixl"}[transport]
    return KVTransferOptions(secret=SECRET, timeout=30, transport=name, **more)


def ends() -> list[int]:
    return [LAYER_BYTES * (layer + 1) for layer in range(LAYERS)]


def send(pipe: Connection, transport: str, slots: int) -> None:
    """Process of the prefill engine; sends all slots of a transfer at once."""
    bind(0)
    woken = threading.Event()
    buffer = TransferBuffer(slots, LAYERS * LAYER_BYTES)
    buffer.data[:] = np.random.default_rng(0).integers(0, 256, buffer.data.shape, np.uint8)
    stages = [(range(LAYERS), [0])]
    endpoint = Endpoint(INSTANCE, buffer, ends(), stages, options(transport, listen="127.0.0.1:0"), woken.set)
    pipe.send(endpoint.port)
    while not pipe.poll():
        if not woken.wait(0.05):
            continue
        woken.clear()
        for event in endpoint.take_events():
            if isinstance(event, Start):
                exported: list[Exported] = []
                while len(exported) < slots:
                    if allocated := buffer.allocate():
                        exported.append(Exported(len(exported), *allocated))
                endpoint.offer(event.transfer, exported, 0, LAYERS)
                endpoint.finish(event.transfer, 0)
    endpoint.close()


def transfer_rates(transport: str, slots: int, transfers: int) -> list[float]:
    """Bandwidth in GB/s of each transfer except the first, which is a warm-up."""
    ours, theirs = multiprocessing.Pipe()
    sender = multiprocessing.get_context("spawn").Process(target=send, args=(theirs, transport, slots))
    sender.start()
    port = ours.recv()
    bind(1)
    woken, found = threading.Event(), []
    buffer = TransferBuffer(slots, LAYERS * LAYER_BYTES)
    endpoint = Endpoint(INSTANCE, buffer, ends(), [(range(LAYERS), [0])], options(transport), woken.set)
    for number in range(transfers + 1):
        tokens = [number] * slots * SLOT_TOKENS
        start = Start(new_transfer_id(), "", tokens, 0, "", "", "", 0, 0.0)
        pull = Pull(start=start, hashes=slot_hashes("w", "", "", tokens))
        begun, size, done = time.perf_counter(), 0, False
        endpoint.pull(f"127.0.0.1:{port}", pull)
        while not done:
            woken.wait()
            woken.clear()
            for event in endpoint.take_events():
                assert not isinstance(event, Broken), event
                if isinstance(event, Arrived):
                    size += event.size
                    endpoint.imported([event])
                done |= isinstance(event, Completed)
        if number:
            found.append(size / (time.perf_counter() - begun) / 1e9)
    endpoint.close()
    ours.send(None)
    sender.join()
    os.sched_setaffinity(0, CORES)
    return found


if __name__ == "__main__":
    main()
