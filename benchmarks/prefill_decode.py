"""Disaggregated prefill and decode compared with one instance: time to first token, share of the KV transfer that is
overlapped with computation, and time between tokens while long prompts arrive.

python benchmarks/prefill_decode.py --picture docs/prefill_decode.png

The model has the shape of Qwen3-0.6B and random weights. For time to first token, every instance has one core; the
single instance shares its core with the prefill instance. For the load of long prompts, the single instance has both
cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from penstock import demo

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
"""``config.json`` of Qwen3-0.6B."""
FIRST_TOKEN, LAST_TOKEN = 100, 900
"""Range of the prompts' token ids, which also exist in the built-in model's tokenizer."""
OUTPUT_TOKENS = list(range(300, 364))
"""Ids of tokens that decode to complete text, so that each is streamed immediately."""
CORES = sorted(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input-len", type=int, nargs="+", default=[512, 2048], help="prompt tokens (default: 512 2048)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds per prompt length (default: 5)")
    parser.add_argument("--streams", type=int, default=4, help="number of decoding streams (default: 4)")
    parser.add_argument("--stream-prompt", type=int, default=48, help="tokens of the streams' prompts (default: 48)")
    parser.add_argument("--load-prompt", type=int, default=1024, help="tokens of a long prompt (default: 1024)")
    parser.add_argument("--interval", type=float, default=6.0, help="seconds between two long prompts (default: 6)")
    parser.add_argument(
        "--load-seconds", type=float, default=60.0, help="duration of the load in seconds; 0: no load (default: 60)"
    )
    parser.add_argument("--kv-transport", default="auto", help="transport between the instances (default: auto)")
    parser.add_argument("--picture", type=Path, help="draw the time between tokens to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = checkpoint(Path(name))
        if args.rounds:
            first_tokens(args, folder)
        if args.load_seconds:
            gaps = {
                "one instance, two cores": under_load(args, folder, apart=False),
                "prefill and decode, one core each": under_load(args, folder, apart=True),
            }
            print_gaps(gaps)
            if args.picture:
                draw(gaps, args)


def checkpoint(folder: Path) -> Path:
    """Write a checkpoint without weights; returns the folder."""
    for file in demo.CHAT.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "secret").write_text("of this benchmark's processes")
    (folder / "secret").chmod(0o600)
    return folder


# --- Servers ---------------------------------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, cores: list[int], *flags: str) -> Iterator[str]:
    """Context with the base URL of a server that runs on ``cores``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--model", str(folder), "--load-format", "dummy"]
    command += ["--weight-cache-dir", "none", "--log-level", "warning", "--port", str(port), "--max-model-len", "4096"]
    command += ["--num-gpu-blocks-override", "400", "--cluster-secret-file", str(folder / "secret"), *flags]
    server = subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, cores))
    url = f"http://127.0.0.1:{port}"
    try:
        while not ready(url):
            if server.poll() is not None:
                raise SystemExit(f"the server exited with status {server.returncode} before it was ready")
            time.sleep(0.2)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def instances(folder: Path, cores: list[int], *flags: str) -> Iterator[tuple[str, str]]:
    """Context with the URLs of a router and its prefill instance. Prefill has the first core, decode the second."""
    with ExitStack() as stack:
        urls = {
            role: stack.enter_context(serving(folder, [core], "--role", role, "--threads", "1", *flags))
            for role, core in zip(("prefill", "decode"), cores, strict=True)
        }
        named = [text for role, url in urls.items() for text in (f"--{role}-instances", url)]
        router = serving(folder, cores, "--role", "router", "--pd-min-prefill-tokens", "100", *named)
        yield stack.enter_context(router), urls["prefill"]


# --- Time to the first token -----------------------------------------------------------------------------------------


def first_tokens(args: argparse.Namespace, folder: Path) -> None:
    first, second = (CORES * 2)[:2]
    rng, found = random.Random(0), defaultdict[tuple[int, str], list[float]](list)
    flags = ("--kv-transport", args.kv_transport)
    with serving(folder, [first], "--threads", "1") as alone, instances(folder, [first, second], *flags) as apart:
        router, prefill = apart
        for url in (alone, router):
            first_token(url, prompt(rng, 512))
        turns = [length for _ in range(args.rounds) for length in args.input_len]
        for length in tqdm(turns, desc="time to first token", unit="turn"):
            tokens = prompt(rng, length)
            found[length, "one instance"].append(first_token(alone, tokens))
            found[length, "apart"].append(first_token(router, tokens))
            post(f"{router}/reset_prefix_cache", {})  # resets all instances
            first_token(prefill, tokens)
            found[length, "cached by prefill"].append(first_token(router, tokens))
            found[length, "cached by decode"].append(first_token(router, tokens))
    print("time to first token, ms, medians")
    print("| tokens | one instance | apart | ratio | prefill has it cached | decode has it cached | hidden |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for length in args.input_len:
        one, apart_, sent, decoded = (
            1e3 * statistics.median(found[length, name])
            for name in ("one instance", "apart", "cached by prefill", "cached by decode")
        )
        hidden = 1 - (apart_ - one) / (sent - decoded)
        times = [f"{ms:.1f}" for ms in (one, apart_)]
        cached = [f"{ms:.1f}" for ms in (sent, decoded)]
        print(f"| {length} | {' | '.join(times)} | {apart_ / one:.3f} | {' | '.join(cached)} | {hidden:.0%} |")
    print("hidden: 1 - (apart - one instance) / (prefill has it cached - decode has it cached)")


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]


def first_token(url: str, tokens: list[int]) -> float:
    """Time to first token in seconds."""
    return next(token_times(url, tokens, 2))


def token_times(url: str, tokens: list[int], max_tokens: int) -> Iterator[float]:
    """Time from the request to each token in seconds."""
    body = {"prompt": tokens, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body["allowed_token_ids"] = OUTPUT_TOKENS
    begun = time.perf_counter()
    with post(f"{url}/v1/completions", body) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                yield time.perf_counter() - begun


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request)


# --- Time between tokens ---------------------------------------------------------------------------------------------


def under_load(args: argparse.Namespace, folder: Path, apart: bool) -> list[float]:
    """Times between tokens of the streams in seconds while long prompts arrive."""
    cores, gaps, stop = (CORES * 2)[:2], list[float](), threading.Event()
    with ExitStack() as stack:
        if apart:
            url, _ = stack.enter_context(instances(folder, cores, "--kv-transport", args.kv_transport))
        else:
            url = stack.enter_context(serving(folder, cores, "--threads", "2"))
        rng = random.Random(1)
        first_token(url, prompt(rng, 512))

        def decode(seed: int) -> None:
            own = random.Random(seed)
            while not stop.is_set():
                times = list(token_times(url, prompt(own, args.stream_prompt), 128))
                gaps.extend(later - earlier for earlier, later in itertools.pairwise(times))

        def load() -> None:
            for tokens in [prompt(rng, args.load_prompt) for _ in range(int(args.load_seconds / args.interval))]:
                threading.Thread(target=lambda own: list(token_times(url, own, 2)), args=(tokens,)).start()
                if stop.wait(args.interval):
                    return

        threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(args.streams)]
        threads.append(threading.Thread(target=load))
        for thread in threads:
            thread.start()
        for _ in tqdm(range(int(args.load_seconds)), desc="apart" if apart else "one instance", unit="s"):
            time.sleep(1)
        stop.set()
        for thread in threads:
            thread.join()
    return gaps


def print_gaps(gaps: dict[str, list[float]]) -> None:
    print("time between tokens while long prompts arrive, ms")
    print("| | p50 | p90 | p99 | largest | tokens |\n|---|---:|---:|---:|---:|---:|")
    for name, found in gaps.items():
        cuts = statistics.quantiles(found, n=100)
        cells = " | ".join(f"{1e3 * value:.0f}" for value in (cuts[49], cuts[89], cuts[98], max(found)))
        print(f"| {name} | {cells} | {len(found)} |")


def draw(gaps: dict[str, list[float]], args: argparse.Namespace) -> None:
    """Draw the share of tokens above each time between tokens."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, found in gaps.items():
        ordered = sorted(found)
        axes.step([1e3 * value for value in ordered], [1 - i / len(ordered) for i in range(len(ordered))], label=name)
    axes.axhline(0.01, color="gray", linewidth=0.8, linestyle=":")
    axes.annotate("p99", (1, 0.01), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="gray")
    axes.set(xscale="log", yscale="log", xlabel="time between two tokens, ms", ylabel="share of tokens above")
    axes.set_title(
        f"{args.streams} streams, a prompt of {args.load_prompt} tokens every {args.interval:g} s", fontsize=10
    )
    axes.legend()
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
