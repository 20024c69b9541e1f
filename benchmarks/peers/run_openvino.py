"""Runner of OpenVINO: python run_openvino.py EXPORTED THREADS"""

import sys
from collections.abc import Callable
from math import exp
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from timing import Prompts, run_all
from windows import FIRST, windows_of


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

    run_all(generate, lambda text, count: perplexity(folder, options, text, count))


def perplexity(folder: str, options: dict[str, int], text: str, count: int) -> float:
    """Perplexity of the exported model, in the pipeline's precision."""
    tokenizer = openvino_genai.Tokenizer(folder)

    def encode(text: str, special: bool) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=special).input_ids.data[0].tolist()

    begun = encode("a", True)
    bos = begun[0] if begun != encode("a", False) else None
    windows = windows_of(encode(Path(text).read_text(encoding="utf-8"), False), bos, count)
    request = openvino.Core().compile_model(f"{folder}/openvino_model.xml", "CPU", options).create_infer_request()
    names = {name for one in request.model_inputs for name in one.names}
    total = 0.0
    for window in windows:
        request.reset_state()
        ids = np.array([window], np.int64)
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(ids.shape[1], dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        request.infer({name: value for name, value in inputs.items() if name in names})
        logits = request.get_tensor("logits").data[0, FIRST:-1].astype(np.float64)
        highest = logits.max(1, keepdims=True)
        normalizer = np.log(np.exp(logits - highest).sum(1)) + highest[:, 0]
        total -= float((logits[np.arange(len(logits)), window[FIRST + 1 :]] - normalizer).sum())
    return exp(total / (len(windows) * (len(windows[0]) - FIRST - 1)))


if __name__ == "__main__":
    main()
