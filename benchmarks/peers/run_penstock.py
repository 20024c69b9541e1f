"""python run_penstock.py CHECKPOINT THREADS WORKS QUANTIZATION"""

import json
import random
import sys
import time

from penstock import LLM, SamplingParams


def main() -> None:
    checkpoint, threads, works, quantization = sys.argv[1:]
    llm = LLM(
        checkpoint,
        dtype="bfloat16",
        quantization=quantization,
        threads=int(threads),
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=4 * 2**30,
        enable_prefix_caching=False,
    )
    draw = random.Random(0)

    def run(prompts: int, read: int, generated: int) -> float:
        given = [[draw.randrange(1000, 100000) for _ in range(read)] for _ in range(prompts)]
        params = SamplingParams(max_tokens=generated, ignore_eos=True, temperature=0, detokenize=False)
        begun = time.perf_counter()
        llm.generate(given, params, use_tqdm=False)
        return time.perf_counter() - begun

    run(1, 32, 8)
    for work in json.loads(works):
        print(json.dumps({"work": work, "seconds": run(*work)}), flush=True)


if __name__ == "__main__":
    main()
