"""python run_vllm.py CHECKPOINT THREADS WORKS"""

import json
import os
import random
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(sys.argv[2]) - 1}")
from vllm import LLM, SamplingParams, TokensPrompt


def main() -> None:
    checkpoint, _, works = sys.argv[1:]
    llm = LLM(
        checkpoint,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )
    draw = random.Random(0)

    def run(prompts: int, read: int, generated: int) -> float:
        ids = [[draw.randrange(1000, 100000) for _ in range(read)] for _ in range(prompts)]
        params = SamplingParams(max_tokens=generated, ignore_eos=True, temperature=0, detokenize=False)
        begun = time.perf_counter()
        llm.generate([TokensPrompt(prompt_token_ids=one) for one in ids], params, use_tqdm=False)
        return time.perf_counter() - begun

    run(1, 32, 8)
    for work in json.loads(works):
        print(json.dumps({"work": work, "seconds": run(*work)}), flush=True)


if __name__ == "__main__":
    main()
