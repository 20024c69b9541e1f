"""Tokens per second compared with transformers' ``generate``: same checkpoint, dtype, threads, prompts and lengths.

python benchmarks/against_transformers.py CHECKPOINT

Penstock and transformers alternate in one run, since machines are shared and noisy. The result is the median of the
rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams

Prompts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32], help="batch sizes (default: 1 8 32)")
    parser.add_argument("--input-len", type=int, default=16, help="tokens per prompt (default: 16)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens to generate per prompt (default: 64)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="number of threads (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument("--json", type=Path, help="write results to this file")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=getattr(torch, args.dtype)).eval()
    longest = args.input_len + args.output_len
    llm = LLM(
        args.checkpoint,
        dtype=args.dtype,
        threads=args.threads,
        max_model_len=max(longest, 64),
        num_gpu_blocks_override=max(args.batch_size) * (longest // 64 + 1),
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)

    def ours(prompts: Prompts) -> None:
        llm.generate(prompts, params, use_tqdm=False)

    @torch.inference_mode()
    def theirs(prompts: Prompts) -> None:
        ids, n = torch.tensor(prompts), args.output_len
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, min_new_tokens=n, do_sample=False)

    def rate(run: Callable[[Prompts], None], prompts: Prompts) -> float:
        begun = time.perf_counter()
        run(prompts)
        return len(prompts) * args.output_len / (time.perf_counter() - begun)

    print(f"{llm.engine.fingerprint}, {args.input_len} tokens in, {args.output_len} out, {args.threads} threads")
    print(f"{'batch':>5} {'penstock':>10} {'transformers':>13} {'ratio':>6}   (median output tokens/s)")
    found = []
    for size in args.batch_size:
        rng = Random(size)
        prompts = [[rng.randrange(llm.engine.info.vocab_size) for _ in range(args.input_len)] for _ in range(size)]
        rate(ours, prompts), rate(theirs, prompts)  # warm up
        rounds = [(rate(ours, prompts), rate(theirs, prompts)) for _ in range(args.rounds)]
        mine, other = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(a / b for a, b in rounds)
        print(f"{size:>5} {mine:>10.1f} {other:>13.1f} {ratio:>6.2f}", flush=True)
        found.append({"batch": size, "penstock": mine, "transformers": other, "ratio": ratio, "rounds": rounds})
    if args.json:
        args.json.write_text(json.dumps({"kernels": llm.engine.fingerprint, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
