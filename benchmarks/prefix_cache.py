"""Time to first token of a repeated prompt: recomputed, and cached on the device, in host memory and on disk,
alternating. Also measures the overhead of storing the KV cache of new prompts.

    python benchmarks/prefix_cache.py CHECKPOINT [--disk FOLDER] [--tokens 512 2048 8192] [--rounds 3]

On a CPU, device memory is host memory, so the host tier measures a copy.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median

from penstock import LLM, SamplingParams

PLACES = ("computed", "device", "host", "disk, in the page cache", "disk")
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class Bench:
    """Two engines with the same checkpoint, without and with KV offloading."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        longest = max(args.tokens)
        gib = args.host_memory
        options = {"dtype": args.dtype, "quantization": args.quantization, "max_model_len": longest + 64}
        options |= {"num_gpu_blocks_override": -(-longest // 64) * 2 + 2, "load_format": args.load_format}
        self.plain = LLM(args.checkpoint, **options)
        self.tiers = LLM(
            args.checkpoint,
            **options,
            kv_offloading_size=gib,
            kv_offloading_disk_path=str(folder / "kv"),
            kv_offloading_disk_size=gib,
        )
        self.folder = folder / "kv"
        self.vocabulary = self.plain.engine.info.vocab_size
        self.rng = random.Random(0)

    def prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(1000, self.vocabulary - 1000) for _ in range(tokens)]

    def first_token(self, llm: LLM, prompt: list[int]) -> tuple[float, int]:
        """Time to first token in seconds, and number of cached tokens."""
        begun = time.perf_counter()
        (output,) = llm.generate([prompt], ONE, use_tqdm=False)
        return time.perf_counter() - begun, output.num_cached_tokens

    def wait_for_disk(self) -> None:
        """Wait until all blocks in host memory are written to disk."""
        offloading = self.tiers.engine.kv_offloading
        assert offloading
        while len(list(self.folder.glob("*.kv"))) < offloading.counts["slots_used"]:
            time.sleep(0.05)

    def measure(self, place: str, prompt: list[int]) -> float:
        """Time to first token in seconds of a prompt in one of ``PLACES``; the engine ``tiers`` has cached it."""
        if place == "computed":
            self.plain.reset_prefix_cache()
            return self.first_token(self.plain, prompt)[0]
        if place == "host":
            self.tiers.engine.scheduler.device_pool.clear_cache()
        elif place != "device":
            self.tiers.reset_prefix_cache()
        if place == "disk":
            self.drop_pages()
        seconds, cached = self.first_token(self.tiers, prompt)
        assert cached == (len(prompt) - 1) // 64 * 64, (place, cached)
        return seconds

    def drop_pages(self) -> None:
        """Drop the files of the disk tier from the page cache."""
        for file in self.folder.iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--disk", type=Path, help="folder on the disk to measure (default: a temporary folder)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument("--host-memory", type=float, default=4.0, help="GiB of the host and disk tiers (default: 4)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--load-format", default="auto")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.disk, prefix="prefix-cache-") as folder:
        bench = Bench(args, Path(folder))
        for llm in (bench.plain, bench.tiers):
            bench.first_token(llm, bench.prompt(64))
        print(f"| tokens | {' | '.join(PLACES)} | new prompts: without tiers, with |")
        print("|---:" * (len(PLACES) + 2) + "|")
        for tokens in args.tokens:
            seconds: dict[str, list[float]] = {name: [] for name in (*PLACES, "without", "with")}
            for _ in range(args.rounds):
                prompt = bench.prompt(tokens)
                seconds["without"].append(bench.first_token(bench.plain, prompt)[0])
                seconds["with"].append(bench.first_token(bench.tiers, prompt)[0])
                bench.wait_for_disk()
                for place in PLACES:
                    seconds[place].append(bench.measure(place, prompt))
            mid = {name: median(times) for name, times in seconds.items()}
            ratios = [f"{mid[name] * 1000:,.0f} ms ({mid['computed'] / mid[name]:.1f}×)" for name in PLACES[1:]]
            new = f"{mid['without'] * 1000:,.0f} ms, {mid['with'] * 1000:,.0f} ms ({mid['with'] / mid['without']:.2f})"
            print(f"| {tokens:,} | {mid['computed'] * 1000:,.0f} ms | {' | '.join(ratios)} | {new} |", flush=True)
        for llm in (bench.plain, bench.tiers):
            llm.engine.close()


if __name__ == "__main__":
    main()
