"""Overhead of guided decoding per token: the same batch with and without it, alternating.

python benchmarks/guided_cost.py CHECKPOINT

The guided batch generates long JSON arrays of strings. Tokens that the grammar forces need no separate step, and count
like sampled tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time

from tqdm import tqdm

from penstock import LLM, GuidedDecodingParams, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--batch", type=int, default=32, help="number of sequences (default: 32)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens per sequence (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-length", type=int, help="limit of a string's length in characters (default: none)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    args = parser.parse_args()
    llm = LLM(args.checkpoint, quantization=args.quantization, max_model_len=1024, kv_cache_memory_bytes=2**31)
    free = SamplingParams(temperature=args.temperature, max_tokens=args.output_len, ignore_eos=True)
    word = {"type": "string"} | ({"maxLength": args.max_length} if args.max_length else {})
    form = GuidedDecodingParams(json={"type": "array", "items": word, "minItems": 500})
    guided = SamplingParams(temperature=args.temperature, max_tokens=args.output_len, guided_decoding=form)
    prompts = [[100 + i, *range(200, 215)] for i in range(args.batch)]

    def run(params: SamplingParams) -> float:
        """Seconds per token of the batch."""
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return (time.perf_counter() - begun) / sum(len(output.outputs[0].token_ids) for output in outputs)

    run(free), run(guided)  # warm up
    times = [(run(free), run(guided)) for _ in tqdm(range(args.rounds), desc="rounds", unit="round")]
    ratio = statistics.median(with_guide / without for without, with_guide in times)
    without, with_guide = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    print(f"{without:.3f} ms/token without, {with_guide:.3f} with; median of the rounds' ratios {ratio:.3f}")


if __name__ == "__main__":
    main()
