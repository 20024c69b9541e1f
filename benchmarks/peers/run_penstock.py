"""Runner of Penstock: python run_penstock.py CHECKPOINT THREADS QUANTIZATION"""

import sys
from collections.abc import Callable
from math import exp
from pathlib import Path

from timing import Prompts, run_all
from windows import FIRST, windows_of

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

    def perplexity(text: str, count: int) -> float:
        tokenizer = llm.get_tokenizer()
        ids = tokenizer.encode(Path(text).read_text(encoding="utf-8"), add_special_tokens=False)
        begun = tokenizer.encode("a")  # begins with the BOS token if the tokenizer adds one
        bos = begun[0] if begun != tokenizer.encode("a", add_special_tokens=False) else None
        windows = windows_of(ids, bos, count)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
        scored = [
            position[token].logprob
            for window, output in zip(windows, llm.generate(windows, params, use_tqdm=False), strict=True)
            for token, position in list(zip(window, output.prompt_logprobs or [], strict=True))[FIRST + 1 :]
            if position
        ]
        return exp(-sum(scored) / len(scored))

    run_all(generate, perplexity)


if __name__ == "__main__":
    main()
