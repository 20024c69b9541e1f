"""python run_penstock.py CHECKPOINT THREADS QUANTIZATION"""

import sys
from collections.abc import Callable

from timing import Prompts, run_all

from penstock import LLM, SamplingParams


def main() -> None:
    checkpoint, threads, quantization = sys.argv[1:]
    llm = LLM(
        checkpoint,
        dtype="bfloat16",
        quantization=quantization,
        kv_cache_dtype="auto" if quantization == "none" else "int8",
        threads=int(threads),
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=4 * 2**30,
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, generated: int) -> Callable[[], object]:
        params = SamplingParams(max_tokens=generated, ignore_eos=True, temperature=0, detokenize=False)
        return lambda: llm.generate(prompts, params, use_tqdm=False)

    run_all(generate)


if __name__ == "__main__":
    main()
