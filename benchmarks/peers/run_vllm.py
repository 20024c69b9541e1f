"""Runner of vLLM: python run_vllm.py CHECKPOINT THREADS"""

import os
import sys
from collections.abc import Callable

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(sys.argv[2]) - 1}")
from timing import Prompts, run_all
from vllm import LLM, SamplingParams, TokensPrompt


def main() -> None:
    checkpoint, _ = sys.argv[1:]
    llm = LLM(
        checkpoint,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, generated: int) -> Callable[[], object]:
        params = SamplingParams(max_tokens=generated, ignore_eos=True, temperature=0, detokenize=False)
        given = [TokensPrompt(prompt_token_ids=one) for one in prompts]
        return lambda: llm.generate(given, params, use_tqdm=False)

    run_all(generate)


if __name__ == "__main__":
    main()
