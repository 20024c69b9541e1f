"""python run_openvino.py EXPORTED THREADS WORKS"""

import json
import random
import sys
import time

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    folder, threads, works = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 4  # GiB
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    options = {"INFERENCE_NUM_THREADS": int(threads)}
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", options)
    draw = random.Random(0)

    def run(prompts: int, read: int, generated: int) -> float:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = generated, True, False
        ids = [[[draw.randrange(1000, 100000) for _ in range(read)]] for _ in range(prompts)]
        given = [openvino.Tensor(np.array(one, np.int64)) for one in ids]
        begun = time.perf_counter()
        pipeline.generate(given, [config] * prompts)
        return time.perf_counter() - begun

    run(1, 32, 8)
    for work in json.loads(works):
        print(json.dumps({"work": work, "seconds": run(*work)}), flush=True)


if __name__ == "__main__":
    main()
