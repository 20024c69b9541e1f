"""python run_openvino.py EXPORTED THREADS"""

import sys
from collections.abc import Callable

import numpy as np
import openvino
import openvino_genai
from timing import Prompts, run_all


def main() -> None:
    folder, threads = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 4  # GiB
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    options = {"INFERENCE_NUM_THREADS": int(threads)}
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", options)

    def generate(prompts: Prompts, generated: int) -> Callable[[], object]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = generated, True, False
        given = [openvino.Tensor(np.array([one], np.int64)) for one in prompts]
        return lambda: pipeline.generate(given, [config] * len(prompts))

    run_all(generate)


if __name__ == "__main__":
    main()
